//! Steps that fail: what depends on them waits, and is tried again.

use dns_policy::mapping::{Realised, Refusal};
use shared_maps::{
    IdentityId,
    ipcache::IpcacheKey,
    policy::{EGRESS, PolicyKey},
};

use super::{
    restart::left_behind,
    scenario::{Node, WEB, spec},
};
use crate::{
    core::{CoreConfig, Effect, Event, Restored},
    datapath::{memory::MemoryDatapath, plan::Step},
    source_event::SourceEvent,
};

fn started(config: CoreConfig) -> Node {
    let mut node = Node::with(config, Restored::default(), MemoryDatapath::default());
    node.begin();
    node
}

#[test]
fn a_full_ipcache_is_reported_and_tried_again() {
    let mut node = Node::usual();
    node.datapath.fail = Some(|step| matches!(step, Step::SetIpcache(..)));
    let (_, result) = node.learn("www.cilium.io", &["1.1.1.1"]);
    assert_eq!(result.realised, Realised::No(Refusal::NotRealised));
    assert_eq!(result.lease_end, None);
    assert_eq!(node.identity("1.1.1.1"), None);
    node.datapath.fail = None;
    let retry = node.core.next_deadline().unwrap();
    node.tick(retry.max(node.now.plus_secs(1)));
    assert!(node.identity("1.1.1.1").is_some());
}

#[test]
fn no_identity_is_used_that_is_not_on_disk() {
    let mut node = started(CoreConfig::default());
    node.policy(WEB);
    node.endpoint(spec("web", 7, "app=web"));
    node.datapath.fail = Some(|step| matches!(step, Step::Checkpoint(_)));
    node.sync();
    let local = |identity: u32| IdentityId(identity).is_local_scope();
    assert!(
        !node
            .datapath
            .ipcache
            .values()
            .any(|value| local(value.sec_identity))
    );
    assert!(
        !node
            .datapath
            .policy
            .values()
            .flatten()
            .any(|(key, _)| local(key.sec_label))
    );
    assert!(
        !node
            .effects
            .iter()
            .any(|effect| matches!(effect, Effect::Rules(_)))
    );
    node.datapath.fail = None;
    node.tick(node.now.plus_secs(1));
    let server = IpcacheKey::v4([10, 9, 0, 53], 32);
    assert!(local(node.datapath.ipcache[&server].sec_identity));
    assert!(
        node.effects
            .iter()
            .any(|effect| matches!(effect, Effect::Rules(_)))
    );
    assert!(node.datapath.attached.len() == 1);
}

/// Pattern of the names that rules published by the last event allow; `None` if it published no rules.
fn published(node: &Node) -> Option<String> {
    let rules = node.effects.iter().find_map(|effect| match effect {
        Effect::Rules(update) => Some(update),
        _ => None,
    })?;
    let port = rules.changed.first()?.rules.ports.first()?;
    Some(format!("{:?}", port.rules))
}

#[test]
fn rules_wait_for_two_failing_plans_and_no_longer() {
    let narrower = WEB.replace(
        r#"dns: [{matchPattern: "*"}]"#,
        "dns: [{matchName: a.test}]",
    ) + "  - toCIDR: [20.0.0.0/24]\n";
    let again = narrower
        .replace("a.test", "b.test")
        .replace("20.0.0", "20.1.0");
    let mut node = Node::usual();
    // Two failed plans publish nothing, the third does; after a success the count begins again.
    for (text, name) in [(&narrower, "a.test"), (&again, "b.test")] {
        node.datapath.fail = Some(|step| matches!(step, Step::SetPolicy(..)));
        node.policy(text);
        assert_eq!(published(&node), None, "the first fails");
        node.tick(node.now.plus_secs(2));
        assert_eq!(published(&node), None, "the second fails");
        node.tick(node.now.plus_secs(2));
        let rules = published(&node).expect("the third fails");
        assert!(rules.contains(name), "{rules}");
        node.datapath.fail = None;
        node.tick(node.now.plus_secs(2));
        assert_eq!(published(&node), None, "it is published");
    }
    // A plan fails and the next one succeeds: its rules are published then.
    node.datapath.fail = Some(|step| matches!(step, Step::SetPolicy(..)));
    node.policy(&narrower);
    assert_eq!(published(&node), None);
    node.datapath.fail = None;
    node.tick(node.now.plus_secs(2));
    assert!(published(&node).unwrap().contains("a.test"));
    // A plan succeeds: its rules are published at once.
    node.policy(&again);
    assert!(published(&node).unwrap().contains("b.test"));
}

