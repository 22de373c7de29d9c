//! NetworkPolicies of Kubernetes, from documents to the entries of policy maps.

use std::{collections::BTreeMap, net::IpAddr};

use shared_maps::{
    EndpointId, IdentityId,
    policy::{EGRESS, INGRESS, PolicyKey, PolicyValue},
};

use super::{
    oracle::identity,
    scenario::{Node, spec},
};
use crate::{
    core::Event,
    endpoint::spec::EndpointSpec,
    labels::{K8S, Label, NAMESPACE_KEY, NAMESPACE_LABELS},
    named_port::NamedPorts,
    policy::compute::{decide, longest},
    source_event::SourceEvent,
};

mod beside_cilium;
mod conformance;
mod netpol_parity;
mod parity;
mod world;

/// A pod of the node, with the labels of its namespace.
struct PodSpec<'a> {
    /// `namespace/name`: the endpoint's key.
    key: String,
    host: u8,
    namespace: &'a str,
    labels: &'a BTreeMap<String, String>,
    namespace_labels: &'a BTreeMap<String, String>,
    /// Named ports, such as `http=80/TCP`.
    ports: &'a [String],
}

impl PodSpec<'_> {
    fn endpoint(&self) -> EndpointSpec {
        let own = self
            .labels
            .iter()
            .map(|(key, value)| Label::new(K8S, key, value));
        let inherited = self.namespace_labels.iter();
        let inherited = inherited
            .map(|(key, value)| Label::new(K8S, &format!("{NAMESPACE_LABELS}{key}"), value));
        let name = format!("{NAMESPACE_LABELS}kubernetes.io/metadata.name");
        let namespace = [NAMESPACE_KEY, &name].map(|key| Label::new(K8S, key, self.namespace));
        let ports = NamedPorts::parse(self.ports).unwrap().labels();
        let labels = own.chain(inherited).chain(namespace).chain(ports);
        EndpointSpec {
            labels: labels.map(|label| label.to_string()).collect(),
            ..spec(&self.key, self.host, "unused=")
        }
    }
}

fn apply(node: &mut Node, document: &serde_json::Value) {
    node.policy(&document.to_string());
}

fn delete(node: &mut Node, namespace: &str, name: &str) {
    let key = format!("NetworkPolicy/{namespace}/{name}");
    node.event(Event::Policies(SourceEvent::Delete(key)));
}

/// The maps as the programs read them, arranged so that many packets are judged quickly.
struct Maps {
    entries: BTreeMap<(EndpointId, u32), Vec<(PolicyKey, PolicyValue)>>,
    endpoints: BTreeMap<IpAddr, EndpointId>,
    identities: BTreeMap<IpAddr, IdentityId>,
}

impl Maps {
    fn of(node: &Node, addresses: impl Iterator<Item = IpAddr>) -> Self {
        let mut entries: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (endpoint, map) in &node.datapath.policy {
            for (key, value) in map {
                let of = entries.entry((*endpoint, key.sec_label)).or_default();
                of.push((*key, *value));
            }
        }
        let locations = node.core.locations();
        let endpoints = locations.iter().flat_map(|location| {
            location
                .addresses
                .iter()
                .map(|address| (*address, location.id))
        });
        Self {
            entries,
            endpoints: endpoints.collect(),
            identities: addresses
                .map(|a| (a, identity(&node.datapath, a)))
                .collect(),
        }
    }

    /// Whether a packet passes the egress of its sender and the ingress of its receiver, where
    /// they are endpoints.
    fn passes(&self, from: IpAddr, to: IpAddr, protocol: u8, port: u16) -> bool {
        self.side_passes(from, to, EGRESS, protocol, port)
            && self.side_passes(to, from, INGRESS, protocol, port)
    }

    fn side_passes(
        &self,
        own: IpAddr,
        peer: IpAddr,
        direction: u8,
        protocol: u8,
        port: u16,
    ) -> bool {
        let Some(endpoint) = self.endpoints.get(&own) else {
            return true;
        };
        let lookup = |id: u32| {
            let entries = self.entries.get(&(*endpoint, id)).into_iter().flatten();
            longest(
                entries.map(|(key, value)| (key, value)),
                direction,
                protocol,
                port,
            )
        };
        let decided = decide(lookup, self.identities[&peer]);
        decided.is_some_and(|(_, value)| !value.is_deny())
    }
}
