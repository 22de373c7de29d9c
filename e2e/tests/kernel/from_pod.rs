//! Verdicts about packets that a pod sends.
use std::net::IpAddr;

use anyhow::Result;
use holdfast_e2e::kernel::{
    Kernel, LINK_LOCAL, MAC, PEER, PEER4, PEER6, POD4, POD6, PROXY_PORT, STRANGER4, STRANGER6,
    Verdict, with_kernel, with_stacks,
};
use holdfast_e2e::packet::{ACK, Packet, SYN, Transport, arp, echo, ethernet, icmp, raw, tcp, udp};
use shared_maps::IdentityId;
use shared_maps::event::Reason;
use shared_maps::mark;
use shared_maps::policy::{EGRESS, INGRESS, PRECEDENCE_ALLOW, PolicyKey, PolicyValue};

const TCP: u8 = 6;
const UDP: u8 = 17;

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// Both families: (pod, peer, stranger).
const FAMILIES: [(IpAddr, IpAddr, IpAddr); 2] =
    [(POD4, PEER4, STRANGER4), (POD6, PEER6, STRANGER6)];

fn passes(kernel: &mut Kernel, what: &str, frame: &[u8], reason: Reason) -> Result<Verdict> {
    let verdict = kernel.send(frame)?;
    assert!(verdict.pass, "{what}: {verdict:?}");
    assert_eq!(verdict.reason, reason, "{what}");
    Ok(verdict)
}

fn drops(kernel: &mut Kernel, what: &str, frame: &[u8], reason: Reason) -> Result<()> {
    let verdict = kernel.send(frame)?;
    assert!(!verdict.pass, "{what}: {verdict:?}");
    assert_eq!(verdict.reason, reason, "{what}");
    Ok(())
}

fn frame(src: IpAddr, dst: IpAddr, transport: Transport) -> Vec<u8> {
    Packet::new(src, dst, transport).frame()
}

#[test]
fn policy_allows_drops_and_redirects() {
    with_kernel(|k| {
        k.redirect_dns()?;
        k.allow(PEER, EGRESS, TCP, 80)?;
        for (pod, peer, stranger) in FAMILIES {
            let ok = frame(pod, peer, tcp(4000, 80, SYN));
            assert_eq!(
                passes(k, "allowed", &ok, Reason::Allowed)?.mark,
                mark::JUDGED
            );
            let other_port = frame(pod, peer, tcp(4000, 81, SYN));
            drops(k, "port", &other_port, Reason::PolicyDenied)?;
            let other_protocol = frame(pod, peer, udp(4000, 80));
            drops(k, "protocol", &other_protocol, Reason::PolicyDenied)?;
            let other_peer = frame(pod, stranger, tcp(4000, 80, SYN));
            drops(k, "identity", &other_peer, Reason::PolicyDenied)?;
            for (protocol, query) in [(UDP, udp(4000, 53)), (TCP, tcp(4000, 53, SYN))] {
                let query = frame(pod, peer, query);
                let verdict = passes(k, "query", &query, Reason::Redirected)?;
                assert_eq!(verdict.mark, mark::to_proxy(PROXY_PORT));
                let entry = k.redirect(peer, 53, protocol)?.expect("a redirect entry");
                assert_eq!(entry.proxy_port.get(), PROXY_PORT);
            }
        }
        Ok(())
    });
}

#[test]
fn a_redirect_that_policy_no_longer_has_is_forgotten() {
    with_kernel(|k| {
        k.redirect_dns()?;
        let query = frame(POD4, PEER4, udp(4000, 53));
        passes(k, "before", &query, Reason::Redirected)?;
        assert!(k.redirect(PEER4, 53, UDP)?.is_some());
        k.forget(PolicyKey::new(PEER, EGRESS, UDP, 53, 16))?;
        drops(k, "revoked", &query, Reason::PolicyDenied)?;
        // The redirect entry stays for answers of the proxy that are on their way.
        let note = k.redirect(PEER4, 53, UDP)?.expect("a redirect entry");
        assert_eq!(note.proxy_port.get(), 0);
        k.allow(PEER, EGRESS, UDP, 53)?;
        let plain = passes(k, "plain", &query, Reason::Allowed)?;
        assert_eq!(plain.mark, mark::JUDGED);
        Ok(())
    });
}