#[test]
fn an_endpoint_is_not_plumbed_without_its_file() {
    let mut node = started(CoreConfig::default());
    node.policy(WEB);
    node.datapath.fail = Some(|step| matches!(step, Step::WriteEndpoint(..)));
    node.endpoint(spec("web", 7, "app=web"));
    node.sync();
    assert!(node.datapath.lxc.is_empty());
    node.datapath.fail = None;
    node.tick(node.now.plus_secs(1));
    assert_eq!(
        (node.datapath.lxc.len(), node.datapath.attached.len()),
        (1, 1)
    );
}

#[test]
fn programs_of_an_attach_that_failed_halfway_go_with_their_endpoint() {
    let mut node = started(CoreConfig::default());
    node.policy(WEB);
    node.sync();
    node.datapath.fail = Some(|step| matches!(step, Step::Attach(_)));
    let steps = node.endpoint(spec("web", 7, "app=web"));
    let half = steps.into_iter().find_map(|step| match step {
        Step::Attach(attachment) => Some(attachment),
        _ => None,
    });
    let half = half.expect("its programs are to be attached");
    // One of the two programs was attached before the step failed.
    node.datapath.attached.insert(half.endpoint, half);
    node.event(Event::Endpoints(SourceEvent::Delete("web".to_owned())));
    assert!(node.datapath.attached.is_empty());
    assert!(node.datapath.policy.is_empty());
}

#[test]
fn an_endpoint_without_room_in_lxc_has_its_programs_and_so_has_every_other() {
    let mut node = started(CoreConfig::default());
    node.policy(WEB);
    node.datapath.fail = Some(|step| matches!(step, Step::SetLxc(_, value) if value.lxc_id == 1));
    node.endpoint(spec("one", 7, "app=web"));
    node.endpoint(spec("two", 8, "app=web"));
    node.sync();
    let attached: Vec<u16> = node.datapath.attached.keys().map(|id| id.0).collect();
    assert_eq!(attached, [1, 2]);
    let problems = node.core.summary().endpoint_problems;
    assert!(
        matches!(problems.as_slice(), [one] if one.contains("(one): map")),
        "{problems:?}"
    );
    node.datapath.fail = None;
    node.tick(node.now.plus_secs(1));
    assert_eq!(node.datapath.lxc.len(), 2);
    assert!(node.core.summary().endpoint_problems.is_empty());
}

#[test]
fn a_policy_that_does_not_fit_leaves_the_old_one_whole() {
    let mut node = started(CoreConfig {
        policy_map_max: 12,
        ..CoreConfig::default()
    });
    node.policy(WEB);
    node.endpoint(spec("web", 7, "app=web"));
    node.sync();
    let before = node.datapath.policy.clone();
    node.policy(&big());
    assert_eq!(node.datapath.policy, before);
    let snapshot = node.core.snapshot();
    assert!(
        snapshot.endpoints[0]
            .problem
            .as_ref()
            .unwrap()
            .contains("map entries")
    );
    node.policy(&big().replace(&blocks(), "20.0.0.0/24"));
    assert!(node.core.snapshot().endpoints[0].problem.is_none());
    assert_ne!(node.datapath.policy, before);
}

#[test]
fn a_new_pod_whose_policy_does_not_fit_is_closed_and_holds_up_no_other() {
    let mut node = started(CoreConfig {
        policy_map_max: 12,
        ..CoreConfig::default()
    });
    let allowed = |blocks: &str| {
        format!(
            r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {{name: big}}
spec:
  endpointSelector: {{matchLabels: {{app: web}}}}
  enableDefaultDeny: {{egress: false, ingress: false}}
  egress:
  - toCIDR: [{blocks}]
"
        )
    };
    node.policy(&allowed(&blocks()));
    node.policy(
        r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: api}
spec:
  endpointSelector: {matchLabels: {app: api}}
  egress:
  - toCIDR: [20.0.1.0/32]
",
    );
    node.endpoint(spec("web", 7, "app=web"));
    node.sync();
    let id = node.id();
    assert!(node.datapath.attached.contains_key(&id), "it is open");
    assert_eq!(node.datapath.policy[&id].len(), 0);
    let problems = node.core.summary().endpoint_problems;
    assert!(
        matches!(problems.as_slice(), [one] if one.contains("no packet of it passes")),
        "{problems:?}"
    );
    node.endpoint(spec("api", 8, "app=api"));
    assert!(node.identity("20.0.1.0").is_some(), "the other pod waits");
    node.policy(&allowed("20.0.2.0/24"));
    assert!(node.core.summary().endpoint_problems.is_empty());
    assert_ne!(node.datapath.policy[&id].len(), 0);
}

