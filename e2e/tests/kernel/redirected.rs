//! Flows to the proxy need no connection entry.
use std::net::IpAddr;
use std::thread::sleep;
use std::time::Duration;

use agent_datapath::events::EventReader;
use anyhow::{Result, ensure};
use holdfast_e2e::kernel::{
    From, IFINDEX, Kernel, PEER, PEER4, PEER6, POD4, POD6, PROXY_PORT, STRANGER4, STRANGER6,
    attachment, with_kernel,
};
use holdfast_e2e::packet::{ACK, FIN, Packet, SYN, Transport, tcp, udp, unreachable};
use shared_maps::IdentityId;
use shared_maps::event::Reason;
use shared_maps::mark::{self, JUDGED, MAGIC_FROM_EGRESS_PROXY, MAGIC_TO_PROXY, to_proxy};
use shared_maps::policy::{EGRESS, INGRESS, PolicyKey, PolicyValue};
use shared_maps::redirect::{self, RedirectKey, RedirectValue};
use shared_maps::user::{MapKind, monotonic_ns};

const TCP: u8 = 6;
const UDP: u8 = 17;
const PROXY: From = From::Local(MAGIC_FROM_EGRESS_PROXY);
/// Both families: (pod, peer, stranger).
const FAMILIES: [(IpAddr, IpAddr, IpAddr); 2] =
    [(POD4, PEER4, STRANGER4), (POD6, PEER6, STRANGER6)];

fn frame(src: IpAddr, dst: IpAddr, transport: Transport) -> Vec<u8> {
    Packet::new(src, dst, transport).frame()
}

/// Fails unless the pod's packet goes to the proxy.
fn asks(k: &mut Kernel, frame: &[u8]) -> Result<()> {
    let verdict = k.send(frame)?;
    ensure!(
        verdict.pass && verdict.mark == to_proxy(PROXY_PORT),
        "not redirected: {verdict:?}"
    );
    Ok(())
}

#[track_caller]
fn expect(k: &mut Kernel, frame: &[u8], from: From, pass: bool, reason: Reason) -> Result<()> {
    let verdict = k.receive(frame, from)?;
    assert_eq!((verdict.pass, verdict.reason), (pass, reason));
    Ok(())
}

/// Makes policy allow the pod to query the peer directly.
fn directly(k: &mut Kernel) -> Result<()> {
    for protocol in [TCP, UDP] {
        let key = PolicyKey::new(PEER, EGRESS, protocol, 53, 16);
        k.policy(key, PolicyValue::allow(key))?;
    }
    Ok(())
}

/// Connection entries of any kind.
fn entries(k: &Kernel) -> Result<usize> {
    let mut count = 0;
    for tcp in [true, false] {
        count += k.conntrack4(tcp)?.entries()?.found.len();
        count += k.conntrack6(tcp)?.entries()?.found.len();
    }
    Ok(count)
}

fn forget_notes(k: &Kernel) -> Result<()> {
    let notes = k.open::<RedirectKey, RedirectValue>(redirect::NAME, MapKind::LruHash)?;
    for (key, _) in notes.entries()?.found {
        notes.remove(&key)?;
    }
    Ok(())
}

#[test]
fn closed_dns_connections_and_queries_leave_no_entry() {
    with_kernel(|k| {
        k.redirect_dns()?;
        for (pod, peer, _) in FAMILIES {
            for port in 4000..4100 {
                asks(k, &frame(pod, peer, udp(port, 53)))?;
                expect(
                    k,
                    &frame(peer, pod, udp(53, port)),
                    PROXY,
                    true,
                    Reason::Reply,
                )?;
                for (ours, theirs) in [(SYN, SYN | ACK), (ACK, ACK), (FIN | ACK, FIN | ACK)] {
                    asks(k, &frame(pod, peer, tcp(port, 53, ours)))?;
                    let theirs = frame(peer, pod, tcp(53, port, theirs));
                    expect(k, &theirs, PROXY, true, Reason::Reply)?;
                }
            }
        }
        assert_eq!(entries(k)?, 0);
        Ok(())
    });
}

#[test]
fn answers_pass_after_a_program_swap() {
    with_kernel(|k| {
        k.redirect_dns()?;
        for (pod, peer, _) in FAMILIES {
            asks(k, &frame(pod, peer, udp(4000, 53)))?;
            asks(k, &frame(pod, peer, tcp(4000, 53, SYN)))?;
        }
        k.reload(&attachment(IFINDEX))?;
        for (pod, peer, _) in FAMILIES {
            for answer in [udp(53, 4000), tcp(53, 4000, SYN | ACK)] {
                let answer = frame(peer, pod, answer);
                expect(k, &answer, From::Outside, false, Reason::ForgedAnswer)?;
                expect(k, &answer, PROXY, true, Reason::Reply)?;
            }
        }
        Ok(())
    });
}

#[test]
fn answers_pass_although_every_redirect_entry_was_evicted() {
    with_kernel(|k| {
        k.redirect_dns()?;
        k.allow(0, INGRESS, 0, 0)?;
        for (pod, peer, stranger) in FAMILIES {
            asks(k, &frame(pod, peer, udp(4000, 53)))?;
            asks(k, &frame(pod, peer, tcp(4000, 53, ACK)))?;
            forget_notes(k)?;
            let answer = frame(peer, pod, udp(53, 4000));
            expect(k, &answer, PROXY, true, Reason::Reply)?;
            expect(k, &answer, From::Outside, false, Reason::ForgedAnswer)?;
            let segment = frame(peer, pod, tcp(53, 4000, ACK));
            expect(k, &segment, PROXY, true, Reason::Reply)?;
            let other = frame(stranger, pod, udp(53, 4000));
            expect(k, &other, From::Outside, true, Reason::Allowed)?;
            // A query of the proxy carries the identity of the client pod.
            let query = From::Local(mark::from_proxy(IdentityId(3000)));
            expect(k, &answer, query, true, Reason::Allowed)?;
        }
        Ok(())
    });
}

