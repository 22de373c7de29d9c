//! The packets of the high-scale ipcache's vectors (`agent/core/src/high_scale/vectors.json`): wrapped and
//! unwrapped, refused, and given to the receiver's policy with the identity of their sender.
use std::net::{IpAddr, Ipv4Addr};

use agent_core::datapath::attachment::Attachment;
use agent_core::datapath::plan::{Datapath as _, Step};
use agent_datapath::events::EventReader;
use agent_datapath::tunnel::TunnelMode;
use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::kernel::tunnel::{Fate, Outcome, Wrapped, with_tunnel};
use holdfast_e2e::kernel::{From, IDENTITY, Kernel, POD4, attachment};
use holdfast_e2e::packet::{Packet, SYN, echo, ethernet, raw, tcp, udp};
use serde_json::Value;
use shared_maps::event::Reason;
use shared_maps::lxc::{LxcKey, LxcValue};
use shared_maps::tunnel::OVERHEAD;
use shared_maps::{EndpointId, IdentityId};

static VECTORS: &str = include_str!("../../../agent/core/src/high_scale/vectors.json");

/// Groups that run here, with the number of their vectors.
const RUN: [(&str, usize); 4] = [
    ("decap", 7),
    ("encap_decision", 10),
    ("local_source_identity", 1),
    ("migration_matrix", 6),
];
/// Identity of the sender where a vector names none.
const SENDER: u32 = 12_345;
/// A pod of another node.
const REMOTE: Ipv4Addr = Ipv4Addr::new(172, 16, 1, 2);
/// Interface of the pod that sends.
const FROM_POD: u32 = 4242;
/// Another pod of the node, and its interface.
const NEIGHBOUR: EndpointId = EndpointId(8);
const FROM_NEIGHBOUR: u32 = 4243;

/// The vectors of a group, with their ids.
fn of_group(group: &str) -> Vec<(String, Value)> {
    let all: Value = serde_json::from_str(VECTORS).expect("JSON");
    let cases = all["cases"].as_array().expect("a list").iter();
    let cases = cases.filter(|case| case["group"] == group);
    let cases = cases.map(|case| (case["id"].as_str().expect("text").to_owned(), case.clone()));
    let cases: Vec<_> = cases.collect();
    assert!(RUN.contains(&(group, cases.len())), "{group}");
    cases
}

fn text(value: &Value) -> &str {
    value.as_str().expect("text")
}

fn address(value: &Value) -> Ipv4Addr {
    text(value).parse().expect("an address")
}

fn mode(value: &Value) -> TunnelMode {
    TunnelMode::of(text(value)).expect("a mode")
}

fn small<N: TryFrom<u64>>(value: &Value) -> N {
    let number = value.as_u64().and_then(|number| number.try_into().ok());
    number.unwrap_or_else(|| panic!("{value}"))
}

#[test]
fn tunnel_vectors_all_run() {
    let all: Value = serde_json::from_str(VECTORS).expect("JSON");
    let count = |(group, count): (&str, usize)| {
        let cases = all["cases"].as_array().expect("a list").iter();
        assert_eq!(cases.filter(|case| case["group"] == group).count(), count);
        count
    };
    // The other 36 need no packet: `agent/core/src/high_scale/vectors.rs` says where they run.
    assert_eq!(RUN.map(count).iter().sum::<usize>(), 24);
}

#[test]
fn tunnel_vectors_of_wrapping_hold() {
    for (id, vector) in of_group("encap_decision") {
        let given = &vector["given"];
        with_tunnel(mode(&given["mode"]), |k| {
            let IpAddr::V4(sender) = POD4 else {
                unreachable!("a constant")
            };
            k.local_pod(sender, IDENTITY.0)?;
            for local in given["local_endpoints"].as_array().context("a list")? {
                k.local_pod(address(local), 300)?;
            }
            for block in given["world_cidrs"].as_array().context("a list")? {
                let (ip, len) = text(block).split_once('/').context("a block")?;
                k.outside_block(ip.parse()?, len.parse()?)?;
            }
            let (fate, reason) = match text(&vector["expect"]) {
                "encapsulate" => (Fate::Wrapped, Some(Reason::Wrapped)),
                // To a pod of this node too: the packet stays as it is, and a route leads it there.
                "native" | "deliver-local" => (Fate::Passed, None),
                other => anyhow::bail!("{other}"),
            };
            for transport in [
                tcp(4000, 80, SYN),
                udp(4000, 53),
                echo(false, false, 7),
                raw(47, &[0; 9]),
            ] {
                let to = address(&given["dst"]);
                let frame = Packet::new(POD4, to.into(), transport).frame();
                let expected = Outcome {
                    fate: fate.clone(),
                    reason,
                    frame: frame.clone(),
                };
                assert_eq!(k.to_net(&frame, FROM_POD)?, expected, "{id}");
            }
            Ok(())
        });
    }
}

