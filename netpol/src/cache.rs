//! The objects of the cluster on which the meaning of policies depends, and what their changes
//! affect.
//!
//! A replacement of all objects has the same result as single changes: `Cache::replace` removes and
//! puts only the objects that differ.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use crate::{
    addresses::{self, Addresses},
    contiv::{InNamespaces, PodSet, PolicyId},
    pod::{Namespace, Pod, PodId},
    pod_set::NamespaceLabels,
    policy::NetworkPolicy,
};

/// An object of one of the three kinds that matter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Object {
    /// A pod that runs on this node or another one.
    Pod(Arc<Pod>),
    /// A namespace with its labels.
    Namespace(Arc<Namespace>),
    /// A policy, which restricts pods of its namespace.
    Policy(Arc<NetworkPolicy>),
}

/// The key of an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    /// Namespace and name of a pod.
    Pod(PodId),
    /// The name of a namespace.
    Namespace(Arc<str>),
    /// Namespace and name of a policy.
    Policy(PolicyId),
}

impl Object {
    /// Kind, namespace and name.
    pub fn key(&self) -> Key {
        match self {
            Self::Pod(pod) => Key::Pod(pod.id.clone()),
            Self::Namespace(namespace) => Key::Namespace(Arc::clone(&namespace.name)),
            Self::Policy(policy) => Key::Policy(PolicyId {
                namespace: policy.namespace.as_str().into(),
                name: policy.name.as_str().into(),
            }),
        }
    }
}

/// Pods and policies that changes affected.
#[derive(Debug, Default)]
pub(crate) struct Touched {
    /// Pods that changed, pods of a namespace whose labels changed, and pods that share or shared
    /// an address with a pod that changed.
    pub(crate) pods: BTreeSet<PodId>,
    /// Policies that were added, removed or changed.
    pub(crate) policies: BTreeSet<PolicyId>,
}

/// All objects of the cluster, indexed for look-ups.
#[derive(Debug)]
pub struct Cache {
    node: Arc<str>,
    /// Pods by namespace and name.
    pods: BTreeMap<Arc<str>, BTreeMap<Arc<str>, Arc<Pod>>>,
    /// Pods of this node.
    local: BTreeSet<PodId>,
    namespaces: BTreeMap<Arc<str>, Arc<Namespace>>,
    policies: BTreeMap<PolicyId, Arc<NetworkPolicy>>,
    addresses: Addresses<PodId>,
    touched: Touched,
}

impl Cache {
    /// A cache without objects. `node` is the name of this node, whose pods are local.
    pub(crate) fn new(node: &str) -> Self {
        Self {
            node: node.into(),
            pods: BTreeMap::new(),
            local: BTreeSet::new(),
            namespaces: BTreeMap::new(),
            policies: BTreeMap::new(),
            addresses: Addresses::default(),
            touched: Touched::default(),
        }
    }

    /// Adds an object, or replaces its former version.
    pub(crate) fn put(&mut self, object: Object) {
        match object {
            Object::Pod(pod) => self.put_pod(pod),
            Object::Namespace(namespace) => {
                let name = Arc::clone(&namespace.name);
                if self.namespaces.get(&name) != Some(&namespace) {
                    self.namespaces.insert(Arc::clone(&name), namespace);
                    self.touch_namespace(&name);
                }
            }
            Object::Policy(ref policy) => {
                let Key::Policy(id) = object.key() else {
                    return;
                };
                if self.policies.get(&id) != Some(policy) {
                    self.policies.insert(id.clone(), Arc::clone(policy));
                    self.touched.policies.insert(id);
                }
            }
        }
    }

    /// Removes an object, if it exists.
    pub(crate) fn remove(&mut self, key: &Key) {
        match key {
            Key::Pod(id) => self.remove_pod(id),
            Key::Namespace(name) => {
                if self.namespaces.remove(name).is_some() {
                    self.touch_namespace(name);
                }
            }
            Key::Policy(id) => {
                if self.policies.remove(id).is_some() {
                    self.touched.policies.insert(id.clone());
                }
            }
        }
    }

    /// Replaces all objects by these.
    pub(crate) fn replace(&mut self, objects: Vec<Object>) {
        let stay: BTreeSet<Key> = objects.iter().map(Object::key).collect();
        let gone: Vec<Key> = self.keys().filter(|key| !stay.contains(key)).collect();
        for key in gone {
            self.remove(&key);
        }
        for object in objects {
            self.put(object);
        }
    }

    /// Returns what was touched since the last call.
    pub(crate) fn take_touched(&mut self) -> Touched {
        std::mem::take(&mut self.touched)
    }

    /// The pod of this name.
    pub fn pod(&self, id: &PodId) -> Option<&Arc<Pod>> {
        self.pods.get(&id.namespace)?.get(&id.name)
    }

    /// Every pod.
    pub fn pods(&self) -> impl Iterator<Item = &Arc<Pod>> {
        self.pods.values().flat_map(BTreeMap::values)
    }

    /// Whether a pod runs on this node.
    pub fn is_local(&self, id: &PodId) -> bool {
        self.local.contains(id)
    }

    /// Pods of the namespace that run on this node.
    pub(crate) fn local_in(&self, namespace: &Arc<str>) -> impl Iterator<Item = &Arc<Pod>> {
        let first = PodId {
            namespace: Arc::clone(namespace),
            name: "".into(),
        };
        let ids = self.local.range(first..);
        let ids = ids.take_while(move |id| id.namespace == *namespace);
        ids.filter_map(|id| self.pod(id))
    }

    /// The policy of this name.
    pub fn policy(&self, id: &PolicyId) -> Option<&Arc<NetworkPolicy>> {
        self.policies.get(id)
    }

