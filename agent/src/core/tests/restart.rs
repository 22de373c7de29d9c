//! kill -9 and start again: nothing that was allowed is cut, nothing is renumbered.

use std::collections::BTreeSet;

use holdfast_sdp::mapping::Realised;
use proptest::prelude::*;
use shared_maps::IdentityId;

use super::{
    oracle::{Act, Pod, World, acts, check_way, config, fates, parts},
    scenario::{Node, WEB, mapping, spec},
};
use crate::{
    core::{
        CoreConfig, Event, Restored,
        event::{CleanNames, SourceEvent},
    },
    datapath::{
        memory::MemoryDatapath,
        plan::{Datapath as _, Step},
    },
    endpoint::config_file,
    fqdn::cleaned,
    identity::checkpoint,
};

/// What a start finds.
pub(super) fn left_behind(datapath: &MemoryDatapath, interfaces: &[u32]) -> Restored {
    let local = datapath.checkpoint.as_deref().map(checkpoint::parse_local);
    let pods = datapath
        .endpoint_checkpoint
        .as_deref()
        .map(checkpoint::parse_endpoints);
    let cleaned = datapath.cleaned.as_deref().map(cleaned::parse);
    Restored {
        now: Default::default(),
        local_identities: local.transpose().unwrap().unwrap_or_default(),
        endpoint_identities: pods.transpose().unwrap().unwrap_or_default(),
        cleaned: cleaned.transpose().unwrap().unwrap_or_default(),
        endpoints: datapath
            .files
            .values()
            .map(|text| config_file::parse(text).unwrap())
            .collect(),
        ipcache: datapath
            .ipcache
            .iter()
            .map(|(key, value)| (*key, *value))
            .collect(),
        older_ipcache: Vec::new(),
        lxc: datapath
            .lxc
            .iter()
            .map(|(key, value)| (*key, *value))
            .collect(),
        policy_maps: datapath
            .policy
            .iter()
            .map(|(id, map)| (*id, map.iter().map(|(key, value)| (*key, *value)).collect()))
            .collect(),
        pre_cache: Vec::new(),
        policy_map_sizes: Default::default(),
        interfaces: interfaces.iter().copied().collect(),
    }
}

pub(super) fn again(node: &Node, config: CoreConfig, interfaces: &[u32]) -> Node {
    let restored = left_behind(&node.datapath, interfaces);
    let restored = Restored {
        now: node.now.plus_secs(2),
        ..restored
    };
    let datapath = MemoryDatapath {
        log: Vec::new(),
        ..node.datapath.clone()
    };
    Node::with(CoreConfig { start: 2, ..config }, restored, datapath)
}

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
    // At least 30 s are left, whatever the TTL was; then the restored labels go too.
    let later = node.now.plus_secs(29);
    node.tick(later);
    assert!(node.identity("1.1.1.1").is_some());
}

#[test]
fn policy_of_an_identity_whose_prefix_is_looked_at_last_is_not_cut() {
    const BLOCK: &str = "\
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
    const OTHER: &str = "\
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
    // Confirmed, and not on disk yet.
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
    // Confirmed, and not on disk yet.
    node.learn("www.cilium.io", &["1.1.1.1"]);
    let mut told = mapping(&node, "www.cilium.io", &["1.1.1.1"]);
    let mut node = again(&node, CoreConfig::default(), &[107]);
    node.begin();
    node.policy(WEB);
    node.endpoint(spec("web", 7, "app=web"));
    node.sync();
    node.event(Event::CleanNames(CleanNames::default()));
    assert!(
        node.identity("1.1.1.1").is_some(),
        "nobody knows whose it is"
    );
    told.replayed = true;
    let (_, outcome) = node.mapping(told);
    assert_ne!(outcome.realised, Realised::Yes);
    assert_eq!(node.identity("1.1.1.1"), None);
}