/// The packet of a vector about unwrapping.
fn wrapped(given: &Value) -> Wrapped {
    let (outer, inner) = (&given["outer"], &given["inner"]);
    let transport = tcp(4000, small(&inner["dport"]), SYN);
    let (from, to) = (address(&inner["src"]), address(&inner["dst"]));
    let packet = Packet::new(from.into(), to.into(), transport);
    let mut wrapped = Wrapped::new(address(&outer["src"]), address(&outer["dst"]), 0, &packet);
    let header = u64::from_str_radix(text(&given["vxlan_header_hex"]), 16).expect("hex");
    wrapped.header = header.to_be_bytes();
    wrapped.port = small(&outer["dport"]);
    wrapped.protocol = match text(&outer["proto"]) {
        "udp" => 17,
        "tcp" => 6,
        other => panic!("{other}"),
    };
    assert_eq!(outer["ihl"], 5);
    assert_eq!(outer["frag_offset"], 0);
    wrapped
}

#[test]
fn tunnel_vectors_of_unwrapping_hold() {
    for (id, vector) in of_group("decap") {
        let (given, expect) = (&vector["given"], &vector["expect"]);
        with_tunnel(mode(&given["mode"]), |k| {
            for local in given["local_endpoints"].as_array().context("a list")? {
                k.local_pod(address(local), 300)?;
            }
            let packet = wrapped(given);
            let ether_type = given["ethertype"].as_str().unwrap_or("0x0800");
            let ether_type = u16::from_str_radix(ether_type.trim_start_matches("0x"), 16)?;
            let frame = ethernet(ether_type, &packet.ip());
            let outcome = k.from_net(&frame)?;
            let source = k.source(packet.source)?.map(|source| source.identity);
            match text(&expect["action"]) {
                "decapsulate" => {
                    assert_eq!(outcome.fate, Fate::Passed, "{id}");
                    assert_eq!(outcome.reason, Some(Reason::Unwrapped), "{id}");
                    let removed: usize = small(&expect["bytes_removed"]);
                    assert_eq!(outcome.frame.len() + removed, frame.len(), "{id}");
                    assert_eq!(outcome.frame, ethernet(0x0800, &packet.inner), "{id}");
                    let identity: u32 = small(&expect["source_identity"]);
                    assert_eq!(source, Some(identity), "{id}");
                    let next = format!("ingress policy of {}", packet.destination);
                    assert_eq!(expect["next"], next, "{id}");
                }
                "pass-unchanged" => {
                    let expected = Outcome {
                        fate: Fate::Passed,
                        reason: None,
                        frame,
                    };
                    assert_eq!((outcome, source), (expected, None), "{id}");
                }
                "drop" => {
                    assert_eq!(outcome.fate, Fate::Dropped, "{id}: {expect}");
                    assert_eq!(outcome.reason, Some(Reason::TunnelForged), "{id}");
                    assert_eq!(source, None, "{id}");
                }
                other => anyhow::bail!("{other}"),
            }
            Ok(())
        });
    }
}

/// The identity by which the pod under test judges the sender of a packet.
fn judged(k: &mut Kernel, frame: &[u8], from: From) -> Result<u32> {
    let mut reader = EventReader::open(&k.globals())?;
    match from {
        // A packet without an identity is counted twice: as plain, and by its verdict.
        From::Outside => k.pass_in(frame)?,
        from => drop(k.receive(frame, from)?),
    }
    let events = reader.take(10);
    ensure!(events.len() == 1, "{events:?}");
    Ok(events[0].remote_identity)
}

/// What a node of this mode sends to a pod of another node, on the wire: the packet, or none if it is wrapped.
/// The kernel's device puts the outer headers around it, with the number that the program gave.
fn is_wrapped(mode: TunnelMode, packet: &Packet) -> bool {
    let mut is_wrapped = None;
    with_tunnel(mode, |k| {
        k.local_pod(REMOTE, SENDER)?;
        let outcome = k.to_net(&packet.frame(), FROM_POD)?;
        is_wrapped = Some(outcome.fate == Fate::Wrapped);
        Ok(())
    });
    is_wrapped.expect("the test ran")
}

