//! Neighbour discovery and MLD pass without policy: the messages that a pod may send and receive,
//! by type, direction, destination and hop limit.
use std::net::{IpAddr, Ipv6Addr};

use agent_core::datapath::{
    attachment::Attachment,
    link::Link,
    plan::{Datapath as _, Step},
};
use anyhow::Result;
use holdfast_e2e::kernel::{
    From, IFINDEX, Kernel, LINK_LOCAL, MAC, PEER6, POD6, attachment, with_kernel,
};
use holdfast_e2e::packet::{Packet, Transport, icmp};
use shared_maps::event::Reason::{self, LinkLocal, Malformed, NotOnLink, SpoofedSource};
use shared_maps::lxc::{FLAG_HOST, LxcValue};
use shared_maps::policy::{EGRESS, INGRESS};
use shared_maps::user::lxc_key;

const ROUTER_SOLICITATION: u8 = 133;
const ROUTER_ADVERTISEMENT: u8 = 134;
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
const REDIRECT: u8 = 137;
const MLD_QUERY: u8 = 130;
const MLD_REPORT: u8 = 131;
const MLD_DONE: u8 = 132;
const MLD2_REPORT: u8 = 143;

/// The host-side interface, a port of the bridge.
const PORT_MAC: [u8; 6] = [2, 0, 0, 0, 1, 1];
const BRIDGE_MAC: [u8; 6] = [2, 0, 0, 0, 1, 2];
const NEIGHBOUR_MAC: [u8; 6] = [2, 0, 0, 0, 1, 3];
/// Hop limits of the table: neighbour discovery, routed once, usual, MLD.
const HOPS: [u8; 4] = [255, 254, 64, 1];

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn v6(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V6(v6) => v6,
        IpAddr::V4(_) => unreachable!("IPv6"),
    }
}

/// The link-layer address option of a source (1) or a target (2).
fn link_address(kind: u8, mac: [u8; 6]) -> Vec<u8> {
    [&[kind, 1], mac.as_slice()].concat()
}

fn nonce() -> Vec<u8> {
    vec![14, 1, 1, 2, 3, 4, 5, 6]
}

/// A well-formed message of `kind` about `about` with `options`.
fn message_with(kind: u8, about: IpAddr, options: &[Vec<u8>]) -> Transport {
    let target = v6(about).octets();
    let mut rest = match kind {
        // Hop limit, flags, lifetime, timers.
        ROUTER_ADVERTISEMENT => vec![64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0],
        REDIRECT => [&[0; 4], target.as_slice(), &target].concat(),
        ROUTER_SOLICITATION => vec![0; 4],
        // One record: "exclude nothing".
        MLD2_REPORT => [&[0, 0, 0, 1, 4, 0, 0, 0], target.as_slice()].concat(),
        _ => [&[0; 4], target.as_slice()].concat(),
    };
    rest.extend(options.concat());
    icmp(true, kind, &rest)
}

/// A message as Linux sends it from an address.
fn message(kind: u8, about: IpAddr) -> Transport {
    let options = match kind {
        SOLICITATION | ROUTER_SOLICITATION => vec![link_address(1, MAC)],
        ADVERTISEMENT => vec![link_address(2, MAC)],
        _ => Vec::new(),
    };
    message_with(kind, about, &options)
}

fn packet(kind: u8, from: IpAddr, to: IpAddr, about: IpAddr, hops: u8) -> Packet {
    let packet = Packet::new(from, to, message(kind, about)).hop_limit(hops);
    if is_mld(kind) {
        packet.router_alert()
    } else {
        packet
    }
}

fn is_mld(kind: u8) -> bool {
    matches!(kind, MLD_QUERY..=MLD_DONE | MLD2_REPORT)
}

fn bridged() -> Attachment {
    Attachment {
        gateway_mac: Some(PORT_MAC),
        link: Link {
            bridge_mac: Some(BRIDGE_MAC),
            on_link_bits: 64,
            ..attachment(IFINDEX).link
        },
        ..attachment(IFINDEX)
    }
}

/// Adds `address` to `cilium_lxc` as an address of the node.
fn node_has(k: &mut Kernel, address: IpAddr) -> Result<()> {
    let value = LxcValue {
        flags: FLAG_HOST,
        ..LxcValue::default()
    };
    Ok(k.datapath().apply(&Step::SetLxc(lxc_key(address), value))?)
}

