//! Verdicts about packets to a pod.
use std::net::IpAddr;

use anyhow::Result;
use holdfast_e2e::kernel::{
    From, Kernel, PEER, PEER4, PEER6, POD4, POD6, STRANGER4, STRANGER6, Verdict, with_kernel,
};
use holdfast_e2e::packet::{ACK, Packet, SYN, Transport, echo, tcp, udp, unreachable};
use shared_maps::IdentityId;
use shared_maps::event::Reason;
use shared_maps::mark::{self, MAGIC_FROM_EGRESS_PROXY, MAGIC_IDENTITY};
use shared_maps::policy::{EGRESS, INGRESS, PolicyKey, PolicyValue};

const TCP: u8 = 6;
const UDP: u8 = 17;
/// Both families: (pod, peer, stranger).
const FAMILIES: [(IpAddr, IpAddr, IpAddr); 2] =
    [(POD4, PEER4, STRANGER4), (POD6, PEER6, STRANGER6)];

fn frame(src: IpAddr, dst: IpAddr, transport: Transport) -> Vec<u8> {
    Packet::new(src, dst, transport).frame()
}

fn passes(k: &mut Kernel, what: &str, frame: &[u8], from: From, reason: Reason) -> Result<()> {
    let verdict = k.receive(frame, from)?;
    assert!(verdict.pass, "{what}: {verdict:?}");
    assert_eq!(verdict.reason, reason, "{what}");
    Ok(())
}

fn drops(k: &mut Kernel, what: &str, frame: &[u8], from: From, reason: Reason) -> Result<()> {
    let verdict = k.receive(frame, from)?;
    assert!(!verdict.pass, "{what}: {verdict:?}");
    assert_eq!(verdict.reason, reason, "{what}");
    Ok(())
}

fn sent(k: &mut Kernel, frame: &[u8]) -> Result<Verdict> {
    let verdict = k.send(frame)?;
    assert!(verdict.pass, "{verdict:?}");
    Ok(verdict)
}

#[test]
fn new_connections_need_an_ingress_entry() {
    with_kernel(|k| {
        k.allow(PEER, INGRESS, TCP, 80)?;
        for (pod, peer, stranger) in FAMILIES {
            let open = frame(peer, pod, tcp(4000, 80, SYN));
            passes(k, "allowed", &open, From::Outside, Reason::Allowed)?;
            let other = frame(stranger, pod, tcp(4000, 80, SYN));
            drops(k, "stranger", &other, From::Outside, Reason::PolicyDenied)?;
            let port = frame(peer, pod, tcp(4000, 81, SYN));
            drops(k, "port", &port, From::Outside, Reason::PolicyDenied)?;
            let answer = frame(pod, peer, tcp(80, 4000, SYN | ACK));
            assert_eq!(sent(k, &answer)?.reason, Reason::Reply);
            let own = frame(pod, peer, tcp(80, 4000, SYN));
            assert_eq!(k.send(&own)?.reason, Reason::PolicyDenied, "not a reply");
        }
        Ok(())
    });
}

#[test]
fn the_node_may_always_reach_its_pods() {
    with_kernel(|k| {
        for (pod, peer, _) in FAMILIES {
            let probe = frame(peer, pod, tcp(4000, 80, SYN));
            passes(k, "local", &probe, From::Local(0), Reason::Allowed)?;
        }
        Ok(())
    });
}

#[test]
fn a_mark_of_the_node_carries_the_source_identity() {
    with_kernel(|k| {
        let client = IdentityId(3000);
        let query = frame(STRANGER4, POD4, udp(4000, 53));
        for magic in [MAGIC_FROM_EGRESS_PROXY, MAGIC_IDENTITY] {
            let mark = mark::from_proxy(client) & !mark::MAGIC_MASK | magic;
            drops(k, "denied", &query, From::Local(mark), Reason::PolicyDenied)?;
        }
        k.allow(client.0, INGRESS, UDP, 53)?;
        let mark = mark::from_proxy(client);
        passes(k, "allowed", &query, From::Local(mark), Reason::Allowed)?;
        drops(
            k,
            "from outside",
            &query,
            From::Outside,
            Reason::PolicyDenied,
        )?;
        Ok(())
    });
}

