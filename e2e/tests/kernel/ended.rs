//! A packet counts as a reply only while policy allows the direction that opened the connection,
//! and only for the endpoint that had the connection.
use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::kernel::{
    ENDPOINT, From, Kernel, PEER, PEER4, PEER6, POD4, POD6, STRANGER4, STRANGER6, with_kernel,
};
use holdfast_e2e::packet::{ACK, Packet, SYN, Transport, echo, icmp, tcp, udp, unreachable};
use shared_maps::IdentityId;
use shared_maps::conntrack::{CtValue, REFUSED};
use shared_maps::event::Reason;
use shared_maps::mark;
use shared_maps::policy::{EGRESS, INGRESS, PolicyKey, PolicyValue};
use shared_maps::user::monotonic_ns;

const TCP: u8 = 6;
const UDP: u8 = 17;
/// Both families: (pod, peer, stranger).
const FAMILIES: [(IpAddr, IpAddr, IpAddr); 2] =
    [(POD4, PEER4, STRANGER4), (POD6, PEER6, STRANGER6)];

fn frame(src: IpAddr, dst: IpAddr, transport: Transport) -> Vec<u8> {
    Packet::new(src, dst, transport).frame()
}

/// Applies `change` to every entry of the four conntrack maps. Returns the number of entries.
fn rewrite(k: &Kernel, change: impl Fn(&mut CtValue)) -> Result<usize> {
    let mut changed = 0;
    for tcp in [true, false] {
        let map = k.conntrack4(tcp)?;
        for (key, mut value) in map.entries()?.found {
            change(&mut value);
            map.set(&key, &value)?;
            changed += 1;
        }
        let map = k.conntrack6(tcp)?;
        for (key, mut value) in map.entries()?.found {
            change(&mut value);
            map.set(&key, &value)?;
            changed += 1;
        }
    }
    Ok(changed)
}

/// Makes the entries look as if they were last judged a second earlier.
fn later(k: &Kernel) -> Result<()> {
    let changed = rewrite(k, |value| {
        value.last_tx_report = value.last_tx_report.saturating_sub(1);
    })?;
    ensure!(changed > 0, "no connection");
    Ok(())
}

/// Number of unexpired connections whose opening direction policy allows.
fn alive(k: &Kernel) -> Result<usize> {
    let now = u32::try_from(monotonic_ns() / 1_000_000_000)?;
    let mut count = 0;
    for tcp in [true, false] {
        let four = k.conntrack4(tcp)?.entries()?.found;
        count += four
            .iter()
            .filter(|(_, v)| v.lifetime >= now && v.last_tx_report != REFUSED)
            .count();
        let six = k.conntrack6(tcp)?.entries()?.found;
        count += six
            .iter()
            .filter(|(_, v)| v.lifetime >= now && v.last_tx_report != REFUSED)
            .count();
    }
    Ok(count)
}

/// Flows from a client: protocol, port, the packets that open and continue the flow, and the packet
/// that answers it.
fn flows(v6: bool) -> [(u8, u16, Vec<Transport>, Transport); 3] {
    let request = if v6 { 128 } else { 8 };
    let icmp = if v6 { 58 } else { 1 };
    [
        (UDP, 90, vec![udp(5000, 90)], udp(90, 5000)),
        (
            TCP,
            80,
            vec![tcp(5000, 80, SYN), tcp(5000, 80, ACK)],
            tcp(80, 5000, ACK),
        ),
        (icmp, request, vec![echo(v6, false, 7)], echo(v6, true, 7)),
    ]
}

#[test]
fn the_pods_replies_end_with_the_policy_that_let_the_other_side_open() {
    with_kernel(|k| {
        for (pod, peer, _) in FAMILIES {
            for (protocol, port, opens, reply) in flows(pod.is_ipv6()) {
                k.allow(PEER, INGRESS, protocol, port)?;
                for opening in opens {
                    let verdict = k.receive(&frame(peer, pod, opening), From::Outside)?;
                    assert_eq!(verdict.reason, Reason::Allowed);
                }
                let reply = frame(pod, peer, reply);
                for _ in 0..3 {
                    assert_eq!(k.send(&reply)?.reason, Reason::Reply, "while it is allowed");
                    later(k)?;
                }
                k.forget(PolicyKey::new(PEER, INGRESS, protocol, port, 16))?;
                for _ in 0..3 {
                    let verdict = k.send(&reply)?;
                    assert_eq!(verdict.reason, Reason::PolicyDenied, "{protocol} {pod}");
                }
                assert_eq!(alive(k)?, 0, "a connection that is over stays no longer");
            }
        }
        Ok(())
    });
}

