//! From releases that gave each address an identity of its own, and back to them (CFP-28427,
//! "upgrades & downgrades").

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use shared_maps::{IdentityId, policy::PolicyKey};

use super::{
    oracle::{check_way, fates},
    restart::again,
    scenario::{Node, WEB, spec},
};
use crate::{
    core::CoreConfig,
    datapath::{memory::MemoryDatapath, plan::Step},
    ipcache::table::prefix_of,
};

const MORE: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: more}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toFQDNs: [{matchName: www.cilium.io}]
    toPorts: [{ports: [{port: '80', protocol: TCP}]}]
  - toCIDR: [192.0.2.0/24]
";

/// A node that learned names, with everything on disk.
fn learned() -> Node {
    let mut node = Node::usual();
    node.policy(MORE);
    node.learn("www.cilium.io", &["1.1.1.1", "1.1.1.2"]);
    node.learn("dev.cilium.io", &["2.2.2.2", "1.1.1.2", "2.2.2.3"]);
    node.tick(node.now.plus_secs(6));
    node
}

/// Numbers of addresses and blocks outside the cluster.
fn numbers(datapath: &MemoryDatapath) -> BTreeMap<IpNet, IdentityId> {
    let entries = datapath.ipcache.iter();
    let entries = entries.map(|(key, v)| (prefix_of(key).unwrap(), IdentityId(v.sec_identity)));
    entries.filter(|(_, id)| id.is_local_scope()).collect()
}

/// Changes the maps as a release up to 1.15 does: it has no checkpoint, and gives each address a number of its own. The
/// first address of a shared number keeps the number. The others get new numbers with the same policy.
fn one_number_each(datapath: &mut MemoryDatapath) {
    datapath.checkpoint = None;
    let mut taken = BTreeSet::new();
    let mut next = IdentityId::LOCAL_MIN.0 + 1000;
    let mut keys: Vec<_> = datapath.ipcache.keys().copied().collect();
    keys.sort_unstable();
    for key in keys {
        let value = datapath.ipcache.get_mut(&key).unwrap();
        let old = IdentityId(value.sec_identity);
        if !old.is_local_scope() || taken.insert(old) {
            continue;
        }
        value.sec_identity = next;
        for map in datapath.policy.values_mut() {
            let same: Vec<_> = map
                .iter()
                .filter(|(key, _)| key.sec_label == old.0)
                .collect();
            let same: Vec<_> = same
                .into_iter()
                .map(|(key, value)| (*key, *value))
                .collect();
            for (key, value) in same {
                let key = PolicyKey {
                    sec_label: next,
                    ..key
                };
                map.insert(key, value);
            }
        }
        next += 1;
    }
}

fn start(node: &mut Node) {
    node.begin();
    node.policy(WEB);
    node.policy(MORE);
    node.endpoint(spec("web", 7, "app=web"));
    node.sync();
}

fn moves(datapath: &MemoryDatapath) -> Vec<&Step> {
    let steps = datapath.log.iter();
    let moves = |step: &&Step| matches!(step, Step::SetIpcache(..) | Step::UnsetIpcache(_));
    steps.filter(moves).collect()
}

/// Checks that after the grace labels come from names alone, and that addresses share numbers
/// again.
fn settles(node: &mut Node, before: &MemoryDatapath) {
    let synced = node.datapath.clone();
    // The names are still valid: proxies report them again.
    node.learn("www.cilium.io", &["1.1.1.1", "1.1.1.2"]);
    node.learn("dev.cilium.io", &["2.2.2.2", "1.1.1.2", "2.2.2.3"]);
    node.tick(node.now.plus_secs(31));
    check_way(&synced, &node.datapath);
    assert_eq!(fates(&node.datapath), fates(before));
    assert_eq!(node.identity("2.2.2.2"), node.identity("2.2.2.3"));
    assert_eq!(node.identity("1.1.1.1"), node.identity("1.1.1.2"));
    let used: BTreeSet<_> = numbers(&node.datapath).into_values().collect();
    let local = node.core.summary().local_identities;
    assert!(local <= used.len() + 4, "{local} identities for {used:?}");
}

#[test]
fn an_upgrade_from_a_number_for_each_address_changes_none_and_drops_nothing() {
    let mut node = learned();
    one_number_each(&mut node.datapath);
    let before = node.datapath.clone();
    let each: BTreeSet<_> = numbers(&before).into_values().collect();
    assert_eq!(each.len(), numbers(&before).len());
    let mut node = again(&node, CoreConfig::default(), &[107]);
    start(&mut node);
    assert_eq!(moves(&node.datapath), Vec::<&Step>::new());
    assert_eq!(numbers(&node.datapath), numbers(&before));
    assert_eq!(fates(&node.datapath), fates(&before));
    check_way(&before, &node.datapath);
    settles(&mut node, &before);
}

