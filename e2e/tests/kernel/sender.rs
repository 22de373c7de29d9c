//! Who sent a packet to a pod: the interface at which it arrived counts, and not its address alone.
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use agent_core::datapath::{
    attachment::Attachment,
    plan::{Datapath as _, Step},
};
use anyhow::Result;
use holdfast_e2e::kernel::{
    From, Kernel, LOOPBACK, PEER4, PEER6, POD4, POD6, STRANGER4, STRANGER6, attachment,
    with_kernel, with_stacks,
};
use holdfast_e2e::packet::{ACK, Packet, SYN, tcp, udp};
use shared_maps::endpoint::LOW_INTERFACES;
use shared_maps::event::Reason;
use shared_maps::lxc::{FLAG_HOST, LxcValue};
use shared_maps::policy::INGRESS;
use shared_maps::user::lxc_key;
use shared_maps::{EndpointId, IdentityId};

const TCP: u8 = 6;
const NEIGHBOUR: EndpointId = EndpointId(8);
const NEIGHBOUR4: Ipv4Addr = Ipv4Addr::new(10, 9, 1, 3);
const NEIGHBOUR6: Ipv6Addr = Ipv6Addr::new(0xfd09, 1, 0, 0, 0, 0, 0, 3);
const OF_NEIGHBOUR: u32 = 1001;
/// The pod, an address of the node, the neighbour.
const FAMILIES: [(IpAddr, IpAddr, IpAddr); 2] = [
    (POD4, STRANGER4, IpAddr::V4(NEIGHBOUR4)),
    (POD6, STRANGER6, IpAddr::V6(NEIGHBOUR6)),
];

/// `STRANGER4` and `STRANGER6` become addresses of the node.
fn with_node(k: &mut Kernel) -> Result<()> {
    for (_, node, _) in FAMILIES {
        let value = LxcValue {
            flags: FLAG_HOST,
            ..LxcValue::default()
        };
        k.datapath().apply(&Step::SetLxc(lxc_key(node), value))?;
        k.identity(node, IdentityId::HOST.0)?;
    }
    Ok(())
}

/// A second endpoint behind `interface`.
fn with_neighbour(k: &mut Kernel, interface: u32) -> Result<()> {
    k.datapath().apply(&Step::CreatePolicyMap(NEIGHBOUR))?;
    let neighbour = Attachment {
        endpoint: NEIGHBOUR,
        identity: IdentityId(OF_NEIGHBOUR),
        ipv4: Some(NEIGHBOUR4),
        ipv6: Some(NEIGHBOUR6),
        ..attachment(interface)
    };
    k.datapath().enter(&neighbour, interface)?;
    for (.., ip) in FAMILIES {
        let value = LxcValue {
            ifindex: interface,
            lxc_id: NEIGHBOUR.0,
            ..LxcValue::default()
        };
        k.datapath().apply(&Step::SetLxc(lxc_key(ip), value))?;
        k.identity(ip, OF_NEIGHBOUR)?;
    }
    Ok(())
}

fn opening(from: IpAddr, to: IpAddr) -> Vec<u8> {
    Packet::new(from, to, tcp(4000, 80, SYN)).frame()
}

fn reason(k: &mut Kernel, frame: &[u8], from: From) -> Result<Reason> {
    Ok(k.receive(frame, from)?.reason)
}