fn expect_sent(k: &mut Kernel, what: &str, frame: &[u8], expected: Reason) -> Result<()> {
    let verdict = k.send(frame)?;
    assert_eq!(verdict.reason, expected, "{what}");
    Ok(())
}

fn expect_received(k: &mut Kernel, what: &str, frame: &[u8], expected: Reason) -> Result<()> {
    for from in [From::Outside, From::Local(0)] {
        let verdict = k.receive(frame, from)?;
        assert_eq!(verdict.reason, expected, "{what}, {from:?}");
    }
    Ok(())
}

#[test]
fn a_pod_sends_messages_to_its_link_only() {
    let node = ip("fd09:1::1");
    // Destination; whether it is on the link of a routed interface.
    let rows = [
        ("the group of an address", "ff02::1:ff00:3", true),
        ("all nodes", "ff02::1", true),
        ("all routers", "ff02::2", true),
        ("the node's link-local address", "fe80::1", true),
        ("the node's address", "fd09:1::1", true),
        ("a neighbour's link-local address", "fe80::3", false),
        ("a neighbour's address", "fd09:1::3", false),
        ("an address elsewhere", "2001:db8::53", false),
        ("a group elsewhere", "ff05::2", false),
        ("a group of everyone", "ff0e::1", false),
    ];
    with_kernel(|k| {
        // Policy allows everything and does not judge these messages.
        k.allow(0, EGRESS, 0, 0)?;
        node_has(k, node)?;
        for (what, to, on_link) in rows {
            for kind in ROUTER_SOLICITATION..=REDIRECT {
                for hops in HOPS {
                    let about = if kind == ADVERTISEMENT { POD6 } else { ip(to) };
                    let frame = packet(kind, POD6, ip(to), about, hops).frame();
                    let expected = match (kind, hops) {
                        (ROUTER_ADVERTISEMENT | REDIRECT, _) => SpoofedSource,
                        (_, 255) if on_link => LinkLocal,
                        (_, 255) => NotOnLink,
                        _ => Malformed,
                    };
                    let what = format!("type {kind} to {what}, hop limit {hops}");
                    expect_sent(k, &what, &frame, expected)?;
                }
            }
        }
        Ok(())
    });
}

#[test]
fn on_a_bridge_a_pod_reaches_neighbours_only_without_the_node() {
    let node = ip("fd09:1::1");
    // Destination; whether it passes to a neighbour's MAC, and to the node's.
    let rows = [
        ("the group of an address", "ff02::1:ff00:3", true, true),
        ("the node's link-local address", "fe80::1", true, true),
        ("the node's address", "fd09:1::1", true, true),
        ("a neighbour's link-local address", "fe80::3", true, false),
        ("a neighbour's address", "fd09:1::3", true, false),
        (
            "an address beside the prefix",
            "fd09:1:0:1::3",
            false,
            false,
        ),
        ("an address elsewhere", "2001:db8::53", false, false),
    ];
    with_kernel(|k| {
        k.allow(0, EGRESS, 0, 0)?;
        node_has(k, node)?;
        k.reload(&bridged())?;
        for (what, to, to_neighbour, to_node) in rows {
            for (mac, on_link) in [
                (NEIGHBOUR_MAC, to_neighbour),
                (PORT_MAC, to_node),
                (BRIDGE_MAC, to_node),
            ] {
                for kind in [ROUTER_SOLICITATION, SOLICITATION, ADVERTISEMENT] {
                    for hops in HOPS {
                        let about = if kind == ADVERTISEMENT { POD6 } else { ip(to) };
                        let frame = packet(kind, POD6, ip(to), about, hops).frame_to(mac);
                        let expected = match hops {
                            255 if on_link => LinkLocal,
                            255 => NotOnLink,
                            _ => Malformed,
                        };
                        let what = format!("type {kind} to {what} at {mac:?}, hop limit {hops}");
                        expect_sent(k, &what, &frame, expected)?;
                    }
                }
            }
        }
        Ok(())
    });
}