#[test]
fn a_map_of_an_earlier_run_takes_what_it_was_made_for() {
    let node = Node::usual();
    let mut restored = left_behind(&node.datapath, &[107]);
    restored.policy_map_sizes.insert(node.id(), 12);
    let before = node.datapath.policy.clone();
    let config = CoreConfig {
        start: 2,
        ..CoreConfig::default()
    };
    let mut node = Node::with(config, restored, node.datapath.clone());
    node.begin();
    node.policy(WEB);
    node.endpoint(spec("web", 7, "app=web"));
    node.sync();
    node.policy(&big());
    assert_eq!(node.datapath.policy, before);
    // A new endpoint has a map of the current size.
    node.endpoint(spec("other", 8, "app=web"));
    let snapshot = node.core.snapshot();
    let problems = snapshot.endpoints.iter().map(|e| e.problem.is_some());
    assert_eq!(problems.collect::<Vec<_>>(), [true, false]);
}

fn blocks() -> String {
    let blocks: Vec<String> = (1..40).map(|n| format!("20.0.{n}.0/24")).collect();
    blocks.join(", ")
}

/// A policy that allows 39 blocks.
fn big() -> String {
    format!(
        r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {{name: big}}
spec:
  endpointSelector: {{}}
  egress:
  - toCIDR: [{}]
",
        blocks()
    )
}

const TWO_NAMES: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: two}
spec:
  endpointSelector: {}
  egress:
  - toCIDR: [10.9.0.53/32]
    toPorts:
    - ports: [{port: "53", protocol: ANY}]
      rules: {dns: [{matchPattern: "*"}]}
  - toFQDNs: [{matchPattern: "*.cilium.io"}, {matchPattern: "*.example.com"}]
    toPorts: [{ports: [{port: "443", protocol: TCP}]}]
"#;

/// A node on which a second name gives 1.1.1.1 another identity, with one step failing; and the
/// identity before.
fn relabelled(endpoints: &[u8], fail: fn(&Step) -> bool) -> (Node, IdentityId) {
    let mut node = started(CoreConfig {
        preallocate_identities: false,
        ..CoreConfig::default()
    });
    node.policy(TWO_NAMES);
    for host in endpoints {
        node.endpoint(spec(&format!("web{host}"), *host, "app=web"));
    }
    node.sync();
    node.learn("www.cilium.io", &["1.1.1.1"]);
    let before = node.identity("1.1.1.1").unwrap();
    node.datapath.fail = Some(fail);
    let (_, result) = node.learn("www.example.com", &["1.1.1.1"]);
    assert_eq!(result.realised, Realised::No(Refusal::NotRealised));
    node.datapath.fail = None;
    (node, before)
}

fn everyone_allows(node: &Node, identity: IdentityId) -> bool {
    let key = PolicyKey::new(identity.0, EGRESS, 6, 443, 16);
    node.datapath
        .policy
        .values()
        .all(|map| map.contains_key(&key))
}

/// The identity that the kernel has for 1.1.1.1 is allowed before, during and after the retry, and
/// nothing is left of the former identity.
fn stays_open_until_relabelled(mut node: Node, before: IdentityId) {
    assert_eq!(node.identity("1.1.1.1"), Some(before));
    assert!(everyone_allows(&node, before));
    let (steps, _) = node.learn("unrelated.test", &["9.9.9.9"]);
    assert_eq!(node.identity("1.1.1.1"), Some(before), "{steps:?}");
    assert!(everyone_allows(&node, before), "{steps:?}");
    node.tick(node.now.plus_secs(2));
    let after = node.identity("1.1.1.1").unwrap();
    assert_ne!(after, before);
    assert!(everyone_allows(&node, after));
    let left = node.datapath.policy.values().flatten();
    assert_eq!(left.filter(|(key, _)| key.sec_label == before.0).count(), 0);
}

#[test]
fn an_identity_in_force_keeps_its_policy_across_other_events() {
    let (node, before) = relabelled(&[7], |step| matches!(step, Step::SetIpcache(..)));
    stays_open_until_relabelled(node, before);
}

#[test]
fn one_endpoint_that_fails_does_not_close_another() {
    let (node, before) = relabelled(
        &[7, 8],
        |step| matches!(step, Step::SetPolicy(id, ..) if id.0 == 1),
    );
    stays_open_until_relabelled(node, before);
}
