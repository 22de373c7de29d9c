//! The core with numbers of the cluster: waiting, changes of the mode, and the objects that are
//! wanted.

use std::sync::Arc;

use shared_maps::IdentityId;

use super::{
    pod_identities::identity,
    pods::{Member, WEB_TO_DB, of_pod, pod},
    restart::again,
    scenario::{Node, spec},
};
use crate::{
    core::{CoreConfig, Effect, Event},
    datapath::plan::Step,
    identity::cluster::{GivenNumber, WantedIdentities, candidates},
    labels::LabelSet,
    policy::{parse::parse_object, source::PolicyChange},
    source_event::SourceEvent,
};

fn cluster_mode() -> CoreConfig {
    CoreConfig {
        cluster_identities: Some(Default::default()),
        ..CoreConfig::default()
    }
}

/// A synced node with an endpoint, app=web.
fn member() -> Member {
    let mut member = Member::with(cluster_mode(), WEB_TO_DB);
    // The endpoint gets a number of the node.
    wait_two_seconds(&mut member);
    member
}

fn labels(app: &str) -> LabelSet {
    LabelSet::parse(&[
        &format!("k8s:app={app}"),
        "k8s:io.cilium.k8s.policy.cluster=default",
        "k8s:io.kubernetes.pod.namespace=default",
    ])
    .unwrap()
}

/// The list that was published last in the effects of the last event.
fn wanted(node: &Node) -> Option<Arc<WantedIdentities>> {
    let effects = node.effects.iter().rev();
    let mut lists = effects.filter_map(|effect| match effect {
        Effect::WantedIdentities(wanted) => Some(Arc::clone(wanted)),
        _ => None,
    });
    lists.next()
}

fn wait_two_seconds(member: &mut Member) {
    member.node.tick(member.node.now.plus_secs(2));
}

#[test]
fn a_set_of_this_node_is_wanted_until_its_number_is_given() {
    let mut member = member();
    member.put(&pod("db-1", "db", "10.0.0.8"));
    member.node.endpoint(of_pod("db", 8, "default/db-1"));
    let list = wanted(&member.node).unwrap();
    let db = labels("db");
    assert_eq!(
        list[&db].choices[0],
        candidates(&db, Default::default()).next().unwrap()
    );
    assert!(list[&db].is_of_pod);
    let web = list.iter().find(|(set, _)| **set != db).unwrap();
    assert!(!web.1.is_of_pod, "an endpoint without a Pod document");
    assert_eq!(
        member.node.identity("10.0.0.8"),
        Some(IdentityId::UNMANAGED)
    );
    let given = GivenNumber {
        labels: db.clone(),
        id: list[&db].choices[0],
    };
    member.node.event(Event::NumbersGiven(vec![given.clone()]));
    assert_eq!(member.node.identity("10.0.0.8"), Some(given.id));
    assert!(member.may_connect("10.0.0.8"));
    assert!(!wanted(&member.node).unwrap().contains_key(&db));
    // The list of objects confirms the number, so nothing changes.
    let steps = member.put(&identity(given.id.0, "db"));
    assert!(steps.is_empty(), "{steps:?}");
    // The object is deleted while the pod has its number.
    member.delete(&format!("CiliumIdentity/{}", given.id.0));
    assert_eq!(wanted(&member.node).unwrap()[&db].choices[0], given.id);
    assert_eq!(member.node.identity("10.0.0.8"), Some(given.id));
    // The endpoint is removed.
    member
        .node
        .event(Event::Endpoints(SourceEvent::Delete("db".to_owned())));
    assert!(!wanted(&member.node).unwrap().contains_key(&db));
}

