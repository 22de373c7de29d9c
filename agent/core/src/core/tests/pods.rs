//! Pods of other nodes, from documents to entries.

use shared_maps::{
    IdentityId,
    policy::{EGRESS, PolicyKey},
};

use super::{
    restart::again,
    scenario::{Node, spec},
};
use crate::{
    core::{CoreConfig, router::Router},
    datapath::{memory::MemoryDatapath, plan::Step},
    policy::{parse::parse_documents, source::PolicyChange},
    source_event::SourceEvent,
};

pub(super) const WEB_TO_DB: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: web}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toEndpoints: [{matchLabels: {app: db}}]
    toPorts: [{ports: [{port: "5432", protocol: TCP}]}]
"#;

const WEB_TO_TEAM_A: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: web}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toEndpoints: [{matchLabels: {"k8s:io.cilium.k8s.namespace.labels.team": a}}]
    toPorts: [{ports: [{port: "5432", protocol: TCP}]}]
"#;

pub(super) fn pod(name: &str, app: &str, address: &str) -> String {
    format!(
        r"
---
apiVersion: v1
kind: Pod
metadata: {{name: {name}, labels: {{app: {app}}}}}
spec: {{nodeName: worker-2}}
status: {{phase: Running, podIP: {address}}}
"
    )
}

fn namespace(team: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: Namespace\nmetadata: {{name: default, labels: {{team: {team}}}}}\n"
    )
}

/// A node with the objects of its cluster.
pub(super) struct Member {
    pub(super) node: Node,
    pub(super) router: Router,
}

pub(super) fn router() -> Router {
    Router::default()
}

impl Member {
    /// A synced node with an endpoint, app=web.
    pub(super) fn new(policy: &str) -> Self {
        Self::with(CoreConfig::default(), policy)
    }

    pub(super) fn with(config: CoreConfig, policy: &str) -> Self {
        Self {
            node: Node::synced(config, policy),
            router: router(),
        }
    }

    pub(super) fn put(&mut self, text: &str) -> Vec<Step> {
        let documents = parse_documents(text, "test").into_iter();
        let changes = documents.map(|document| SourceEvent::Apply(document.unwrap()));
        self.change(changes.map(PolicyChange::Document).collect())
    }

    pub(super) fn delete(&mut self, key: &str) -> Vec<Step> {
        let gone = SourceEvent::Delete(key.to_owned());
        self.change(vec![PolicyChange::Document(gone)])
    }

    pub(super) fn change(&mut self, changes: Vec<PolicyChange>) -> Vec<Step> {
        let events = self.router.route(changes);
        events
            .into_iter()
            .flat_map(|event| self.node.event(event))
            .collect()
    }

    /// Whether the endpoint may open a connection to port 5432 of an address.
    pub(super) fn may_connect(&self, address: &str) -> bool {
        let Some(identity) = self.node.identity(address) else {
            return false;
        };
        let key = PolicyKey::new(identity.0, EGRESS, 6, 5432, 16);
        self.node.datapath.policy[&self.node.id()].contains_key(&key)
    }
}

#[test]
fn rules_select_pods_of_other_nodes_by_their_labels() {
    let mut member = Member::new(WEB_TO_DB);
    assert!(!member.may_connect("10.2.0.9"));
    member.put(&pod("db-0", "db", "10.2.0.9"));
    member.put(&pod("web-0", "web", "10.2.0.10"));
    assert!(member.may_connect("10.2.0.9") && !member.may_connect("10.2.0.10"));
    let identity = member.node.identity("10.2.0.9").unwrap();
    assert!(identity.is_endpoint());
    // A replica costs one entry, and a label that differs from pod to pod costs nothing at all.
    let steps = member.put(&pod("db-1", "db, pod-template-hash: x", "10.2.0.11"));
    assert!(
        matches!(steps.as_slice(), [Step::SetIpcache(..)]),
        "{steps:?}"
    );
    assert_eq!(member.node.identity("10.2.0.11"), Some(identity));
    // A pod gets another address and another label, and is removed.
    member.put(&pod("db-1", "db", "10.2.0.12"));
    assert!(member.may_connect("10.2.0.12"));
    assert_eq!(member.node.identity("10.2.0.11"), None);
    member.put(&pod("db-1", "old", "10.2.0.12"));
    assert!(!member.may_connect("10.2.0.12"));
    member.delete("Pod/default/db-0");
    assert_eq!(member.node.identity("10.2.0.9"), None);
    assert_eq!(member.node.core.summary().pods, 2);
}

#[test]
fn pods_make_no_revision_of_the_policy() {
    let mut member = Member::new(WEB_TO_DB);
    let before = member.node.core.summary();
    member.put(&pod("db-0", "db", "10.2.0.9"));
    member.put(&namespace("a"));
    let after = member.node.core.summary();
    assert_eq!(
        (before.revision, before.policies),
        (after.revision, after.policies)
    );
}

