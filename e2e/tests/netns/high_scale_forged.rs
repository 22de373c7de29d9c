//! Packets of the tunnel that others make up, and where real ones do not go.
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::fleet::{NODE_ONE, NODE_TWO, with_fleet};
use holdfast_e2e::kernel::tunnel::{Wrapped, checksum};
use holdfast_e2e::lab::{NODE4, at, web4};
use holdfast_e2e::packet::{Packet, ethernet, udp};
use holdfast_e2e::policy::WEB;
use holdfast_e2e::raw_frames::RawFrames;
use holdfast_e2e::service::{ServicePort, kube_proxy, service4};
use holdfast_e2e::web::Web;
use holdfast_e2e::{Netns, eventually};
use shared_maps::event::Reason;
use shared_maps::tunnel::DEFAULT_PORT;

use super::high_scale::{
    NEVER, OF_OTHER, OF_WEB, POLICY, PORT, SOON, connects, is_ipv4, other_nodes,
};
use super::high_scale_traffic::{seen, start};

/// A datagram of the pods in the tunnel's headers, as the network would see it.
struct Forged {
    outer: (Ipv4Addr, Ipv4Addr),
    inner: (Ipv4Addr, Ipv4Addr),
    identity: u32,
    /// Source port inside: connection tracking lets packets of a known connection pass.
    port: u16,
}

const DATAGRAMS: u16 = 7777;
/// How long a datagram that must not arrive is awaited.
const NOTHING: Duration = Duration::from_millis(500);

impl Forged {
    /// Between the same addresses outside and inside.
    fn plain(source: Ipv4Addr, destination: Ipv4Addr, identity: u32) -> Self {
        Self {
            outer: (source, destination),
            inner: (source, destination),
            identity,
            port: 4000,
        }
    }

    /// The outer packet from its IP header on.
    fn ip(&self) -> Vec<u8> {
        let (source, destination) = self.inner;
        let datagram = udp(self.port, DATAGRAMS);
        let inner = Packet::new(source.into(), destination.into(), datagram);
        let mut wrapped = Wrapped::new(self.outer.0, self.outer.1, self.identity, &inner);
        wrapped.inner = with_checksum(wrapped.inner);
        with_checksum(wrapped.ip())
    }

    /// Header of the tunnel and what follows it.
    fn payload(&self) -> Vec<u8> {
        self.ip().split_off(28)
    }

    fn frame(&self, mac: [u8; 6]) -> Vec<u8> {
        let mut frame = ethernet(0x0800, &self.ip());
        frame[..6].copy_from_slice(&mac);
        frame
    }
}

/// The packet with the checksum of its IPv4 header, which has no options.
fn with_checksum(mut ip: Vec<u8>) -> Vec<u8> {
    let checksum = checksum(&ip[..20]);
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    ip
}

fn mac(netns: &Netns, device: &str) -> Result<[u8; 6]> {
    let shown = netns.run("ip", &["-o", "link", "show", device])?;
    let mut words = shown.split_whitespace();
    let text = words.find(|word| word.matches(':').count() == 5);
    let text = text.with_context(|| format!("no address: {shown}"))?;
    let mut octets = [0; 6];
    for (octet, part) in octets.iter_mut().zip(text.split(':')) {
        *octet = u8::from_str_radix(part, 16)?;
    }
    Ok(octets)
}

fn listens(netns: &Netns, to: SocketAddr) -> Result<UdpSocket> {
    let socket = netns.enter(|| UdpSocket::bind(to))??;
    socket.set_read_timeout(Some(NOTHING))?;
    Ok(socket)
}

/// IPv4 packets that the socket has seen.
fn frames(wire: &RawFrames) -> Result<Vec<Vec<u8>>> {
    let mut all = Vec::new();
    while let Some(frame) = wire.next(Duration::from_millis(200))? {
        if is_ipv4(&frame) {
            all.push(frame);
        }
    }
    Ok(all)
}