#[test]
fn without_an_answer_a_pod_is_under_policy_after_two_seconds_and_moves_later() {
    let mut member = member();
    member.put(&(pod("db-0", "db", "10.2.0.9") + &pod("db-1", "db", "10.0.0.8")));
    member.node.endpoint(of_pod("db", 8, "default/db-1"));
    assert!(!member.may_connect("10.2.0.9"));
    let due = member.node.core.next_deadline().unwrap();
    assert!(due <= member.node.now.plus_secs(2));
    wait_two_seconds(&mut member);
    for address in ["10.2.0.9", "10.0.0.8"] {
        let number = member.node.identity(address).unwrap();
        assert!(number.0 >= 61_440, "{address}: {number}");
        assert!(member.may_connect(address), "{address}");
    }
    assert_eq!(member.node.core.state.endpoints.waiting().len(), 0);
    // At no step of the move is db closed: the entries of the new number come before the ipcache has it.
    let steps = member.put(&identity(5000, "db"));
    assert_no_gap(&steps, 5000);
    for address in ["10.2.0.9", "10.0.0.8"] {
        assert_eq!(member.node.identity(address), Some(IdentityId(5000)));
        assert!(member.may_connect(address), "{address}");
    }
}

/// Policy entries of the new number come before addresses have it, and entries of the old number go
/// after that.
fn assert_no_gap(steps: &[Step], number: u32) {
    let of = |wanted: &dyn Fn(&Step) -> bool| steps.iter().position(wanted);
    let set = of(&|step| matches!(step, Step::SetPolicy(_, key, _) if key.sec_label == number));
    let moved =
        of(&|step| matches!(step, Step::SetIpcache(_, value) if value.sec_identity == number));
    let last = steps
        .iter()
        .rposition(|step| matches!(step, Step::SetIpcache(..)));
    let removed = of(&|step| matches!(step, Step::UnsetPolicy(..)));
    assert!(set.unwrap() < moved.unwrap(), "{steps:?}");
    assert!(
        removed.is_none_or(|removed| removed > last.unwrap()),
        "{steps:?}"
    );
}

#[test]
fn a_pod_of_another_node_keeps_its_identity_until_that_of_its_new_labels_is_there() {
    let mut member = member();
    member.put(&(identity(5000, "db") + &pod("db-0", "db", "10.2.0.9")));
    assert!(member.may_connect("10.2.0.9"));
    member.put(&pod("db-0", "other", "10.2.0.9"));
    assert_eq!(member.node.identity("10.2.0.9"), Some(IdentityId(5000)));
    wait_two_seconds(&mut member);
    let number = member.node.identity("10.2.0.9").unwrap();
    assert!(number.0 >= 61_440, "{number}");
    assert!(!member.may_connect("10.2.0.9"));
    // Other addresses do not keep the old number, because the agent does not know which pod had them.
    member.put(&pod("db-0", "third", "10.2.0.10"));
    assert_eq!(
        member.node.identity("10.2.0.10"),
        Some(IdentityId::UNMANAGED)
    );
    // No reference is left behind.
    member.delete("Pod/default/db-0");
    let held = member.node.core.state.numbers.allocated().into_iter();
    let held: Vec<_> = held
        .filter(|(_, labels, held)| *held > 0 && labels.texts().concat().contains("other"))
        .collect();
    assert_eq!(held, []);
}

