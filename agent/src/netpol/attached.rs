//! Pods that the CNI plugin added: their addresses count at once, even if no document has them yet.
//!
//! An address that the plugin reported is the pod's until the runtime removes the pod. Documents may be
//! late: then they give a pod no address, or the address of another pod.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::PathBuf,
    sync::Arc,
};

use netpol::pod::{Pod, PodId};

/// A pod's interface as the plugin described it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AttachedPod {
    /// Name of the attachment.
    pub(super) key: String,
    /// Path of its network namespace, if this process sees it.
    pub(super) netns: Option<PathBuf>,
    pub(super) uid: Option<Arc<str>>,
    /// Addresses that the interface was given.
    pub(super) addresses: Vec<IpAddr>,
    /// The pod as its document had it last.
    pub(super) pod: Arc<Pod>,
    /// Number of the state from which on this pod is complete.
    pub(super) since: Option<u64>,
}

/// A pod as its document describes it.
#[derive(Clone, Debug)]
struct Known {
    uid: Option<Arc<str>>,
    pod: Arc<Pod>,
}

impl Known {
    fn is(&self, uid: Option<&Arc<str>>) -> bool {
        match (&self.uid, uid) {
            (Some(own), Some(uid)) => own == uid,
            _ => true,
        }
    }

    /// Whether this pod was made after `former`, which has the same name.
    fn replaces(&self, former: &AttachedPod) -> bool {
        let (now, then) = (self.pod.created, former.pod.created);
        now.zip(then).is_some_and(|(now, then)| now > then)
    }
}

/// The pods of the plugin, and what documents say about pods.
#[derive(Debug)]
pub(super) struct Attached {
    node: Arc<str>,
    pods: BTreeMap<PodId, AttachedPod>,
    /// The pod that each address belongs to.
    held: BTreeMap<IpAddr, PodId>,
    /// Pods of documents that may run on this node, or that lost an address to a pod of the plugin.
    known: BTreeMap<PodId, Known>,
}

/// A change of one pod for the pipeline.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Effect {
    Put(Arc<Pod>),
    Remove(PodId),
}

/// Why a pod is not known well enough to be under policy.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NotKnown {
    #[error(
        "no Pod document of {0} has arrived: its labels are not known; is the API server or its relay away, see `netpol status`?"
    )]
    NoDocument(PodId),
    /// The document describes a former pod of that name.
    #[error(
        "the Pod document of {pod} is of another pod with that name (uid {known}, not {uid}): the new one has not arrived"
    )]
    Other {
        pod: PodId,
        /// Uid in the document.
        known: Arc<str>,
        /// Uid that the runtime gives.
        uid: Arc<str>,
    },
    #[error(
        "the Pod document of {pod} has spec.nodeName {named}, and this node is {node}; --node-name sets the name"
    )]
    OtherNode {
        pod: PodId,
        /// Name in the document.
        named: Arc<str>,
        /// Name that this process was given.
        node: Arc<str>,
    },
}

impl Attached {
    pub(super) fn new(node: &str) -> Self {
        Self {
            node: node.into(),
            pods: BTreeMap::new(),
            held: BTreeMap::new(),
            known: BTreeMap::new(),
        }
    }

    /// Takes a document's pod.
    pub(super) fn put(&mut self, pod: Arc<Pod>, uid: Option<Arc<str>>) -> Vec<Effect> {
        let id = pod.id.clone();
        let known = Known { uid, pod };
        let mut effects = Vec::new();
        if let Some(attached) = self.pods.get_mut(&id) {
            if known.is(attached.uid.as_ref()) {
                attached.pod = Arc::clone(&known.pod);
            } else if known.replaces(attached) {
                effects = self.detach(|attached| attached.pod.id == id).1;
            }
        }
        self.known.insert(id.clone(), known);
        effects.push(self.effect(&id));
        if let Some(Effect::Put(counts)) = effects.last()
            && self.is_elsewhere_and_whole(&id, counts)
        {
            self.known.remove(&id);
        }
        effects
    }

    /// Whether a document's pod runs on another node and `counts` is the pod as its document has it.
    fn is_elsewhere_and_whole(&self, id: &PodId, counts: &Arc<Pod>) -> bool {
        let known = self.known.get(id).map(|known| &known.pod);
        let is_here = |node: &Arc<str>| *node == self.node;
        known == Some(counts) && counts.node.as_ref().is_some_and(|node| !is_here(node))
    }

    /// Removes a pod's document. A pod of the plugin stays until the runtime removes it.
    pub(super) fn remove(&mut self, id: &PodId) -> Effect {
        self.known.remove(id);
        self.effect(id)
    }