#[test]
fn replies_to_the_pod_end_with_the_policy_that_let_the_pod_open() {
    with_kernel(|k| {
        for (pod, peer, _) in FAMILIES {
            for (protocol, port, opens, reply) in flows(pod.is_ipv6()) {
                k.allow(PEER, EGRESS, protocol, port)?;
                for opening in opens {
                    let verdict = k.send(&frame(pod, peer, opening))?;
                    assert_eq!(verdict.reason, Reason::Allowed);
                }
                let reply = frame(peer, pod, reply);
                for _ in 0..3 {
                    let verdict = k.receive(&reply, From::Outside)?;
                    assert_eq!(verdict.reason, Reason::Reply, "while it is allowed");
                    later(k)?;
                }
                k.forget(PolicyKey::new(PEER, EGRESS, protocol, port, 16))?;
                let verdict = k.receive(&reply, From::Outside)?;
                assert_eq!(verdict.reason, Reason::PolicyDenied, "{protocol} {pod}");
                assert_eq!(alive(k)?, 0);
            }
        }
        Ok(())
    });
}

/// Policy allows the other side to open connections of its own with any of its packets.
#[test]
fn a_flow_that_policy_closed_does_not_go_on_in_the_other_direction() {
    with_kernel(|k| {
        for (pod, peer, _) in FAMILIES {
            for (protocol, port, opens, reply) in flows(pod.is_ipv6()).into_iter().take(2) {
                for from_pod in [true, false] {
                    let (opening, other) = match from_pod {
                        true => (EGRESS, INGRESS),
                        false => (INGRESS, EGRESS),
                    };
                    let (client, server) = match from_pod {
                        true => (pod, peer),
                        false => (peer, pod),
                    };
                    let pass = |k: &mut Kernel, packet: &[u8], of_pod: bool| match of_pod {
                        true => k.send(packet),
                        false => k.receive(packet, From::Outside),
                    };
                    k.allow(PEER, opening, protocol, port)?;
                    k.allow(PEER, other, protocol, 5000)?;
                    for packet in &opens {
                        let packet = frame(client, server, packet.clone());
                        assert_eq!(pass(k, &packet, from_pod)?.reason, Reason::Allowed);
                    }
                    let further = opens.last().context("a packet")?;
                    let further = frame(client, server, further.clone());
                    let reply = frame(server, client, reply.clone());
                    assert_eq!(pass(k, &reply, !from_pod)?.reason, Reason::Reply);
                    k.forget(PolicyKey::new(PEER, opening, protocol, port, 16))?;
                    later(k)?;
                    for _ in 0..3 {
                        let verdict = pass(k, &reply, !from_pod)?;
                        assert_eq!(verdict.reason, Reason::PolicyDenied, "{protocol} {pod}");
                        let verdict = pass(k, &further, from_pod)?;
                        assert_eq!(verdict.reason, Reason::PolicyDenied, "{protocol} {pod}");
                    }
                    k.forget(PolicyKey::new(PEER, other, protocol, 5000, 16))?;
                    rewrite(k, |value| value.lifetime = 0)?;
                }
            }
        }
        Ok(())
    });
}

#[test]
fn another_identity_of_the_other_side_is_judged() {
    with_kernel(|k| {
        k.allow(PEER, INGRESS, UDP, 90)?;
        k.receive(&frame(PEER4, POD4, udp(5000, 90)), From::Outside)?;
        let reply = frame(POD4, PEER4, udp(90, 5000));
        assert_eq!(k.send(&reply)?.reason, Reason::Reply);
        k.identity(PEER4, 2001)?;
        k.allow(2001, INGRESS, UDP, 90)?;
        later(k)?;
        assert_eq!(k.send(&reply)?.reason, Reason::Reply, "allowed as well");
        k.identity(PEER4, 2002)?;
        later(k)?;
        assert_eq!(k.send(&reply)?.reason, Reason::PolicyDenied);
        Ok(())
    });
}

#[test]
fn a_denial_ends_replies_too() {
    with_kernel(|k| {
        k.allow(0, INGRESS, 0, 0)?;
        k.receive(&frame(PEER4, POD4, udp(5000, 90)), From::Outside)?;
        let reply = frame(POD4, PEER4, udp(90, 5000));
        assert_eq!(k.send(&reply)?.reason, Reason::Reply);
        let key = PolicyKey::new(PEER, INGRESS, 0, 0, 0);
        k.policy(key, PolicyValue::deny(key))?;
        later(k)?;
        assert_eq!(k.send(&reply)?.reason, Reason::PolicyDenied);
        Ok(())
    });
}

#[test]
fn what_the_node_opened_needs_no_rule() {
    with_kernel(|k| {
        for (pod, peer, stranger) in FAMILIES {
            k.identity(stranger, IdentityId::HOST.0)?;
            for from in [peer, stranger] {
                k.receive(&frame(from, pod, udp(5000, 90)), From::Local(0))?;
                let reply = frame(pod, from, udp(90, 5000));
                for _ in 0..3 {
                    assert_eq!(k.send(&reply)?.reason, Reason::Reply);
                    later(k)?;
                }
            }
        }
        Ok(())
    });
}