#[test]
fn a_change_of_the_mode_and_back_opens_and_cuts_nothing() {
    let mut member = Member::with(CoreConfig::default(), WEB_TO_DB);
    member.put(
        &(pod("db-0", "db", "10.2.0.9")
            + &pod("db-1", "db", "10.0.0.8")
            + &pod("x-0", "x", "10.2.0.7")),
    );
    member.node.endpoint(of_pod("db", 8, "default/db-1"));
    let before = member.node.identity("10.2.0.9").unwrap();
    assert!(before.0 < 61_440);
    let check = |member: &Member| {
        for address in ["10.2.0.9", "10.0.0.8"] {
            assert!(member.may_connect(address), "{address}");
        }
        assert!(!member.may_connect("10.2.0.7"));
    };
    check(&member);
    for config in [cluster_mode(), CoreConfig::default()] {
        let is_cluster = config.cluster_identities.is_some();
        let node = again(&member.node, config, &[107, 108]);
        member = Member {
            node,
            router: super::pods::router(),
        };
        check(&member);
        member.node.begin();
        member.node.policy(WEB_TO_DB);
        member.put(
            &(pod("db-0", "db", "10.2.0.9")
                + &pod("db-1", "db", "10.0.0.8")
                + &pod("x-0", "x", "10.2.0.7")),
        );
        member.node.endpoint(spec("web", 7, "app=web"));
        member.node.endpoint(of_pod("db", 8, "default/db-1"));
        member.node.sync();
        check(&member);
        if is_cluster {
            assert_eq!(
                member.node.identity("10.2.0.9"),
                Some(before),
                "nothing says otherwise"
            );
            // The number that db has here is x's number in the cluster.
            let steps = member.put(&(identity(5000, "db") + &identity(before.0, "x")));
            assert_no_gap(&steps, 5000);
            check(&member);
            for _ in 0..3 {
                if let Some(due) = member.node.core.next_deadline() {
                    member.node.tick(due);
                }
                check(&member);
            }
            assert_eq!(member.node.identity("10.2.0.9"), Some(IdentityId(5000)));
            assert_eq!(member.node.identity("10.2.0.7"), Some(before));
        }
    }
    // Without the objects the numbers of the earlier run stay.
    assert_eq!(member.node.identity("10.2.0.9"), Some(IdentityId(5000)));
    assert_eq!(member.node.identity("10.2.0.7"), Some(before));
}

#[test]
fn with_numbers_of_the_node_nothing_is_wanted() {
    let mut member = Member::new(WEB_TO_DB);
    member.put(&pod("db-1", "db", "10.0.0.8"));
    member.node.endpoint(of_pod("db", 8, "default/db-1"));
    assert_eq!(wanted(&member.node), None);
    assert_eq!(member.node.core.state.numbers.next_deadline(), None);
}

#[test]
fn who_leads_sees_pods_without_an_object_and_objects_without_a_pod() {
    let mut member = member();
    let ours = |number: u32, app: &str| {
        identity(number, app).replace(
            "metadata: {",
            "metadata: {annotations: {holdfast.io/made-by: holdfast}, ",
        )
    };
    member.put(&(pod("db-0", "db", "10.2.0.9") + &pod("x-0", "x", "10.2.0.7") + &ours(5000, "x")));
    let in_use = member.node.core.identities_in_use();
    assert!(in_use.is_synced);
    let lacking: Vec<_> = in_use.lacking.into_keys().collect();
    assert_eq!(lacking, [labels("db")]);
    assert!(in_use.unused.is_empty());
    member.delete("Pod/default/x-0");
    // The agents must not delete documents.
    assert!(member.node.core.identities_in_use().unused.is_empty());
    member.change(vec![of_server(6000, "gone", 1, true)]);
    let unused = member.node.core.identities_in_use().unused;
    assert_eq!(unused.len(), 1, "{unused:?}");
    assert_eq!(
        (unused[0].id, unused[0].uid.as_deref()),
        (IdentityId(6000), Some("u-6000"))
    );
    assert!(member.node.core.is_unused(&unused[0]));
    // Between the look and the request a pod uses the labels, and then the object is removed.
    member.put(&pod("gone-0", "gone", "10.2.0.6"));
    assert!(!member.node.core.is_unused(&unused[0]));
    member.delete("Pod/default/gone-0");
    assert!(member.node.core.is_unused(&unused[0]));
    member.change(vec![PolicyChange::Document(SourceEvent::Delete(
        "CiliumIdentity/6000".to_owned(),
    ))]);
    assert!(!member.node.core.is_unused(&unused[0]));
}

