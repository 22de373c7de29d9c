//! Which label sets the pods of the cluster have. The agent that leads needs this to look after the CiliumIdentities of
//! the whole cluster.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use shared_maps::IdentityId;

use super::{Core, state::State};
use crate::{
    identity::{cluster::WantedIdentities, cluster_object::NumberSource},
    labels::{Label, LabelSet},
};

/// Numbers and label sets of the whole cluster.
#[derive(Clone, Debug, Default)]
pub struct IdentitiesInUse {
    /// Whether every source was read once.
    pub is_synced: bool,
    /// Label sets without an object, of pods that have addresses.
    pub lacking: WantedIdentities,
    /// Objects that agents made and whose labels no pod has, and duplicates.
    pub unused: Vec<UnusedIdentity>,
}

/// An object that no pod uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnusedIdentity {
    pub id: IdentityId,
    pub labels: LabelSet,
    pub uid: Option<Arc<str>>,
    /// Whether an older object has the same labels and is used instead.
    pub is_duplicate: bool,
}

impl Core {
    /// The cost grows with the number of pods.
    pub fn identities_in_use(&self) -> IdentitiesInUse {
        self.state.identities_in_use()
    }

    /// Whether the object is still unused: it has not changed, and no pod or endpoint uses its
    /// number.
    pub fn is_unused(&self, object: &UnusedIdentity) -> bool {
        let sets = self.state.label_sets();
        let unused = self.state.unused(&sets);
        unused.into_iter().any(|one| one == *object)
    }
}

impl State {
    /// Label sets of pods and endpoints, and whether a pod with an address has them.
    fn label_sets(&self) -> HashMap<&LabelSet, bool> {
        // Replicas share one label set, which is looked at only once.
        let mut seen: HashSet<(*const Label, bool)> = HashSet::new();
        let mut sets: HashMap<&LabelSet, bool> = HashMap::new();
        for pod in self.cluster.pods.known.values() {
            let labels = &pod.at.labels;
            let has_address = !pod.at.addresses.is_empty();
            if seen.insert((labels.as_slice().as_ptr(), has_address)) {
                *sets.entry(labels).or_default() |= has_address;
            }
        }
        for endpoint in self.endpoints.iter() {
            sets.entry(&endpoint.labels).or_default();
        }
        sets
    }

    fn identities_in_use(&self) -> IdentitiesInUse {
        let sets = self.label_sets();
        let lacking = sets.iter().filter(|(_, has_address)| **has_address);
        let lacking = lacking.filter_map(|(labels, _)| {
            let wanted = self.numbers.wanted(labels, true, self.now)?;
            Some(((*labels).clone(), wanted))
        });
        IdentitiesInUse {
            is_synced: self.restoration.is_synced(),
            lacking: lacking.collect(),
            unused: self.unused(&sets),
        }
    }

    fn unused(&self, sets: &HashMap<&LabelSet, bool>) -> Vec<UnusedIdentity> {
        // An agent that does not read all pods cannot know that no pod uses an object.
        let sees_all = !self.config.pods.prunes();
        let objects = self.numbers.objects().filter(|_| sees_all);
        let unused = objects.filter(|object| {
            let is_used = !object.is_duplicate && sets.contains_key(&object.labels);
            object.source() == NumberSource::Agent && !is_used
        });
        let unused = unused.map(|object| UnusedIdentity {
            id: object.id,
            labels: object.labels.clone(),
            uid: object.uid.clone(),
            is_duplicate: object.is_duplicate,
        });
        unused.collect()
    }
}
