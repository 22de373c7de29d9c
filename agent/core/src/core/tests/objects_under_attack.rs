//! Objects of the cluster that are lost, renamed, renumbered or written by a stranger: no packet
//! passes that policy does not allow, at any step on the way.

use shared_maps::policy::EGRESS;

use super::{
    oracle::{Fate, Question, fate},
    pod_identities::identity,
    pods::{Member, WEB_TO_DB, pod, router},
    restart::again,
    scenario::spec,
    services::{service, slice},
};
use crate::{
    core::{CoreConfig, Event},
    datapath::{memory::MemoryDatapath, plan::Datapath as _},
    policy::{parse::parse_documents, source::PolicyChange},
    source_event::SourceEvent,
};

/// Whether the endpoint may send to this TCP port.
fn passes(datapath: &MemoryDatapath, remote: &str, port: u16) -> bool {
    let Some(endpoint) = datapath.policy.keys().next() else {
        return false;
    };
    let question = Question {
        endpoint: *endpoint,
        remote: remote.parse().unwrap(),
        direction: EGRESS,
        protocol: 6,
        port,
    };
    fate(datapath, question) == Some(Fate::Passed)
}

/// Starts the agent again with these documents. Gives the node before its first step.
fn start_again(
    member: &Member,
    lose: impl Fn(&mut MemoryDatapath),
    text: &str,
) -> (MemoryDatapath, Member) {
    let mut node = again(&member.node, CoreConfig::default(), &[107]);
    lose(&mut node.datapath);
    // The loss comes before the start.
    let mut node = again(&node, CoreConfig::default(), &[107]);
    let start = node.datapath.clone();
    node.begin();
    let mut member = Member {
        node,
        router: router(),
    };
    let mut listing = vec![PolicyChange::Document(SourceEvent::Init)];
    let documents = parse_documents(text, "test").into_iter();
    listing.extend(
        documents.map(|document| PolicyChange::Document(SourceEvent::Apply(document.unwrap()))),
    );
    listing.push(PolicyChange::Document(SourceEvent::InitDone));
    member.change(listing);
    member.node.endpoint(spec("web", 7, "app=web"));
    member.node.event(Event::Endpoints(SourceEvent::InitDone));
    (start, member)
}

/// The first step after which the endpoint may send to this address and port, if there is one.
fn opens_at(
    start: &MemoryDatapath,
    end: &MemoryDatapath,
    remote: &str,
    port: u16,
) -> Option<usize> {
    let mut now = start.clone();
    end.log.iter().position(|step| {
        now.apply(step).unwrap();
        passes(&now, remote, port)
    })
}

/// A Service with one backend that no Pod object describes.
fn served(name: &str, address: &str, backend: &str) -> String {
    service(name, &format!("clusterIP: {address}"), "{port: 80}")
        + &slice(name, &[("", backend)], "{port: 5432}")
}

#[test]
fn a_lost_checkpoint_gives_no_pods_number_to_another_pod_while_entries_are_left() {
    let mut member = Member::new(WEB_TO_DB);
    member.put(&(pod("db-0", "db", "10.2.0.9") + &pod("other-0", "other", "10.2.0.10")));
    assert!(passes(&member.node.datapath, "10.2.0.9", 5432));
    assert!(!passes(&member.node.datapath, "10.2.0.10", 5432));
    let lose = |datapath: &mut MemoryDatapath| datapath.endpoint_checkpoint = None;
    let text = WEB_TO_DB.to_owned() + &pod("other-0", "other", "10.2.0.10");
    let (start, after) = start_again(&member, lose, &text);
    assert_eq!(
        opens_at(&start, &after.node.datapath, "10.2.0.10", 5432),
        None
    );
    // Both pods, and one that may be numbered before them.
    let text = text + &pod("db-0", "db", "10.2.0.9") + &pod("aaa", "aaa", "10.2.0.7");
    let (start, after) = start_again(&member, lose, &text);
    for address in ["10.2.0.10", "10.2.0.7"] {
        assert_eq!(
            opens_at(&start, &after.node.datapath, address, 5432),
            None,
            "{address}"
        );
    }
}

#[test]
fn a_number_that_the_cluster_gave_to_other_labels_meanwhile_opens_nothing() {
    let mut member = Member::new(WEB_TO_DB);
    let both = pod("db-0", "db", "10.2.0.9") + &pod("other-0", "other", "10.2.0.10");
    member.put(&(identity(300, "db") + &identity(301, "other") + &both));
    assert!(passes(&member.node.datapath, "10.2.0.9", 5432));
    let text = WEB_TO_DB.to_owned() + &identity(301, "db") + &identity(300, "other") + &both;
    for lose in [false, true] {
        let (start, mut after) = start_again(
            &member,
            |datapath| {
                if lose {
                    datapath.endpoint_checkpoint = None;
                }
            },
            &text,
        );
        after.node.tick(after.node.now.plus_secs(60));
        let at = opens_at(&start, &after.node.datapath, "10.2.0.10", 5432);
        assert_eq!(at, None, "checkpoint lost: {lose}");
        assert!(passes(&after.node.datapath, "10.2.0.9", 5432));
    }
}