/// An object of the API server, made `minute` minutes after another one.
fn of_server(number: u32, app: &str, minute: u32, is_ours: bool) -> PolicyChange {
    let made_by = if is_ours { "holdfast" } else { "" };
    let object = parse_object(
        &serde_json::json!({
            "apiVersion": "cilium.io/v2", "kind": "CiliumIdentity",
            "metadata": {
                "name": number.to_string(), "uid": format!("u-{number}"),
                "annotations": {"holdfast.io/made-by": made_by},
                "creationTimestamp": format!("2026-11-23T12:{minute:02}:00Z"),
            },
            "security-labels": {
                "k8s:app": app, "k8s:io.cilium.k8s.policy.cluster": "default",
                "k8s:io.kubernetes.pod.namespace": "default",
            },
        }),
        "test",
    );
    PolicyChange::Document(SourceEvent::Apply(object.unwrap()))
}

#[test]
fn a_younger_duplicate_of_an_agent_is_unused_and_those_of_other_writers_and_documents_stay() {
    let mut member = member();
    member.put(&pod("db-0", "db", "10.2.0.9"));
    member.change(vec![of_server(5000, "db", 1, true)]);
    let number = |member: &Member| member.node.identity("10.2.0.9");
    assert_eq!(number(&member), Some(IdentityId(5000)));
    let unused = |member: &Member| -> Vec<(u32, bool)> {
        let unused = member.node.core.identities_in_use().unused.into_iter();
        unused.map(|one| (one.id.0, one.is_duplicate)).collect()
    };
    assert_eq!(unused(&member), []);
    member.change(vec![
        of_server(4000, "db", 2, true),
        of_server(4001, "db", 2, false),
    ]);
    assert_eq!(unused(&member), [(4000, true)], "the younger one of ours");
    assert_eq!(number(&member), Some(IdentityId(5000)));
    let duplicate = member.node.core.identities_in_use().unused.remove(0);
    assert!(member.node.core.is_unused(&duplicate));
    // The older object is removed. The other one counts now, and is in use.
    member.change(vec![PolicyChange::Document(SourceEvent::Delete(
        "CiliumIdentity/5000".to_owned(),
    ))]);
    assert_eq!(number(&member), Some(IdentityId(4000)));
    assert_eq!(unused(&member), []);
    assert!(!member.node.core.is_unused(&duplicate));
    // An object of another writer is older than the agents' object, which is therefore the
    // duplicate.
    member.change(vec![of_server(3000, "db", 0, false)]);
    assert_eq!(number(&member), Some(IdentityId(3000)));
    assert_eq!(unused(&member), [(4000, true)]);
    member.change(vec![PolicyChange::Document(SourceEvent::Delete(
        "CiliumIdentity/3000".to_owned(),
    ))]);
    // A document of this node has an earlier time. Other nodes do not have the document, and use the object.
    member.put(&identity(6000, "db").replace(
        "metadata: {",
        "metadata: {creationTimestamp: 2020-01-01T00:00:00Z, ",
    ));
    assert_eq!(number(&member), Some(IdentityId(6000)));
    assert_eq!(unused(&member), []);
}

#[test]
fn a_namespace_that_has_as_many_numbers_as_are_free_gets_no_more() {
    let config = CoreConfig {
        cluster_identities: Some("1000-1199".parse().unwrap()),
        ..CoreConfig::default()
    };
    let mut member = Member::with(config, WEB_TO_DB);
    let objects = (1000..1100).map(|number| of_server(number, &format!("x{number}"), 1, true));
    member.change(objects.collect());
    member.put(&pod("db-0", "db", "10.2.0.9"));
    member.put(&pod("db-1", "db", "10.0.0.8"));
    member.node.endpoint(of_pod("db", 8, "default/db-1"));
    let lacking = member.node.core.identities_in_use().lacking;
    assert!(lacking[&labels("db")].is_beyond_share, "100 of 200");
    assert!(wanted(&member.node).unwrap()[&labels("db")].is_beyond_share);
    // One object is removed: the namespace may have one more.
    member.delete("CiliumIdentity/1000");
    assert!(!wanted(&member.node).unwrap()[&labels("db")].is_beyond_share);
}