fn arrives(socket: &UdpSocket) -> bool {
    socket.recv_from(&mut [0; 256]).is_ok()
}

#[test]
fn high_scale_forged_packets_are_not_delivered() {
    with_fleet(|fleet| {
        let running = start(fleet)?;
        let pods = &running.pods;
        // On the first node, the other pod admits web servers.
        let admits = POLICY.replace("client", "other");
        fleet.one.write_policy("other.yaml", &admits)?;
        let to = pods.other.v4;
        let socket = listens(&pods.other.netns, (to, DATAGRAMS).into())?;
        let known = Ipv4Addr::new(10, 77, 0, 99);
        let router = RawFrames::open(fleet.router())?;
        let node = mac(&fleet.one.node, "up0")?;
        // This forged packet arrives: the network has to keep it out. It shows that the others fail for their faults.
        let accepted = Forged::plain(known, to, OF_WEB).frame(node);
        eventually(
            "policy is in force, and a packet of a web server arrives",
            SOON,
            || {
                router.send(&accepted)?;
                ensure!(arrives(&socket), "it does not arrive");
                Ok(())
            },
        )?;
        ensure!(!arrives(&socket), "more than one packet");
        let outside = match web4(10) {
            IpAddr::V4(address) => address,
            IpAddr::V6(_) => known,
        };
        let of_tunnel = Forged::plain(known, to, OF_WEB);
        let cases = [
            ("of the world", Forged::plain(outside, to, OF_WEB)),
            ("of the node", Forged::plain(NODE_ONE, to, OF_WEB)),
            (
                "of a pod of this node",
                Forged::plain(pods.web.v4, to, OF_WEB),
            ),
            ("of another identity", Forged::plain(known, to, OF_OTHER)),
            ("without an identity", Forged::plain(known, to, 0)),
            ("of the host", Forged::plain(known, to, 1)),
            ("of a number of a node", Forged::plain(known, to, 61_440)),
            (
                "of another source",
                Forged {
                    inner: (Ipv4Addr::new(10, 77, 0, 98), to),
                    ..Forged::plain(known, to, OF_WEB)
                },
            ),
            (
                "to the node",
                Forged {
                    outer: (known, NODE_ONE),
                    ..of_tunnel
                },
            ),
        ];
        for (port, (what, forged)) in (4_001..).zip(cases) {
            let forged = Forged { port, ..forged };
            router.send(&forged.frame(node))?;
            ensure!(!arrives(&socket), "a packet {what} arrived");
        }
        let forged = fleet.one.counted(Reason::TunnelForged)?;
        ensure!(forged >= 7, "{forged} forged packets counted");

        // A pod may not send to the tunnel's port, neither under its own address nor under another one.
        let far = listens(&pods.client.netns, (pods.client.v4, DATAGRAMS).into())?;
        let direct = listens(&pods.client.netns, (pods.client.v4, DEFAULT_PORT).into())?;
        let sender = pods.other.netns.enter(|| UdpSocket::bind((to, 0)))??;
        let own = Forged::plain(to, pods.client.v4, OF_WEB);
        let before = fleet.one.counted(Reason::TunnelPort)?;
        let wire = RawFrames::open(fleet.router())?;
        // The node's address is in a block outside, so that only its `hf_vxlan` drops the packet.
        for destination in [IpAddr::from(pods.client.v4), NODE4] {
            let _refused = sender.send_to(&own.payload(), (destination, DEFAULT_PORT));
        }
        let pod = RawFrames::open(&pods.other.netns)?;
        let gateway = mac(&fleet.one.node, &pods.other.host_side)?;
        for source in [to, pods.web.v4, known] {
            let mut frame = Forged::plain(source, pods.client.v4, OF_WEB).frame(gateway);
            frame[6..12].copy_from_slice(&pod.mac());
            pod.send(&frame)?;
        }
        ensure!(
            !arrives(&far) && !arrives(&direct),
            "a pod's packet arrived"
        );
        let left = frames(&wire)?;
        ensure!(left.is_empty(), "a pod's packet left the node: {left:x?}");
        let counted = fleet.one.counted(Reason::TunnelPort)? - before;
        ensure!(counted == 2, "{counted} packets to the port counted");

        // Nor may a pod send to a port that the node translates to the tunnel's port.
        let service = at(service4(81), 53);
        let translated = ServicePort {
            protocol: "udp",
            at: service,
            backends: vec![at(pods.client.v4.into(), DEFAULT_PORT)],
        };
        kube_proxy(fleet.one, &[translated])?;
        let before = fleet.one.counted(Reason::TunnelPort)?;
        sender.send_to(&own.payload(), service)?;
        ensure!(
            !arrives(&far) && !arrives(&direct),
            "a translated packet arrived"
        );
        ensure!(seen(&wire)? == (0, 0), "a translated packet left the node");
        ensure!(
            fleet.one.counted(Reason::TunnelPort)? == before + 1,
            "not counted"
        );
        Ok(())
    });
}

