//! A flood of one endpoint displaces no entry of another endpoint in the datapath.
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Instant;

use agent_core::datapath::{
    attachment::Attachment,
    plan::{Datapath as _, Step},
};
use agent_datapath::conntrack;
use anyhow::Result;
use holdfast_e2e::kernel::{
    ENDPOINT, From, IFINDEX, Kernel, PEER, PEER4, PEER6, POD4, POD6, attachment, with_dns_quota,
    with_kernel,
};
use holdfast_e2e::packet::{ACK, FIN, Packet, SYN, Transport, tcp, udp};
use shared_maps::conntrack::CtValue;
use shared_maps::event::{self, Counter, Reason};
use shared_maps::lxc::LxcValue;
use shared_maps::mark::MAGIC_FROM_EGRESS_PROXY;
use shared_maps::policy::{EGRESS, INGRESS, PolicyKey, PolicyValue};
use shared_maps::quota::{self, CONNECTION_COST, Limit, QuotaKey, held_index, held_map};
use shared_maps::redirect::{self, RedirectKey, RedirectValue};
use shared_maps::user::{MapKind, lxc_key, monotonic_ns};
use shared_maps::{EndpointId, IdentityId};

const TCP: u8 = 6;
const UDP: u8 = 17;
/// Limit of packets to the proxy per second, for each endpoint.
const DNS_QUOTA: u32 = 10_000;
/// The neighbour of the endpoint under test.
const OTHER: EndpointId = EndpointId(8);
const OTHER4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 1, 3));
const OTHER6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd09, 1, 0, 0, 0, 0, 0, 3));
/// More flows than a conntrack map of the tests can hold (8,192).
const FLOOD: u16 = 20_000;
/// Limit of unanswered connections of one endpoint: a 32nd of the map.
const UNANSWERED: usize = 256;

fn other() -> Attachment {
    let (IpAddr::V4(ipv4), IpAddr::V6(ipv6)) = (OTHER4, OTHER6) else {
        unreachable!("constants")
    };
    Attachment {
        endpoint: OTHER,
        identity: IdentityId(1001),
        ifindex: IFINDEX + 1,
        ipv4: Some(ipv4),
        ipv6: Some(ipv6),
        ..attachment(IFINDEX)
    }
}

/// Loads the programs of the other endpoint, whose policy allows everything.
fn as_other(k: &mut Kernel) -> Result<()> {
    k.datapath().apply(&Step::CreatePolicyMap(OTHER))?;
    let key = PolicyKey::new(0, EGRESS, 0, 0, 0);
    let step = Step::SetPolicy(OTHER, key, PolicyValue::allow(key));
    k.datapath().apply(&step)?;
    k.reload(&other())
}

/// Loads the programs of the endpoint under test again.
fn as_attacker(k: &mut Kernel) -> Result<()> {
    k.reload(&attachment(IFINDEX))
}

fn frame(src: IpAddr, dst: IpAddr, transport: Transport) -> Vec<u8> {
    Packet::new(src, dst, transport).frame()
}

fn beyond(k: &Kernel, endpoint: EndpointId, limit: Limit) -> Result<u64> {
    let map = k.open::<QuotaKey, Counter>(quota::NAME, MapKind::LruPerCpuHash)?;
    let key = QuotaKey {
        endpoint: endpoint.0,
        limit: limit as u8,
        pad: 0,
    };
    let values = map.get_per_cpu(&key)?;
    Ok(values.iter().flatten().map(|value| value.packets).sum())
}

/// Packets of a reason so far.
fn counted(k: &Kernel, reason: Reason) -> Result<u64> {
    let map = k.open::<u32, Counter>(event::COUNTERS_NAME, MapKind::PerCpuArray)?;
    let values = map.get_per_cpu(&u32::from(reason as u8))?;
    Ok(values.iter().flatten().map(|value| value.packets).sum())
}

fn now() -> Result<u32> {
    Ok(u32::try_from(monotonic_ns() / 1_000_000_000)?)
}

#[test]
fn an_ended_entry_that_is_the_oldest_of_a_full_queue_can_be_used_again() {
    with_kernel(|k| {
        k.allow(PEER, EGRESS, 0, 0)?;
        k.send(&frame(POD4, PEER4, udp(4000, 80)))?;
        let map = k.conntrack4(false)?;
        let (key, value) = map.entries()?.found.remove(0);
        let lifetime = now()? - 1;
        map.set(&key, &CtValue { lifetime, ..value })?;
        for port in 1..UNANSWERED {
            k.pass(&frame(POD4, PEER4, udp(u16::try_from(port)?, 80)))?;
        }
        k.send(&frame(POD4, PEER4, udp(4000, 80)))?;
        let answer = frame(PEER4, POD4, udp(80, 4000));
        assert_eq!(k.receive(&answer, From::Outside)?.reason, Reason::Reply);
        Ok(())
    });
}

