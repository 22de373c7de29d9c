//! Messages that pass without policy between a pod and its link: neighbour discovery, duplicate
//! address detection and MLD of a real stack. None of them makes the node look for neighbours.
use std::net::{Ipv6Addr, SocketAddrV6, UdpSocket};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::lab::{DNS6, Lab, web6};
use holdfast_e2e::policy::{CLIENT, good_names};
use holdfast_e2e::{Netns, Query, eventually, with_lab};
use nix::net::if_::if_nametoindex;
use shared_maps::event::Reason;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

const SOON: Duration = Duration::from_secs(10);
const MANY: u16 = 200;

fn ip(text: &str) -> Ipv6Addr {
    text.parse().expect("an address")
}

/// Entries of the node's IPv6 neighbour table.
fn neighbours(netns: &Netns) -> Result<usize> {
    Ok(netns.run("ip", &["-6", "neigh", "show"])?.lines().count())
}

fn link_local(ip: Ipv6Addr, port: u16, interface: &str) -> Result<SocketAddrV6> {
    Ok(SocketAddrV6::new(ip, port, 0, if_nametoindex(interface)?))
}

#[test]
fn neighbour_messages_of_a_pod_do_not_fill_the_node_s_neighbour_table() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web6(10)], 600);
        let _programs = lab.start(&good_names())?;
        lab.a.ask(&Query::aaaa("www.good.test", DNS6))?;
        // The pod's stack sends packets for its link to the node.
        let mac = host_mac(lab)?;
        let near = |i: u16| Ipv6Addr::new(0xfe80, 0, 0, 0, 0xbad, 0, 0, 0x1000 + i);
        let far = |i: u16| Ipv6Addr::new(0x2001, 0xdb8, 0x53, 0, 0xbad, 0, 0, 0x1000 + i);
        let lines: Vec<String> = (0..MANY)
            .map(|i| format!("neigh add {} lladdr {mac} dev eth0", near(i)))
            .collect();
        lab.a.netns.batch(&lines.join("\n"))?;
        let before = neighbours(&lab.node)?;
        let refused = lab.counted(Reason::NotOnLink)?;
        lab.a.netns.enter(|| -> Result<()> {
            let socket = Socket::new(Domain::IPV6, Type::RAW, Some(Protocol::ICMPV6))?;
            socket.set_unicast_hops_v6(255)?;
            let index = if_nametoindex("eth0")?;
            for i in 0..MANY {
                for to in [near(i), far(i)] {
                    let mut solicitation = vec![135, 0, 0, 0, 0, 0, 0, 0];
                    solicitation.extend(to.octets());
                    let to = SockAddr::from(SocketAddrV6::new(to, 0, 0, index));
                    // An error about an earlier packet may be returned here.
                    let _sent = socket.send_to(&solicitation, &to);
                }
            }
            Ok(())
        })??;
        eventually("the solicitations are counted", SOON, || {
            let now = lab.counted(Reason::NotOnLink)?;
            ensure!(
                now >= refused + u64::from(MANY),
                "{refused} before, {now} now"
            );
            Ok(())
        })?;
        let now = neighbours(&lab.node)?;
        ensure!(now <= before + 4, "{before} neighbours before, {now} now");
        // The pod still works.
        lab.a.ask(&Query::aaaa("www.good.test", DNS6))?;
        Ok(())
    });
}

fn host_mac(lab: &Lab) -> Result<String> {
    let shown = lab
        .node
        .run("ip", &["-o", "link", "show", "dev", &lab.a.host_side])?;
    let mut words = shown
        .split_whitespace()
        .skip_while(|word| *word != "link/ether");
    Ok(words.nth(1).context("no MAC")?.to_owned())
}

