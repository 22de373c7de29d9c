//! Joins the objects of a cluster: pods with their namespaces, Services with their slices.
//!
//! Pure: objects are put in and removed, and [`Book::changes`] returns the difference since the
//! last call. Objects may come in any order: a slice waits for its Service, and a pod has the labels
//! of its namespace once that is there.

mod identities;
mod services;
mod workloads;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use netpol::addresses::Addresses;

use self::{
    identities::Identities,
    services::Services,
    workloads::{Workload, Workloads},
};
use super::{
    labels::{self, LabelFilter},
    local_pods::{LocalPod, LocalPods},
    pod_at::PodAt,
    service_at::ServiceAt,
};
use crate::{
    identity::cluster_object::CiliumIdentity,
    labels::{Label, LabelSet},
    policy::{
        cluster::{endpoint::CiliumEndpoint, namespace::Namespace, pod::Pod},
        document::{Body, PolicyDocument},
        parse::CLUSTER,
    },
    source_event::SourceEvent,
    users::release,
};

/// What changed since the last call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// CiliumIdentities: the numbers that the cluster has for label sets.
    pub identities: Vec<SourceEvent<CiliumIdentity>>,
    /// Pods: first those that get an address, so that an address that moves from one pod to another
    /// is never without a pod.
    pub pods: Vec<SourceEvent<PodAt>>,
    pub services: Vec<SourceEvent<ServiceAt>>,
}

/// Joins objects of the cluster into the pods and Services that the core needs.
#[derive(Debug)]
pub struct Book {
    filter: LabelFilter,
    cluster: String,
    /// This node; `None` = its pods are not wanted.
    node: Option<String>,
    /// Pods of this node that have an address.
    local: LocalPods,
    local_changed: bool,
    pods: BTreeMap<Arc<str>, KnownPod>,
    workloads: Workloads,
    /// Pods as Cilium describes them. A [`Pod`] of the same name takes precedence.
    endpoints: BTreeMap<Arc<str>, Arc<CiliumEndpoint>>,
    namespaces: BTreeMap<String, Arc<Namespace>>,
    /// How many of `pods` each namespace has, whether it has a document or not.
    pods_of: BTreeMap<String, usize>,
    identities: Identities,
    services: Services,
    addresses: Addresses<Arc<str>>,
    /// Pods that may have changed since the last call.
    touched: BTreeSet<Arc<str>>,
    /// Pods as they were returned last.
    returned: BTreeMap<Arc<str>, PodAt>,
    /// Label sets of the pods: replicas share one.
    sets: BTreeMap<LabelSet, usize>,
    /// Names of the pods' nodes, each stored once.
    node_names: BTreeSet<Arc<str>>,
}

/// What is kept of a [`Pod`].
#[derive(Debug)]
struct KnownPod {
    workload: Arc<Workload>,
    uid: Option<Arc<str>>,
    addresses: Arc<[IpAddr]>,
    created: Option<u64>,
    node: Option<Arc<str>>,
    /// Whether it runs on this node.
    is_here: bool,
}

impl Book {
    /// An empty book. `cluster` is the name of the cluster, which every pod has as a label.
    pub fn new(filter: LabelFilter, cluster: &str) -> Self {
        Self {
            filter,
            cluster: cluster.to_owned(),
            node: None,
            local: LocalPods::new(),
            local_changed: false,
            pods: BTreeMap::new(),
            workloads: Workloads::default(),
            endpoints: BTreeMap::new(),
            namespaces: BTreeMap::new(),
            pods_of: BTreeMap::new(),
            identities: Identities::default(),
            services: Services::default(),
            addresses: Addresses::default(),
            touched: BTreeSet::new(),
            returned: BTreeMap::new(),
            sets: BTreeMap::new(),
            node_names: BTreeSet::new(),
        }
    }

    /// The same, with the pods of this node.
    pub fn on_node(self, node: &str) -> Self {
        let node = Some(node.to_owned());
        Self { node, ..self }
    }

    /// Adds an object, or replaces its former version. Documents of other kinds are ignored.
    pub fn put(&mut self, document: &PolicyDocument) {
        match &document.body {
            Body::Pod(pod) => {
                let key = self.touch(&pod.namespace, &pod.name);
                self.put_pod(key, pod);
            }
            Body::Endpoint(endpoint) => {
                let key = self.touch(&endpoint.namespace, &endpoint.name);
                self.endpoints.insert(key, Arc::clone(endpoint));
            }
            Body::Namespace(namespace) => {
                self.touch_namespace(&namespace.name);
                self.workloads.forget(&namespace.name);
                let name = namespace.name.clone();
                self.namespaces.insert(name, Arc::clone(namespace));
            }
            Body::Service(service) => self.services.put_service(service),
            Body::Slice(slice) => {
                let pods = &self.pods;
                let known = |pod: &str| pods.get_key_value(pod).map(|(key, _)| Arc::clone(key));
                self.services.put_slice(slice, known);
            }
            Body::Identity(identity) => self.identities.put(CiliumIdentity {
                is_document: document.source != CLUSTER,
                ..identity.clone()
            }),
            Body::Rules(_)
            | Body::NetworkPolicy { .. }
            | Body::Group(_)
            | Body::Node(_)
            | Body::ServiceCidr(_)
            | Body::World(_)
            | Body::NameResolver(_) => {}
        }
    }