#[test]
fn a_flood_of_connections_evicts_no_connection_of_another_pod() {
    with_kernel(|k| {
        k.allow(PEER, EGRESS, 0, 0)?;
        as_other(k)?;
        let kept = [(4000, 443), (4001, 444)];
        for (port, to) in kept {
            k.send(&frame(OTHER4, PEER4, tcp(port, to, SYN)))?;
            k.send(&frame(OTHER4, PEER4, udp(port, to)))?;
            k.send(&frame(OTHER6, PEER6, tcp(port, to, SYN)))?;
            k.send(&frame(OTHER6, PEER6, udp(port, to)))?;
        }
        as_attacker(k)?;
        for port in 1..FLOOD {
            k.pass(&frame(POD4, PEER4, tcp(port, 80, SYN)))?;
            k.pass(&frame(POD4, PEER4, udp(port, 80)))?;
        }
        for port in 1..FLOOD / 2 {
            k.pass(&frame(POD6, PEER6, tcp(port, 80, SYN)))?;
            k.pass(&frame(POD6, PEER6, udp(port, 80)))?;
        }
        let found = k.conntrack4(true)?.entries()?.found.len();
        assert!(found <= UNANSWERED + kept.len(), "{found} entries");
        // The attacker's newest connection can still be answered.
        let newest = frame(PEER6, POD6, udp(80, FLOOD / 2 - 1));
        assert_eq!(k.receive(&newest, From::Outside)?.reason, Reason::Reply);
        assert!(beyond(k, ENDPOINT, Limit::Unanswered)? > 0);
        assert_eq!(beyond(k, OTHER, Limit::Unanswered)?, 0);
        as_other(k)?;
        for (port, to) in kept {
            for (own, peer) in [(OTHER4, PEER4), (OTHER6, PEER6)] {
                let answer = frame(peer, own, tcp(to, port, SYN | ACK));
                let verdict = k.receive(&answer, From::Outside)?;
                assert_eq!(verdict.reason, Reason::Reply, "TCP of the other pod");
                let answer = frame(peer, own, udp(to, port));
                let verdict = k.receive(&answer, From::Outside)?;
                assert_eq!(verdict.reason, Reason::Reply, "UDP of the other pod");
            }
        }
        Ok(())
    });
}

#[test]
fn answered_connections_outlast_a_flood_of_their_own_pod() {
    with_kernel(|k| {
        k.allow(PEER, EGRESS, 0, 0)?;
        k.allow(PEER, INGRESS, TCP, 90)?;
        k.send(&frame(POD4, PEER4, udp(4000, 443)))?;
        k.receive(&frame(PEER4, POD4, udp(443, 4000)), From::Outside)?;
        k.send(&frame(POD4, PEER4, tcp(4000, 443, SYN)))?;
        k.receive(
            &frame(PEER4, POD4, tcp(443, 4000, SYN | ACK)),
            From::Outside,
        )?;
        k.send(&frame(POD4, PEER4, tcp(4000, 443, ACK)))?;
        k.receive(&frame(PEER4, POD4, tcp(5000, 90, SYN)), From::Outside)?;
        k.send(&frame(POD4, PEER4, tcp(90, 5000, SYN | ACK)))?;
        k.receive(&frame(PEER4, POD4, tcp(5000, 90, ACK)), From::Outside)?;
        for port in 10_000..19_000 {
            k.pass(&frame(POD4, PEER4, tcp(port, 80, SYN)))?;
            k.pass(&frame(POD4, PEER4, udp(port, 80)))?;
            k.receive(&frame(PEER4, POD4, tcp(port, 90, SYN)), From::Outside)?;
        }
        for answer in [udp(443, 4000), tcp(443, 4000, ACK)] {
            let verdict = k.receive(&frame(PEER4, POD4, answer), From::Outside)?;
            assert_eq!(verdict.reason, Reason::Reply);
        }
        let own = frame(POD4, PEER4, tcp(90, 5000, ACK));
        assert_eq!(k.send(&own)?.reason, Reason::Reply);
        Ok(())
    });
}