#[test]
fn documents_of_nodes_and_groups_of_blocks_do_not_count_as_policies() {
    let mut member = Member::new(WEB_TO_DB);
    let policies = |member: &Member| member.node.core.summary().policies;
    let before = policies(&member);
    member.put(
        r"
apiVersion: cilium.io/v2
kind: CiliumNode
metadata: {name: n2}
spec: {addresses: [{type: InternalIP, ip: 192.0.2.2}]}
---
",
    );
    member.put(
        r"
apiVersion: cilium.io/v2
kind: CiliumCIDRGroup
metadata: {name: lan}
spec: {externalCIDRs: [192.0.2.0/24]}
---
",
    );
    assert_eq!((before, policies(&member)), (1, 1));
}

#[test]
fn without_objects_of_a_cluster_there_is_no_event_about_any() {
    let mut router = router();
    let listing = [SourceEvent::Init, SourceEvent::InitDone];
    let events = router.route(listing.map(PolicyChange::Document).into());
    assert_eq!(events.len(), 2, "{events:?}");
    assert!(router.route(Vec::new()).is_empty());
}

#[test]
fn a_namespaces_label_opens_and_closes_its_pods() {
    let mut member = Member::new(WEB_TO_TEAM_A);
    member.put(&(pod("db-0", "db", "10.2.0.9") + &pod("db-1", "db", "10.2.0.10")));
    assert!(!member.may_connect("10.2.0.9"));
    let warnings = member.node.core.policy_warnings();
    assert!(
        warnings
            .iter()
            .any(|text| text.contains("no Namespace document for default"))
    );
    member.put(&namespace("a"));
    assert!(member.may_connect("10.2.0.9") && member.may_connect("10.2.0.10"));
    assert!(member.node.core.policy_warnings().is_empty());
    member.put(&namespace("b"));
    assert!(!member.may_connect("10.2.0.9") && !member.may_connect("10.2.0.10"));
    member.put(&namespace("a"));
    member.delete("Namespace/default");
    assert!(!member.may_connect("10.2.0.9"));
}

#[test]
fn an_endpoint_counts_before_a_pod_with_its_address() {
    let mut member = Member::new(WEB_TO_DB);
    let own = member.node.identity("10.0.0.7").unwrap();
    member.put(&pod("web-0", "other", "10.0.0.7"));
    assert_eq!(member.node.identity("10.0.0.7"), Some(own));
    // Once the endpoint is gone the pod counts: its address is not the world's.
    let gone = SourceEvent::Delete("web".to_owned());
    member.node.event(crate::core::Event::Endpoints(gone));
    let pods = member.node.identity("10.0.0.7").unwrap();
    assert!(pods.is_endpoint() && pods != own);
}

#[test]
fn a_pod_and_an_endpoint_with_equal_labels_are_one_identity() {
    let mut member = Member::new(WEB_TO_DB);
    let mut db = spec("db", 8, "app=db");
    db.labels
        .push("k8s:io.cilium.k8s.policy.cluster=default".to_owned());
    member.node.endpoint(db);
    member.put(&pod("db-0", "db", "10.2.0.9"));
    assert_eq!(
        member.node.identity("10.2.0.9"),
        member.node.identity("10.0.0.8")
    );
    assert!(member.may_connect("10.2.0.9"));
}

#[test]
fn a_restart_keeps_the_numbers_of_pods_and_writes_nothing() {
    let mut member = Member::new(WEB_TO_DB);
    member.put(&(pod("old-0", "old", "10.2.0.8") + &pod("db-0", "db", "10.2.0.9")));
    member.delete("Pod/default/old-0");
    let before = member.node.datapath.clone();
    let mut member = Member {
        node: again(&member.node, CoreConfig::default(), &[107]),
        router: router(),
    };
    member.node.begin();
    let mut listing = vec![PolicyChange::Document(SourceEvent::Init)];
    let text = WEB_TO_DB.to_owned() + &pod("db-0", "db", "10.2.0.9");
    listing.extend(
        parse_documents(&text, "test")
            .into_iter()
            .map(|document| PolicyChange::Document(SourceEvent::Apply(document.unwrap()))),
    );
    listing.push(PolicyChange::Document(SourceEvent::InitDone));
    member.change(listing);
    member.node.endpoint(spec("web", 7, "app=web"));
    let listed = crate::core::Event::Endpoints(SourceEvent::InitDone);
    member.node.event(listed);
    assert_eq!(member.node.datapath.ipcache, before.ipcache);
    assert_eq!(member.node.datapath.policy, before.policy);
    assert!(member.may_connect("10.2.0.9"));
}