    /// Removes the object of this document key, if it is known.
    pub(crate) fn remove(&mut self, key: &str) {
        let (kind, key) = key.split_once('/').unwrap_or((key, ""));
        match kind {
            "Pod" => {
                if let Some((key, pod)) = self.pods.remove_entry(key) {
                    self.touched.insert(key);
                    release(&mut self.pods_of, &pod.workload.namespace);
                    self.workloads.remove(&pod.workload);
                }
            }
            "CiliumEndpoint" => {
                if let Some((key, _)) = self.endpoints.remove_entry(key) {
                    self.touched.insert(key);
                }
            }
            "Namespace" => {
                self.touch_namespace(key);
                self.workloads.forget(key);
                self.namespaces.remove(key);
            }
            "CiliumIdentity" => self.identities.remove(key),
            "Service" => self.services.remove_service(key),
            "EndpointSlice" => self.services.remove_slice(key),
            _ => {}
        }
    }

    /// What changed since the last call.
    pub fn changes(&mut self) -> Changes {
        let touched = self.give_addresses();
        let (mut gains, mut others, mut gone) = (Vec::new(), Vec::new(), Vec::new());
        for key in touched {
            let now = self.pod_at(&key);
            self.follow_local(&key, now.as_ref());
            let before = self.returned.remove(&key);
            if let Some(pod) = &now {
                *self.sets.entry(pod.labels.clone()).or_default() += 1;
            }
            if let Some(pod) = &before {
                release(&mut self.sets, &pod.labels);
            }
            match (before, now) {
                (None, None) => {}
                (Some(_), None) => gone.push(SourceEvent::Delete(key.to_string())),
                (before, Some(now)) => {
                    self.returned.insert(key, now.clone());
                    let had = |address| before.iter().any(|pod| pod.addresses.contains(address));
                    if before.as_ref() == Some(&now) {
                        continue;
                    }
                    match now.addresses.iter().all(had) {
                        true => others.push(SourceEvent::Apply(now)),
                        false => gains.push(SourceEvent::Apply(now)),
                    }
                }
            }
        }
        gains.append(&mut others);
        gains.append(&mut gone);
        Changes {
            identities: self.identities.changes(),
            pods: gains,
            services: self.services.changes(),
        }
    }

    /// The pods of this node, if they changed since the last call.
    pub(crate) fn take_local(&mut self) -> Option<LocalPods> {
        std::mem::take(&mut self.local_changed).then(|| self.local.clone())
    }

    /// Warnings for the authors of the documents: about addresses of several pods, label sets with
    /// several numbers, and namespaces without a document. Each has the key of a document.
    pub fn warnings(&self) -> Vec<(String, String)> {
        let mut found: Vec<(String, String)> = self.addresses.conflicts().collect();
        found.extend(self.identities.conflicts());
        let unknown = self.pods_of.iter();
        let unknown = unknown.filter(|(namespace, _)| !self.namespaces.contains_key(*namespace));
        found.extend(unknown.map(|(namespace, pods)| {
            let first = self.pods_in(namespace).next();
            let key = format!("Pod/{}", first.map(AsRef::as_ref).unwrap_or_default());
            let warning = format!(
                "metadata.namespace: there is no Namespace document for {namespace}: its pods \
                 ({pods}) have no labels of their namespace, and rules with a namespaceSelector do \
                 not select them"
            );
            (key, warning)
        }));
        found
    }

    /// Whether there is a Pod object; CiliumEndpoints do not count.
    pub(crate) fn has_pods(&self) -> bool {
        !self.pods.is_empty()
    }

    /// How many Namespace objects there are.
    pub(crate) fn namespaces(&self) -> usize {
        self.namespaces.len()
    }

    /// Whether a label of a pod is part of its identity.
    pub(crate) fn gives(&self, label: &Label) -> bool {
        self.filter.keeps(label)
    }

    fn put_pod(&mut self, key: Arc<str>, pod: &Pod) {
        let known = KnownPod {
            workload: self.workloads.add(pod),
            // A copy: any remaining part of a freed document would keep a whole page of the heap.
            uid: pod.uid.as_deref().map(Arc::from),
            addresses: pod.addresses.as_slice().into(),
            created: pod.created,
            node: pod.node.as_deref().map(|name| self.node_name(name)),
            is_here: self.node.is_some() && pod.node == self.node,
        };
        match self.pods.insert(key, known) {
            Some(before) => self.workloads.remove(&before.workload),
            None => *self.pods_of.entry(pod.namespace.clone()).or_default() += 1,
        }
    }