#[test]
fn a_query_of_the_proxy_is_judged_by_its_client() {
    with_kernel(|k| {
        let client = IdentityId(3000);
        k.allow(client.0, INGRESS, UDP, 53)?;
        for (pod, _, stranger) in FAMILIES {
            k.identity(stranger, IdentityId::HOST.0)?;
            let query = frame(stranger, pod, udp(40000, 53));
            let asked = k.receive(&query, From::Local(mark::from_proxy(client)))?;
            assert_eq!(asked.reason, Reason::Allowed);
        }
        for allowed in [true, false] {
            if !allowed {
                k.forget(PolicyKey::new(client.0, INGRESS, UDP, 53, 16))?;
            }
            later(k)?;
            for (pod, _, stranger) in FAMILIES {
                let answer = frame(pod, stranger, udp(53, 40000));
                let reason = k.send(&answer)?.reason;
                assert_eq!(reason == Reason::Reply, allowed, "{reason:?}");
            }
        }
        Ok(())
    });
}

#[test]
fn a_pod_inherits_no_connection_of_an_earlier_pod_with_its_address() {
    with_kernel(|k| {
        // Policy lets everyone open connections to both pods.
        k.allow(0, INGRESS, 0, 0)?;
        for (pod, peer, _) in FAMILIES {
            let request = frame(peer, pod, udp(5000, 90));
            k.receive(&request, From::Outside)?;
            rewrite(k, |value| value.last_rx_report = u32::from(ENDPOINT.0) + 1)?;
            let reply = frame(pod, peer, udp(90, 5000));
            assert_eq!(k.send(&reply)?.reason, Reason::PolicyDenied, "inherited");
            let error = Packet::new(peer, pod, udp(5000, 90));
            let error = frame(pod, peer, unreachable(&error));
            assert!(!k.send(&error)?.pass, "an error about it");
            // From the next packet on, the connection is this pod's.
            k.receive(&request, From::Outside)?;
            assert_eq!(k.send(&reply)?.reason, Reason::Reply);
        }
        Ok(())
    });
}

#[test]
fn errors_about_ended_connections_do_not_pass() {
    with_kernel(|k| {
        for (pod, peer, stranger) in FAMILIES {
            k.allow(PEER, EGRESS, UDP, 80)?;
            k.allow(PEER, INGRESS, UDP, 90)?;
            let query = Packet::new(pod, peer, udp(4000, 80));
            assert_eq!(k.send(&query.frame())?.reason, Reason::Allowed);
            let request = Packet::new(peer, pod, udp(5000, 90));
            k.receive(&request.frame(), From::Outside)?;
            let inward = frame(stranger, pod, unreachable(&query));
            let outward = frame(pod, peer, unreachable(&request));
            assert_eq!(k.receive(&inward, From::Outside)?.reason, Reason::Reply);
            assert_eq!(k.send(&outward)?.reason, Reason::Reply);
            later(k)?;
            assert_eq!(k.receive(&inward, From::Outside)?.reason, Reason::Reply);
            assert_eq!(k.send(&outward)?.reason, Reason::Reply);
            k.forget(PolicyKey::new(PEER, EGRESS, UDP, 80, 16))?;
            k.forget(PolicyKey::new(PEER, INGRESS, UDP, 90, 16))?;
            later(k)?;
            assert!(!k.receive(&inward, From::Outside)?.pass, "to the pod");
            assert!(!k.send(&outward)?.pass, "of the pod");
        }
        Ok(())
    });
}

#[test]
fn other_icmp_requests_are_judged_by_their_own_type() {
    with_kernel(|k| {
        // ICMP timestamp request and timestamp reply.
        k.allow(PEER, INGRESS, 1, 13)?;
        k.receive(&frame(PEER4, POD4, icmp(false, 13, &[])), From::Outside)?;
        let reply = frame(POD4, PEER4, icmp(false, 14, &[]));
        for _ in 0..2 {
            assert_eq!(k.send(&reply)?.reason, Reason::Reply);
            later(k)?;
        }
        k.forget(PolicyKey::new(PEER, INGRESS, 1, 13, 16))?;
        assert_eq!(k.send(&reply)?.reason, Reason::PolicyDenied);
        Ok(())
    });
}

#[test]
fn policy_that_begins_to_redirect_ends_direct_answers() {
    with_kernel(|k| {
        k.allow(PEER, EGRESS, UDP, 53)?;
        for (pod, peer, _) in FAMILIES {
            k.send(&frame(pod, peer, udp(4000, 53)))?;
            let answer = frame(peer, pod, udp(53, 4000));
            assert_eq!(k.receive(&answer, From::Outside)?.reason, Reason::Reply);
        }
        k.redirect_dns()?;
        later(k)?;
        for (pod, peer, _) in FAMILIES {
            let answer = frame(peer, pod, udp(53, 4000));
            let reason = k.receive(&answer, From::Outside)?.reason;
            assert_eq!(reason, Reason::PolicyDenied);
        }
        Ok(())
    });
}