#[test]
fn a_pods_neighbour_messages_are_about_its_own_addresses_only() {
    let all_nodes = ip("ff02::1");
    let nobody = ip("::");
    let other = ip("fd09:1::3");
    let chosen = ip("fe80::a");
    let rows = [
        ("resolves", SOLICITATION, POD6, other, LinkLocal),
        (
            "resolves from its MAC's",
            SOLICITATION,
            LINK_LOCAL,
            other,
            LinkLocal,
        ),
        (
            "resolves from a chosen one",
            SOLICITATION,
            chosen,
            other,
            LinkLocal,
        ),
        (
            "resolves from another's",
            SOLICITATION,
            other,
            PEER6,
            SpoofedSource,
        ),
        (
            "resolves from the node's",
            SOLICITATION,
            ip("fe80::1"),
            PEER6,
            SpoofedSource,
        ),
        ("advertises its own", ADVERTISEMENT, POD6, POD6, LinkLocal),
        (
            "advertises its MAC's",
            ADVERTISEMENT,
            LINK_LOCAL,
            LINK_LOCAL,
            LinkLocal,
        ),
        (
            "advertises a chosen one",
            ADVERTISEMENT,
            chosen,
            chosen,
            LinkLocal,
        ),
        (
            "advertises another's",
            ADVERTISEMENT,
            POD6,
            other,
            SpoofedSource,
        ),
        (
            "advertises the node's",
            ADVERTISEMENT,
            POD6,
            ip("fe80::1"),
            SpoofedSource,
        ),
        (
            "advertises from the unspecified address",
            ADVERTISEMENT,
            nobody,
            POD6,
            Malformed,
        ),
        (
            "asks for routers",
            ROUTER_SOLICITATION,
            chosen,
            other,
            LinkLocal,
        ),
    ];
    with_kernel(|k| {
        let mut attachment = attachment(IFINDEX);
        attachment.link.pod = vec![v6(chosen)];
        k.reload(&attachment)?;
        for (what, kind, from, about, expected) in rows {
            let frame = packet(kind, from, all_nodes, about, 255).frame();
            expect_sent(k, what, &frame, expected)?;
        }
        // Duplicate address detection, with a nonce (RFC 7527) and without.
        for (about, expected) in [
            (POD6, LinkLocal),
            (LINK_LOCAL, LinkLocal),
            (chosen, LinkLocal),
            (other, SpoofedSource),
            (ip("fe80::b"), SpoofedSource),
        ] {
            for options in [vec![], vec![nonce()]] {
                let probe = message_with(SOLICITATION, about, &options);
                let probe = Packet::new(nobody, ip("ff02::1:ff00:2"), probe).hop_limit(255);
                expect_sent(k, "probe", &probe.frame(), expected)?;
            }
        }
        let soliciting = message_with(ROUTER_SOLICITATION, nobody, &[]);
        let soliciting = Packet::new(nobody, ip("ff02::2"), soliciting).hop_limit(255);
        expect_sent(k, "routers, no address yet", &soliciting.frame(), LinkLocal)?;
        Ok(())
    });
}

#[test]
fn neighbour_messages_have_no_room_for_anything_else() {
    let group = ip("ff02::1:ff00:3");
    let own = || link_address(1, MAC);
    let rows: Vec<(&str, Vec<Vec<u8>>, Reason)> = vec![
        ("no option", vec![], LinkLocal),
        ("its MAC", vec![own()], LinkLocal),
        ("its MAC and a nonce", vec![own(), nonce()], LinkLocal),
        (
            "another's MAC",
            vec![link_address(1, NEIGHBOUR_MAC)],
            SpoofedSource,
        ),
        ("three options", vec![own(), nonce(), nonce()], Malformed),
        (
            "an unknown option",
            vec![vec![200, 1, 0, 0, 0, 0, 0, 0]],
            Malformed,
        ),
        (
            "an option of no length",
            vec![vec![1, 0, 0, 0, 0, 0, 0, 0]],
            Malformed,
        ),
        ("a long option", vec![vec![14, 2], vec![7; 14]], Malformed),
        ("half an option", vec![vec![1, 1, 2, 3]], Malformed),
        ("payload", vec![vec![7; 1200]], Malformed),
    ];
    with_kernel(|k| {
        for (what, options, expected) in rows {
            for about in [group, POD6] {
                let transport = message_with(SOLICITATION, about, &options);
                let packet = Packet::new(POD6, group, transport).hop_limit(255);
                expect_sent(k, what, &packet.frame(), expected)?;
            }
            let transport = message_with(SOLICITATION, POD6, &options);
            let inward = Packet::new(PEER6, POD6, transport).hop_limit(255).frame();
            // The programs do not know the MACs of the other end.
            let inwards = if expected == SpoofedSource {
                LinkLocal
            } else {
                expected
            };
            expect_received(k, what, &inward, inwards)?;
        }
        let good = packet(SOLICITATION, POD6, group, POD6, 255);
        let trailing = [good.frame(), vec![0; 16]].concat();
        expect_sent(k, "bytes behind the packet", &trailing, Malformed)?;
        let long = Packet::new(POD6, group, message(SOLICITATION, POD6)).hop_limit(255);
        for header in [0, 43, 60] {
            let frame = long.clone().extensions(header, 1).frame();
            expect_sent(k, "an extension header", &frame, Malformed)?;
        }
        let mut coded = good.frame();
        coded[14 + 40 + 1] = 1;
        expect_sent(k, "a code", &coded, Malformed)?;
        for cut in 1..32 {
            let mut frame = good.frame();
            frame.truncate(frame.len() - cut);
            expect_sent(k, "cut", &frame, Malformed)?;
        }
        Ok(())
    });
}