#[test]
fn what_was_cleaned_stays_so_through_restarts_of_one_boot() {
    for boot in ["", "another"] {
        let mut node = Node::usual();
        node.learn("www.cilium.io", &["1.1.1.1"]);
        let mut told = mapping(&node, "www.cilium.io", &["1.1.1.1"]);
        told.replayed = true;
        // No room on the disk at first: written when there is.
        node.datapath.fail = Some(|step| matches!(step, Step::KeepCleaned(_)));
        node.event(Event::CleanNames(CleanNames::default()));
        node.datapath.fail = None;
        node.tick(node.now.plus_secs(2));
        // Killed before the proxy gave its lease back: the map still has it.
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
            let (_, outcome) = node.mapping(told.clone());
            let open = outcome.realised == Realised::Yes;
            assert_eq!(open, !boot.is_empty(), "start {start}");
            assert_eq!(node.identity("1.1.1.1").is_some(), open, "start {start}");
        }
        let (_, again) = node.learn("www.cilium.io", &["1.1.1.1"]);
        assert_eq!(again.realised, Realised::Yes, "asked again, it opens");
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
        let [place] = node.core.places().try_into().unwrap();
        assert_ne!(place.id, old);
        let datapath = &node.datapath;
        assert!(datapath.policy.keys().eq([&place.id]));
        assert!(datapath.files.keys().eq([&place.id]));
        assert!(datapath.attached.keys().eq([&place.id]));
        assert!(
            datapath
                .lxc
                .values()
                .all(|value| value.lxc_id == place.id.0)
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
    // Its file was damaged and set aside: another number, other programs.
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

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn a_restart_changes_no_map(acts in acts()) {
        let mut world = World::new();
        for act in &acts {
            world.act(act);
        }
        // What was learned last reaches the files.
        world.node.tick(world.node.now.plus_secs(6));
        let before = world.node.datapath.clone();
        let mut node = again(&world.node, config(), &[107, 108, 109]);
        node.begin();
        world.replay(&mut node);
        node.sync();
        prop_assert_eq!(&node.datapath.ipcache, &before.ipcache);
        prop_assert_eq!(&node.datapath.policy, &before.policy);
        prop_assert_eq!(&node.datapath.lxc, &before.lxc);
        let ids: BTreeSet<_> = before.files.keys().collect();
        prop_assert_eq!(node.datapath.files.keys().collect::<BTreeSet<_>>(), ids);
    }

    #[test]
    fn killed_between_any_two_steps(acts in acts(), cut in 0.0f64..1.0, part in parts()) {
        // What was not learned at all comes again from the proxy, not from the files.
        let end = acts.iter().rposition(|act| !matches!(act, Act::Learn(..)));
        let acts = end.map_or(&[][..], |end| &acts[..=end]);
        prop_assume!(!acts.is_empty());
        killed(acts, cut, part);
    }
}

#[test]
fn a_group_that_went_while_away_keeps_nothing_open() {
    use Act::{Drop, Group, Policy};
    let acts = [Policy(0, 18), Drop(1), Group(0, Some(2)), Group(0, None)];
    killed(&acts, 0.0, 1);
}

#[test]
fn an_api_server_that_went_while_away_keeps_nothing_open() {
    use Act::{ApiServers, Drop, Policy};
    let mut specs = super::oracle::SPECS.iter();
    let spec = specs.position(|spec| spec.contains("- toEntities: [kube-apiserver]\n"));
    let acts = [
        Policy(0, spec.unwrap()),
        Drop(1),
        ApiServers(3),
        ApiServers(0),
    ];
    killed(&acts, 0.0, 1);
}

/// The agent is killed when this share of the last act's steps is done: the next run ends
/// where one does that finds all of them done.
fn killed(acts: &[Act], cut: f64, part: usize) {
    let (last, earlier) = acts.split_last().unwrap();
    let mut world = World::new();
    world.node.in_parts(part);
    // A pair that only its lease keeps is not restored: leases end with the agent.
    let quick = |act: &Act| {
        if let Act::Wait(_) = act {
            Act::Wait(1)
        } else {
            act.clone()
        }
    };
    for act in earlier {
        world.act(&quick(act));
    }
    world.node.tick(world.node.now.plus_secs(6));
    let before = world.node.datapath.clone();
    world.act(&quick(last));
    let steps = world.node.datapath.log.split_off(before.log.len());
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a share of a small number"
    )]
    let done = (steps.len() as f64 * cut) as usize;
    let mut cut_short = before;
    for step in steps.iter().take(done) {
        cut_short.apply(step).unwrap();
    }
    let whole = restarted(&world);
    world.node.datapath = cut_short;
    let mended = restarted(&world);
    assert_eq!(fates(&mended.datapath), fates(&whole.datapath), "{acts:?}");
}

/// Rules that change while the agent is away meet addresses whose labels change with them.
#[test]
fn a_policy_that_changed_while_away_comes_after_its_labels() {
    use Act::{Endpoint, Policy};
    for acts in [
        vec![Policy(0, 15), Policy(0, 11)],
        vec![Policy(0, 0), Policy(2, 7), Policy(2, 10)],
        vec![Policy(0, 8), Policy(0, 10)],
        vec![Policy(0, 8), Policy(1, 2), Policy(0, 11)],
        vec![
            Policy(3, 7),
            Policy(0, 5),
            Endpoint(8, Pod::DB),
            Policy(3, 2),
        ],
    ] {
        killed(&acts, 0.0, usize::MAX);
    }
}

