//! A node with one pod on a veth, and proxies that own steering slots.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use agent_core::datapath::plan::{Datapath as _, Step};
use agent_datapath::routing;
use anyhow::{Result, ensure};
use nix::net::if_::if_nametoindex;
use shared_maps::mark::MAGIC_FROM_EGRESS_PROXY;
use shared_maps::steering::{SLOTS_NAME, SOCKS_NAME, Slot, socket_index};
use shared_maps::user::{Map, MapKind};
use socket2::{Domain, Socket, Type};

use super::{Kernel, MAC, POD4, POD6, PROXY_PORT, attachment, with_attachment, with_kernel};
use crate::{Netns, eventually};

/// The node's address towards the pod.
pub const NODE4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 1, 1));
/// IPv6 address of the node towards the pod.
pub const NODE6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd09, 1, 0, 0, 0, 0, 0, 1));
/// Number of datagrams or connections in each check.
pub const MANY: u16 = 100;
/// Longest wait for something to arrive.
pub const SOON: Duration = Duration::from_secs(5);
/// A heartbeat that keeps a slot alive for the whole test.
pub const FOREVER: u64 = u64::MAX;

/// Number of nodes so far. Each node's pod has a name of its own.
static COUNT: AtomicU32 = AtomicU32::new(0);

/// A node with one pod, and proxies on it.
pub struct Node<'k> {
    kernel: &'k mut Kernel,
    pod: Netns,
    slots: Map<u32, Slot>,
    socks: Map<u32, u32>,
}

/// The four sockets of one proxy.
pub struct Proxy {
    /// Sockets for IPv4 and IPv6, in this order.
    pub udp: [UdpSocket; 2],
    /// Listeners for IPv4 and IPv6, in this order.
    pub tcp: [TcpListener; 2],
}

/// Runs `test` with a node whose policy redirects DNS to the peer.
pub fn with_node(test: impl FnOnce(&mut Node<'_>) -> Result<()> + Send) {
    with_kernel(|kernel| on_node(kernel, test));
}

/// Like [`with_node`], with programs attached by TCX links or by tc filters.
pub fn with_node_attached(tcx: bool, test: impl FnOnce(&mut Node<'_>) -> Result<()> + Send) {
    with_attachment(tcx, |kernel| on_node(kernel, test));
}

fn on_node(kernel: &mut Kernel, test: impl FnOnce(&mut Node<'_>) -> Result<()>) -> Result<()> {
    // Each namespace has its own value of this sysctl.
    fs::write("/proc/sys/net/ipv6/conf/default/accept_dad", "0")?;
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let pod = Netns::create(format!("hf-steer-{}-{number}", std::process::id()))?;
    let mac = MAC.map(|byte| format!("{byte:02x}")).join(":");
    ip("link set lo up")?;
    let peer = format!("peer name eth0 address {mac} netns {}", pod.name());
    ip(&format!("link add hf0 type veth {peer}"))?;
    ip(&format!("addr add {NODE4}/24 dev hf0"))?;
    ip(&format!("addr add {NODE6}/64 dev hf0 nodad"))?;
    ip("link set hf0 up")?;
    pod.batch(&format!(
        "link set eth0 up\naddr add {POD4}/24 dev eth0\naddr add {POD6}/64 dev eth0 nodad\n\
         route add default via {NODE4}\nroute add default via {NODE6}"
    ))?;
    pod.settled()?;
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
}

fn ip(arguments: &str) -> Result<()> {
    let status = Command::new("ip").args(arguments.split(' ')).status()?;
    ensure!(status.success(), "ip {arguments}: {status}");
    Ok(())
}

fn tc(arguments: &[&str]) -> Result<()> {
    let status = Command::new("tc").args(arguments).status()?;
    ensure!(status.success(), "tc: {status}");
    Ok(())
}

fn nft(rules: &str) -> Result<()> {
    let path = tempfile::NamedTempFile::new()?;
    fs::write(path.path(), rules)?;
    let status = Command::new("nft").arg("-f").arg(path.path()).status()?;
    ensure!(status.success(), "nft: {status}");
    Ok(())
}

/// A UDP socket with `mark`, bound to `at`, which may be an address of another machine.
pub fn udp_at(at: SocketAddr, mark: u32) -> Result<UdpSocket> {
    let socket = bound(Type::DGRAM, at)?;
    socket.set_mark(mark)?;
    Ok(socket.into())
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
    pub fn kernel(&mut self) -> &mut Kernel {
        self.kernel
    }

    pub fn pod(&self) -> &Netns {
        &self.pod
    }

    pub fn slots(&self) -> &Map<u32, Slot> {
        &self.slots
    }

    /// Redirects marked packets as another datapath does: TPROXY to the proxy's address.
    pub fn tproxy(&self) -> Result<()> {
        nft(&format!(
            "table inet steer {{ chain pre {{ type filter hook prerouting priority mangle;
             meta mark & 0xf00 == 0x200 meta nfproto ipv4 meta l4proto {{ tcp, udp }} tproxy ip to 127.0.0.1:{PROXY_PORT} accept
             meta mark & 0xf00 == 0x200 meta nfproto ipv6 meta l4proto {{ tcp, udp }} tproxy ip6 to [::1]:{PROXY_PORT} accept
             }}\n}}\n"
        ))
    }

    /// Applies `rule` to every packet that the node itself sends.
    pub fn on_output(&self, rule: &str) -> Result<()> {
        nft(&format!(
            "table inet marks {{\n}}\ndelete table inet marks\n
             table inet marks {{ chain out {{ type filter hook output priority mangle;
             {rule}\n}}\n}}\n"
        ))
    }

    /// Removes the program that [`Self::drop_after_us`] attached.
    pub fn leave_all(&self) -> Result<()> {
        tc(&["qdisc", "delete", "dev", "hf0", "clsact"])
    }

    /// Attaches a classifier of another system at the node's end of the pod's veth pair (`ingress`
    /// or `egress`). It drops every packet that reaches it.
    pub fn drop_after_us(&self, direction: &str) -> Result<()> {
        let filter = ["filter", "add", "dev", "hf0", direction, "protocol", "all"];
        // Classic BPF: return 2, `TC_ACT_SHOT`.
        let program = ["bpf", "da", "bytecode", "1,6 0 0 2"];
        tc(&["qdisc", "replace", "dev", "hf0", "clsact"])?;
        tc(&[filter.as_slice(), program.as_slice()].concat())
    }

    /// Starts a proxy in `slot`.
    pub fn proxy(&self, slot: u32, kind: u32) -> Result<Proxy> {
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

    /// Writes the record of a slot that has all four sockets.
    pub fn set(&self, slot: u32, kind: u32, heartbeat: u64) -> Result<()> {
        let value = Slot {
            heartbeat,
            kind,
            owner: std::process::id(),
            sockets: 0b1111,
            proxy_port: PROXY_PORT.into(),
        };
        Ok(self.slots.set(&slot, &value)?)
    }

    /// The pod sends a datagram from each of many ports. Returns how many each proxy received.
    pub fn ask<const N: usize>(&self, server: IpAddr, proxies: [&Proxy; N]) -> Result<[u16; N]> {
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

    /// The pod opens many connections. Returns how many each proxy received.
    pub fn connect<const N: usize>(
        &self,
        server: IpAddr,
        proxies: [&Proxy; N],
    ) -> Result<[u16; N]> {
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
