//! If a policy document is refused at a start, and no good version of it is known, endpoints of the last run do not
//! open.

use shared_maps::policy::EGRESS;

use super::{
    oracle::{Fate, Question, fate},
    restart::again,
    scenario::{Node, WEB, spec},
};
use crate::{
    core::{CoreConfig, Effect, Event},
    source_event::SourceEvent,
};

const OTHER: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: other}
spec:
  endpointSelector: {matchLabels: {app: other}}
  egress:
  - toCIDR: [192.0.2.0/24]
";

/// The usual endpoint, one under another policy and one under none; then the agent starts again
/// and cannot read the policy of the first.
fn restarted() -> Node {
    let mut node = Node::usual();
    node.policy(OTHER);
    node.endpoint(spec("other", 8, "app=other"));
    node.endpoint(spec("free", 9, "app=free"));
    let mut node = again(&node, CoreConfig::default(), &[107, 108, 109]);
    node.begin();
    node.policy(OTHER);
    for (key, host) in [("web", 7), ("other", 8), ("free", 9)] {
        node.endpoint(spec(key, host, &format!("app={key}")));
    }
    node.event(Event::PoliciesUncertain(true));
    node
}

fn problems(node: &Node) -> String {
    node.core.summary().endpoint_problems.join("\n")
}

fn published(node: &Node) -> usize {
    let rules = node.effects.iter().filter_map(|effect| match effect {
        Effect::Rules(update) => Some(update.changed.len()),
        _ => None,
    });
    rules.sum()
}

#[test]
fn an_endpoint_of_the_last_run_keeps_its_policy_until_the_document_is_read() {
    let mut node = restarted();
    let before = node.datapath.policy.clone();
    node.sync();
    assert_eq!(node.datapath.policy, before);
    assert_eq!(published(&node), 1, "its DNS rules");
    let said = problems(&node);
    assert!(
        said.contains("(web)") && said.contains("policy get"),
        "{said}"
    );
    assert!(
        !said.contains("(other)") && !said.contains("(free)"),
        "{said}"
    );
    // Addresses that the kept rules are about keep their identities after the grace.
    node.tick(node.now.plus_secs(1000));
    assert_eq!(node.datapath.policy, before);
    assert!(node.identity("10.9.0.53").is_some());

    node.policy(WEB);
    node.event(Event::PoliciesUncertain(false));
    assert_eq!(node.datapath.policy, before);
    assert_eq!(problems(&node), "");
    assert_eq!(published(&node), 0, "the same rules again");
}

#[test]
fn it_opens_once_the_document_is_removed() {
    let mut node = restarted();
    let before = node.datapath.policy.clone();
    node.sync();
    node.event(Event::PoliciesUncertain(false));
    let web = *before.keys().next().unwrap();
    assert_ne!(node.datapath.policy[&web], before[&web]);
    assert_eq!(node.datapath.policy[&web].len(), 2, "everything, both ways");
    assert_eq!(problems(&node), "");
    node.tick(node.now.plus_secs(1000));
    assert!(node.identity("10.9.0.53").is_none());
}

#[test]
fn other_endpoints_follow_their_policies_meanwhile() {
    let mut node = restarted();
    let before = node.datapath.policy.clone();
    node.sync();
    node.policy(&OTHER.replace("192.0.2.0", "198.51.100.0"));
    node.event(Event::Policies(SourceEvent::Delete(
        "CiliumNetworkPolicy/default/other".to_owned(),
    )));
    let changed = before
        .iter()
        .filter(|(id, map)| node.datapath.policy[id] != **map);
    assert_eq!(changed.count(), 1);
    node.event(Event::Endpoints(SourceEvent::Delete("web".to_owned())));
    assert_eq!(problems(&node), "");
    assert_eq!(node.datapath.policy.len(), 2);
}

/// Blocks have no identity of this run when the endpoints are looked at.
#[test]
fn a_deny_of_a_block_that_the_refused_document_has_stays() {
    const ALL: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: all}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toEntities: [all]
  ingress:
  - fromEntities: [all]
";
    const DENY: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: deny}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egressDeny:
  - toCIDR: [192.0.2.0/24]
";
    let mut node = Node::synced(CoreConfig::default(), ALL);
    node.policy(DENY);
    let mut node = again(&node, CoreConfig::default(), &[107]);
    let before = node.datapath.policy.clone();
    let denied = |value: &shared_maps::policy::PolicyValue| value.is_deny();
    assert!(before[&node.id()].values().any(denied));
    node.begin();
    node.policy(ALL);
    node.endpoint(spec("web", 7, "app=web"));
    node.event(Event::PoliciesUncertain(true));
    node.sync();
    assert_eq!(node.datapath.policy, before);
    assert!(problems(&node).contains("(web)"), "{}", problems(&node));
    // Without the document the endpoint opens.
    node.event(Event::PoliciesUncertain(false));
    assert!(!node.datapath.policy[&node.id()].values().any(denied));
}

/// A list lets every address pass that it does not name, so an address with a new identity would
/// pass.
#[test]
fn an_address_with_a_new_identity_opens_nothing_under_a_list_that_is_kept() {
    const LIST: &str = r"
apiVersion: k8s.ovn.org/v1
kind: EgressFirewall
metadata: {name: default, namespace: default}
spec:
  egress:
  - {type: Allow, to: {cidrSelector: 192.0.2.0/24}}
  - {type: Deny, to: {cidrSelector: 0.0.0.0/0}}
";
    const ELSEWHERE: &str = r"
apiVersion: k8s.ovn.org/v1
kind: EgressFirewall
metadata: {name: default, namespace: elsewhere}
spec:
  egress:
  - {type: Deny, to: {cidrSelector: 203.0.113.0/24}}
";
    let fate_of = |node: &Node, address: &str| {
        let question = Question {
            endpoint: node.id(),
            remote: address.parse().unwrap(),
            direction: EGRESS,
            protocol: 6,
            port: 443,
        };
        fate(&node.datapath, question).unwrap()
    };
    let node = Node::synced(CoreConfig::default(), LIST);
    assert_eq!(fate_of(&node, "203.0.113.1"), Fate::Dropped);
    let mut node = again(&node, CoreConfig::default(), &[107]);
    node.begin();
    node.endpoint(spec("web", 7, "app=web"));
    node.event(Event::PoliciesUncertain(true));
    node.sync();
    assert_eq!(fate_of(&node, "203.0.113.1"), Fate::Dropped);
    assert_eq!(fate_of(&node, "192.0.2.1"), Fate::Passed);
    node.policy(ELSEWHERE);
    assert_eq!(fate_of(&node, "203.0.113.1"), Fate::Dropped);
    assert_eq!(fate_of(&node, "192.0.2.1"), Fate::Passed);
    node.tick(node.now.plus_secs(1000));
    assert_eq!(fate_of(&node, "203.0.113.1"), Fate::Dropped);
    assert_eq!(fate_of(&node, "192.0.2.1"), Fate::Passed);
}