#[test]
fn an_address_of_the_node_is_the_node_only_in_packets_that_the_node_made() {
    with_kernel(|k| {
        with_node(k)?;
        for (pod, node, _) in FAMILIES {
            let frame = opening(node, pod);
            assert_eq!(reason(k, &frame, From::Local(0))?, Reason::Allowed);
            assert_eq!(reason(k, &frame, From::Outside)?, Reason::PolicyDenied);
            let datagram = Packet::new(node, pod, udp(4000, 80)).frame();
            assert_eq!(reason(k, &datagram, From::Local(0))?, Reason::Allowed);
            assert_eq!(reason(k, &datagram, From::Outside)?, Reason::PolicyDenied);
            // A rule for the node admits no one else.
            k.allow(IdentityId::HOST.0, INGRESS, TCP, 80)?;
            assert_eq!(reason(k, &frame, From::Outside)?, Reason::PolicyDenied);
        }
        // To policy, the packet comes from the world outside: nothing else is known about its
        // sender.
        k.allow(IdentityId::WORLD_IPV4.0, INGRESS, TCP, 80)?;
        let [(pod4, node4, _), (pod6, node6, _)] = FAMILIES;
        let four = opening(node4, pod4);
        assert_eq!(reason(k, &four, From::Outside)?, Reason::Allowed);
        let six = opening(node6, pod6);
        assert_eq!(reason(k, &six, From::Outside)?, Reason::PolicyDenied);
        k.allow(IdentityId::WORLD_IPV6.0, INGRESS, TCP, 80)?;
        assert_eq!(reason(k, &six, From::Outside)?, Reason::Allowed);
        Ok(())
    });
    with_stacks(false, |k| {
        with_node(k)?;
        let four = opening(STRANGER4, POD4);
        assert_eq!(reason(k, &four, From::Outside)?, Reason::PolicyDenied);
        k.allow(IdentityId::WORLD.0, INGRESS, TCP, 80)?;
        assert_eq!(reason(k, &four, From::Outside)?, Reason::Allowed);
        Ok(())
    });
}

#[test]
fn a_packet_from_a_pod_s_interface_is_that_pod_s() {
    for interface in [4301, LOW_INTERFACES + 7] {
        with_kernel(|k| {
            with_node(k)?;
            with_neighbour(k, interface)?;
            let from = From::Interface(interface);
            for (pod, node, neighbour) in FAMILIES {
                for source in [node, neighbour] {
                    let frame = opening(source, pod);
                    assert_eq!(reason(k, &frame, from)?, Reason::PolicyDenied, "{source}");
                }
            }
            k.allow(OF_NEIGHBOUR, INGRESS, TCP, 80)?;
            for (pod, node, neighbour) in FAMILIES {
                for source in [node, neighbour] {
                    let frame = opening(source, pod);
                    assert_eq!(reason(k, &frame, from)?, Reason::Allowed, "{source}");
                }
                // The interface decides: the peer's address is admitted here, but not from outside.
                let peer = if pod.is_ipv4() { PEER4 } else { PEER6 };
                assert_eq!(reason(k, &opening(peer, pod), from)?, Reason::Allowed);
                assert_eq!(
                    reason(k, &opening(peer, pod), From::Outside)?,
                    Reason::PolicyDenied
                );
            }
            // The neighbour's present labels count, not its labels at the time of its attachment.
            for (pod, node, neighbour) in FAMILIES {
                k.identity(neighbour, 1002)?;
                let frame = opening(node, pod);
                assert_eq!(reason(k, &frame, from)?, Reason::PolicyDenied);
            }
            Ok(())
        });
    }
}

#[test]
fn a_pod_s_address_counts_at_its_own_interface_only() {
    with_kernel(|k| {
        with_neighbour(k, 4301)?;
        k.allow(OF_NEIGHBOUR, INGRESS, TCP, 80)?;
        for (pod, _, neighbour) in FAMILIES {
            let frame = opening(neighbour, pod);
            assert_eq!(
                reason(k, &frame, From::Interface(4301))?,
                Reason::Allowed,
                "itself"
            );
            assert_eq!(
                reason(k, &frame, From::Outside)?,
                Reason::PolicyDenied,
                "a spoofed packet"
            );
        }
        Ok(())
    });
}

#[test]
fn no_policy_parts_a_pod_from_itself() {
    with_kernel(|k| {
        with_node(k)?;
        for (pod, node, _) in FAMILIES {
            let frame = opening(node, pod);
            // The pod's own interface, on which the test runs the program.
            let own = From::Interface(LOOPBACK);
            assert_eq!(reason(k, &frame, own)?, Reason::Allowed);
            let answer = Packet::new(pod, node, tcp(80, 4000, SYN | ACK)).frame();
            assert_eq!(k.send(&answer)?.reason, Reason::Reply);
        }
        Ok(())
    });
}
