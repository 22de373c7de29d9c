//! kill -9 and start again: nothing that was allowed is cut, nothing is renumbered.

use dns_policy::mapping::Realised;

use super::{
    oracle::{World, check_way, config},
    scenario::{Node, WEB, mapping, spec},
};
pub(super) use crate::core::testing::restart::{again, left_behind};
use crate::{
    core::{CoreConfig, Event, Restored, event::CleanNames},
    datapath::plan::Step,
    identity::checkpoint,
    source_event::SourceEvent,
};

#[test]
fn numbers_and_names_survive() {
    let mut node = Node::usual();
    node.learn("www.cilium.io", &["1.1.1.1"]);
    node.tick(node.now.plus_secs(1));
    let before = node.datapath.clone();
    let mut node = again(&node, CoreConfig::default(), &[107]);
    node.begin();
    node.policy(WEB);
    node.endpoint(spec("web", 7, "app=web"));
    assert!(
        node.datapath.log.is_empty(),
        "nothing is touched before all sources are synced"
    );
    node.sync();
    assert_eq!(node.datapath.ipcache, before.ipcache);
    assert_eq!(node.datapath.policy, before.policy);
    assert_eq!(node.datapath.lxc, before.lxc);
    let touched = |step: &Step| {
        matches!(
            step,
            Step::SetIpcache(..)
                | Step::UnsetIpcache(_)
                | Step::SetPolicy(..)
                | Step::UnsetPolicy(..)
        )
    };
    assert!(
        !node.datapath.log.iter().any(touched),
        "{:?}",
        node.datapath.log
    );
    // A restored address stays for at least 30 s, whatever its TTL was. Then the restored labels
    // are removed too.
    let later = node.now.plus_secs(29);
    node.tick(later);
    assert!(node.identity("1.1.1.1").is_some());
}

#[test]
fn policy_of_an_identity_whose_prefix_is_looked_at_last_is_not_cut() {
    const BLOCK: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: block, namespace: default}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toCIDR: [192.0.2.0/24]
";
    let mut node = Node::usual();
    node.policy(BLOCK);
    // More than one chunk of longer prefixes, which come first.
    for n in 0..600 {
        node.learn(
            &format!("n{n}.cilium.io"),
            &[&format!("10.9.{}.{}", n / 200, n % 200)],
        );
    }
    let before = node.datapath.clone();
    assert!(before.ipcache.len() > 600);
    let mut node = again(&node, CoreConfig::default(), &[107]);
    node.begin();
    node.policy(WEB);
    node.policy(BLOCK);
    node.endpoint(spec("web", 7, "app=web"));
    node.sync();
    assert_eq!(node.datapath.policy, before.policy);
    let cut = |step: &Step| matches!(step, Step::UnsetPolicy(..) | Step::UnsetIpcache(_));
    let cuts: Vec<&Step> = node.datapath.log.iter().filter(|s| cut(s)).collect();
    assert!(cuts.is_empty(), "{cuts:?}");
}

#[test]
fn a_policy_that_went_while_away_goes_at_the_sync_and_not_before() {
    let node = Node::usual();
    let mut node = again(&node, CoreConfig::default(), &[107]);
    node.begin();
    node.endpoint(spec("web", 7, "app=web"));
    node.event(Event::Endpoints(SourceEvent::InitDone));
    assert!(node.datapath.log.is_empty());
    node.event(Event::Policies(SourceEvent::InitDone));
    let map = &node.datapath.policy[&node.id()];
    assert_eq!(map.len(), 2, "{map:?}");
}

#[test]
fn what_nobody_asks_for_again_goes_after_the_grace() {
    let config = CoreConfig {
        restore_grace: std::time::Duration::from_secs(600),
        ..CoreConfig::default()
    };
    let mut node = again(&Node::usual(), config, &[107]);
    node.begin();
    node.endpoint(spec("web", 7, "app=web"));
    node.tick(node.now.plus_secs(1000));
    node.sync();
    let synced = node.now;
    node.tick(synced.plus_secs(599));
    assert!(node.identity("10.9.0.53").is_some());
    assert_eq!(node.core.next_deadline(), Some(synced.plus_secs(600)));
    node.tick(synced.plus_secs(600));
    assert!(node.identity("10.9.0.53").is_none());
}