#[test]
fn after_a_downgrade_and_an_upgrade_again_nothing_is_dropped() {
    let mut node = learned();
    let ours = numbers(&node.datapath);
    for round in 0..3 {
        let before = node.datapath.clone();
        one_number_each(&mut node.datapath);
        // As the CFP has it: one address captures the number, the others get new ones.
        let kept = numbers(&node.datapath);
        let captured = ours.values().filter(|id| kept.values().any(|k| k == *id));
        assert!(captured.count() > 0, "round {round}");
        assert_eq!(fates(&node.datapath), fates(&before), "round {round}");
        node = again(&node, CoreConfig::default(), &[107]);
        start(&mut node);
        settles(&mut node, &before);
        node.tick(node.now.plus_secs(6));
    }
}

#[test]
fn shared_numbers_outlive_a_lost_checkpoint() {
    let mut node = learned();
    node.datapath.checkpoint = None;
    let before = node.datapath.clone();
    let mut node = again(&node, CoreConfig::default(), &[107]);
    start(&mut node);
    assert_eq!(numbers(&node.datapath), numbers(&before));
    assert_eq!(moves(&node.datapath), Vec::<&Step>::new());
    assert_eq!(fates(&node.datapath), fates(&before));
    check_way(&before, &node.datapath);
    settles(&mut node, &before);
}

/// Two addresses shared a number whose meaning is lost, and mean different things now.
#[test]
fn a_number_that_would_mean_two_things_goes_to_neither() {
    let mut node = learned();
    node.datapath.checkpoint = None;
    let shared = node.identity("2.2.2.2").unwrap();
    assert_eq!(node.identity("2.2.2.3"), Some(shared));
    let before = node.datapath.clone();
    let mut node = again(&node, CoreConfig::default(), &[107]);
    node.begin();
    node.policy(WEB);
    node.policy(MORE);
    node.policy(
        &MORE
            .replace("name: more", "name: block")
            .replace("192.0.2.0/24", "2.2.2.3/32"),
    );
    node.endpoint(spec("web", 7, "app=web"));
    node.sync();
    assert_ne!(node.identity("2.2.2.2"), Some(shared));
    assert_ne!(node.identity("2.2.2.3"), Some(shared));
    check_way(&before, &node.datapath);
}

/// Two numbers whose meaning is lost mean one thing now: the policy of one must not apply to the
/// addresses of the other.
#[test]
fn two_numbers_that_would_mean_one_thing_do_not_lend_each_other_policy() {
    let of = |names: &[(&str, u16)]| {
        let rules = names.iter().map(|(selector, port)| {
            format!("  - toFQDNs: [{selector}]\n    toPorts: [{{ports: [{{port: '{port}', protocol: TCP}}]}}]\n")
        });
        let dns = "  - toCIDR: [10.9.0.53/32]\n    toPorts: [{ports: [{port: '53', protocol: ANY}], rules: {dns: [{matchPattern: '*'}]}}]\n";
        format!(
            r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {{name: web}}
spec:
  endpointSelector: {{matchLabels: {{app: web}}}}
  egress:
{dns}{}",
            rules.collect::<String>()
        )
    };
    let (www, dev) = ("{matchName: www.cilium.io}", "{matchName: dev.cilium.io}");
    for ports in [(80, 443), (443, 80)] {
        let mut node = Node::usual();
        node.policy(&of(&[(www, ports.0), (dev, ports.1)]));
        node.learn("www.cilium.io", &["1.1.1.1", "1.1.1.2"]);
        node.learn("dev.cilium.io", &["2.2.2.1", "2.2.2.2"]);
        node.tick(node.now.plus_secs(6));
        node.datapath.checkpoint = None;
        let before = node.datapath.clone();
        assert_ne!(node.identity("1.1.1.1"), node.identity("2.2.2.1"));
        let mut node = again(&node, CoreConfig::default(), &[107]);
        node.begin();
        node.policy(&of(&[("{matchPattern: '*.cilium.io'}", 443)]));
        node.endpoint(spec("web", 7, "app=web"));
        node.sync();
        assert_eq!(node.identity("1.1.1.1"), node.identity("2.2.2.1"));
        check_way(&before, &node.datapath);
    }
}
