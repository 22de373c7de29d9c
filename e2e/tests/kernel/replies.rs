//! Packets of a pod that are replies to connections that the other side opened.
use std::net::IpAddr;

use anyhow::Result;
use holdfast_e2e::kernel::{From, Kernel, PEER4, PEER6, POD4, POD6, with_kernel};
use holdfast_e2e::packet::{ACK, Packet, SYN, Transport, tcp, udp};
use shared_maps::IdentityId;
use shared_maps::event::Reason;
use shared_maps::mark::{self, MAGIC_FROM_EGRESS_PROXY};
use shared_maps::policy::{EGRESS, INGRESS, PolicyKey, PolicyValue};

const UDP: u8 = 17;
const PROXY_PORT: u16 = 10094;
/// Addresses of the pod and its peer, for IPv4 and IPv6.
const FAMILIES: [(IpAddr, IpAddr); 2] = [(POD4, PEER4), (POD6, PEER6)];

fn sends(k: &mut Kernel, what: &str, from: IpAddr, to: IpAddr, t: Transport) -> Result<Reason> {
    let verdict = k.send(&Packet::new(from, to, t).frame())?;
    assert!(verdict.pass, "{what}: {verdict:?}");
    let redirected = verdict.reason == Reason::Redirected;
    assert_eq!(
        verdict.mark,
        if redirected {
            mark::to_proxy(PROXY_PORT)
        } else {
            mark::JUDGED
        },
        "{what}"
    );
    Ok(verdict.reason)
}

fn receives(k: &mut Kernel, what: &str, from: IpAddr, to: IpAddr, t: Transport) -> Result<()> {
    let verdict = k.receive(&Packet::new(from, to, t).frame(), From::Outside)?;
    assert!(verdict.pass, "{what}: {verdict:?}");
    Ok(())
}

#[test]
fn an_unsolicited_datagram_of_a_dns_server_turns_no_query_into_a_reply() {
    with_kernel(|k| {
        k.redirect_dns()?;
        k.allow(0, INGRESS, 0, 0)?;
        for (pod, peer) in FAMILIES {
            let unsolicited = Packet::new(peer, pod, udp(53, 4000)).frame();
            let verdict = k.receive(&unsolicited, From::Outside)?;
            assert_eq!(verdict.reason, Reason::ForgedAnswer, "{verdict:?}");
            for _ in 0..2 {
                let reason = sends(k, "query", pod, peer, udp(4000, 53))?;
                assert_eq!(reason, Reason::Redirected, "the query went past the proxy");
            }
            // Another server program at the same address is not covered by the rule.
            receives(k, "other port", peer, pod, udp(5353, 4000))?;
            let reason = sends(k, "its answer", pod, peer, udp(4000, 5353))?;
            assert_eq!(reason, Reason::Reply);
        }
        Ok(())
    });
}

#[test]
fn a_policy_that_begins_to_redirect_ends_replies_to_earlier_datagrams() {
    with_kernel(|k| {
        k.allow(0, INGRESS, 0, 0)?;
        for (pod, peer) in FAMILIES {
            receives(k, "unsolicited", peer, pod, udp(53, 4000))?;
            let reason = sends(k, "before", pod, peer, udp(4000, 53))?;
            assert_eq!(reason, Reason::Reply);
        }
        k.redirect_dns()?;
        for (pod, peer) in FAMILIES {
            let reason = sends(k, "after", pod, peer, udp(4000, 53))?;
            assert_eq!(reason, Reason::Redirected, "the query went past the proxy");
        }
        Ok(())
    });
}

#[test]
fn a_tcp_connection_that_a_dns_server_opened_stays_a_connection() {
    with_kernel(|k| {
        k.redirect_dns()?;
        k.allow(0, INGRESS, 0, 0)?;
        for (pod, peer) in FAMILIES {
            receives(k, "SYN", peer, pod, tcp(53, 4000, SYN))?;
            for flags in [SYN | ACK, ACK] {
                let reason = sends(k, "its answer", pod, peer, tcp(4000, 53, flags))?;
                assert_eq!(reason, Reason::Reply);
            }
            // A segment that opened nothing is not a connection.
            receives(k, "stray", peer, pod, tcp(53, 4001, ACK))?;
            for flags in [SYN, ACK] {
                let reason = sends(k, "own", pod, peer, tcp(4001, 53, flags))?;
                assert_eq!(reason, Reason::Redirected, "a stray segment diverts it");
            }
        }
        Ok(())
    });
}

#[test]
fn a_pod_that_is_a_dns_server_answers_the_proxy_of_its_node() {
    with_kernel(|k| {
        // The proxy queries from a port to which the pod's own queries are redirected.
        let key = PolicyKey::new(0, EGRESS, UDP, 0, 0);
        k.policy(key, PolicyValue::dns_redirect(key, PROXY_PORT))?;
        k.allow(0, INGRESS, 0, 0)?;
        let client = IdentityId(3000);
        for (pod, peer) in FAMILIES {
            let query = Packet::new(peer, pod, udp(40000, 53)).frame();
            let asked = k.receive(&query, From::Local(mark::from_proxy(client)))?;
            assert_eq!(asked.reason, Reason::Allowed, "{asked:?}");
            let reason = sends(k, "answer", pod, peer, udp(53, 40000))?;
            assert_eq!(reason, Reason::Reply);

            // An answer of the proxy without a redirect entry opens nothing.
            let late = Packet::new(peer, pod, udp(53, 4000)).frame();
            let late = k.receive(&late, From::Local(MAGIC_FROM_EGRESS_PROXY))?;
            assert!(late.pass, "{late:?}");
            let reason = sends(k, "query", pod, peer, udp(4000, 53))?;
            assert_eq!(reason, Reason::Redirected);
        }
        Ok(())
    });
}