#[test]
fn what_is_cleaned_after_a_restart_is_closed_at_once() {
    let mut node = Node::usual();
    node.learn("www.cilium.io", &["1.1.1.1"]);
    node.tick(node.now.plus_secs(6));
    let mut node = again(&node, CoreConfig::default(), &[107]);
    node.begin();
    node.policy(WEB);
    node.endpoint(spec("web", 7, "app=web"));
    node.sync();
    assert!(node.identity("1.1.1.1").is_some());
    node.event(Event::CleanNames(CleanNames::default()));
    assert_eq!(node.identity("1.1.1.1"), None);
}

#[test]
fn what_is_cleaned_takes_no_other_name_from_its_address() {
    const OTHER: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: other}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toFQDNs: [{matchName: ebpf.io}]
";
    let mut node = Node::usual();
    node.policy(OTHER);
    node.learn("www.cilium.io", &["1.1.1.1"]);
    node.tick(node.now.plus_secs(6));
    let numbers = |node: &Node| ["1.1.1.1", "1.1.1.2"].map(|address| node.identity(address));
    // These names are confirmed, and not on disk yet.
    node.learn("ebpf.io", &["1.1.1.1", "1.1.1.2"]);
    let [both, one] = numbers(&node);
    assert!(both.is_some() && one.is_some() && both != one);
    let mut node = again(&node, CoreConfig::default(), &[107]);
    node.begin();
    node.policy(WEB);
    node.policy(OTHER);
    node.endpoint(spec("web", 7, "app=web"));
    node.sync();
    assert_eq!(numbers(&node), [both, one]);
    node.event(Event::CleanNames(CleanNames {
        pattern: Some("www.cilium.io".to_owned()),
        endpoint: None,
    }));
    assert_eq!(numbers(&node), [one, one], "what it is kept for besides");
}

#[test]
fn what_is_cleaned_before_a_proxy_tells_it_again_is_closed_then() {
    let mut node = Node::usual();
    // The name is confirmed, and not on disk yet.
    node.learn("www.cilium.io", &["1.1.1.1"]);
    let mut report = mapping(&node, "www.cilium.io", &["1.1.1.1"]);
    let mut node = again(&node, CoreConfig::default(), &[107]);
    node.begin();
    node.policy(WEB);
    node.endpoint(spec("web", 7, "app=web"));
    node.sync();
    node.event(Event::CleanNames(CleanNames::default()));
    assert!(node.identity("1.1.1.1").is_some(), "its owner is unknown");
    report.replayed = true;
    let (_, result) = node.mapping(report);
    assert_ne!(result.realised, Realised::Yes);
    assert_eq!(node.identity("1.1.1.1"), None);
}

#[test]
fn what_was_cleaned_stays_so_through_restarts_of_one_boot() {
    for boot in ["", "another"] {
        let mut node = Node::usual();
        node.learn("www.cilium.io", &["1.1.1.1"]);
        let mut report = mapping(&node, "www.cilium.io", &["1.1.1.1"]);
        report.replayed = true;
        // The disk has no room at first. The list is written once the disk has room.
        node.datapath.fail = Some(|step| matches!(step, Step::KeepCleaned(_)));
        node.event(Event::CleanNames(CleanNames::default()));
        node.datapath.fail = None;
        node.tick(node.now.plus_secs(2));
        // The agent is killed before the proxy gave its lease back: the map still has it.
        assert!(node.identity("1.1.1.1").is_some());
        let config = CoreConfig {
            boot_id: boot.to_owned(),
            ..CoreConfig::default()
        };
        for start in 0..2 {
            node = again(&node, config.clone(), &[107]);
            node.begin();
            node.policy(WEB);
            node.endpoint(spec("web", 7, "app=web"));
            node.sync();
            let (_, result) = node.mapping(report.clone());
            let open = result.realised == Realised::Yes;
            assert_eq!(open, !boot.is_empty(), "start {start}");
            assert_eq!(node.identity("1.1.1.1").is_some(), open, "start {start}");
        }
        let (_, again) = node.learn("www.cilium.io", &["1.1.1.1"]);
        assert_eq!(again.realised, Realised::Yes, "asked again, it opens");
    }
}

