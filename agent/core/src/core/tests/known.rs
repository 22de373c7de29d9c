//! Names that are known before a pod looks them up (`--tofqdns-pre-cache`).

use dns_policy::{boot_time::BootTime, name::Fqdn};

use super::{
    restart::left_behind,
    scenario::{Node, WEB, spec},
};
use crate::{
    core::{CoreConfig, Event, Restored, event::CleanNames},
    datapath::{memory::MemoryDatapath, plan::Step},
    fqdn::pre_cache::PreCached,
};

fn known(name: &str, address: &str, expires: u64) -> PreCached {
    PreCached {
        name: Fqdn::normalise(name),
        lookup: 0,
        expires: expires * 1_000_000_000,
        addresses: vec![address.parse().unwrap()],
    }
}

/// Starts with what is left in `datapath`, up to the point where the sources are synced.
fn start(datapath: MemoryDatapath, secs: u64, pre_cache: &[PreCached]) -> Node {
    start_with(CoreConfig::default(), datapath, secs, pre_cache)
}

fn start_with(
    config: CoreConfig,
    datapath: MemoryDatapath,
    secs: u64,
    pre_cache: &[PreCached],
) -> Node {
    let restored = Restored {
        now: BootTime::START.plus_secs(secs),
        pre_cache: pre_cache.to_vec(),
        ..left_behind(&datapath, &[107])
    };
    let mut node = Node::with(config, restored, datapath);
    node.begin();
    node.policy(WEB);
    node.endpoint(spec("web", 7, "app=web"));
    node.sync();
    node
}

#[test]
fn it_is_open_unasked_until_it_expires() {
    let entries = [
        known("www.cilium.io", "1.1.1.1", 1400),
        known("www.cilium.io", "1.1.1.2", 999),
        known("www.cilium.io", "127.0.0.1", 1400),
        known("other.test", "1.1.1.3", 1400),
    ];
    let mut node = start(MemoryDatapath::default(), 1000, &entries);
    let open = node.identity("1.1.1.1");
    assert!(open.is_some());
    for closed in ["1.1.1.2", "127.0.0.1", "1.1.1.3"] {
        assert_eq!(node.identity(closed), None, "{closed}");
    }
    let number = open.map(|id| id.0);
    // The policy map has the identity before the address has it.
    let at = |wanted: &dyn Fn(&Step) -> bool| node.datapath.log.iter().position(wanted);
    let policy =
        at(&|step| matches!(step, Step::SetPolicy(_, key, _) if Some(key.sec_label) == number));
    let ipcache = at(
        &|step| matches!(step, Step::SetIpcache(_, value) if Some(value.sec_identity) == number),
    );
    assert!(policy.unwrap() < ipcache.unwrap());
    node.tick(BootTime::START.plus_secs(1399));
    assert!(node.identity("1.1.1.1").is_some());
    node.tick(BootTime::START.plus_secs(1400));
    assert_eq!(node.identity("1.1.1.1"), None);
}

#[test]
fn an_endpoint_that_asks_keeps_it_beyond() {
    let entries = [known("www.cilium.io", "1.1.1.1", 1010)];
    let mut node = start(MemoryDatapath::default(), 1000, &entries);
    node.learn("www.cilium.io", &["1.1.1.1"]);
    node.tick(node.now.plus_secs(20));
    assert!(node.identity("1.1.1.1").is_some());
}

#[test]
fn what_is_cleaned_closes_at_once_and_is_not_known_again() {
    let entries = [
        known("www.cilium.io", "1.1.1.1", 90_000),
        known("dev.cilium.io", "1.1.1.2", 90_000),
    ];
    let mut node = start(MemoryDatapath::default(), 1000, &entries);
    node.event(Event::CleanNames(CleanNames {
        pattern: Some("www.cilium.io".to_owned()),
        endpoint: None,
    }));
    assert_eq!(node.identity("1.1.1.1"), None);
    assert!(node.identity("1.1.1.2").is_some());
    let mut node = start(node.datapath.clone(), 1010, &entries);
    // What was in the map at the kill is kept no longer than the grace.
    node.tick(node.now.plus_secs(31));
    assert_eq!(node.identity("1.1.1.1"), None);
    assert!(node.identity("1.1.1.2").is_some());
}

/// Times of the former boot mean nothing in this one: Unix time counts.
#[test]
fn what_is_cleaned_is_not_known_again_after_a_reboot_or_a_week() {
    let booted = |boot_id: &str, at: u64| CoreConfig {
        boot_id: boot_id.to_owned(),
        boot_unix_ns: at * 1_000_000_000,
        ..CoreConfig::default()
    };
    let looked_up = |at: u64| PreCached {
        lookup: at * 1_000_000_000,
        ..known("www.cilium.io", "1.1.1.1", 10_000_000)
    };
    let is_open = |node: &Node| node.identity("1.1.1.1").is_some();
    let clean = |node: &mut Node, pattern: &str| {
        node.event(Event::CleanNames(CleanNames {
            pattern: Some(pattern.to_owned()),
            endpoint: None,
        }));
    };
    let mut node = start_with(
        booted("a", 5000),
        MemoryDatapath::default(),
        1000,
        &[looked_up(5500)],
    );
    assert!(is_open(&node));
    clean(&mut node, "www.cilium.io");
    // Another cleaning more than a week later writes the list again.
    node.tick(node.now.plus_secs(700_000));
    clean(&mut node, "other.test");
    let cleaned = node.datapath.cleaned.clone();
    let reboot = |lookup: u64| {
        let datapath = MemoryDatapath {
            cleaned: cleaned.clone(),
            ..MemoryDatapath::default()
        };
        start_with(booted("b", 800_000), datapath, 1000, &[looked_up(lookup)])
    };
    assert!(!is_open(&reboot(5500)));
    assert!(is_open(&reboot(6500)), "looked up after it was cleaned");
    // The list that this boot writes has the name at the next boot.
    let mut node = reboot(5500);
    clean(&mut node, "another.test");
    let node = start_with(
        booted("c", 900_000),
        MemoryDatapath {
            cleaned: node.datapath.cleaned.clone(),
            ..MemoryDatapath::default()
        },
        1000,
        &[looked_up(5500)],
    );
    assert!(!is_open(&node));
}
