//! Which proxy socket gets a redirected packet: real sockets, real lookups.
//!
//! Sockets of all proxies share one reuse-port group, as in life: were the
//! choice left to the kernel's hash, each test would see packets elsewhere.
use std::fs;
use std::io::Read as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_agent::datapath::plan::{Datapath as _, Step};
use holdfast_agent::datapath::routing;
use holdfast_e2e::kernel::{
    Kernel, MAC, PEER4, PEER6, POD4, POD6, PROXY_PORT, attachment, with_kernel,
};
use holdfast_e2e::{Netns, eventually};
use nix::net::if_::if_nametoindex;
use shared_maps::mark::MAGIC_FROM_EGRESS_PROXY;
use shared_maps::policy::{EGRESS, INGRESS};
use shared_maps::steering::{
    KIND_FALLBACK, KIND_FREE, KIND_SDP, SLOTS_NAME, SOCKS_NAME, Slot, socket_index,
};
use shared_maps::user::{Map, MapKind, monotonic_ns};
use socket2::{Domain, Socket, Type};

const NODE4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 1, 1));
const UDP: u8 = 17;
/// Datagrams or connections per check.
const MANY: u16 = 100;
/// Longest wait for something to arrive.
const SOON: Duration = Duration::from_secs(5);
/// Alive for as long as the test runs.
const FOREVER: u64 = u64::MAX;

/// A node with one pod, and proxies on it.
struct Node<'k> {
    kernel: &'k mut Kernel,
    pod: Netns,
    slots: Map<u32, Slot>,
    socks: Map<u32, u32>,
}

/// The four sockets of one proxy.
struct Proxy {
    udp: [UdpSocket; 2],
    tcp: [TcpListener; 2],
}

fn with_node(test: impl FnOnce(&mut Node<'_>) -> Result<()> + Send) {
    with_kernel(|kernel| {
        // The kernel gives a sysctl of its own to each namespace.
        fs::write("/proc/sys/net/ipv6/conf/default/accept_dad", "0")?;
        let pod = Netns::create(format!("hf-steer-{}", std::process::id()))?;
        let mac = MAC.map(|byte| format!("{byte:02x}")).join(":");
        ip("link set lo up")?;
        let peer = format!("peer name eth0 address {mac} netns {}", pod.name());
        ip(&format!("link add hf0 type veth {peer}"))?;
        ip(&format!("addr add {NODE4}/24 dev hf0"))?;
        ip("addr add fd09:1::1/64 dev hf0 nodad")?;
        ip("link set hf0 up")?;
        pod.batch(&format!(
            "link set eth0 up\naddr add {POD4}/24 dev eth0\naddr add {POD6}/64 dev eth0 nodad\n\
             route add default via {NODE4}\nroute add default via fd09:1::1"
        ))?;
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?
            .block_on(routing::install(true, true))?;
        kernel.redirect_dns()?;
        let ifindex = if_nametoindex("hf0")?;
        kernel
            .datapath()
            .apply(&Step::Attach(attachment(ifindex)))?;
        let slots = kernel.open(SLOTS_NAME, MapKind::Array)?;
        let socks = kernel.open(SOCKS_NAME, MapKind::SockMap)?;
        test(&mut Node {
            kernel,
            pod,
            slots,
            socks,
        })
    });
}

fn ip(arguments: &str) -> Result<()> {
    let status = Command::new("ip").args(arguments.split(' ')).status()?;
    ensure!(status.success(), "ip {arguments}: {status}");
    Ok(())
}

fn bound(kind: Type, at: SocketAddr) -> Result<Socket> {
    let socket = Socket::new(Domain::for_address(at), kind, None)?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    if at.is_ipv4() {
        socket.set_ip_transparent_v4(true)?;
    } else {
        socket.set_ip_transparent_v6(true)?;
    }
    socket.set_mark(MAGIC_FROM_EGRESS_PROXY)?;
    socket.bind(&at.into())?;
    Ok(socket)
}

impl Node<'_> {
    /// Starts a proxy in `slot`.
    fn proxy(&self, slot: u32, kind: u32) -> Result<Proxy> {
        let loopback = [
            IpAddr::V4(Ipv4Addr::LOCALHOST),
            IpAddr::V6(Ipv6Addr::LOCALHOST),
        ];
        let at = loopback.map(|ip| SocketAddr::new(ip, PROXY_PORT));
        let udp = |at| -> Result<UdpSocket> {
            let socket: UdpSocket = bound(Type::DGRAM, at)?.into();
            socket.set_nonblocking(true)?;
            Ok(socket)
        };
        let tcp = |at| -> Result<TcpListener> {
            let socket = bound(Type::STREAM, at)?;
            socket.listen(256)?;
            socket.set_nonblocking(true)?;
            Ok(socket.into())
        };
        let proxy = Proxy {
            udp: [udp(at[0])?, udp(at[1])?],
            tcp: [tcp(at[0])?, tcp(at[1])?],
        };
        for (v6, (udp, tcp)) in [false, true]
            .into_iter()
            .zip(proxy.udp.iter().zip(&proxy.tcp))
        {
            for (is_tcp, fd) in [(false, udp.as_raw_fd()), (true, tcp.as_raw_fd())] {
                let index = socket_index(slot, is_tcp, v6);
                self.socks.set(&index, &u32::try_from(fd)?)?;
            }
        }
        self.set(slot, kind, FOREVER)?;
        Ok(proxy)
    }

    fn set(&self, slot: u32, kind: u32, heartbeat: u64) -> Result<()> {
        let value = Slot {
            heartbeat,
            kind,
            owner: std::process::id(),
            sockets: 0b1111,
            proxy_port: PROXY_PORT.into(),
        };
        Ok(self.slots.set(&slot, &value)?)
    }

    /// The pod sends a datagram from each of many ports; how many each proxy got.
    fn ask<const N: usize>(&self, server: IpAddr, proxies: [&Proxy; N]) -> Result<[u16; N]> {
        let v6 = usize::from(server.is_ipv6());
        self.pod.enter(|| -> Result<()> {
            let any = if v6 == 1 { "[::]:0" } else { "0.0.0.0:0" };
            for _ in 0..MANY {
                UdpSocket::bind(any)?.send_to(b"query", (server, 53))?;
            }
            Ok(())
        })??;
        let mut got = [0; N];
        eventually("all datagrams", SOON, || {
            for (proxy, got) in proxies.iter().zip(&mut got) {
                while proxy.udp[v6].recv(&mut [0; 64]).is_ok() {
                    *got += 1;
                }
            }
            ensure!(got.iter().sum::<u16>() == MANY, "{got:?} of {MANY}");
            Ok(())
        })?;
        Ok(got)
    }

    /// The pod opens many connections; how many each proxy got.
    fn connect<const N: usize>(&self, server: IpAddr, proxies: [&Proxy; N]) -> Result<[u16; N]> {
        let v6 = usize::from(server.is_ipv6());
        let streams = self.pod.enter(|| -> Result<Vec<TcpStream>> {
            let wait = Duration::from_secs(3);
            (0..MANY)
                .map(|_| Ok(TcpStream::connect_timeout(&(server, 53).into(), wait)?))
                .collect()
        })??;
        let mut got = [0; N];
        for (proxy, got) in proxies.iter().zip(&mut got) {
            while let Ok((stream, _)) = proxy.tcp[v6].accept() {
                ensure!(stream.local_addr()? == SocketAddr::new(server, 53));
                *got += 1;
            }
        }
        ensure!(streams.len() == usize::from(MANY));
        Ok(got)
    }
}