#[test]
fn answered_connections_of_one_pod_take_half_of_the_map_at_most() {
    with_kernel(|k| {
        k.allow(PEER, EGRESS, 0, 0)?;
        for (address, endpoint) in [(POD4, ENDPOINT), (OTHER4, OTHER)] {
            let value = LxcValue {
                lxc_id: endpoint.0,
                ..LxcValue::default()
            };
            k.datapath().apply(&Step::SetLxc(lxc_key(address), value))?;
        }
        as_other(k)?;
        k.send(&frame(OTHER4, PEER4, udp(4000, 443)))?;
        k.receive(&frame(PEER4, OTHER4, udp(443, 4000)), From::Outside)?;
        as_attacker(k)?;
        // The agent does this every 30 seconds.
        assert!(conntrack::scan(&k.globals(), now()?, 3600).complete);
        for port in 1..FLOOD {
            k.pass(&frame(POD4, PEER4, udp(port, 80)))?;
            k.receive(&frame(PEER4, POD4, udp(80, port)), From::Outside)?;
        }
        let entries = k.conntrack4(false)?.entries()?.found.len();
        assert!(
            (4096..=4096 + UNANSWERED + 1).contains(&entries),
            "{entries}"
        );
        assert!(beyond(k, ENDPOINT, Limit::Connections)? > 0);
        let newest = frame(PEER4, POD4, udp(80, FLOOD - 1));
        assert_eq!(k.receive(&newest, From::Outside)?.reason, Reason::Reply);
        as_other(k)?;
        let answer = frame(PEER4, OTHER4, udp(443, 4000));
        assert_eq!(k.receive(&answer, From::Outside)?.reason, Reason::Reply);
        Ok(())
    });
}

#[test]
fn short_connections_evict_no_connection_of_another_pod() {
    with_kernel(|k| {
        k.allow(PEER, EGRESS, 0, 0)?;
        as_other(k)?;
        k.send(&frame(OTHER4, PEER4, tcp(4000, 443, SYN)))?;
        let answer = frame(PEER4, OTHER4, tcp(443, 4000, SYN | ACK));
        k.receive(&answer, From::Outside)?;
        as_attacker(k)?;
        for port in 1..FLOOD / 2 {
            k.pass(&frame(POD4, PEER4, tcp(port, 80, SYN)))?;
            k.pass_in(&frame(PEER4, POD4, tcp(80, port, SYN | ACK)))?;
            k.pass(&frame(POD4, PEER4, tcp(port, 80, FIN | ACK)))?;
            k.pass_in(&frame(PEER4, POD4, tcp(80, port, FIN | ACK)))?;
        }
        let found = k.conntrack4(true)?.entries()?.found.len();
        assert!(found <= UNANSWERED + 1, "{found} entries");
        let lost = beyond(k, ENDPOINT, Limit::Unanswered)?;
        assert_eq!(lost, 0, "closed connections lose nothing");
        as_other(k)?;
        assert_eq!(k.receive(&answer, From::Outside)?.reason, Reason::Reply);
        Ok(())
    });
}

#[test]
fn expired_pairs_are_removed_and_no_longer_held() {
    with_kernel(|k| {
        k.allow(PEER, EGRESS, 0, 0)?;
        let value = LxcValue {
            lxc_id: ENDPOINT.0,
            ..LxcValue::default()
        };
        k.datapath().apply(&Step::SetLxc(lxc_key(POD4), value))?;
        for port in [4000, 4001] {
            k.send(&frame(POD4, PEER4, udp(port, 80)))?;
            k.receive(&frame(PEER4, POD4, udp(80, port)), From::Outside)?;
        }
        let held = k.open::<u32, u32>(quota::HELD_NAME, MapKind::Array)?;
        let own = held_index(ENDPOINT.0, held_map(false, false));
        let free = held_index(0, held_map(false, false));
        let found = conntrack::scan(&k.globals(), now()?, 3600);
        assert_eq!(found.alive, [(POD4, PEER4)]);
        assert_eq!((held.get(&own)?, held.get(&free)?), (Some(2), Some(8190)));
        let found = conntrack::scan(&k.globals(), now()? + 3600, 3600);
        assert!(found.alive.is_empty() && found.complete);
        assert!(k.conntrack4(false)?.entries()?.found.is_empty());
        assert_eq!((held.get(&own)?, held.get(&free)?), (Some(0), Some(8192)));
        Ok(())
    });
}