#[test]
fn a_link_local_address_that_a_routed_pod_gives_itself_later_counts() {
    with_lab(|lab| {
        let (node, own) = (ip("fe80::1"), ip("fe80::b"));
        let host_side = lab.b.host_side.clone();
        lab.node
            .batch(&format!("address replace {node}/64 dev {host_side} nodad"))?;
        let _programs = lab.start(&good_names())?;
        lab.add_endpoint(&lab.b, CLIENT)?;
        let server = lab.node.enter(|| -> Result<UdpSocket> {
            Ok(UdpSocket::bind(link_local(node, 7000, &host_side)?)?)
        })??;
        server.set_read_timeout(Some(Duration::from_millis(100)))?;
        lab.b
            .netns
            .batch(&format!("address add {own}/64 dev eth0 nodad"))?;
        let client = lab.b.netns.enter(|| -> Result<UdpSocket> {
            let client = UdpSocket::bind(link_local(own, 0, "eth0")?)?;
            client.connect(link_local(node, 7000, "eth0")?)?;
            Ok(client)
        })??;
        eventually("the node gets the pod's packet", SOON, || {
            client.send(b"hello")?;
            server.recv_from(&mut [0; 16])?;
            Ok(())
        })
    });
}

#[test]
fn a_chosen_link_local_address_a_probe_and_a_report_work() {
    with_lab(|lab| {
        let (node, own) = (ip("fe80::1"), ip("fe80::b"));
        let host_side = lab.b.host_side.clone();
        lab.node
            .batch(&format!("address replace {node}/64 dev {host_side} nodad"))?;
        lab.b.netns.batch(&format!(
            "address flush dev eth0 scope link\naddress add {own}/64 dev eth0 nodad"
        ))?;
        let _programs = lab.start(&good_names())?;
        lab.add_endpoint(&lab.b, CLIENT)?;
        let refusals = |lab: &Lab| -> Result<Vec<u64>> {
            [Reason::SpoofedSource, Reason::Malformed, Reason::NotOnLink]
                .into_iter()
                .map(|reason| lab.counted(reason))
                .collect()
        };
        let refused = refusals(lab)?;

        let server = lab.node.enter(|| -> Result<UdpSocket> {
            Ok(UdpSocket::bind(link_local(node, 7000, &host_side)?)?)
        })??;
        let client = lab.b.netns.enter(|| -> Result<UdpSocket> {
            let client = UdpSocket::bind(link_local(own, 0, "eth0")?)?;
            client.connect(link_local(node, 7000, "eth0")?)?;
            Ok(client)
        })??;
        for socket in [&server, &client] {
            socket.set_read_timeout(Some(SOON))?;
        }
        client.send(b"hello")?;
        let (_, from) = server.recv_from(&mut [0; 16]).context("at the node")?;
        server.send_to(b"hello", from)?;
        client.recv(&mut [0; 16]).context("the node's answer")?;

        // Each side checks whether the other's address is still there.
        for (netns, neighbour, device) in [
            (&lab.b.netns, node, "eth0"),
            (&lab.node, own, host_side.as_str()),
        ] {
            let neighbour = neighbour.to_string();
            netns.batch(&format!("neigh change {neighbour} dev {device} nud probe"))?;
            eventually("the neighbour answers a probe", SOON, || {
                let shown = netns.run(
                    "ip",
                    &["-6", "neigh", "show", "to", &neighbour, "dev", device],
                )?;
                ensure!(shown.contains("REACHABLE"), "{shown}");
                Ok(())
            })?;
        }

        // Duplicate address detection, and a group that the pod joins.
        let passed = lab.counted(Reason::LinkLocal)?;
        lab.b.netns.sysctl(&[
            ("net.ipv6.conf.all.accept_dad", "1"),
            ("net.ipv6.conf.eth0.accept_dad", "1"),
        ])?;
        let address = lab.b.v6;
        lab.b.netns.batch(&format!(
            "address del {address}/128 dev eth0\naddress add {address}/128 dev eth0"
        ))?;
        let group = lab.b.netns.enter(|| -> Result<UdpSocket> {
            let socket = UdpSocket::bind("[::]:0")?;
            socket.join_multicast_v6(&ip("ff02::1234"), if_nametoindex("eth0")?)?;
            Ok(socket)
        })??;
        eventually("the address is checked", SOON, || {
            let shown = lab
                .b
                .netns
                .run("ip", &["-6", "address", "show", "dev", "eth0", "tentative"])?;
            ensure!(shown.trim().is_empty(), "{shown}");
            Ok(())
        })?;
        eventually("probes and reports pass", SOON, || {
            let now = lab.counted(Reason::LinkLocal)?;
            ensure!(now >= passed + 2, "{passed} before, {now} now");
            Ok(())
        })?;
        drop(group);
        assert_eq!(refusals(lab)?, refused, "some message was refused");
        Ok(())
    });
}