    /// The name of a node, as its other pods have it.
    fn node_name(&mut self, name: &str) -> Arc<str> {
        if let Some(known) = self.node_names.get(name) {
            return Arc::clone(known);
        }
        self.node_names.retain(|name| Arc::strong_count(name) > 1);
        let name: Arc<str> = name.into();
        self.node_names.insert(Arc::clone(&name));
        name
    }

    /// Notes a pod; gives its key.
    fn touch(&mut self, namespace: &str, name: &str) -> Arc<str> {
        let key: Arc<str> = format!("{namespace}/{name}").into();
        let key = match self.pods.get_key_value(&key) {
            Some((known, _)) => Arc::clone(known),
            None => key,
        };
        self.touched.insert(Arc::clone(&key));
        key
    }

    fn touch_namespace(&mut self, name: &str) {
        let pods: Vec<_> = self.pods_in(name).map(Arc::clone).collect();
        self.touched.extend(pods);
    }

    /// Keys of the pods of a namespace.
    fn pods_in(&self, namespace: &str) -> impl Iterator<Item = &Arc<str>> {
        let first: Arc<str> = format!("{namespace}/").into();
        let pods = self.pods.range(Arc::clone(&first)..).map(|(key, _)| key);
        pods.take_while(move |key| key.starts_with(&*first))
    }

    /// Notes the addresses of touched pods. Gives these pods, and those whose addresses change with
    /// them.
    fn give_addresses(&mut self) -> BTreeSet<Arc<str>> {
        let mut all = std::mem::take(&mut self.touched);
        for key in all.clone() {
            let (addresses, created) = match (self.pods.get(&key), self.endpoints.get(&key)) {
                (Some(pod), _) => (Arc::clone(&pod.addresses), pod.created),
                (None, Some(endpoint)) => (endpoint.addresses.as_slice().into(), endpoint.created),
                (None, None) => (Arc::default(), None),
            };
            all.extend(self.addresses.set(&key, addresses, created));
        }
        all
    }

    fn follow_local(&mut self, key: &Arc<str>, now: Option<&PodAt>) {
        let pod = self.pods.get(key);
        let is_here = pod.is_some_and(|pod| pod.is_here);
        let here = now.filter(|pod| is_here && !pod.addresses.is_empty());
        let here = here.map(|pod| LocalPod {
            uid: pod.uid.clone(),
            addresses: pod.addresses.clone(),
        });
        if self.local.get(key) != here.as_ref() {
            self.local_changed = true;
            match here {
                Some(pod) => self.local.insert(Arc::clone(key), pod),
                None => self.local.remove(key),
            };
        }
    }

    fn pod_at(&mut self, key: &Arc<str>) -> Option<PodAt> {
        let (kind, labels, addresses) = match (self.pods.get(key), self.endpoints.get(key)) {
            (Some(pod), _) => {
                let (filter, cluster) = (&self.filter, &self.cluster);
                let namespace = self.namespaces.get(&pod.workload.namespace);
                let make = |workload: &Workload| labels_of(filter, cluster, workload, namespace);
                let labels = self.workloads.identity(&pod.workload, make);
                ("Pod", labels, &*pod.addresses)
            }
            (None, Some(endpoint)) => {
                let labels = endpoint.labels.iter().cloned();
                let all = labels.chain(endpoint.ports.labels()).collect();
                (
                    "CiliumEndpoint",
                    LabelSet::new(all),
                    endpoint.addresses.as_slice(),
                )
            }
            (None, None) => return None,
        };
        let pod = self.pods.get(key);
        let uid = pod.and_then(|pod| pod.uid.clone());
        let node = pod.and_then(|pod| pod.node.clone());
        let own = addresses.iter().copied();
        let own = own.filter(|address| self.addresses.holder(*address) == Some(key));
        Some(PodAt {
            key: Arc::clone(key),
            document: format!("{kind}/{key}").into(),
            uid,
            node,
            labels: match self.sets.get_key_value(&labels) {
                Some((known, _)) => known.clone(),
                None => labels,
            },
            addresses: own.collect(),
        })
    }
}

/// Labels of a workload's identity.
fn labels_of(
    filter: &LabelFilter,
    cluster: &str,
    workload: &Workload,
    namespace: Option<&Arc<Namespace>>,
) -> LabelSet {
    let mut labels = labels::of_pod(
        filter,
        cluster,
        &workload.namespace,
        &workload.labels,
        workload.service_account.as_deref(),
        namespace.map(|namespace| &namespace.labels),
    );
    labels.extend(workload.ports.labels());
    LabelSet::new(labels)
}

#[cfg(test)]
mod tests;