#[test]
fn live_slots_share_and_a_silent_one_gets_nothing() {
    with_node(|node| {
        let (a, b) = (node.proxy(0, KIND_SDP)?, node.proxy(5, KIND_SDP)?);
        for server in [PEER4, PEER6] {
            for got in [node.ask(server, [&a, &b])?, node.connect(server, [&a, &b])?] {
                assert!(got.iter().all(|n| *n > MANY / 5), "{got:?}");
                assert_eq!(got.iter().sum::<u16>(), MANY);
            }
        }
        // The last beat was a second ago.
        node.set(0, KIND_SDP, monotonic_ns() - 1_000_000_000)?;
        for server in [PEER4, PEER6] {
            assert_eq!(node.ask(server, [&a, &b])?, [0, MANY]);
            assert_eq!(node.connect(server, [&a, &b])?, [0, MANY]);
        }
        Ok(())
    });
}

#[test]
fn the_fallback_serves_only_alone() {
    with_node(|node| {
        let (sdp, agent) = (node.proxy(3, KIND_SDP)?, node.proxy(1, KIND_FALLBACK)?);
        for server in [PEER4, PEER6] {
            assert_eq!(node.ask(server, [&sdp, &agent])?, [MANY, 0]);
            assert_eq!(node.connect(server, [&sdp, &agent])?, [MANY, 0]);
        }
        node.set(3, KIND_FREE, 0)?;
        for server in [PEER4, PEER6] {
            assert_eq!(node.ask(server, [&sdp, &agent])?, [0, MANY]);
            assert_eq!(node.connect(server, [&sdp, &agent])?, [0, MANY]);
        }
        Ok(())
    });
}

#[test]
fn a_proxy_that_died_loses_its_packets_to_the_living_at_once() {
    with_node(|node| {
        let dead: Vec<_> = (0..4)
            .map(|slot| node.proxy(slot, KIND_SDP))
            .collect::<Result<_>>()?;
        let alive = node.proxy(9, KIND_SDP)?;
        drop(dead);
        for server in [PEER4, PEER6] {
            assert_eq!(node.ask(server, [&alive])?, [MANY]);
            assert_eq!(node.connect(server, [&alive])?, [MANY]);
        }
        Ok(())
    });
}