#[test]
fn a_services_number_opens_no_other_service_after_a_restart() {
    let mut member = Member::new(WEB_TO_DB);
    let pods = pod("db-0", "db", "10.2.0.9") + &pod("other-0", "other", "10.2.0.10");
    let shut = served("shut", "10.96.0.11", "10.2.0.10");
    member.put(&(pods.clone() + &served("open", "10.96.0.10", "10.2.0.9") + &shut));
    assert!(passes(&member.node.datapath, "10.96.0.10", 80));
    assert!(!passes(&member.node.datapath, "10.96.0.11", 80));
    for lose in [false, true] {
        for text in [
            shut.clone(),
            shut.clone() + &served("aaa", "10.96.0.12", "10.2.0.10"),
            shut.clone() + &served("renamed", "10.96.0.10", "10.2.0.9"),
        ] {
            let text = WEB_TO_DB.to_owned() + &pods + &text;
            let (start, after) = start_again(
                &member,
                |datapath| {
                    if lose {
                        datapath.checkpoint = None;
                    }
                },
                &text,
            );
            for address in ["10.96.0.11", "10.96.0.12"] {
                let at = opens_at(&start, &after.node.datapath, address, 80);
                assert_eq!(at, None, "{address}, checkpoint lost: {lose}");
            }
        }
    }
}

/// A NetworkPolicy that lets `app=web` send to all namespaces but those of `team: a`.
const NOT_TO_TEAM_A: &str = r"
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web}
spec:
  podSelector: {matchLabels: {app: web}}
  policyTypes: [Egress]
  egress:
  - to: [{namespaceSelector: {matchExpressions: [{key: team, operator: NotIn, values: [a]}]}}]
";

/// The same, as a policy of Cilium.
const NOT_TO_TEAM_A_OF_CILIUM: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: web}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toEndpoints: [{matchExpressions: [{key: 'k8s:io.cilium.k8s.namespace.labels.team', operator: NotIn, values: [a]}]}]
";

#[test]
fn a_namespace_without_a_document_is_not_one_without_labels() {
    for policy in [NOT_TO_TEAM_A, NOT_TO_TEAM_A_OF_CILIUM] {
        opens_known_namespaces_only(policy);
    }
}

/// A deny of all namespaces but one holds where the namespace is unknown.
#[test]
fn a_deny_holds_for_a_namespace_without_a_document() {
    let allow = "egress:\n  - toEndpoints: [{}]\n  egressDeny:";
    let mut member = Member::new(&NOT_TO_TEAM_A_OF_CILIUM.replace("egress:", allow));
    member.put(&pod("db-0", "db", "10.2.0.9"));
    assert!(!passes(&member.node.datapath, "10.2.0.9", 80));
}

fn opens_known_namespaces_only(policy: &str) {
    let mut member = Member::new(policy);
    let namespace = |team: &str| {
        format!(
            "---\napiVersion: v1\nkind: Namespace\nmetadata: {{name: default, labels: {{team: {team}}}}}\n"
        )
    };
    member.put(&pod("db-0", "db", "10.2.0.9"));
    assert!(
        !passes(&member.node.datapath, "10.2.0.9", 80),
        "its labels are unknown"
    );
    member.put(&namespace("b"));
    assert!(passes(&member.node.datapath, "10.2.0.9", 80));
    member.put(&namespace("a"));
    assert!(!passes(&member.node.datapath, "10.2.0.9", 80));
    member.delete("Namespace/default");
    assert!(
        !passes(&member.node.datapath, "10.2.0.9", 80),
        "its labels are unknown again"
    );
}

#[test]
fn a_slice_that_names_a_pod_opens_no_address_where_pods_cannot_be() {
    let config = CoreConfig {
        pod_blocks: vec!["10.2.0.0/16".parse().unwrap()],
        ..CoreConfig::default()
    };
    let mut member = Member::with(config, WEB_TO_DB);
    let served = |backends: &[(&str, &str)]| {
        service("x", "clusterIP: 10.96.0.10", "{port: 80}") + &slice("x", backends, "{port: 5432}")
    };
    let known = ("", "10.2.0.9");
    member.put(&(pod("db-0", "db", "10.2.0.9") + &served(&[known])));
    assert!(passes(&member.node.datapath, "10.96.0.10", 80));
    member.put(&served(&[known, ("no", "10.2.0.10")]));
    assert!(passes(&member.node.datapath, "10.96.0.10", 80));
    member.put(&served(&[known, ("no", "1.1.1.1")]));
    assert!(!passes(&member.node.datapath, "10.96.0.10", 80));
}

#[test]
fn an_endpoint_whose_new_labels_have_no_number_is_named() {
    let mut member = Member::new(WEB_TO_DB);
    member.put(&pod("p", "db", "10.0.0.8"));
    member.node.endpoint(crate::endpoint::spec::EndpointSpec {
        labels: Vec::new(),
        pod: Some("default/p".into()),
        ..spec("p", 8, "unused=")
    });
    assert!(passes(&member.node.datapath, "10.0.0.8", 5432));
    let mut n = 0;
    let labels = |n: u32| crate::labels::LabelSet::parse(&[format!("k8s:n={n}")]).unwrap();
    while member.node.core.state.acquire_pod(&labels(n)).is_ok() {
        n += 1;
    }
    member.put(&pod("p", "other", "10.0.0.8"));
    let waiting = member.node.core.state.endpoints.waiting();
    let reasons: Vec<&String> = waiting.map(|(_, reason)| reason).collect();
    assert!(reasons[0].contains("no identity number"), "{reasons:?}");
    // The pod gets its number once one is free, without another event.
    let some = shared_maps::IdentityId(300);
    member.node.core.state.numbers.release_endpoint(some);
    for _ in 0..2 {
        let due = member.node.core.next_deadline().unwrap();
        member.node.tick(due);
    }
    assert_eq!(member.node.core.state.endpoints.waiting().len(), 0);
    assert!(!passes(&member.node.datapath, "10.0.0.8", 5432));
}