#[test]
fn replies_pass_and_only_replies() {
    with_kernel(|k| {
        k.allow(PEER, EGRESS, 0, 0)?;
        for (pod, peer, stranger) in FAMILIES {
            let v6 = pod.is_ipv6();
            let flows = [
                (udp(4000, 80), udp(80, 4000), udp(80, 4001)),
                (
                    tcp(4000, 80, SYN),
                    tcp(80, 4000, SYN | ACK),
                    tcp(81, 4000, ACK),
                ),
                (echo(v6, false, 7), echo(v6, true, 7), echo(v6, true, 8)),
            ];
            for (query, reply, other) in flows {
                let reply = frame(peer, pod, reply);
                drops(k, "too early", &reply, From::Outside, Reason::PolicyDenied)?;
                sent(k, &frame(pod, peer, query))?;
                passes(k, "reply", &reply, From::Outside, Reason::Reply)?;
                let other = frame(peer, pod, other.clone());
                drops(k, "other", &other, From::Outside, Reason::PolicyDenied)?;
            }
            let elsewhere = frame(stranger, pod, udp(80, 4000));
            drops(
                k,
                "elsewhere",
                &elsewhere,
                From::Outside,
                Reason::PolicyDenied,
            )?;
            let opens = frame(peer, pod, tcp(80, 4000, SYN));
            drops(k, "SYN", &opens, From::Outside, Reason::PolicyDenied)?;
        }
        Ok(())
    });
}

#[test]
fn the_node_needs_no_entry_but_can_be_denied() {
    with_kernel(|k| {
        let node = From::Local(0);
        k.allow(PEER, INGRESS, TCP, 80)?;
        for (by, port) in [(IdentityId::HOST.0, 80), (0, 81)] {
            let to = |pod, peer, port| frame(peer, pod, tcp(4000, port, SYN));
            for (pod, peer, _) in FAMILIES {
                passes(k, "no entry", &to(pod, peer, port), node, Reason::Allowed)?;
            }
            let key = PolicyKey::new(by, INGRESS, TCP, port, 16);
            k.policy(key, PolicyValue::deny(key))?;
            for (pod, peer, _) in FAMILIES {
                drops(k, "denied", &to(pod, peer, port), node, Reason::PolicyDeny)?;
                passes(k, "other", &to(pod, peer, 82), node, Reason::Allowed)?;
            }
        }
        Ok(())
    });
}

#[test]
fn only_the_proxy_answers_for_redirected_servers() {
    with_kernel(|k| {
        k.redirect_dns()?;
        k.allow(0, INGRESS, 0, 0)?;
        let proxy = From::Local(MAGIC_FROM_EGRESS_PROXY);
        for (pod, peer, _) in FAMILIES {
            for (query, answer) in [
                (udp(4000, 53), udp(53, 4000)),
                (tcp(4000, 53, SYN), tcp(53, 4000, SYN | ACK)),
            ] {
                sent(k, &frame(pod, peer, query))?;
                let answer = frame(peer, pod, answer);
                passes(k, "proxy", &answer, proxy, Reason::Reply)?;
                drops(k, "direct", &answer, From::Outside, Reason::ForgedAnswer)?;
                drops(k, "no mark", &answer, From::Local(0), Reason::ForgedAnswer)?;
                let forwarded = From::OutsideMarked(MAGIC_FROM_EGRESS_PROXY);
                drops(k, "forwarded", &answer, forwarded, Reason::ForgedAnswer)?;
                let host = From::Local(mark::MAGIC_HOST);
                drops(k, "other mark", &answer, host, Reason::ForgedAnswer)?;
            }
            // To a port that sent no query: answers of the proxy need no connection entry.
            let late = frame(peer, pod, udp(53, 4999));
            passes(k, "no entry", &late, proxy, Reason::Reply)?;
        }
        Ok(())
    });
}

#[test]
fn a_lost_redirect_entry_admits_no_direct_answer() {
    with_kernel(|k| {
        k.redirect_dns()?;
        sent(k, &frame(POD4, PEER4, udp(4000, 53)))?;
        let map: shared_maps::user::Map<
            shared_maps::redirect::RedirectKey,
            shared_maps::redirect::RedirectValue,
        > = k.open(
            shared_maps::redirect::NAME,
            shared_maps::user::MapKind::LruHash,
        )?;
        for (key, _) in map.entries()?.found {
            map.remove(&key)?;
        }
        let answer = frame(PEER4, POD4, udp(53, 4000));
        drops(k, "direct", &answer, From::Outside, Reason::ForgedAnswer)?;
        let proxy = From::Local(MAGIC_FROM_EGRESS_PROXY);
        passes(k, "proxy", &answer, proxy, Reason::Reply)?;
        Ok(())
    });
}