#[test]
fn a_listing_removes_pods_that_it_does_not_have() {
    let mut member = Member::new(WEB_TO_DB);
    member.put(&(pod("db-0", "db", "10.2.0.9") + &pod("db-1", "db", "10.2.0.10")));
    let mut other = router();
    let documents = parse_documents(&pod("db-1", "db", "10.2.0.10"), "test").into_iter();
    let mut listing = vec![PolicyChange::Document(SourceEvent::Init)];
    listing.extend(
        documents.map(|document| PolicyChange::Document(SourceEvent::Apply(document.unwrap()))),
    );
    for event in other.route(listing) {
        member.node.event(event);
    }
    assert_eq!(member.node.identity("10.2.0.9"), None);
    assert!(member.may_connect("10.2.0.10"));
}

#[test]
fn a_pod_without_a_number_is_closed_and_not_the_world() {
    let mut member = Member::new(WEB_TO_DB);
    let taken = 65_536 - 256 - 1;
    for n in 0..taken {
        let labels = crate::labels::LabelSet::parse(&[format!("k8s:n={n}")]).unwrap();
        member.node.core.state.acquire_pod(&labels).unwrap();
    }
    member.put(&pod("db-0", "db", "10.2.0.9"));
    assert_eq!(
        member.node.identity("10.2.0.9"),
        Some(IdentityId::UNMANAGED)
    );
    assert_eq!(member.node.core.summary().pods_without_identity, 1);
    // A number becomes free: the pod gets it at the next try.
    let some = IdentityId(300);
    member.node.core.state.numbers.release_endpoint(some);
    let due = member.node.core.next_deadline().unwrap();
    member.node.tick(due);
    let due = member.node.core.next_deadline().unwrap_or(due);
    member.node.tick(due);
    assert!(member.may_connect("10.2.0.9"));
    assert_eq!(member.node.core.summary().pods_without_identity, 0);
}

#[test]
fn a_full_map_closes_a_pod_until_there_is_room() {
    let mut member = Member::new(WEB_TO_DB);
    member.node.datapath.fail = Some(|step| matches!(step, Step::SetIpcache(..)));
    member.put(&pod("db-0", "db", "10.2.0.9"));
    assert_eq!(member.node.identity("10.2.0.9"), None);
    member.node.datapath = MemoryDatapath {
        fail: None,
        ..member.node.datapath.clone()
    };
    let due = member.node.core.next_deadline().unwrap();
    member.node.tick(due);
    assert!(member.may_connect("10.2.0.9"));
}

pub(super) fn of_pod(key: &str, host: u8, pod: &str) -> crate::endpoint::spec::EndpointSpec {
    crate::endpoint::spec::EndpointSpec {
        labels: Vec::new(),
        pod: Some(pod.to_owned()),
        ..spec(key, host, "unused")
    }
}

fn labels_at(member: &Member, address: &str) -> Vec<String> {
    let identity = member.node.identity(address).unwrap();
    let labels = member.node.core.state.policy.labels_of(identity);
    labels.unwrap().texts()
}

#[test]
fn a_pod_never_has_the_labels_of_another_one_of_its_name() {
    let mut member = Member::new(WEB_TO_DB);
    let document = |uid: &str, app: &str| {
        pod("db-0", app, "10.0.0.8").replace("{name: db-0", &format!("{{name: db-0, uid: {uid}"))
    };
    let with = |uid: &str| crate::endpoint::spec::EndpointSpec {
        pod_uid: Some(uid.to_owned()),
        ..of_pod("db", 8, "default/db-0")
    };
    let waits = |member: &Member| {
        let mut waiting = member.node.core.state.endpoints.waiting();
        waiting.next().map(|(_, reason)| reason.clone())
    };
    // The former pod is still known when the new one starts.
    member.put(&document("one", "db"));
    member.node.endpoint(with("two"));
    assert_eq!(member.node.core.state.endpoints.by_key("db"), None);
    let reason = waits(&member).unwrap();
    assert!(reason.contains("uid two"), "{reason}");
    member.put(&document("two", "other"));
    assert_eq!(waits(&member), None);
    assert!(!member.may_connect("10.0.0.8"));
    let labels = labels_at(&member, "10.0.0.8");
    // The next pod of this name appears: the endpoint still belongs to the previous pod, and keeps
    // the labels of that pod.
    member.put(&document("three", "db"));
    assert_eq!(labels_at(&member, "10.0.0.8"), labels);
    assert!(!member.may_connect("10.0.0.8"));
    assert!(waits(&member).unwrap().contains("keeps them"));
    // If the document or the endpoint has no uid, the name alone decides.
    member.put(&pod("db-0", "db", "10.0.0.8"));
    assert!(member.may_connect("10.0.0.8"));
}