/// The port of a Service is not the port of its backends.
#[test]
fn rules_about_everyone_at_a_port_say_nothing_of_a_service() {
    let service = IdentityId::SERVICE_MIN.0;
    with_kernel(|k| {
        for (_, peer, _) in FAMILIES {
            k.identity(peer, service)?;
        }
        k.allow(0, EGRESS, TCP, 80)?;
        k.allow(PEER, EGRESS, TCP, 80)?;
        let all_of_tcp = PolicyKey::new(0, EGRESS, TCP, 0, 0);
        k.policy(all_of_tcp, PolicyValue::allow(all_of_tcp))?;
        let to =
            |(pod, peer, _): (IpAddr, IpAddr, IpAddr), port| frame(pod, peer, tcp(4000, port, SYN));
        for family in FAMILIES {
            drops(
                k,
                "everyone at port 80",
                &to(family, 80),
                Reason::PolicyDenied,
            )?;
        }
        k.allow(service, EGRESS, TCP, 80)?;
        for family in FAMILIES {
            passes(k, "its own entry", &to(family, 80), Reason::Allowed)?;
            drops(k, "another port", &to(family, 81), Reason::PolicyDenied)?;
        }
        k.allow(0, EGRESS, 0, 0)?;
        for family in FAMILIES {
            passes(k, "everyone, every port", &to(family, 81), Reason::Allowed)?;
        }
        let none = PolicyKey::new(service, EGRESS, 0, 0, 0);
        k.policy(none, PolicyValue::deny(none))?;
        for family in FAMILIES {
            passes(k, "its own entry", &to(family, 80), Reason::Allowed)?;
            drops(k, "every other port", &to(family, 82), Reason::PolicyDeny)?;
        }
        Ok(())
    });
}

/// Rows: entries (identity, port bits, precedence, deny), and whether port 80 passes.
#[test]
fn the_entry_of_higher_precedence_wins() {
    struct Row {
        what: &'static str,
        entries: &'static [(u32, u8, u32, bool)],
        pass: bool,
    }
    const ALLOW: u32 = PRECEDENCE_ALLOW;
    const DENY: u32 = u32::MAX;
    let rows = [
        Row {
            what: "any identity",
            entries: &[(0, 16, ALLOW, false)],
            pass: true,
        },
        Row {
            what: "deny of the identity beats allow of any",
            entries: &[(PEER, 16, DENY, true), (0, 16, ALLOW, false)],
            pass: false,
        },
        Row {
            what: "deny of any beats allow of the identity",
            entries: &[(PEER, 16, ALLOW, false), (0, 16, DENY, true)],
            pass: false,
        },
        Row {
            what: "higher precedence of any wins",
            entries: &[(PEER, 16, 100, true), (0, 16, 200, false)],
            pass: true,
        },
        Row {
            what: "lower precedence of any loses",
            entries: &[(PEER, 16, 200, true), (0, 16, 100, false)],
            pass: false,
        },
        Row {
            what: "equal precedence: longer prefix of any wins",
            entries: &[(PEER, 8, 100, true), (0, 16, 100, false)],
            pass: true,
        },
        Row {
            what: "equal precedence and prefix: the identity wins",
            entries: &[(PEER, 16, 100, true), (0, 16, 100, false)],
            pass: false,
        },
        Row {
            what: "a range of ports",
            entries: &[(PEER, 12, ALLOW, false)],
            pass: true,
        },
    ];
    for row in rows {
        with_kernel(|k| {
            for (identity, bits, precedence, deny) in row.entries {
                let key = PolicyKey::new(*identity, EGRESS, TCP, 80, *bits);
                let value = if *deny {
                    PolicyValue::deny(key)
                } else {
                    PolicyValue::allow(key)
                };
                let precedence = *precedence;
                k.policy(
                    key,
                    PolicyValue {
                        precedence,
                        ..value
                    },
                )?;
            }
            let verdict = k.send(&frame(POD4, PEER4, tcp(4000, 80, SYN)))?;
            assert_eq!(verdict.pass, row.pass, "{}: {verdict:?}", row.what);
            Ok(())
        });
    }
}