#[test]
fn tunnel_vectors_of_pairs_of_modes_hold() {
    let IpAddr::V4(receiver) = POD4 else {
        unreachable!("a constant")
    };
    for (id, vector) in of_group("migration_matrix") {
        let (given, expect) = (&vector["given"], &vector["expect"]);
        let packet = Packet::new(REMOTE.into(), POD4, tcp(4000, 80, SYN));
        let is_wrapped = is_wrapped(mode(&given["sender"]), &packet);
        let on_wire = if is_wrapped { "vxlan" } else { "plain" };
        assert_eq!(expect["on_wire"], on_wire, "{id}");
        // What the ipcache has for the sender, and by what it is judged. No entry is the world.
        for (known, by_ipcache) in [(Some(4300), 4300), (Some(3), 3), (None, 2)] {
            with_tunnel(mode(&given["receiver"]), |k| {
                k.local_pod(receiver, IDENTITY.0)?;
                if let Some(known) = known {
                    k.identity(REMOTE.into(), known)?;
                }
                let frame = match is_wrapped {
                    true => {
                        let wrapped = Wrapped::new(REMOTE, receiver, SENDER, &packet).frame();
                        let outcome = k.from_net(&wrapped)?;
                        assert_eq!(outcome.reason, Some(Reason::Unwrapped), "{id}");
                        outcome.frame
                    }
                    false => k.from_net(&packet.frame())?.frame,
                };
                let identity = judged(k, &frame, From::Outside)?;
                let expected = match text(&expect["source_identity_at_receiver"]) {
                    "from ipcache" => by_ipcache,
                    "from VNI" => SENDER,
                    // mig-8. A pruned node that knows the block of the pod has an entry for the block, `unmanaged`
                    // (3): such an address is not outside of the cluster, so that no rule about the world opens
                    // it. The vector's world is that of a node that knows no blocks.
                    "world (2), unless the receiver still keeps remote pods in its ipcache" => {
                        by_ipcache
                    }
                    other => anyhow::bail!("{other}"),
                };
                assert_eq!(identity, expected, "{id}, ipcache {known:?}");
                Ok(())
            });
        }
    }
}

/// Another pod of this node, behind an interface of its own. The ipcache has no entry for it yet.
fn add_neighbour(k: &mut Kernel, address: Ipv4Addr, identity: u32) -> Result<()> {
    k.datapath().apply(&Step::CreatePolicyMap(NEIGHBOUR))?;
    let neighbour = Attachment {
        endpoint: NEIGHBOUR,
        identity: IdentityId(identity),
        ipv4: Some(address),
        ipv6: None,
        ..attachment(FROM_NEIGHBOUR)
    };
    k.datapath().enter(&neighbour, FROM_NEIGHBOUR)?;
    let value = LxcValue {
        ifindex: FROM_NEIGHBOUR,
        lxc_id: NEIGHBOUR.0,
        sec_id: identity,
        ..LxcValue::default()
    };
    let step = Step::SetLxc(LxcKey::v4(address.octets()), value);
    Ok(k.datapath().apply(&step)?)
}

#[test]
fn tunnel_vectors_of_local_senders_hold() {
    for (id, vector) in of_group("local_source_identity") {
        let given = &vector["given"];
        let source = address(&given["src"]);
        let of_source: u32 = small(&given["local_endpoints"][text(&given["src"])]);
        with_tunnel(TunnelMode::Full, |k| {
            let packet = |port| Packet::new(source.into(), POD4, tcp(port, 80, SYN)).frame();
            // By the ipcache alone.
            let so_far: u32 = small(&given["identity_so_far"]);
            assert_eq!(judged(k, &packet(4000), From::Outside)?, so_far, "{id}");
            add_neighbour(k, source, of_source)?;
            let at = From::Interface(FROM_NEIGHBOUR);
            let expected: u32 = small(&vector["expect"]["identity"]);
            assert_eq!(judged(k, &packet(4001), at)?, expected, "{id}");
            Ok(())
        });
    }
}

#[test]
fn tunnel_overhead_is_that_of_the_vectors() {
    for (id, vector) in of_group("decap") {
        if let Some(removed) = vector["expect"]["bytes_removed"].as_u64() {
            assert_eq!(removed, u64::from(OVERHEAD), "{id}");
        }
    }
}