#[test]
fn what_was_cleaned_stays_so_although_a_file_still_has_it() {
    // The name is live in one case, and a zombie in the other.
    for age in [6, 130] {
        let mut node = Node::usual();
        let named = |node: &Node| node.datapath.files[&node.id()].contains("www.cilium.io.");
        let restarted = |node: &Node| {
            let mut node = again(node, CoreConfig::default(), &[107]);
            node.begin();
            node.policy(WEB);
            node.endpoint(spec("web", 7, "app=web"));
            node.sync();
            node.tick(node.now.plus_secs(6));
            node
        };
        let learned = node.now;
        node.learn("www.cilium.io", &["1.1.1.1"]);
        node.tick(learned.plus_secs(age));
        node.tick(learned.plus_secs(age + 6));
        assert!(named(&node));
        assert_eq!(node.core.summary().names_zombies > 0, age > 60);
        let files = node.datapath.files.clone();
        node.event(Event::CleanNames(CleanNames::default()));
        // The agent is killed after it reported the cleaning, and before it wrote the file.
        node.datapath.files = files;
        let mut node = restarted(&node);
        assert!(!named(&node), "{age}");
        node.tick(node.now.plus_secs(31));
        assert_eq!(node.identity("1.1.1.1"), None, "{age}");
        node.learn("www.cilium.io", &["1.1.1.1"]);
        assert!(node.identity("1.1.1.1").is_some());
        node.tick(node.now.plus_secs(age));
        node.tick(node.now.plus_secs(6));
        let mut node = restarted(&node);
        node.tick(node.now.plus_secs(31));
        assert!(
            node.identity("1.1.1.1").is_some(),
            "{age}: asked again since"
        );
    }
}

#[test]
fn what_is_left_of_a_dead_interface_goes_first() {
    let node = Node::usual();
    assert!(node.identity("10.0.0.7").is_some());
    let mut node = again(&node, CoreConfig::default(), &[]);
    node.begin();
    assert!(node.datapath.lxc.is_empty());
    assert!(node.identity("10.0.0.7").is_none());
    node.policy(WEB);
    node.sync();
    assert!(node.datapath.policy.is_empty() && node.datapath.files.is_empty());
}

#[test]
fn a_new_endpoint_does_not_get_a_number_of_which_something_is_left() {
    let usual = Node::usual();
    let old = usual.id();
    for damaged in [false, true] {
        let mut left = Node {
            core: crate::core::Core::new(CoreConfig::default(), Restored::default()),
            datapath: usual.datapath.clone(),
            now: usual.now,
            effects: Vec::new(),
        };
        if damaged {
            left.datapath.files.clear();
        }
        let mut node = again(&left, CoreConfig::default(), &[108]);
        node.begin();
        node.policy(WEB);
        node.endpoint(spec("db", 8, "app=db"));
        node.sync();
        let [location] = node.core.locations().try_into().unwrap();
        assert_ne!(location.id, old);
        let datapath = &node.datapath;
        assert!(datapath.policy.keys().eq([&location.id]));
        assert!(datapath.files.keys().eq([&location.id]));
        assert!(datapath.attached.keys().eq([&location.id]));
        assert!(
            datapath
                .lxc
                .values()
                .all(|value| value.lxc_id == location.id.0)
        );
    }
}