#[test]
fn a_slot_of_another_port_or_without_the_socket_is_passed_over() {
    with_node(|node| {
        let (a, b) = (node.proxy(0, KIND_SDP)?, node.proxy(1, KIND_SDP)?);
        let odd = Slot {
            heartbeat: FOREVER,
            kind: KIND_SDP,
            owner: 1,
            sockets: 0b1111,
            proxy_port: u32::from(PROXY_PORT) + 1,
        };
        node.slots.set(&0, &odd)?;
        assert_eq!(node.ask(PEER4, [&a, &b])?, [0, MANY]);
        let only_tcp4 = Slot {
            sockets: 1 << socket_index(0, true, false),
            proxy_port: PROXY_PORT.into(),
            ..odd
        };
        node.slots.set(&0, &only_tcp4)?;
        assert_eq!(node.ask(PEER4, [&a, &b])?, [0, MANY]);
        let got = node.connect(PEER4, [&a, &b])?;
        assert!(got.iter().all(|n| *n > 0), "{got:?}");
        Ok(())
    });
}

#[test]
fn a_server_on_the_node_without_dns_policy_is_reached() {
    with_node(|node| {
        let proxy = node.proxy(0, KIND_SDP)?;
        node.kernel.identity(NODE4, 1)?;
        node.kernel.allow(1, EGRESS, UDP, 53)?;
        node.kernel.allow(1, INGRESS, 0, 0)?;
        let server = UdpSocket::bind((NODE4, 53))?;
        server.set_nonblocking(true)?;
        node.pod
            .enter(|| UdpSocket::bind("0.0.0.0:0")?.send_to(b"query", (NODE4, 53)))??;
        eventually("a query at the node's own server", SOON, || {
            Ok(server.recv(&mut [0; 64])?)
        })?;
        assert!(proxy.udp[0].recv(&mut [0; 64]).is_err());
        Ok(())
    });
}

#[test]
fn large_queries_arrive_whole() {
    with_node(|node| {
        let proxy = node.proxy(0, KIND_SDP)?;
        for server in [PEER4, PEER6] {
            let v6 = usize::from(server.is_ipv6());
            let any = if v6 == 1 { "[::]:0" } else { "0.0.0.0:0" };
            node.pod
                .enter(|| UdpSocket::bind(any)?.send_to(&[7; 4000], (server, 53)))??;
            let mut buffer = [0; 5000];
            let length = eventually("the query", SOON, || Ok(proxy.udp[v6].recv(&mut buffer)?))?;
            assert_eq!(&buffer[..length], [7; 4000]);
        }
        Ok(())
    });
}

/// The pod reconnects from the port of a connection that the proxy closed
/// first, and whose remains the node still keeps (TIME_WAIT).
#[test]
fn a_reused_port_reaches_the_proxy() {
    with_node(|node| {
        let proxy = node.proxy(0, KIND_SDP)?;
        for server in [PEER4, PEER6] {
            let v6 = usize::from(server.is_ipv6());
            let from = if v6 == 1 { POD6 } else { POD4 };
            for round in 0..3 {
                let accepted = |stream: TcpStream| -> Result<()> {
                    let (own, _) =
                        eventually("a connection", SOON, || Ok(proxy.tcp[v6].accept()?))?;
                    drop(own);
                    let mut stream = stream;
                    ensure!(stream.read(&mut [0; 8])? == 0, "closed by the proxy");
                    Ok(())
                };
                let stream = node.pod.enter(|| -> Result<TcpStream> {
                    let socket =
                        Socket::new(Domain::for_address((server, 53).into()), Type::STREAM, None)?;
                    socket.set_reuse_address(true)?;
                    socket.bind(&SocketAddr::new(from, 45000).into())?;
                    socket.connect_timeout(
                        &SocketAddr::new(server, 53).into(),
                        Duration::from_secs(3),
                    )?;
                    Ok(socket.into())
                })?;
                accepted(stream.with_context(|| format!("round {round}"))?)?;
            }
        }
        Ok(())
    });
}

/// Packets that another datapath redirects: marked, then TPROXY to the proxy's address.
#[test]
fn tproxy_is_steered_as_well() {
    with_node(|node| {
        let rules = format!(
            "table inet steer {{ chain pre {{ type filter hook prerouting priority mangle;
             meta mark & 0xf00 == 0x200 meta nfproto ipv4 meta l4proto {{ tcp, udp }} tproxy ip to 127.0.0.1:{PROXY_PORT} accept
             meta mark & 0xf00 == 0x200 meta nfproto ipv6 meta l4proto {{ tcp, udp }} tproxy ip6 to [::1]:{PROXY_PORT} accept
             }}\n}}\n"
        );
        let path = tempfile::NamedTempFile::new()?;
        fs::write(path.path(), rules)?;
        let status = Command::new("nft").arg("-f").arg(path.path()).status()?;
        ensure!(status.success(), "nft: {status}");
        let (a, b) = (node.proxy(2, KIND_SDP)?, node.proxy(6, KIND_SDP)?);
        for server in [PEER4, PEER6] {
            for got in [node.ask(server, [&a, &b])?, node.connect(server, [&a, &b])?] {
                assert!(got.iter().all(|n| *n > MANY / 5), "{got:?}");
            }
        }
        node.set(2, KIND_FREE, 0)?;
        for server in [PEER4, PEER6] {
            assert_eq!(node.ask(server, [&a, &b])?, [0, MANY]);
            assert_eq!(node.connect(server, [&a, &b])?, [0, MANY]);
        }
        Ok(())
    });
}