#[test]
fn answers_in_flight_pass_when_policy_no_longer_redirects() {
    with_kernel(|k| {
        for (pod, peer, _) in FAMILIES {
            k.redirect_dns()?;
            asks(k, &frame(pod, peer, udp(4000, 53)))?;
            asks(k, &frame(pod, peer, tcp(4000, 53, ACK)))?;
            directly(k)?;
            for direct in [udp(4001, 53), tcp(4001, 53, SYN)] {
                let verdict = k.send(&frame(pod, peer, direct))?;
                assert_eq!((verdict.reason, verdict.mark), (Reason::Allowed, JUDGED));
            }
            for answer in [udp(53, 4000), tcp(53, 4000, ACK)] {
                let answer = frame(peer, pod, answer);
                expect(k, &answer, PROXY, true, Reason::Reply)?;
                expect(k, &answer, From::Outside, false, Reason::PolicyDenied)?;
            }
            let answer = frame(peer, pod, udp(53, 4001));
            expect(k, &answer, From::Outside, true, Reason::Reply)?;
        }
        Ok(())
    });
}

#[test]
fn direct_answers_in_flight_pass_in_the_second_in_which_policy_begins_to_redirect() {
    with_kernel(|k| {
        for (pod, peer, _) in FAMILIES {
            directly(k)?;
            let ports = [4000, 4001];
            // Connections are judged again in each second of the kernel's clock, so these steps
            // begin with one.
            let second = 1_000_000_000;
            sleep(Duration::from_nanos(second - monotonic_ns() % second));
            for port in ports {
                assert_eq!(k.send(&frame(pod, peer, udp(port, 53)))?.mark, JUDGED);
            }
            k.redirect_dns()?;
            asks(k, &frame(pod, peer, udp(4001, 53)))?;
            let [direct, redirected] = ports.map(|port| frame(peer, pod, udp(53, port)));
            expect(k, &direct, From::Outside, true, Reason::Reply)?;
            let forged = Reason::ForgedAnswer;
            expect(k, &redirected, From::Outside, false, forged)?;
            expect(k, &redirected, PROXY, true, Reason::Reply)?;
        }
        Ok(())
    });
}

#[test]
fn an_error_of_the_pod_about_an_answer_goes_to_the_proxy() {
    with_kernel(|k| {
        k.redirect_dns()?;
        for (pod, peer, stranger) in FAMILIES {
            let answer = Packet::new(peer, pod, udp(53, 4000));
            let complaint = frame(pod, peer, unreachable(&answer));
            assert!(!k.send(&complaint)?.pass, "nothing was asked yet");
            asks(k, &frame(pod, peer, udp(4000, 53)))?;
            let verdict = k.send(&complaint)?;
            assert_eq!(
                (verdict.pass, verdict.reason, verdict.mark),
                (true, Reason::Returned, MAGIC_TO_PROXY)
            );
            let elsewhere = frame(pod, stranger, unreachable(&answer));
            assert!(!k.send(&elsewhere)?.pass, "not to others");
        }
        Ok(())
    });
}

#[test]
fn an_error_of_the_pod_about_a_direct_answer_goes_to_the_server() {
    with_kernel(|k| {
        for (pod, peer, _) in FAMILIES {
            k.redirect_dns()?;
            asks(k, &frame(pod, peer, udp(4000, 53)))?;
            directly(k)?;
            let about = |port| {
                frame(
                    pod,
                    peer,
                    unreachable(&Packet::new(peer, pod, udp(53, port))),
                )
            };
            assert!(k.send(&frame(pod, peer, udp(4001, 53)))?.pass);
            let verdict = k.send(&about(4001))?;
            assert_eq!((verdict.reason, verdict.mark), (Reason::Reply, JUDGED));
            // The proxy still answers the query that it received before.
            let verdict = k.send(&about(4000))?;
            assert_eq!(
                (verdict.reason, verdict.mark),
                (Reason::Returned, MAGIC_TO_PROXY)
            );
        }
        Ok(())
    });
}

#[test]
fn a_flow_to_the_proxy_is_reported_once() {
    with_kernel(|k| {
        k.redirect_dns()?;
        let mut reader = EventReader::open(&k.globals())?;
        for (pod, peer, _) in FAMILIES {
            for _ in 0..5 {
                asks(k, &frame(pod, peer, udp(4000, 53)))?;
                asks(k, &frame(pod, peer, udp(4001, 53)))?;
            }
            asks(k, &frame(pod, peer, tcp(4000, 53, SYN)))?;
            asks(k, &frame(pod, peer, tcp(4000, 53, ACK)))?;
        }
        let records: Vec<_> = reader
            .take(100)
            .iter()
            .map(|e| (e.family, e.protocol, e.sport.get(), e.reason))
            .collect();
        let redirected = Reason::Redirected as u8;
        let expected: Vec<_> = [1, 2]
            .into_iter()
            .flat_map(|f| [(f, UDP, 4000), (f, UDP, 4001), (f, TCP, 4000)])
            .map(|(f, protocol, port)| (f, protocol, port, redirected))
            .collect();
        assert_eq!(records, expected);
        Ok(())
    });
}
