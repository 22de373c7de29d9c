//! Where endpoints are, for proxies that cannot read the maps.

use shared_maps::IdentityId;

use crate::core::state::{
    State,
    location::{Directory, EndpointLocation},
};

impl State {
    pub(in crate::core) fn locations(&self) -> Vec<EndpointLocation> {
        let locations = self.endpoints.iter().map(|endpoint| EndpointLocation {
            id: endpoint.id,
            identity: endpoint.identity,
            ifindex: endpoint.spec.interface.ifindex,
            addresses: endpoint.addresses().collect(),
        });
        locations.collect()
    }

    pub(in crate::core) fn directory(&self) -> Directory {
        let allocated = self.numbers.allocated().into_iter();
        let mut identities: Vec<IdentityId> = allocated.map(|(id, ..)| id).collect();
        identities.sort_unstable();
        let mut prefixes = Vec::with_capacity(self.ipcache.realised());
        self.ipcache.for_each(|prefix, metadata| {
            let identity = metadata.realised.or(metadata.desired);
            prefixes.push((prefix, identity.unwrap_or(IdentityId::UNKNOWN)));
        });
        Directory {
            locations: self.locations(),
            identities,
            former: self.restoration.former_rules().clone(),
            prefixes,
        }
    }
}