    /// What a document has about a pod that the plugin adds.
    pub(super) fn document(
        &self,
        id: &PodId,
        uid: Option<&Arc<str>>,
        elsewhere: Option<&Arc<Pod>>,
    ) -> Result<Arc<Pod>, NotKnown> {
        let known = self.known.get(id);
        let node = known.map(|known| &known.pod).or(elsewhere);
        let node = node.and_then(|pod| pod.node.clone());
        if let Some(named) = node.filter(|node| *node != self.node) {
            return Err(NotKnown::OtherNode {
                pod: id.clone(),
                named,
                node: Arc::clone(&self.node),
            });
        }
        let known = known.ok_or_else(|| NotKnown::NoDocument(id.clone()))?;
        if let (Some(own), Some(uid)) = (&known.uid, uid)
            && own != uid
        {
            return Err(NotKnown::Other {
                pod: id.clone(),
                known: Arc::clone(own),
                uid: Arc::clone(uid),
            });
        }
        Ok(Arc::clone(&known.pod))
    }

    /// Takes a pod of the plugin. `others` are pods of documents with one of its addresses.
    pub(super) fn attach(&mut self, pod: AttachedPod, others: Vec<Arc<Pod>>) -> Vec<Effect> {
        let id = pod.pod.id.clone();
        self.take_out(&id);
        let mut changed = BTreeSet::from([id.clone()]);
        for address in &pod.addresses {
            let Some(former) = self.held.insert(*address, id.clone()) else {
                continue;
            };
            // The runtime gave the address to a new pod. So it removed the former one, and that request did not
            // arrive.
            if let Some(lost) = self.pods.get_mut(&former) {
                lost.addresses.retain(|own| own != address);
                if lost.addresses.is_empty() {
                    self.take_out(&former);
                }
            }
            changed.insert(former);
        }
        self.pods.insert(id, pod);
        for other in others {
            let id = other.id.clone();
            changed.insert(id.clone());
            if !self.pods.contains_key(&id) {
                let known = Known {
                    uid: None,
                    pod: other,
                };
                self.known.entry(id).or_insert(known);
            }
        }
        changed.iter().map(|id| self.effect(id)).collect()
    }

    /// Removes the attachments for which `is_gone` is true. Returns their addresses, and the changes of pods.
    pub(super) fn detach(
        &mut self,
        is_gone: impl Fn(&AttachedPod) -> bool,
    ) -> (Vec<AttachedPod>, Vec<Effect>) {
        let gone = self.pods.iter().filter(|(_, pod)| is_gone(pod));
        let gone: Vec<PodId> = gone.map(|(id, _)| id.clone()).collect();
        let removed: Vec<_> = gone.iter().filter_map(|id| self.take_out(id)).collect();
        let freed: BTreeSet<IpAddr> = removed
            .iter()
            .flat_map(|pod| pod.addresses.clone())
            .collect();
        let claims = |known: &Known| known.pod.addresses.iter().any(|own| freed.contains(own));
        let claiming = self.known.iter().filter(|(_, known)| claims(known));
        let claiming = claiming.map(|(id, _)| id.clone());
        let changed: BTreeSet<PodId> = claiming.chain(gone).collect();
        let effects = changed.iter().map(|id| self.effect(id)).collect();
        (removed, effects)
    }

    /// All pods of the plugin.
    pub(super) fn pods(&self) -> impl Iterator<Item = &AttachedPod> {
        self.pods.values()
    }

    pub(super) fn by_key(&mut self, key: &str) -> Option<&mut AttachedPod> {
        self.pods.values_mut().find(|pod| pod.key == key)
    }

    fn take_out(&mut self, id: &PodId) -> Option<AttachedPod> {
        let pod = self.pods.remove(id)?;
        self.held.retain(|_, holder| holder != id);
        Some(pod)
    }

    /// A pod with the addresses that count: those that the plugin reported, and those of its document that belong to
    /// no other pod.
    fn effect(&self, id: &PodId) -> Effect {
        let attached = self.pods.get(id);
        let known = self.known.get(id);
        let is_it =
            |known: &&Known| attached.is_none_or(|attached| known.is(attached.uid.as_ref()));
        let known = known.filter(is_it).map(|known| &known.pod);
        let Some(pod) = known.or(attached.map(|attached| &attached.pod)) else {
            return Effect::Remove(id.clone());
        };
        let mut addresses = attached
            .map(|pod| pod.addresses.clone())
            .unwrap_or_default();
        let free = |address: &&IpAddr| !self.held.contains_key(*address);
        addresses.extend(pod.addresses.iter().filter(free));
        let here = attached.map(|_| Arc::clone(&self.node));
        let node = here.or_else(|| pod.node.clone());
        if addresses == pod.addresses && node == pod.node {
            return Effect::Put(Arc::clone(pod));
        }
        Effect::Put(Arc::new(Pod {
            addresses,
            node,
            ..Pod::clone(pod)
        }))
    }
}

#[cfg(test)]
mod tests;
