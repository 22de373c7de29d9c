//! Pods of the cluster that the core knows.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use shared_maps::IdentityId;

use crate::{kubernetes::pod_at::PodAt, labels::LabelSet};

/// The pods that the cluster has.
#[derive(Debug, Default)]
pub(crate) struct Pods {
    pub(crate) known: BTreeMap<Arc<str>, KnownPod>,
    /// Pods with addresses and without an identity: no number was free.
    pub(crate) without_identity: BTreeSet<Arc<str>>,
    /// Warnings for the authors of the cluster's documents.
    warnings: Vec<String>,
}

#[derive(Debug)]
pub(crate) struct KnownPod {
    pub(crate) at: PodAt,
    /// `None` while the pod has no address, or while no number is free.
    pub(crate) identity: Option<IdentityId>,
}

impl Pods {
    pub(crate) fn len(&self) -> usize {
        self.known.len()
    }

    /// Labels of the pod `namespace/name`.
    pub(crate) fn labels_of(&self, key: &str) -> Option<&LabelSet> {
        self.known.get(key).map(|pod| &pod.at.labels)
    }

    /// Whether the pod `namespace/name` is the one with this uid; true if one of the two has no uid.
    pub(crate) fn is_one(&self, key: &str, uid: &str) -> bool {
        let known = self.known.get(key).and_then(|pod| pod.at.uid.as_deref());
        known.is_none_or(|known| known == uid)
    }

    /// Addresses of the pod `namespace/name`.
    pub(crate) fn addresses_of(&self, key: &str) -> &[IpAddr] {
        self.known
            .get(key)
            .map_or(&[], |pod| pod.at.addresses.as_slice())
    }

    /// Whether pods wait for a number.
    pub(crate) fn lacks_identities(&self) -> bool {
        !self.without_identity.is_empty()
    }

    /// Pods that wait for a number.
    pub(crate) fn without_identity(&self) -> impl Iterator<Item = &str> {
        self.without_identity.iter().map(AsRef::as_ref)
    }

    /// Replaces the list of warnings about the cluster's documents.
    pub(crate) fn warn(&mut self, warnings: Vec<String>) {
        self.warnings = warnings;
    }

    /// Warnings for the authors of the cluster's documents.
    pub(crate) fn warnings(&self) -> &[String] {
        &self.warnings
    }
}
