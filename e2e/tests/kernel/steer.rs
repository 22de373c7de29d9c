//! The proxy socket that gets a redirected packet, with real sockets and real lookups.
//!
//! Sockets of all proxies share one reuse-port group, as in production. If the kernel's hash
//! selected the socket, each test would see packets at other proxies.
use std::fs;
use std::io::{ErrorKind, Read as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use daemon::steering_program::{self, SteerError};
use holdfast_e2e::eventually;
use holdfast_e2e::kernel::node::{FOREVER, MANY, NODE4, Node, SOON, with_node};
use holdfast_e2e::kernel::{PEER4, PEER6, POD4, POD6, PROXY_PORT};
use shared_maps::policy::{EGRESS, INGRESS};
use shared_maps::steering::{KIND_FALLBACK, KIND_FREE, KIND_SDP, SLOTS_NAME, Slot, socket_index};
use shared_maps::user::{HeldPin, monotonic_ns};
use socket2::{Domain, Socket, Type};

const UDP: u8 = 17;

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
fn the_fallback_serves_only_without_other_proxies() {
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
fn packets_of_a_dead_proxy_go_to_live_ones_at_once() {
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
        node.slots().set(&0, &odd)?;
        assert_eq!(node.ask(PEER4, [&a, &b])?, [0, MANY]);
        let only_tcp4 = Slot {
            sockets: 1 << socket_index(0, true, false),
            proxy_port: PROXY_PORT.into(),
            ..odd
        };
        node.slots().set(&0, &only_tcp4)?;
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
        node.kernel().identity(NODE4, 1)?;
        node.kernel().allow(1, EGRESS, UDP, 53)?;
        node.kernel().allow(1, INGRESS, 0, 0)?;
        let server = UdpSocket::bind((NODE4, 53))?;
        server.set_nonblocking(true)?;
        node.pod()
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
            node.pod()
                .enter(|| UdpSocket::bind(any)?.send_to(&[7; 4000], (server, 53)))??;
            let mut buffer = [0; 5000];
            let length = eventually("the query", SOON, || Ok(proxy.udp[v6].recv(&mut buffer)?))?;
            assert_eq!(&buffer[..length], [7; 4000]);
        }
        Ok(())
    });
}