    /// Every policy.
    pub fn policies(&self) -> impl ExactSizeIterator<Item = &Arc<NetworkPolicy>> {
        self.policies.values()
    }

    /// Addresses with which a pod is a peer: all addresses that it claims and no younger pod
    /// claims.
    pub fn addresses(&self, pod: &Pod) -> impl Iterator<Item = IpAddr> {
        let claimed = pod.addresses.iter().copied();
        claimed.filter(|address| self.addresses.holder(*address) == Some(&pod.id))
    }

    /// Number of addresses that pods claim.
    pub(crate) fn address_count(&self) -> usize {
        self.addresses.len()
    }

    /// The pods of this node that claim an address, sorted. Each of them restricts it by its
    /// policies.
    pub fn local_at(&self, address: IpAddr) -> BTreeSet<&PodId> {
        let claimants = self.addresses.claimants(address);
        claimants.filter(|pod| self.is_local(pod)).collect()
    }

    /// A text for each address that several pods claim, among them a pod of this node. It says what
    /// restricts the address.
    pub fn conflicts(&self) -> impl Iterator<Item = String> {
        self.addresses.shared().filter_map(|(address, holder, others)| {
            let here = self.local_at(address).into_iter();
            let here: Vec<String> = here.map(ToString::to_string).collect();
            let others: Vec<String> = others.iter().map(ToString::to_string).collect();
            (!here.is_empty()).then(|| {
                format!(
                    "the address {address} is claimed by pods {holder} and {}: its packets have to be allowed by the \
                     policies of {}; as a peer it is {holder} (the younger, or the first by name); remove the pod \
                     that is gone",
                    others.join(", "),
                    here.join(", and by those of "),
                )
            })
        })
    }

    /// The pod that has an address.
    pub fn pod_at(&self, address: IpAddr) -> Option<&Arc<Pod>> {
        self.pod(self.addresses.holder(address)?)
    }

    /// Labels of a namespace, or only its name if it has no object.
    pub(crate) fn namespace_labels(&self, name: &str) -> NamespaceLabels<'_> {
        match self.namespaces.get(name) {
            Some(namespace) => NamespaceLabels::Known(&namespace.labels),
            None => NamespaceLabels::unknown(name),
        }
    }

    /// The pods that a set selects.
    pub fn selected(&self, set: &PodSet) -> impl Iterator<Item = &Arc<Pod>> {
        let all = self.pods.iter();
        let only = match &set.namespaces {
            InNamespaces::Named(name) => Some(self.pods.get_key_value(name)),
            InNamespaces::Selected(_) => None,
        };
        let all = all.filter(move |_| only.is_none());
        let namespaces = only.flatten().into_iter().chain(all).filter(|(name, _)| {
            let labels = self.namespace_labels(name);
            set.selects_in(name, &labels)
        });
        let pods = namespaces.flat_map(|(_, pods)| pods.values());
        pods.filter(|pod| set.pods.matches(&pod.labels))
    }

    /// Warnings for the author of the documents: addresses that several pods of other nodes claim,
    /// and namespaces without an object. Each comes with the key of a document.
    pub fn warnings(&self) -> Vec<(String, String)> {
        let shared = self.addresses.shared();
        let elsewhere = shared.filter(|(address, ..)| self.local_at(*address).is_empty());
        let mut found: Vec<(String, String)> = elsewhere
            .map(|(address, holder, others)| addresses::warning(address, holder, &others))
            .collect();
        for (namespace, pods) in &self.pods {
            let Some(pod) = pods.values().next() else {
                continue;
            };
            if !self.namespaces.contains_key(namespace) {
                let warning = format!(
                    "metadata.namespace: there is no Namespace document for {namespace}: its pods \
                     ({}) have no labels of their namespace; a namespaceSelector selects them by the \
                     name of the namespace only",
                    pods.len()
                );
                found.push((format!("Pod/{}", pod.id), warning));
            }
        }
        found
    }

    fn keys(&self) -> impl Iterator<Item = Key> {
        let pods = self.pods().map(|pod| Key::Pod(pod.id.clone()));
        let namespaces = self.namespaces.keys().cloned().map(Key::Namespace);
        let policies = self.policies.keys().cloned().map(Key::Policy);
        pods.chain(namespaces).chain(policies)
    }

    fn put_pod(&mut self, pod: Arc<Pod>) {
        let id = pod.id.clone();
        if self.pod(&id) == Some(&pod) {
            return;
        }
        match pod.node.as_ref() == Some(&self.node) {
            true => self.local.insert(id.clone()),
            false => self.local.remove(&id),
        };
        self.claim(&id, pod.addresses.as_slice(), pod.created);
        let pods = self.pods.entry(Arc::clone(&id.namespace)).or_default();
        pods.insert(Arc::clone(&id.name), pod);
    }

    fn remove_pod(&mut self, id: &PodId) {
        let Some(pods) = self.pods.get_mut(&id.namespace) else {
            return;
        };
        if pods.remove(&id.name).is_none() {
            return;
        }
        if pods.is_empty() {
            self.pods.remove(&id.namespace);
        }
        self.local.remove(id);
        self.claim(id, &[], None);
    }

    fn claim(&mut self, id: &PodId, addresses: &[IpAddr], created: Option<u64>) {
        let others = self.addresses.set(id, addresses.into(), created);
        self.touched.pods.extend(others);
        self.touched.pods.insert(id.clone());
    }

    fn touch_namespace(&mut self, name: &Arc<str>) {
        let pods = self.pods.get(name).into_iter().flat_map(BTreeMap::values);
        self.touched.pods.extend(pods.map(|pod| pod.id.clone()));
    }
}
