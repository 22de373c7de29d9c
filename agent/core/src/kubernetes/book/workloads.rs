//! What the replicas of a workload have in common. Each workload is stored once, with the labels of its
//! identity.

use std::{collections::BTreeMap, sync::Arc};

use crate::{labels::LabelSet, named_port::NamedPorts, policy::cluster::pod::Pod};

/// Pods of one namespace with equal labels, service account and named ports.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Workload {
    pub(super) namespace: String,
    pub(super) labels: BTreeMap<String, String>,
    pub(super) service_account: Option<String>,
    pub(super) ports: NamedPorts,
}

/// The workloads of all pods.
#[derive(Debug, Default)]
pub(super) struct Workloads(BTreeMap<Arc<Workload>, Known>);

#[derive(Debug, Default)]
struct Known {
    pods: usize,
    /// Labels of the identity; `None` until they are needed, and after a change of the namespace.
    identity: Option<LabelSet>,
}

impl Workloads {
    /// Adds a pod. Gives its workload.
    pub(super) fn add(&mut self, pod: &Pod) -> Arc<Workload> {
        let workload = Workload {
            namespace: pod.namespace.clone(),
            labels: pod.labels.clone(),
            service_account: pod.service_account.clone(),
            ports: pod.ports.clone(),
        };
        let workload = match self.0.get_key_value(&workload) {
            Some((known, _)) => Arc::clone(known),
            None => Arc::new(workload),
        };
        self.0.entry(Arc::clone(&workload)).or_default().pods += 1;
        workload
    }

    /// Removes a pod of a workload.
    pub(super) fn remove(&mut self, workload: &Arc<Workload>) {
        if let Some(known) = self.0.get_mut(workload) {
            known.pods -= 1;
            if known.pods == 0 {
                self.0.remove(workload);
            }
        }
    }

    /// Labels of a workload's identity, which `make` computes if they are unknown.
    pub(super) fn identity(
        &mut self,
        workload: &Arc<Workload>,
        make: impl FnOnce(&Workload) -> LabelSet,
    ) -> LabelSet {
        match self.0.get_mut(workload) {
            Some(known) => known.identity.get_or_insert_with(|| make(workload)).clone(),
            None => make(workload),
        }
    }

    /// Forgets the labels of a namespace's workloads, because the namespace's labels changed.
    pub(super) fn forget(&mut self, namespace: &str) {
        for (workload, known) in &mut self.0 {
            if workload.namespace == namespace {
                known.identity = None;
            }
        }
    }
}