/// The pod reconnects from the port of a connection that the proxy closed first, and that the node
/// still keeps in TIME_WAIT.
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
                let stream = node.pod().enter(|| -> Result<TcpStream> {
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
        node.tproxy()?;
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

/// If it reached a proxy, a process of the node could fill the queues of pods.
#[test]
fn a_process_of_the_node_reaches_no_proxy_and_other_ports_of_loopback() {
    with_node(|node| {
        let proxy = node.proxy(3, KIND_SDP)?;
        let loopback = [
            Ipv4Addr::LOCALHOST.into(),
            IpAddr::from(Ipv6Addr::LOCALHOST),
        ];
        let check = |node: &mut Node<'_>| -> Result<()> {
            for (v6, ip) in loopback.into_iter().enumerate() {
                let to = SocketAddr::new(ip, PROXY_PORT);
                let local = UdpSocket::bind((ip, 0))?;
                local.connect(to)?;
                local.send(b"query")?;
                local.set_read_timeout(Some(SOON))?;
                let refused = local.recv(&mut [0; 64]).map_err(|error| error.kind());
                ensure!(refused == Err(ErrorKind::ConnectionRefused), "{refused:?}");
                ensure!(
                    proxy.udp[v6].recv(&mut [0; 64]).is_err(),
                    "it got the query"
                );
                let connected = TcpStream::connect(to).map_err(|error| error.kind());
                ensure!(
                    matches!(connected, Err(ErrorKind::ConnectionRefused)),
                    "{connected:?}"
                );
                // Other services of the node stay reachable.
                let other = TcpListener::bind((ip, 0))?;
                TcpStream::connect(other.local_addr()?)?;
                let other = UdpSocket::bind((ip, 0))?;
                other.set_read_timeout(Some(SOON))?;
                UdpSocket::bind((ip, 0))?.send_to(b"query", other.local_addr()?)?;
                other.recv(&mut [0; 64])?;
            }
            for server in [PEER4, PEER6] {
                assert_eq!(node.ask(server, [&proxy])?, [MANY]);
                assert_eq!(node.connect(server, [&proxy])?, [MANY]);
            }
            Ok(())
        };
        check(node)?;
        // Packets of the node are not queued for a proxy that hangs, either.
        node.set(3, KIND_SDP, monotonic_ns() - 2_000_000_000)?;
        check(node)?;
        node.set(3, KIND_SDP, FOREVER)?;
        node.tproxy()?;
        check(node)
    });
}

/// All proxies are silent, as after a pause of the whole machine. A query in the queue of a proxy
/// that may wake is better than a lost query.
#[test]
fn silent_slots_serve_when_none_is_live() {
    with_node(|node| {
        let (a, b) = (node.proxy(0, KIND_SDP)?, node.proxy(1, KIND_FALLBACK)?);
        let long_ago = monotonic_ns() - 2_000_000_000;
        node.set(0, KIND_SDP, long_ago)?;
        node.set(1, KIND_FALLBACK, long_ago)?;
        for server in [PEER4, PEER6] {
            let got = node.ask(server, [&a, &b])?;
            assert_eq!(got.iter().sum::<u16>(), MANY);
            let got = node.connect(server, [&a, &b])?;
            assert_eq!(got.iter().sum::<u16>(), MANY);
        }
        node.set(1, KIND_FALLBACK, FOREVER)?;
        assert_eq!(node.ask(PEER4, [&a, &b])?, [0, MANY]);
        Ok(())
    });
}

#[test]
fn a_socket_without_a_slot_gets_no_query_also_where_there_is_no_proxy() {
    with_node(|node| {
        let stranger = node.proxy(0, KIND_SDP)?;
        node.set(0, KIND_FREE, 0)?;
        for (server, any) in [(PEER4, "0.0.0.0:0"), (PEER6, "[::]:0")] {
            node.pod()
                .enter(|| UdpSocket::bind(any)?.send_to(b"query", (server, 53)))??;
        }
        // The arrival of later queries shows that no earlier one is still on its way.
        let proxy = node.proxy(5, KIND_SDP)?;
        for server in [PEER4, PEER6] {
            assert_eq!(node.ask(server, [&stranger, &proxy])?, [0, MANY]);
        }
        Ok(())
    });
}

/// Loading makes new maps where pins are gone. The proxies are in the slots of the earlier maps.
#[test]
fn a_program_that_was_loaded_with_new_maps_does_not_replace_the_one_that_steers() {
    with_node(|node| {
        let (proxy, other) = (node.proxy(0, KIND_SDP)?, node.proxy(1, KIND_SDP)?);
        node.set(1, KIND_FREE, 0)?;
        let globals = node.kernel().globals();
        let held = HeldPin::open(&globals.path(SLOTS_NAME))?.context("the map is pinned")?;
        fs::remove_file(held.path())?;
        let replaced = steering_program::replace(&globals, &[held.id()]);
        assert!(
            matches!(replaced, Err(SteerError::OtherMaps)),
            "{replaced:?}"
        );
        assert_eq!(node.ask(PEER4, [&proxy, &other])?, [MANY, 0]);

        held.pin_again()?;
        steering_program::replace(&globals, &[held.id()])?;
        assert_eq!(node.ask(PEER4, [&proxy, &other])?, [MANY, 0]);
        Ok(())
    });
}

/// Connections whose half-open state the node does not keep (as under a flood of SYNs). The last
/// packet of the handshake needs another listener lookup.
#[test]
fn connections_made_with_syn_cookies_are_steered() {
    with_node(|node| {
        // Each namespace has its own value, for both families. 2 means always.
        std::fs::write("/proc/sys/net/ipv4/tcp_syncookies", "2")?;
        let (a, b) = (node.proxy(1, KIND_SDP)?, node.proxy(5, KIND_SDP)?);
        let check = |node: &mut Node<'_>| -> Result<()> {
            for server in [PEER4, PEER6] {
                let got = node.connect(server, [&a, &b])?;
                assert_eq!(got.iter().sum::<u16>(), MANY);
                assert!(got.iter().all(|n| *n > MANY / 5), "{got:?}");
            }
            Ok(())
        };
        check(node)?;
        node.tproxy()?;
        check(node)
    });
}
