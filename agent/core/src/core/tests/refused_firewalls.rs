//! An EgressFirewall that is refused and has no good version closes its namespace.

use shared_maps::policy::EGRESS;

use super::{
    oracle::{Fate, Question, fate},
    pods::{Member, pod, router},
    restart::again,
    scenario::{Node, spec},
};
use crate::{
    core::{CoreConfig, Event},
    policy::{document::PolicyError, parse::parse_documents, source::PolicyChange},
    source_event::SourceEvent,
};

const GOOD: &str = r"
apiVersion: k8s.ovn.org/v1
kind: EgressFirewall
metadata: {name: default, namespace: default}
spec:
  egress:
  - {type: Allow, to: {cidrSelector: 192.0.2.0/24}}
  - {type: Deny, to: {cidrSelector: 0.0.0.0/0}}
";
const OUTSIDE: &str = "203.0.113.1";
const ALLOWED: &str = "192.0.2.1";
const POD: &str = "10.2.0.9";

fn bad() -> String {
    GOOD.replace("type: Deny", "type: Denied")
}

fn errors(text: &str) -> Vec<PolicyError> {
    let documents = parse_documents(text, "test").into_iter();
    documents.filter_map(Result::err).collect()
}

fn rejected(text: &str) -> PolicyChange {
    PolicyChange::Rejected(errors(text))
}

/// A node that knows a pod of its own and one of another node. Its first listing refuses these
/// documents.
fn listed(refused: &str) -> Member {
    let mut member = Member {
        node: Node::new(),
        router: router(),
    };
    member.node.begin();
    let pods = parse_documents(&pod("db-0", "db", POD), "test").into_iter();
    let pods = pods.map(|pod| PolicyChange::Document(SourceEvent::Apply(pod.unwrap())));
    let mut listing = vec![PolicyChange::Document(SourceEvent::Init)];
    listing.extend(pods);
    listing.push(rejected(refused));
    listing.push(PolicyChange::Document(SourceEvent::InitDone));
    // Another source is not listed yet: it may have a good version.
    let events = member.router.route(vec![rejected(refused)]);
    assert_eq!(events.len(), 1, "{events:?}");
    member.change(listing);
    member.node.endpoint(spec("web", 7, "app=web"));
    let listed = Event::Endpoints(SourceEvent::InitDone);
    member.node.event(listed);
    member
}

fn passes(member: &Member, address: &str) -> bool {
    let question = Question {
        endpoint: member.node.id(),
        remote: address.parse().unwrap(),
        direction: EGRESS,
        protocol: 6,
        port: 443,
    };
    fate(&member.node.datapath, question) == Some(Fate::Passed)
}

fn reachable(member: &Member) -> Vec<&'static str> {
    let all = [OUTSIDE, ALLOWED, POD];
    all.into_iter()
        .filter(|address| passes(member, address))
        .collect()
}

fn warnings(member: &Member) -> String {
    member.node.core.policy_warnings().join("\n")
}

#[test]
fn it_closes_the_namespace_for_addresses_outside_until_it_is_corrected_or_removed() {
    let mut member = listed(&bad());
    assert_eq!(reachable(&member), [POD]);
    let said = warnings(&member);
    for part in [
        "EgressFirewall/default/default",
        "is refused, and no good version of it is known",
        "spec.egress[1].type",
    ] {
        assert!(said.contains(part), "{said}");
    }
    member.put(GOOD);
    member.change(vec![rejected("")]);
    assert_eq!(reachable(&member), [ALLOWED, POD]);
    assert!(!warnings(&member).contains("refused"));

    let mut member = listed(&bad());
    member.change(vec![rejected("")]);
    assert_eq!(reachable(&member), [OUTSIDE, ALLOWED, POD]);
}

#[test]
fn one_that_comes_later_closes_too() {
    let mut member = listed("");
    assert_eq!(reachable(&member), [OUTSIDE, ALLOWED, POD]);
    member.change(vec![rejected(&bad())]);
    assert_eq!(reachable(&member), [POD]);
}

#[test]
fn a_good_version_stays_in_force_and_a_refused_one_takes_its_place_without_a_gap() {
    let mut member = listed("");
    member.put(GOOD);
    member.change(vec![rejected(&bad())]);
    assert_eq!(reachable(&member), [ALLOWED, POD]);
    // The file with the good version is removed, and another file has the refused version.
    let gone = SourceEvent::Delete("EgressFirewall/default/default".to_owned());
    let events = member.router.route(vec![PolicyChange::Document(gone)]);
    assert_eq!(events.len(), 1, "{events:?}");
    for event in events {
        member.node.event(event);
    }
    assert_eq!(reachable(&member), [POD]);
}

#[test]
fn only_an_egress_firewall_whose_name_and_namespace_are_known_closes() {
    let closes = |text: &str| reachable(&listed(text)) == [POD];
    assert!(closes(&GOOD.replace("spec:", "rules: 1\nspec:")));
    assert!(closes(&GOOD.replace("spec:", "specs:")));
    assert!(closes(&bad().replace(", namespace: default", "")));
    assert!(!closes(
        &bad().replace("namespace: default", "namespace: shop")
    ));
    assert!(!closes(&bad().replace("name: default,", "name: other,")));
    assert!(!closes(&GOOD.replace("ovn.org/v1", "ovn.org/v2")));
    assert!(!closes(
        &GOOD.replace("kind: EgressFirewall", "kind: Egressfirewall")
    ));
    assert!(!closes("a: [\n"));
    assert!(!closes(
        "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: default}\nspec: 1\n"
    ));
}

/// The file is damaged and renamed while the agent is down: the good version is of another file.
#[test]
fn after_a_restart_no_pod_reaches_more_than_before() {
    let mut before = listed("");
    before.put(GOOD);
    let mut member = Member {
        node: again(&before.node, CoreConfig::default(), &[107]),
        router: router(),
    };
    member.node.begin();
    member.change(vec![
        PolicyChange::Document(SourceEvent::Init),
        rejected(&bad()),
        PolicyChange::Uncertain(true),
        PolicyChange::Document(SourceEvent::InitDone),
    ]);
    member.node.endpoint(spec("web", 7, "app=web"));
    member.node.endpoint(spec("new", 8, "app=web"));
    let listed = Event::Endpoints(SourceEvent::InitDone);
    member.node.event(listed);
    let open = reachable(&member);
    assert!(!open.contains(&OUTSIDE), "{open:?}");
    let new = *member.node.datapath.policy.keys().last().unwrap();
    assert_ne!(new, member.node.id());
    let question = Question {
        endpoint: new,
        remote: OUTSIDE.parse().unwrap(),
        direction: EGRESS,
        protocol: 6,
        port: 443,
    };
    assert_eq!(fate(&member.node.datapath, question), Some(Fate::Dropped));
}
