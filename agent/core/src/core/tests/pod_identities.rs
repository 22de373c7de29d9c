//! Numbers of pods from documents, and numbers that come later.

use std::collections::{BTreeMap, BTreeSet};

use dns_policy::boot_time::BootTime;
use shared_maps::IdentityId;

use super::{
    pods::{Member, WEB_TO_DB, of_pod, pod},
    restart::again,
    scenario::spec,
};
use crate::{
    core::CoreConfig,
    identity::{
        allocator::Acquired,
        cluster_object::CiliumIdentity,
        pods::{Asked, PodIdentities},
    },
    labels::LabelSet,
};

pub(super) fn identity(number: u32, app: &str) -> String {
    format!(
        r#"
---
apiVersion: cilium.io/v2
kind: CiliumIdentity
metadata: {{name: "{number}"}}
security-labels:
  "k8s:app": {app}
  "k8s:io.cilium.k8s.policy.cluster": default
  "k8s:io.kubernetes.pod.namespace": default
"#
    )
}

#[test]
fn a_pod_has_the_number_that_a_document_gives_its_labels() {
    let mut member = Member::new(WEB_TO_DB);
    member.put(&(identity(5000, "db") + &pod("db-0", "db", "10.2.0.9")));
    assert_eq!(member.node.identity("10.2.0.9"), Some(IdentityId(5000)));
    assert!(member.may_connect("10.2.0.9"));
    // The document is removed while pods have the number.
    member.delete("CiliumIdentity/5000");
    assert_eq!(member.node.identity("10.2.0.9"), Some(IdentityId(5000)));
    let warned = |member: &Member| member.node.core.policy_warnings().join("; ");
    member.put(&(identity(6000, "x") + &identity(6001, "x")));
    assert!(warned(&member).contains("CiliumIdentity/6000: security-labels: CiliumIdentity/6001"));
}

#[test]
fn pods_and_endpoints_move_to_a_number_that_comes_later() {
    let mut member = Member::new(WEB_TO_DB);
    member.put(&pod("db-0", "db", "10.2.0.9"));
    member.put(&pod("db-1", "db", "10.0.0.8"));
    member.node.endpoint(of_pod("db", 8, "default/db-1"));
    let before = member.node.identity("10.2.0.9").unwrap();
    let steps = member.put(&identity(5000, "db"));
    assert!(!steps.is_empty());
    for address in ["10.2.0.9", "10.0.0.8"] {
        assert_eq!(member.node.identity(address), Some(IdentityId(5000)));
        assert!(member.may_connect(address));
    }
    let stale = member
        .node
        .datapath
        .policy
        .values()
        .flat_map(|map| map.keys());
    assert_eq!(stale.filter(|key| key.sec_label == before.0).count(), 0);
    // After a restart the pod has the number without the document, too.
    let mut node = again(&member.node, CoreConfig::default(), &[107, 108]);
    node.begin();
    node.policy(WEB_TO_DB);
    node.endpoint(spec("web", 7, "app=web"));
    node.endpoint(of_pod("db", 8, "default/db-1"));
    node.sync();
    assert_eq!(node.identity("10.0.0.8"), Some(IdentityId(5000)));
}

#[test]
fn a_number_changes_from_one_label_set_to_another_without_meaning_both() {
    let mut member = Member::new(WEB_TO_DB);
    member.put(&(pod("old-0", "old", "10.2.0.8") + &pod("db-0", "db", "10.2.0.9")));
    let number = member.node.identity("10.2.0.8").unwrap();
    assert!(!member.may_connect("10.2.0.8") && member.may_connect("10.2.0.9"));
    member.put(&identity(number.0, "db"));
    for _ in 0..3 {
        assert!(!member.may_connect("10.2.0.8") && member.may_connect("10.2.0.9"));
        if let Some(due) = member.node.core.next_deadline() {
            member.node.tick(due);
        }
    }
    assert_eq!(member.node.identity("10.2.0.9"), Some(number));
    assert_ne!(member.node.identity("10.2.0.8"), Some(number));
}

/// Gives a label set its number only once it has learned that number.
#[derive(Debug, Default)]
struct Later {
    numbers: BTreeMap<LabelSet, IdentityId>,
    renumbered: BTreeSet<LabelSet>,
}

impl PodIdentities for Later {
    fn ask(&mut self, labels: &LabelSet, _: BootTime) -> Asked {
        match self.numbers.get(labels) {
            Some(id) => Asked::Have(Acquired {
                id: *id,
                new: true,
                fresh: true,
            }),
            None => Asked::Awaited,
        }
    }

    fn learn(&mut self, id: IdentityId, object: Option<&CiliumIdentity>, _: BootTime) {
        if let Some(object) = object {
            self.numbers.insert(object.labels.clone(), id);
            self.renumbered.insert(object.labels.clone());
        }
    }

    fn renumbered(&mut self) -> BTreeSet<LabelSet> {
        std::mem::take(&mut self.renumbered)
    }

    fn release(&mut self, _: IdentityId) {}

    fn sweep(&mut self, _: &dyn Fn(IdentityId) -> bool) -> Vec<IdentityId> {
        Vec::new()
    }

    fn revive(&mut self, _: IdentityId, _: LabelSet) -> bool {
        true
    }

    fn kept(&self) -> Vec<(IdentityId, LabelSet)> {
        Vec::new()
    }

    fn allocated(&self) -> Vec<(IdentityId, LabelSet, usize)> {
        Vec::new()
    }

    fn len(&self) -> usize {
        self.numbers.len()
    }

    fn release_withheld(&mut self) {}
}

#[test]
fn a_pod_whose_number_is_awaited_is_closed_until_it_comes() {
    let mut member = Member::new(WEB_TO_DB);
    let numbers = &mut member.node.core.state.numbers;
    numbers.with_pods(Box::new(Later::default()));
    member.put(&(pod("db-0", "db", "10.2.0.9") + &pod("db-1", "db", "10.0.0.8")));
    member.node.endpoint(of_pod("db", 8, "default/db-1"));
    for address in ["10.2.0.9", "10.0.0.8"] {
        let identity = member.node.identity(address);
        assert_eq!(identity, Some(IdentityId::UNMANAGED), "{address}");
    }
    let waiting = member.node.core.state.endpoints.waiting();
    let reasons: Vec<&str> = waiting.map(|(_, reason)| reason.as_str()).collect();
    assert!(reasons[0].contains("no identity number yet"), "{reasons:?}");
    member.put(&identity(5000, "db"));
    for address in ["10.2.0.9", "10.0.0.8"] {
        assert_eq!(member.node.identity(address), Some(IdentityId(5000)));
        assert!(member.may_connect(address), "{address}");
    }
    assert_eq!(member.node.core.state.endpoints.waiting().len(), 0);
}