#[test]
fn direction_protocol_and_icmp_type_are_part_of_the_key() {
    with_kernel(|k| {
        k.allow(PEER, INGRESS, TCP, 80)?;
        let connect = frame(POD4, PEER4, tcp(4000, 80, SYN));
        drops(k, "ingress entry", &connect, Reason::PolicyDenied)?;
        k.allow(PEER, EGRESS, 1, 8)?;
        let ping = frame(POD4, PEER4, echo(false, false, 9));
        passes(k, "echo", &ping, Reason::Allowed)?;
        let timestamp = frame(POD4, PEER4, icmp(false, 13, &[]));
        drops(k, "timestamp", &timestamp, Reason::PolicyDenied)?;
        k.allow(PEER, EGRESS, 0, 0)?;
        let gre = frame(POD4, PEER4, raw(47, &[0; 8]));
        passes(k, "any protocol", &gre, Reason::Allowed)?;
        Ok(())
    });
}

#[test]
fn addresses_without_an_ipcache_entry_are_world() {
    for (dual, v4, v6) in [(true, 9, 10), (false, 2, 2)] {
        with_stacks(dual, |k| {
            k.allow(v4, EGRESS, TCP, 80)?;
            k.allow(v6, EGRESS, TCP, 81)?;
            let to4 = frame(POD4, STRANGER4, tcp(4000, 80, SYN));
            passes(k, "IPv4", &to4, Reason::Allowed)?;
            let to6 = frame(POD6, STRANGER6, tcp(4000, 81, SYN));
            passes(k, "IPv6", &to6, Reason::Allowed)?;
            let crossed = frame(POD4, STRANGER4, tcp(4000, 81, SYN));
            assert_eq!(k.send(&crossed)?.pass, !dual, "one world or two");
            Ok(())
        });
    }
}

#[test]
fn only_own_addresses_may_be_the_source() {
    with_kernel(|k| {
        k.allow(0, EGRESS, 0, 0)?;
        let link_local = "fe80::42:aff:fe09:103";
        for (source, dst) in [
            ("10.9.1.3", PEER4),
            ("0.0.0.0", PEER4),
            ("127.0.0.1", PEER4),
            ("192.0.2.53", PEER4),
            ("fd09:1::3", PEER6),
            ("::", PEER6),
            ("::1", PEER6),
            (link_local, PEER6),
        ] {
            let spoofed = frame(ip(source), dst, udp(4000, 80));
            drops(k, source, &spoofed, Reason::SpoofedSource)?;
        }
        for (source, dst) in [(POD4, PEER4), (POD6, PEER6), (LINK_LOCAL, PEER6)] {
            let own = frame(source, dst, udp(4000, 80));
            passes(k, "own", &own, Reason::Allowed)?;
        }
        Ok(())
    });
}

#[test]
fn loopback_cannot_be_reached() {
    with_kernel(|k| {
        k.allow(0, EGRESS, 0, 0)?;
        for (src, dst) in [
            (POD4, "127.0.0.1"),
            (POD4, "127.1.2.3"),
            (POD6, "::1"),
            (POD6, "::ffff:127.0.0.1"),
        ] {
            let inward = frame(src, ip(dst), udp(4000, PROXY_PORT));
            drops(k, dst, &inward, Reason::Loopback)?;
        }
        Ok(())
    });
}

#[test]
fn arp_is_about_the_pods_address_only() {
    with_kernel(|k| {
        let gateway = [10, 9, 1, 1];
        let own = arp(MAC, [10, 9, 1, 2], gateway);
        passes(k, "own", &own, Reason::LinkLocal)?;
        let probe = arp(MAC, [0; 4], [10, 9, 1, 2]);
        passes(k, "probe", &probe, Reason::LinkLocal)?;
        let other = arp(MAC, gateway, [10, 9, 1, 5]);
        drops(k, "another's address", &other, Reason::SpoofedSource)?;
        let other_mac = arp([2, 0, 0, 0, 0, 9], [10, 9, 1, 2], gateway);
        drops(k, "another's MAC", &other_mac, Reason::SpoofedSource)?;
        let short = ethernet(0x0806, &[0, 1, 8, 0, 6, 4, 0]);
        drops(k, "short", &short, Reason::Malformed)?;
        Ok(())
    });
}