#[test]
fn a_pod_is_sent_messages_of_its_link_only() {
    let near = ip("fe80::1");
    // Source, destination; whether a solicitation or advertisement passes, and whether a router's
    // message does.
    let rows = [
        (near, POD6, true, true),
        (near, LINK_LOCAL, true, true),
        (near, ip("ff02::1"), true, true),
        (PEER6, POD6, true, false),
        (PEER6, ip("ff02::1:ff00:2"), true, false),
        (near, ip("ff0e::1"), false, false),
        (near, ip("fd09:1::3"), false, false),
        (near, ip("fe80::3"), false, false),
    ];
    with_kernel(|k| {
        k.allow(0, INGRESS, 0, 0)?;
        for (from, to, neighbour, router) in rows {
            for kind in ROUTER_SOLICITATION..=REDIRECT {
                for hops in HOPS {
                    let frame = packet(kind, from, to, POD6, hops).frame();
                    let of_router = matches!(kind, ROUTER_ADVERTISEMENT | REDIRECT);
                    let expected = match hops {
                        255 if of_router && !v6(from).is_unicast_link_local() => Malformed,
                        255 if (if of_router { router } else { neighbour }) => LinkLocal,
                        255 => NotOnLink,
                        _ => Malformed,
                    };
                    let what = format!("type {kind} from {from} to {to}, hop limit {hops}");
                    expect_received(k, &what, &frame, expected)?;
                }
            }
        }
        // Options of a router's message, as radvd and systemd-networkd send them.
        let prefix = [vec![3, 4], vec![0; 30]].concat();
        let mtu = vec![5, 1, 0, 0, 0, 0, 5, 0xdc];
        let servers = [vec![25, 3], vec![0; 22]].concat();
        let options = vec![link_address(1, PORT_MAC), prefix, mtu, servers];
        let whole = message_with(ROUTER_ADVERTISEMENT, POD6, &options);
        let whole = Packet::new(near, ip("ff02::1"), whole)
            .hop_limit(255)
            .frame();
        expect_received(k, "router", &whole, LinkLocal)?;
        let empty = message_with(ROUTER_ADVERTISEMENT, POD6, &[vec![5, 0], vec![0; 6]]);
        let empty = Packet::new(near, ip("ff02::1"), empty)
            .hop_limit(255)
            .frame();
        expect_received(k, "an option of no length", &empty, Malformed)?;
        let beyond = message_with(ROUTER_ADVERTISEMENT, POD6, &[vec![5, 3], vec![0; 6]]);
        let beyond = Packet::new(near, ip("ff02::1"), beyond)
            .hop_limit(255)
            .frame();
        expect_received(k, "an option beyond the end", &beyond, Malformed)?;
        Ok(())
    });
}