#[test]
fn a_flood_of_queries_is_cut_before_the_proxy_and_affects_only_its_pod() {
    with_dns_quota(DNS_QUOTA, |k| {
        k.redirect_dns()?;
        let flood = u32::from(FLOOD);
        let queries = [(tcp(4000, 53, SYN), CONNECTION_COST), (udp(4000, 53), 1)];
        for (query, cost) in queries {
            let begun = Instant::now();
            let (passed, cut) = (
                counted(k, Reason::Redirected)?,
                counted(k, Reason::OverQuota)?,
            );
            k.cost(&frame(POD4, PEER4, query), flood)?;
            let passed = counted(k, Reason::Redirected)? - passed;
            let cut = counted(k, Reason::OverQuota)? - cut;
            assert_eq!(passed + cut, u64::from(flood));
            // The rest of the burst, and the packets that the rate allowed since then.
            let due = begun.elapsed().as_secs_f64() * f64::from(DNS_QUOTA);
            let most = (f64::from(DNS_QUOTA) / 4.0 + due) / f64::from(cost) + 2.0;
            let passed = f64::from(u32::try_from(passed)?);
            assert!(passed <= most, "{passed} passed, at most {most}");
        }
        let cut = beyond(k, ENDPOINT, Limit::ToProxy)?;
        assert_eq!(cut, counted(k, Reason::OverQuota)?);
        assert!(cut > 0);
        // An open connection continues.
        let segment = frame(POD4, PEER4, tcp(4000, 53, ACK));
        assert_eq!(k.send(&segment)?.reason, Reason::Redirected);
        // Packets that do not go to the proxy have no quota.
        k.allow(PEER, EGRESS, UDP, 80)?;
        assert!(k.send(&frame(POD4, PEER4, udp(4000, 80)))?.pass);

        k.datapath().apply(&Step::CreatePolicyMap(OTHER))?;
        for protocol in [TCP, UDP] {
            let key = PolicyKey::new(PEER, EGRESS, protocol, 53, 16);
            let value = PolicyValue::dns_redirect(key, holdfast_e2e::kernel::PROXY_PORT);
            k.datapath().apply(&Step::SetPolicy(OTHER, key, value))?;
        }
        k.reload(&other())?;
        for port in 4000..4200 {
            let verdict = k.send(&frame(OTHER4, PEER4, udp(port, 53)))?;
            assert_eq!(verdict.reason, Reason::Redirected);
        }
        assert_eq!(beyond(k, OTHER, Limit::ToProxy)?, 0);
        // A new endpoint with the same number starts with an unused quota.
        k.datapath().apply(&Step::RemovePolicyMap(ENDPOINT))?;
        assert_eq!(beyond(k, ENDPOINT, Limit::ToProxy)?, 0);
        Ok(())
    });
}

#[test]
fn a_flood_of_fragments_displaces_no_datagram_of_another_pod() {
    with_kernel(|k| {
        k.allow(PEER, EGRESS, 0, 0)?;
        as_other(k)?;
        let datagram = Packet::new(OTHER4, PEER4, udp(4000, 80));
        let head = datagram.clone().fragment(0, true, 5).frame();
        let tail = datagram.fragment(16, false, 5).frame();
        assert!(k.send(&head)?.pass);
        as_attacker(k)?;
        for id in 0..FLOOD {
            let first = Packet::new(POD4, PEER4, udp(4000, 80)).fragment(0, true, id.into());
            k.pass(&first.frame())?;
        }
        assert!(beyond(k, ENDPOINT, Limit::Fragments)? > 0);
        as_other(k)?;
        assert!(k.send(&tail)?.pass, "the rest of the other pod's datagram");
        Ok(())
    });
}

#[test]
fn a_pod_that_queries_many_servers_displaces_no_server_of_another_pod() {
    with_kernel(|k| {
        let any = PolicyKey::new(0, EGRESS, UDP, 53, 16);
        let redirect = PolicyValue::dns_redirect(any, holdfast_e2e::kernel::PROXY_PORT);
        k.policy(any, redirect)?;
        k.datapath().apply(&Step::CreatePolicyMap(OTHER))?;
        k.datapath().apply(&Step::SetPolicy(OTHER, any, redirect))?;
        k.reload(&other())?;
        k.send(&frame(OTHER4, PEER4, udp(4000, 53)))?;
        as_attacker(k)?;
        for number in 0..70_000_u32 {
            let server = IpAddr::from((0x0b00_0000 + number).to_be_bytes());
            k.pass(&frame(POD4, server, udp(4000, 53)))?;
        }
        assert!(beyond(k, ENDPOINT, Limit::Servers)? > 0);
        let notes = k.open::<RedirectKey, RedirectValue>(redirect::NAME, MapKind::LruHash)?;
        let server = lxc_key(PEER4).ip;
        let notes = notes.entries()?.found;
        assert!(notes.iter().any(|(key, _)| key.server == server));
        assert!(notes.len() <= 1025, "{} notes", notes.len());
        // The flood's first server no longer has a redirect entry, and its answer still arrives.
        let answer = frame(IpAddr::from([11, 0, 0, 0]), POD4, udp(53, 4000));
        let proxy = From::Local(MAGIC_FROM_EGRESS_PROXY);
        assert_eq!(k.receive(&answer, proxy)?.reason, Reason::Reply);
        Ok(())
    });
}