#[test]
fn malformed_packets_are_dropped() {
    with_kernel(|k| {
        k.allow(0, EGRESS, 0, 0)?;
        let good = frame(POD4, PEER4, tcp(4000, 80, ACK));
        passes(k, "whole", &good, Reason::Allowed)?;
        let good6 = frame(POD6, PEER6, tcp(4000, 80, ACK));
        passes(k, "whole, IPv6", &good6, Reason::Allowed)?;
        // Frames cut at every place within the transport header. (The kernel gives no program a
        // frame whose IP header is cut.)
        for (whole, start) in [(&good, 14 + 20), (&good6, 14 + 40)] {
            for length in start..start + 14 {
                drops(k, "cut", &whole[..length], Reason::Malformed)?;
            }
        }
        let mut changed = good.clone();
        changed[14] = 0x55;
        drops(k, "version", &changed, Reason::Malformed)?;
        changed[14] = 0x44;
        drops(k, "header length", &changed, Reason::Malformed)?;
        changed[14] = 0x45;
        changed[16..18].copy_from_slice(&4000_u16.to_be_bytes());
        drops(k, "total length", &changed, Reason::Malformed)?;
        drops(
            k,
            "VLAN",
            &ethernet(0x8100, &good[14..]),
            Reason::UnknownProtocol,
        )?;
        drops(
            k,
            "other",
            &ethernet(0x88b5, &[0; 46]),
            Reason::UnknownProtocol,
        )?;
        Ok(())
    });
}

#[test]
fn packets_with_options_and_extension_headers_are_judged() {
    with_kernel(|k| {
        k.redirect_dns()?;
        let marked = mark::to_proxy(PROXY_PORT);
        for length in [4, 20, 40] {
            let packet = Packet::new(POD4, PEER4, udp(4000, 53)).options(&vec![1; length]);
            let verdict = passes(k, "options", &packet.frame(), Reason::Redirected)?;
            assert_eq!(verdict.mark, marked);
        }
        for kind in [0, 43, 60] {
            for count in [1, 3, 7] {
                let packet = Packet::new(POD6, PEER6, udp(4000, 53)).extensions(kind, count);
                let verdict = passes(k, "extensions", &packet.frame(), Reason::Redirected)?;
                assert_eq!(verdict.mark, marked);
            }
        }
        let endless = Packet::new(POD6, PEER6, udp(4000, 53)).extensions(60, 9);
        drops(k, "too many", &endless.frame(), Reason::Malformed)?;
        Ok(())
    });
}

#[test]
fn fragments_get_the_verdict_of_the_first() {
    with_kernel(|k| {
        k.redirect_dns()?;
        k.allow(PEER, EGRESS, UDP, 80)?;
        for (pod, peer, _) in FAMILIES {
            let first = |port| Packet::new(pod, peer, udp(4000, port));
            // In a later fragment, bytes that look like ports are payload.
            let rest = Packet::new(pod, peer, udp(53, 53));
            for (id, port, verdict) in [
                (1, 53, Ok(Reason::Redirected)),
                (2, 80, Ok(Reason::Allowed)),
                (3, 81, Err(Reason::PolicyDenied)),
            ] {
                let head = first(port).fragment(0, true, id).frame();
                let tail = rest.clone().fragment(16, false, id).frame();
                drops(k, "before the first", &tail, Reason::FragmentUnknown)?;
                for part in [&head, &tail] {
                    match verdict {
                        Ok(reason) => {
                            let got = passes(k, "part", part, reason)?;
                            let redirected = reason == Reason::Redirected;
                            assert_eq!(got.mark != mark::JUDGED, redirected);
                        }
                        Err(reason) => drops(k, "part", part, reason)?,
                    }
                }
            }
            let other = rest.fragment(16, false, 99).frame();
            drops(k, "another datagram", &other, Reason::FragmentUnknown)?;
        }
        Ok(())
    });
}