#[test]
fn high_scale_sends_nothing_of_the_tunnel_to_the_world_nodes_or_local_pods() {
    with_fleet(|fleet| {
        let running = start(fleet)?;
        let pods = &running.pods;
        fleet.two.add_endpoint(&pods.near, WEB)?;
        let to = at(pods.client.v4.into(), PORT);
        let _server = Web::start(&pods.client.netns, &[pods.client.v4.into()], &[PORT], &[])?;
        let wire = RawFrames::open(fleet.router())?;
        let local = RawFrames::open(&pods.client.netns)?;
        pods.web.expect_open(at(web4(10), 80))?;
        other_nodes(fleet)?;
        eventually("the other node is known", SOON, || {
            ensure!(fleet.one.is_plumbed(NODE_TWO.into())?, "it is not");
            Ok(())
        })?;
        pods.web.ping(NODE_TWO.into(), SOON)?;
        pods.web.ping(NODE4, SOON)?;
        pods.near.expect_open(to)?;
        let (of_tunnel, plain) = seen(&wire)?;
        ensure!(of_tunnel == 0, "{of_tunnel} packets of the tunnel");
        ensure!(plain > 4, "{plain} packets to the world");
        let (of_tunnel, plain) = seen(&local)?;
        ensure!(of_tunnel == 0, "{of_tunnel} packets of the tunnel");
        ensure!(plain > 4, "{plain} packets between pods of a node");
        Ok(())
    });
}

/// Without an API server, an agent learns the addresses of other nodes from documents alone.
#[test]
fn high_scale_packets_to_nodes_that_are_unknown_are_lost_and_status_says_so() {
    with_fleet(|fleet| {
        let running = start(fleet)?;
        let web = &running.pods.web;
        let to = SocketAddr::from((NODE_TWO, PORT));
        let _server = fleet.two.node.enter(|| TcpListener::bind(to))??;
        let unknown = "no CiliumNode document of another node is known";
        fleet
            .one
            .status_has(SOON, &[unknown, "other nodes known: 0"])?;
        let before = fleet.one.counted(Reason::Wrapped)?;
        ensure!(
            !connects(web, to, NEVER)?,
            "connected to a node that is unknown"
        );
        ensure!(fleet.one.counted(Reason::Wrapped)? > before, "not wrapped");
        other_nodes(fleet)?;
        eventually("the other node is known", SOON, || {
            let status = fleet.one.agent(&["status"])?;
            ensure!(status.contains("other nodes known: 1"), "{status}");
            ensure!(!status.contains("PROBLEM"), "{status}");
            ensure!(fleet.one.is_plumbed(NODE_TWO.into())?, "it has no entry");
            Ok(())
        })?;
        let before = fleet.one.counted(Reason::Wrapped)?;
        ensure!(connects(web, to, SOON)?, "no connection to a known node");
        ensure!(fleet.one.counted(Reason::Wrapped)? == before, "wrapped");
        Ok(())
    });
}