/// Two identities of names become one selector's, and nobody knows what their numbers meant.
#[test]
fn a_policy_that_changed_while_away_with_the_checkpoint_opens_nothing_else() {
    let web = |peers: &str| format!("endpointSelector: {{matchLabels: {{app: web}}}}\n  {peers}");
    let mut world = World::new();
    for (slot, peers) in [
        ("a", "egress:\n  - toFQDNs: [{matchName: www.cilium.io}]"),
        (
            "b",
            "egress:\n  - toFQDNs: [{matchName: dev.cilium.io}]\n    toPorts: [{ports: [{port: 80, protocol: TCP}]}]",
        ),
    ] {
        let event = world.document(slot, Some(&web(peers)));
        world.node.event(event);
    }
    for (name, address) in [(0, 0), (1, 4)] {
        world.act(&Act::Learn(name, address));
    }
    world.node.tick(world.node.now.plus_secs(6));
    world.document("a", Some(&web("egress:\n  - toFQDNs: [{matchPattern: '*.cilium.io'}]\n    toPorts: [{ports: [{port: 450, protocol: TCP}]}]")));
    world.document("b", None);
    for lost in [false, true] {
        if lost {
            world.node.datapath.checkpoint = None;
        }
        let node = restarted(&world);
        assert_ne!(node.identity("1.1.1.1"), None);
        assert_ne!(node.identity("2.2.2.2"), None);
    }
}

/// One was the node's and one the world's, and both are a name's now.
#[test]
fn what_one_address_had_is_not_for_another_that_gets_the_same_identity() {
    const BEFORE: &str = "endpointSelector: {}\n  egress:\n  - toEntities: [host]";
    const AFTER: &str = "endpointSelector: {}\n  egress:\n  - toFQDNs: [{matchPattern: '*.cilium.io'}]\n    toPorts: [{ports: [{port: 443, protocol: TCP}]}]";
    for (own, other) in [("1.1.1.1", "2.2.2.2"), ("2.2.2.2", "1.1.1.1")] {
        let mut world = World::new();
        let event = world.document("p0", Some(BEFORE));
        world.node.event(event);
        world.node.learn("www.cilium.io", &[own, other]);
        let addresses = ["10.0.0.1", own].map(|address| address.parse().unwrap());
        world.node.event(Event::NodeAddresses(addresses.to_vec()));
        world.node.tick(world.node.now.plus_secs(6));
        assert_eq!(world.node.identity(own), Some(IdentityId::HOST));
        assert_eq!(world.node.identity(other), None);
        world.document("p0", Some(AFTER));
        let node = restarted(&world);
        assert_ne!(node.identity(own), Some(IdentityId::HOST));
        assert_eq!(node.identity(own), node.identity(other));
        assert!(node.identity(own).is_some());
    }
}

#[test]
fn an_endpoint_may_come_back_under_another_number() {
    use Act::{Endpoint, Gone, Policy};
    let acts = [
        Endpoint(9, Pod::DB),
        Endpoint(8, Pod::WEB),
        Policy(0, 4),
        Gone(9),
        Endpoint(9, Pod::DB),
    ];
    killed(&acts, 0.0, usize::MAX);
}

#[test]
fn a_map_without_room_for_what_addresses_had_takes_the_new_policy_at_once() {
    let mut world = World::new();
    world.act(&Act::Policy(0, 8));
    let full = world.node.datapath.policy.values().map(|map| map.len());
    let full = full.max().unwrap();
    world.document("p0", Some(super::oracle::SPECS[3]));
    let mut fitting = 0;
    for room in full..full + 16 {
        let config = CoreConfig {
            policy_map_max: room,
            ..config()
        };
        let mut node = again(&world.node, config, &[107]);
        node.begin();
        world.replay(&mut node);
        node.sync();
        let endpoints = node.core.snapshot().endpoints;
        if endpoints.iter().all(|endpoint| endpoint.problem.is_none()) {
            fitting += 1;
            let before = std::mem::replace(&mut world.node, node);
            world.check_end();
            world.node = before;
        }
    }
    assert!((1..16).contains(&fitting), "{fitting} of 16 sizes suffice");
}

/// The agent starts again and hears of everything.
pub(super) fn restarted(world: &World) -> Node {
    let mut node = again(&world.node, config(), &[107, 108, 109]);
    node.begin();
    let start = node.datapath.clone();
    world.replay(&mut node);
    node.sync();
    check_way(&start, &node.datapath);
    node
}