#[test]
fn mld_reports_pass_and_nothing_hides_in_them() {
    let routers = ip("ff02::16");
    let nobody = ip("::");
    let group = ip("ff02::1:ff00:2");
    with_kernel(|k| {
        k.allow(0, EGRESS, 0, 0)?;
        k.allow(0, INGRESS, 0, 0)?;
        for hops in HOPS {
            let expected = if hops == 1 { LinkLocal } else { Malformed };
            for from in [nobody, LINK_LOCAL] {
                for (kind, to) in [
                    (MLD2_REPORT, routers),
                    (MLD_REPORT, group),
                    (MLD_DONE, ip("ff02::2")),
                ] {
                    let frame = packet(kind, from, to, group, hops).frame();
                    expect_sent(k, &format!("type {kind}"), &frame, expected)?;
                }
            }
            let query = packet(MLD_QUERY, ip("fe80::1"), ip("ff02::1"), nobody, hops).frame();
            expect_received(k, "query", &query, expected)?;
            let report = packet(MLD2_REPORT, ip("fe80::1"), routers, group, hops).frame();
            let reason = k.receive(&report, From::Local(0))?.reason;
            assert_eq!(reason, expected, "report of the node");
            let forwarded = if hops == 1 { NotOnLink } else { Malformed };
            let reason = k.receive(&report, From::Outside)?.reason;
            assert_eq!(reason, forwarded, "report of a neighbour");
        }
        // A pod is not a router, and its MLD messages need a link-local source.
        let query = packet(MLD_QUERY, LINK_LOCAL, ip("ff02::1"), nobody, 1).frame();
        expect_sent(k, "query", &query, SpoofedSource)?;
        let global = packet(MLD2_REPORT, POD6, routers, group, 1).frame();
        expect_sent(k, "from an address of the network", &global, Malformed)?;
        let global = packet(MLD_QUERY, PEER6, ip("ff02::1"), nobody, 1).frame();
        expect_received(k, "from an address of the network", &global, Malformed)?;
        let single = packet(MLD2_REPORT, LINK_LOCAL, PEER6, group, 1).frame();
        expect_sent(k, "to one machine", &single, Malformed)?;
        let single = packet(MLD_QUERY, ip("fe80::1"), POD6, nobody, 1).frame();
        expect_received(k, "to one machine", &single, Malformed)?;
        let plain = Packet::new(LINK_LOCAL, routers, message(MLD2_REPORT, group)).hop_limit(1);
        expect_sent(k, "without router alert", &plain.frame(), Malformed)?;
        let other = packet(MLD_REPORT, LINK_LOCAL, routers, group, 1).frame();
        expect_sent(k, "to another group", &other, Malformed)?;

        let record = |sources: u8, extra: u8| -> Vec<u8> {
            let head = [4, extra, 0, sources];
            let group = v6(group).octets();
            [&head, group.as_slice(), &vec![7; usize::from(sources) * 16]].concat()
        };
        for (what, count, records, expected) in [
            (
                "two records",
                2,
                vec![record(0, 0), record(2, 0)],
                LinkLocal,
            ),
            ("32 records", 32, vec![record(0, 0); 32], LinkLocal),
            ("33 records", 33, vec![record(0, 0); 33], Malformed),
            ("two sources", 1, vec![record(2, 0)], LinkLocal),
            ("80 sources", 1, vec![record(80, 0)], Malformed),
            ("no record", 0, vec![], LinkLocal),
            ("fewer than said", 2, vec![record(0, 0)], Malformed),
            ("more than said", 1, vec![record(0, 0); 2], Malformed),
            ("extra data", 1, vec![record(0, 1), vec![0; 4]], Malformed),
            ("payload", 0, vec![vec![7; 1000]], Malformed),
        ] {
            let rest = [vec![0, 0, 0, count], records.concat()].concat();
            let packet = Packet::new(nobody, routers, icmp(true, MLD2_REPORT, &rest));
            let frame = packet.hop_limit(1).router_alert().frame();
            expect_sent(k, what, &frame, expected)?;
        }
        Ok(())
    });
}

#[test]
fn a_chosen_link_local_address_belongs_to_the_pod() {
    with_kernel(|k| {
        k.allow(0, EGRESS, 0, 0)?;
        let chosen = ip("fe80::a");
        let ping = |from: IpAddr| {
            let echo = holdfast_e2e::packet::echo(true, false, 7);
            Packet::new(from, ip("fe80::1"), echo).frame()
        };
        expect_sent(k, "not found", &ping(chosen), SpoofedSource)?;
        let mut attachment = attachment(IFINDEX);
        attachment.link.pod = vec![v6(chosen)];
        k.reload(&attachment)?;
        expect_sent(k, "found", &ping(chosen), Reason::Allowed)?;
        expect_sent(k, "its MAC's", &ping(LINK_LOCAL), Reason::Allowed)?;
        expect_sent(k, "another", &ping(ip("fe80::b")), SpoofedSource)?;
        expect_sent(
            k,
            "of another link",
            &ping(ip("fe80:0:0:1::a")),
            SpoofedSource,
        )?;
        // Without a MAC there is no link-local address made from it.
        attachment.mac = [0; 6];
        k.reload(&attachment)?;
        expect_sent(k, "MAC not known", &ping(LINK_LOCAL), SpoofedSource)?;
        expect_sent(k, "MAC not known, found", &ping(chosen), Reason::Allowed)?;
        Ok(())
    });
}
