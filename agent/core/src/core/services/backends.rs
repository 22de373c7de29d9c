//! Backends of Services: the identities by which policy judges them.
//!
//! Pods and slices come from different sources, one a little later than the other. For [`SKEW`] at
//! most, a slice may be ahead of its pod, or behind it:
//!
//! - If a backend in the blocks of pods names a pod that no document describes, the backend is left out for this time.
//!   After that, no rule selects it. Outside of these blocks, an address is judged by its own identity at once, because
//!   an author of slices may name a pod at any address.
//!   Where pods of other nodes are not read (`--high-scale-prune`), no document is awaited: the
//!   address counts at once.
//! - A removed pod keeps its identity as a backend.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    net::IpAddr,
    sync::Arc,
};

use shared_maps::IdentityId;

use crate::{
    core::state::{
        State,
        services::backends::{Behind, service_of},
    },
    kubernetes::service_at::BackendAt,
};

impl State {
    /// Renders the Services again whose backends may have other identities.
    pub(crate) fn follow_backends(&mut self) {
        for identity in self.cluster.services.departed.take_ended(self.now) {
            self.numbers.release_endpoint(identity);
        }
        for key in self.cluster.services.take_dirty(self.now) {
            let Some(known) = self.cluster.services.get(&key) else {
                continue;
            };
            let (at, identities) = (Arc::clone(&known.at), known.identities.clone());
            let mut behind: BTreeMap<IpAddr, Behind> = BTreeMap::new();
            for backend in at.ports.iter().flat_map(|port| &port.backends) {
                if let Entry::Vacant(entry) = behind.entry(backend.address) {
                    entry.insert(self.behind_address(backend));
                }
            }
            let exceptions = self.cluster.services.exceptions(&behind, self.now);
            for (family, identity) in identities {
                let service = service_of(&at, family, &behind, &exceptions, self.now);
                let touched = self.policy.put_service(identity, Some(service));
                self.mark_dirty_peers(&touched);
            }
            self.cluster
                .services
                .set_exceptions(&key, exceptions, self.now);
        }
    }

    /// What is behind the address of a backend.
    fn behind_address(&mut self, backend: &BackendAt) -> Behind {
        if backend.address.is_unspecified() {
            // The address cannot be read: no rule selects it.
            return Behind::Known(IdentityId::UNKNOWN);
        }
        let Some((prefix, metadata)) = self.ipcache.longest_claimed(backend.address) else {
            return Behind::Known(IdentityId::UNKNOWN);
        };
        if let Some(identity) = metadata.identity() {
            // A Service is not a backend.
            if identity.is_service() {
                return Behind::Known(IdentityId::UNKNOWN);
            }
            self.cluster.services.graces.end(backend.address);
            return Behind::Known(identity);
        }
        if let Some(identity) = self.cluster.services.departed.identity_of(backend) {
            return Behind::Departed(identity);
        }
        if metadata.desired.is_none() && self.restoration.is_synced() {
            self.resolve(prefix);
        }
        let metadata = self.ipcache.get(prefix);
        let identity = metadata.and_then(|metadata| metadata.desired);
        match identity.unwrap_or(IdentityId::UNKNOWN) {
            // Only addresses in the blocks of pods and Services are unmanaged.
            IdentityId::UNMANAGED if backend.pod.is_some() && !self.config.pods.prunes() => {
                Behind::UnknownPod
            }
            identity => Behind::Known(identity),
        }
    }
}