#[test]
fn an_endpoint_that_is_a_pod_follows_its_document() {
    let mut member = Member::new(WEB_TO_DB);
    // The endpoint may come before its pod: status says what it waits for.
    member.node.endpoint(of_pod("db", 8, "default/db-0"));
    let waits = |member: &Member| {
        let waiting = member.node.core.state.endpoints.waiting();
        let reasons: Vec<String> = waiting.map(|(_, reason)| reason.clone()).collect();
        reasons.join("; ")
    };
    assert!(
        waits(&member).contains("no document Pod/default/db-0"),
        "{}",
        waits(&member)
    );
    let named = pod("db-0", "db", "10.0.0.8").replace(
        "nodeName: worker-2",
        "containers: [{ports: [{name: pg, containerPort: 5432}]}]",
    );
    member.put(&named);
    assert_eq!(waits(&member), "");
    assert!(member.may_connect("10.0.0.8"));
    let labels = labels_at(&member, "10.0.0.8");
    assert!(
        labels.contains(&"gen:io.cilium.k8s.named-ports=pg.TCP.5432".to_owned()),
        "{labels:?}"
    );
    let core = &member.node.core;
    let id = core.state.endpoints.by_key("db").unwrap();
    // A question may name the pod.
    assert_eq!(
        core.endpoints_called("default/db-0"),
        [(id, "db".to_owned())]
    );
    assert_eq!(core.labels_of_pod("default/db-0"), core.labels_of(id));
    assert_eq!(core.labels_of_pod("default/no"), None);
    // Labels of the pod and of its namespace change, and the endpoint stays the same one.
    member.put(&named.replace("app: db", "app: other"));
    assert!(!member.may_connect("10.0.0.8"));
    member.put(&(named.clone() + &namespace("a")));
    assert!(member.may_connect("10.0.0.8"));
    let team = "k8s:io.cilium.k8s.namespace.labels.team=a".to_owned();
    assert!(labels_at(&member, "10.0.0.8").contains(&team));
    assert_eq!(member.node.core.state.endpoints.by_key("db"), Some(id));
    // The document is removed: its last labels stay in force, and the reason is shown.
    member.delete("Pod/default/db-0");
    assert!(member.may_connect("10.0.0.8"));
    assert!(waits(&member).contains("no document Pod/default/db-0"));
    member.put(&named.replace("app: db", "app: other"));
    assert!(!member.may_connect("10.0.0.8"));
    assert_eq!(waits(&member), "");
}

#[test]
fn a_restart_without_the_pods_document_leaves_the_endpoint_in_force() {
    let mut member = Member::new(WEB_TO_DB);
    member.put(&pod("db-0", "db", "10.0.0.8"));
    member.node.endpoint(of_pod("db", 8, "default/db-0"));
    assert!(member.may_connect("10.0.0.8"));
    let before = member.node.datapath.clone();
    let mut node = again(&member.node, CoreConfig::default(), &[107, 108]);
    node.begin();
    node.policy(WEB_TO_DB);
    node.endpoint(spec("web", 7, "app=web"));
    node.endpoint(of_pod("db", 8, "default/db-0"));
    // The summary has the problem before the sources are complete, and after.
    let problems = |node: &Node| node.core.summary().endpoint_problems.join("\n");
    let keeps = "endpoint db keeps the policy that it had: there is no document";
    assert!(problems(&node).starts_with(keeps), "{}", problems(&node));
    node.sync();
    assert!(problems(&node).starts_with(keeps), "{}", problems(&node));
    // A new pod has no policy that it could keep.
    node.endpoint(of_pod("new", 9, "default/new"));
    let new = "endpoint new is not in force: there is no document Pod/default/new";
    assert!(problems(&node).contains(new), "{}", problems(&node));
    assert_eq!(node.datapath.ipcache, before.ipcache);
    assert_eq!(node.datapath.lxc, before.lxc);
    assert_eq!(node.core.summary().endpoints, 2);
}

#[test]
fn a_pod_and_a_service_are_found_by_namespace_and_name() {
    let mut member = Member::new(WEB_TO_DB);
    let documents = [
        pod("db-1", "db", "10.0.2.9"),
        super::services::service("db", "clusterIP: 10.96.0.7", "{port: 5432}"),
        super::services::service("db-1", "clusterIP: 10.96.0.8", "{port: 5432}"),
    ];
    member.put(&documents.concat());
    let called = |name: &str| {
        let found = member.node.core.addresses_called(name);
        found.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(called("default/db"), ["10.96.0.7"]);
    assert_eq!(called("default/db-1"), ["10.0.2.9"]);
    assert_eq!(called("default/web"), [""; 0]);
}
