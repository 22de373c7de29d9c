//! Finds the policies that restrict each pod of this node.
//!
//! | change | pods that are looked at again |
//! |---|---|
//! | a policy comes, goes or changes | those that it restricted, and those that it selects |
//! | a pod: labels, ports, addresses, node | the pod itself |
//! | labels of a namespace | its pods |
//!
//! The processor does not look for the peers of a policy, because they are [groups](crate::group)
//! that the matches name. A pod without an address waits until it has one.

mod compile;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use crate::{
    cache::{Cache, Touched},
    contiv::{ContivPolicy, Flow, InNamespaces, PodSet, PolicyId},
    name::PortName,
    pod::{Pod, PodId},
    pod_set::PodSetIndex,
    policy::{NetworkPolicy, Protocol},
};

/// A pod of this node that has an address, and the policies that restrict it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodPolicies {
    /// Addresses that the pod claims, even if a younger pod holds them.
    pub addresses: Vec<IpAddr>,
    /// Numbers of the pod's named ports.
    pub ports: BTreeMap<(PortName, Protocol), u16>,
    /// Sorted by namespace and name. A policy that is set aside has no matches.
    pub policies: Vec<Arc<ContivPolicy>>,
}

impl PodPolicies {
    /// Policies that restrict a direction; empty if the direction is open.
    pub fn restricting(&self, flow: Flow) -> impl Iterator<Item = &ContivPolicy> {
        let policies = self.policies.iter().map(AsRef::as_ref);
        policies.filter(move |policy| policy.restricts.restricts(flow))
    }

    /// Whether a policy restricts a direction.
    pub fn is_restricted(&self, flow: Flow) -> bool {
        self.restricting(flow).next().is_some()
    }
}

/// Finds the policies of each local pod, and follows changes.
#[derive(Debug, Default)]
pub(crate) struct Processor {
    policies: BTreeMap<PolicyId, Compiled>,
    subjects: PodSetIndex<PolicyId>,
    pods: BTreeMap<PodId, PodPolicies>,
    /// The pods that each policy restricts.
    restricted: BTreeMap<PolicyId, BTreeSet<PodId>>,
    set_aside: BTreeSet<PolicyId>,
}

/// A policy that restricts something.
#[derive(Debug)]
pub(crate) struct Compiled {
    subject: PodSet,
    /// The policy as in its document.
    pub(crate) policy: Arc<ContivPolicy>,
    /// The same policy, without matches if it is set aside.
    in_force: Arc<ContivPolicy>,
    /// Whether a match of incoming traffic names ports.
    pub(crate) names_ports: bool,
}

impl Compiled {
    /// Compiles a policy; `None` if the policy restricts nothing.
    fn new(policy: &NetworkPolicy, is_set_aside: bool) -> Option<Self> {
        let compiled = Arc::new(compile::policy(policy)?);
        let mut incoming = compiled
            .matches
            .iter()
            .filter(|one| one.flow == Flow::Ingress);
        let mut all = Self {
            subject: PodSet {
                namespaces: InNamespaces::Named(Arc::clone(&compiled.id.namespace)),
                pods: policy.pods.clone(),
            },
            names_ports: incoming.any(|one| one.ports.has_names()),
            in_force: Arc::clone(&compiled),
            policy: compiled,
        };
        all.set_aside(is_set_aside);
        Some(all)
    }

    fn set_aside(&mut self, is_set_aside: bool) {
        self.in_force = match is_set_aside {
            true => Arc::new(ContivPolicy {
                id: self.policy.id.clone(),
                restricts: self.policy.restricts,
                matches: Vec::new(),
            }),
            false => Arc::clone(&self.policy),
        };
    }
}

/// A pod whose policies, addresses or ports have changed.
#[derive(Debug)]
pub(crate) struct Reconfigured {
    pub(crate) id: PodId,
    /// The pod's former policies; `None` if the pod is new.
    pub(crate) before: Option<PodPolicies>,
}

impl Processor {
    /// Follows changes of the cache. Returns the pods for which they make a difference.
    pub(crate) fn process(&mut self, cache: &Cache, touched: &Touched) -> Vec<Reconfigured> {
        let mut pods = touched.pods.clone();
        for id in &touched.policies {
            pods.extend(self.change_policy(cache, id));
        }
        self.reconfigure(cache, pods)
    }

