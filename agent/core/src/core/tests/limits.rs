//! Limits of one pod or proxy, and the reports on them.

use std::{net::IpAddr, time::Duration};

use dns_policy::{
    boot_time::BootTime,
    mapping::{Realised, Refusal},
};

use super::scenario::{Node, mapping};
use crate::core::CoreConfig;

const NOT_REALISED: Realised = Realised::No(Refusal::NotRealised);

fn addresses(count: u32) -> Vec<String> {
    let address = |n: u32| IpAddr::from((0x0b00_0000 + n).to_be_bytes()).to_string();
    (0..count).map(address).collect()
}

fn learn(node: &mut Node, name: &str, count: u32) -> (Realised, Option<BootTime>) {
    let addresses = addresses(count);
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    let result = node.learn(name, &addresses).1;
    (result.realised, result.lease_end)
}

#[test]
fn the_rate_counts_addresses() {
    let mut node = Node::usual_with(CoreConfig {
        mapping_rate: 1,
        ..CoreConfig::default()
    });
    assert_eq!(learn(&mut node, "a.cilium.io", 8).0, Realised::Yes);
    let limited = Realised::No(Refusal::RateLimited);
    assert_eq!(learn(&mut node, "a.cilium.io", 3).0, limited);
    assert_eq!(learn(&mut node, "a.cilium.io", 2).0, Realised::Yes);
    // A price above a full bucket is paid with a full bucket.
    node.now = node.now.plus_secs(10);
    assert_eq!(learn(&mut node, "a.cilium.io", 100).0, Realised::Yes);
    assert_eq!(learn(&mut node, "a.cilium.io", 1).0, limited);
}

#[test]
fn addresses_beyond_what_a_mapping_may_have_are_owned_up_to() {
    let mut node = Node::usual_with(CoreConfig {
        max_ips_per_name: 10_000,
        ..CoreConfig::default()
    });
    assert_eq!(learn(&mut node, "a.cilium.io", 1024).0, Realised::Yes);
    assert_eq!(learn(&mut node, "b.cilium.io", 1030), (NOT_REALISED, None));
    let summary = node.core.summary();
    assert_eq!(summary.names_live, 2048);
    assert_eq!(summary.counters.pairs_left_out, 6);
    assert_eq!(summary.counters.mappings_not_realised, 1);
}

#[test]
fn an_endpoint_with_its_most_names_is_refused_more_and_keeps_what_it_has() {
    let mut node = Node::usual_with(CoreConfig {
        max_pairs_per_endpoint: 32,
        ..CoreConfig::default()
    });
    for n in 0..32 {
        let (_, result) = node.learn(&format!("n{n}.cilium.io"), &[&format!("11.0.0.{n}")]);
        assert_eq!(result.realised, Realised::Yes);
        assert_eq!(result.lease_end.is_some(), n < 30, "{n}");
    }
    let (_, result) = node.learn("new.cilium.io", &["11.0.1.1"]);
    assert_eq!((result.realised, result.lease_end), (NOT_REALISED, None));
    assert_eq!(node.identity("11.0.1.1"), None);
    assert!((0..32).all(|n| node.identity(&format!("11.0.0.{n}")).is_some()));
    // A pair that the endpoint has may be learned again.
    let (_, result) = node.learn("n0.cilium.io", &["11.0.0.0"]);
    assert_eq!(result.realised, Realised::Yes);
    assert_eq!(node.core.summary().counters.pairs_left_out, 1);
}

#[test]
fn names_long_expired_of_one_address_in_use_shut_no_name_out() {
    let mut node = Node::usual_with(CoreConfig {
        max_pairs_per_endpoint: 32,
        ..CoreConfig::default()
    });
    for n in 0..200 {
        let (_, result) = node.learn(&format!("n{n}.cilium.io"), &["11.0.0.1"]);
        assert_eq!(result.realised, Realised::Yes, "{n}");
        node.tick(node.now.plus_secs(61));
        assert!(node.core.summary().names_live == 0);
    }
    assert!(node.identity("11.0.0.1").is_some());
    assert!(node.core.snapshot().names.len() <= 32);
}

#[test]
fn the_last_room_of_the_node_is_given_without_leases() {
    let mut node = Node::usual_with(CoreConfig {
        ipcache_max: 64,
        ..CoreConfig::default()
    });
    let leases: Vec<bool> = (0..58)
        .map(|n| {
            let (_, result) = node.learn(&format!("n{n}.cilium.io"), &[&format!("11.0.0.{n}")]);
            assert_eq!(result.realised, Realised::Yes, "{n}");
            result.lease_end.is_some()
        })
        .collect();
    assert!(leases[50] && !leases[57], "{leases:?}");
}

#[test]
fn lease_and_restore_grace_are_exact() {
    let half = Duration::from_millis(500);
    let mut node = Node::usual_with(CoreConfig {
        lease_slack: half,
        restore_grace: half,
        ..CoreConfig::default()
    });
    let now = node.now;
    assert_eq!(node.core.next_deadline(), Some(now.plus(half)));
    let (_, result) = node.learn("www.cilium.io", &["1.1.1.1"]);
    assert_eq!(
        result.lease_end,
        Some(BootTime::from_nanos(now.nanos() + 60_500_000_000))
    );
}

#[test]
fn files_of_many_names_are_written_more_rarely() {
    let mut node = Node::usual_with(CoreConfig::default());
    for name in ["a", "b", "c"] {
        learn(&mut node, &format!("{name}.cilium.io"), 1000);
    }
    let until_written = |node: &mut Node| -> BootTime {
        while !node
            .tick(node.core.next_deadline().unwrap().max(node.now))
            .iter()
            .any(|step| matches!(step, crate::datapath::plan::Step::WriteEndpoint(..)))
        {}
        node.now
    };
    let first = until_written(&mut node);
    let again = mapping(&node, "d.cilium.io", &["1.1.1.1"]);
    node.mapping(again);
    assert_eq!(until_written(&mut node), first.plus_secs(5 + 3));
}
