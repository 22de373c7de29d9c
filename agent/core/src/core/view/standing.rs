//! Whether one endpoint is in force, and if not, what is missing.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;
use shared_maps::EndpointId;

use crate::{
    core::{Core, state::State},
    endpoint::endpoint::Endpoint,
};

/// Whether an endpoint is in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The core has no endpoint of this key.
    Absent,
    /// The core cannot accept the endpoint now, for this reason.
    Waiting(String),
    /// The core has the endpoint, but a part of it is not in the datapath. With the reason, if a step failed.
    Incomplete(Option<String>),
    /// The files, the policy, the addresses and the programs of the endpoint are in force.
    InForce(EndpointId),
}

impl Core {
    /// Whether the endpoint of this key is in force.
    pub fn standing(&self, key: &str) -> Standing {
        let state = &self.state;
        let endpoint = state.endpoints.by_key(key);
        let endpoint = endpoint.and_then(|id| state.endpoints.get(id));
        let mut waiting = state.endpoints.waiting();
        let waiting = waiting.find(|(spec, _)| spec.key == key);
        match (waiting, endpoint) {
            (Some((_, reason)), _) => Standing::Waiting(reason.clone()),
            (None, None) => Standing::Absent,
            (None, Some(endpoint)) if state.is_in_force(endpoint) => Standing::InForce(endpoint.id),
            (None, Some(endpoint)) => Standing::Incomplete(endpoint.why_not().cloned()),
        }
    }
}

impl Core {
    /// Pods whose endpoint the core cannot take: nothing of it is in force.
    pub fn pods_without_endpoint(&self) -> BTreeSet<String> {
        let endpoints = &self.state.endpoints;
        let waiting = endpoints.waiting().map(|(spec, _)| spec);
        let without = waiting.filter(|spec| endpoints.by_key(&spec.key).is_none());
        without.filter_map(|spec| spec.pod.clone()).collect()
    }

    /// Addresses of the endpoints that are in force as a whole.
    pub fn addresses_in_force(&self) -> BTreeSet<IpAddr> {
        let state = &self.state;
        let endpoints = state.endpoints.iter();
        let in_force = endpoints.filter(|endpoint| state.is_in_force(endpoint));
        in_force.flat_map(Endpoint::addresses).collect()
    }
}

impl State {
    fn is_in_force(&self, endpoint: &Endpoint) -> bool {
        let has_identity = |address| {
            let realised = self.ipcache.in_force_at(IpNet::from(address));
            realised == Some(endpoint.identity)
        };
        !endpoint.restored
            && endpoint.why_not().is_none()
            && endpoint.policy_map.is_some()
            && endpoint.dirty_peers.is_none()
            && endpoint.attached.as_ref() == Some(&endpoint.attachment())
            && endpoint.addresses().all(has_identity)
    }
}