    /// Sets exactly these policies aside, so that they allow nothing. Returns the pods for which
    /// that makes a difference.
    pub(crate) fn set_aside(
        &mut self,
        cache: &Cache,
        policies: BTreeSet<PolicyId>,
    ) -> Vec<Reconfigured> {
        let before = std::mem::replace(&mut self.set_aside, policies);
        let mut pods = BTreeSet::new();
        for id in before.symmetric_difference(&self.set_aside) {
            if let Some(policy) = self.policies.get_mut(id) {
                policy.set_aside(self.set_aside.contains(id));
            }
            pods.extend(self.restricted.get(id).into_iter().flatten().cloned());
        }
        self.reconfigure(cache, pods)
    }

    fn reconfigure(&mut self, cache: &Cache, pods: BTreeSet<PodId>) -> Vec<Reconfigured> {
        let changed = pods.into_iter().filter_map(|id| {
            let now = cache.pod(&id).and_then(|pod| self.configure(cache, pod));
            if self.pods.get(&id) == now.as_ref() {
                return None;
            }
            let before = match &now {
                Some(now) => self.pods.insert(id.clone(), now.clone()),
                None => self.pods.remove(&id),
            };
            self.note_policies(&id, before.as_ref(), now.as_ref());
            Some(Reconfigured { id, before })
        });
        changed.collect()
    }

    /// The policy of this name, if it restricts something.
    pub(crate) fn policy(&self, id: &PolicyId) -> Option<&Compiled> {
        self.policies.get(id)
    }

    /// The pods that a policy restricts.
    pub(crate) fn restricted_by(&self, id: &PolicyId) -> impl Iterator<Item = &PodId> {
        self.restricted.get(id).into_iter().flatten()
    }

    /// The pods of this node that have an address.
    pub(crate) fn pods(&self) -> &BTreeMap<PodId, PodPolicies> {
        &self.pods
    }

    /// Reads a policy again. Returns the pods that it restricts, or restricted before.
    fn change_policy(&mut self, cache: &Cache, id: &PolicyId) -> BTreeSet<PodId> {
        let mut pods = self.restricted.get(id).cloned().unwrap_or_default();
        self.subjects.remove(id);
        self.policies.remove(id);
        if let Some(compiled) = cache
            .policy(id)
            .and_then(|policy| Compiled::new(policy, self.set_aside.contains(id)))
        {
            let local = cache.local_in(&id.namespace);
            let selected = local.filter(|pod| compiled.subject.pods.matches(&pod.labels));
            pods.extend(selected.map(|pod| pod.id.clone()));
            self.subjects.insert(id, &compiled.subject);
            self.policies.insert(id.clone(), compiled);
        }
        pods
    }

    /// The policies of a pod; `None` if the pod is not on this node or has no address yet.
    fn configure(&self, cache: &Cache, pod: &Pod) -> Option<PodPolicies> {
        if pod.addresses.is_empty() || !cache.is_local(&pod.id) {
            return None;
        }
        let namespace = cache.namespace_labels(&pod.id.namespace);
        let candidates = self.subjects.candidates(pod, &namespace);
        let policies = candidates.iter().filter_map(|id| self.policies.get(id));
        let policies = policies.filter(|policy| policy.subject.selects(pod, &namespace));
        Some(PodPolicies {
            addresses: pod.addresses.clone(),
            ports: pod.ports.clone(),
            policies: policies
                .map(|policy| Arc::clone(&policy.in_force))
                .collect(),
        })
    }

    fn note_policies(
        &mut self,
        id: &PodId,
        before: Option<&PodPolicies>,
        now: Option<&PodPolicies>,
    ) {
        let of = |pod: Option<&PodPolicies>| -> BTreeSet<PolicyId> {
            let policies = pod.map(|pod| pod.policies.as_slice()).unwrap_or_default();
            policies.iter().map(|policy| policy.id.clone()).collect()
        };
        let (before, now) = (of(before), of(now));
        for policy in before.difference(&now) {
            if let Some(pods) = self.restricted.get_mut(policy) {
                pods.remove(id);
                if pods.is_empty() {
                    self.restricted.remove(policy);
                }
            }
        }
        for policy in now.difference(&before) {
            let pods = self.restricted.entry(policy.clone()).or_default();
            pods.insert(id.clone());
        }
    }
}