#[test]
fn programs_do_not_outlive_an_endpoint_that_went_while_away() {
    let usual = Node::usual();
    let mut node = again(&usual, CoreConfig::default(), &[107]);
    node.begin();
    node.policy(WEB);
    assert_eq!(node.datapath.attached.len(), 1, "not before the sync");
    node.sync();
    assert!(node.datapath.attached.is_empty(), "it was not listed again");
    // The endpoint's file was damaged and set aside: it has another number and other programs.
    let mut damaged = usual;
    damaged.datapath.files.clear();
    let mut node = again(&damaged, CoreConfig::default(), &[107]);
    node.begin();
    node.policy(WEB);
    node.endpoint(spec("web", 7, "app=web"));
    node.datapath.fail = Some(|step| matches!(step, Step::Detach(_)));
    node.sync();
    assert_eq!(node.datapath.attached.len(), 2, "the old ones go again");
    node.datapath.fail = None;
    node.tick(node.now.plus_secs(2));
    let maps = node.datapath.policy.keys();
    assert!(
        maps.eq(node.datapath.attached.keys()),
        "{:?}",
        node.datapath.attached
    );
}

#[test]
fn a_lost_checkpoint_keeps_numbers_of_single_blocks() {
    let mut node = Node::usual();
    node.datapath.checkpoint = None;
    let server = shared_maps::ipcache::IpcacheKey::v4([10, 9, 0, 53], 32);
    let before = node.datapath.ipcache[&server];
    let mut node = again(&node, CoreConfig::default(), &[107]);
    node.begin();
    node.policy(WEB);
    node.endpoint(spec("web", 7, "app=web"));
    node.sync();
    assert_eq!(node.datapath.ipcache[&server], before);
}

#[test]
fn a_lost_checkpoint_gives_no_number_in_force_another_meaning() {
    let mut node = Node::usual();
    node.learn("www.cilium.io", &["1.1.1.1", "1.1.1.2"]);
    let shared = node.identity("1.1.1.1").unwrap();
    assert_eq!(node.identity("1.1.1.2"), Some(shared));
    node.datapath.checkpoint = None;
    let mut node = again(&node, CoreConfig::default(), &[107]);
    node.begin();
    node.policy(WEB);
    node.endpoint(spec("web", 7, "app=web"));
    node.sync();
    let kept = checkpoint::parse_local(node.datapath.checkpoint.as_deref().unwrap()).unwrap();
    let (_, labels) = kept.iter().find(|(id, _)| *id == shared).unwrap();
    let texts = labels.texts();
    assert!(
        texts.contains(&"cidr:1.1.1.1/32".to_owned()),
        "{shared} means {texts:?} while entries of the run before are in force"
    );
}

/// The agent starts again and gets everything from its sources.
pub(super) fn restarted(world: &World) -> Node {
    let mut node = again(&world.node, config(), &[107, 108, 109]);
    node.begin();
    let start = node.datapath.clone();
    world.replay(&mut node);
    node.sync();
    check_way(&start, &node.datapath);
    node
}

/// Files have times of the wall clock, which may jump while the agent is away.
#[test]
fn a_clock_that_jumps_keeps_no_name_longer_than_its_ttl_and_closes_none_at_once() {
    const YEAR: u64 = 31_536_000_000_000_000;
    for after in [YEAR, 3 * YEAR] {
        let config = |boot_unix_ns| CoreConfig {
            boot_unix_ns,
            ..CoreConfig::default()
        };
        let mut node = Node::usual_with(config(2 * YEAR));
        node.learn("www.cilium.io", &["1.1.1.1"]);
        node.tick(node.now.plus_secs(6));
        let mut node = again(&node, config(after), &[107]);
        node.begin();
        node.policy(WEB);
        node.endpoint(spec("web", 7, "app=web"));
        node.sync();
        node.tick(node.now.plus_secs(29));
        assert!(node.identity("1.1.1.1").is_some(), "{after}");
        node.tick(node.now.plus_secs(40));
        for _ in 0..3 {
            node.tick(node.now.plus_secs(30));
            node.event(Event::Liveness {
                gc_start: node.now,
                alive: Vec::new(),
                complete: true,
            });
        }
        assert_eq!(node.identity("1.1.1.1"), None, "{after}");
    }
}