#[test]
fn icmp_errors_pass_if_they_quote_a_connection() {
    with_kernel(|k| {
        k.allow(PEER, EGRESS, UDP, 80)?;
        k.allow(PEER, INGRESS, UDP, 90)?;
        for (pod, peer, stranger) in FAMILIES {
            let query = Packet::new(pod, peer, udp(4000, 80));
            let error = frame(stranger, pod, unreachable(&query));
            drops(k, "before", &error, From::Outside, Reason::PolicyDenied)?;
            sent(k, &query.frame())?;
            passes(k, "router", &error, From::Outside, Reason::Reply)?;
            let other = Packet::new(pod, peer, udp(4001, 80));
            let other = frame(stranger, pod, unreachable(&other));
            drops(k, "other flow", &other, From::Outside, Reason::PolicyDenied)?;
            let not_ours = Packet::new(stranger, peer, udp(4000, 80));
            let not_ours = frame(peer, pod, unreachable(&not_ours));
            drops(
                k,
                "not ours",
                &not_ours,
                From::Outside,
                Reason::PolicyDenied,
            )?;

            // The pod sends an ICMP error about a received packet.
            let request = Packet::new(peer, pod, udp(5000, 90));
            passes(k, "in", &request.frame(), From::Outside, Reason::Allowed)?;
            let complaint = frame(pod, peer, unreachable(&request));
            assert_eq!(k.send(&complaint)?.reason, Reason::Reply);
            let elsewhere = frame(pod, stranger, unreachable(&request));
            assert!(!k.send(&elsewhere)?.pass, "not to others");
            let never = Packet::new(peer, pod, udp(5001, 90));
            assert!(!k.send(&frame(pod, peer, unreachable(&never)))?.pass);
        }
        Ok(())
    });
}

#[test]
fn icmp_errors_from_outside_about_redirected_queries_are_dropped() {
    with_kernel(|k| {
        k.redirect_dns()?;
        for (pod, peer, stranger) in FAMILIES {
            let query = Packet::new(pod, peer, udp(4000, 53));
            sent(k, &query.frame())?;
            let forged = frame(stranger, pod, unreachable(&query));
            drops(k, "forged", &forged, From::Outside, Reason::PolicyDenied)?;
            let own = frame(peer, pod, unreachable(&query));
            passes(k, "of the node", &own, From::Local(0), Reason::Reply)?;
        }
        Ok(())
    });
}

#[test]
fn a_revoked_connection_is_cut() {
    with_kernel(|k| {
        k.allow(PEER, EGRESS, TCP, 80)?;
        sent(k, &frame(POD4, PEER4, tcp(4000, 80, SYN)))?;
        let data = frame(POD4, PEER4, tcp(4000, 80, ACK));
        sent(k, &data)?;
        k.forget(PolicyKey::new(PEER, EGRESS, TCP, 80, 16))?;
        assert_eq!(k.send(&data)?.reason, Reason::PolicyDenied);
        Ok(())
    });
}

#[test]
fn arp_passes() {
    with_kernel(|k| {
        let arp = holdfast_e2e::packet::arp([2; 6], [10, 9, 1, 1], [10, 9, 1, 2]);
        passes(k, "ARP", &arp, From::Local(0), Reason::LinkLocal)?;
        Ok(())
    });
}

#[test]
fn fragments_of_answers_follow_the_first() {
    with_kernel(|k| {
        k.redirect_dns()?;
        let proxy = From::Local(MAGIC_FROM_EGRESS_PROXY);
        for (pod, peer, _) in FAMILIES {
            sent(k, &frame(pod, peer, udp(4000, 53)))?;
            let answer = Packet::new(peer, pod, udp(53, 4000));
            let head = answer.clone().fragment(0, true, 5).frame();
            let tail = answer.clone().fragment(16, false, 5).frame();
            drops(k, "early", &tail, proxy, Reason::FragmentUnknown)?;
            passes(k, "head", &head, proxy, Reason::Reply)?;
            passes(k, "tail", &tail, proxy, Reason::Allowed)?;
            let head = answer.clone().fragment(0, true, 6).frame();
            let tail = answer.fragment(16, false, 6).frame();
            drops(k, "forged", &head, From::Outside, Reason::ForgedAnswer)?;
            drops(k, "forged", &tail, From::Outside, Reason::PolicyDenied)?;
        }
        Ok(())
    });
}
