//! NetworkPolicies of a history, and their verdict on a packet by a reading of the documents.

use std::net::IpAddr;

use serde_json::{Value, json};
use shared_maps::policy::EGRESS;

use super::{
    super::network_policy_reading::{
        self as reading, Labels, Packet, Party, PolicyType, Ruling, ruling,
    },
    Pod, World, is_node,
};
use crate::{core::Event, policy::parse::parse_documents, source_event::SourceEvent};

/// Puts the policy `n<slot>` in force.
pub(super) fn applied(slot: u8, policy: &Value) -> Event {
    let mut policy = policy.clone();
    policy["metadata"]["name"] = json!(format!("n{slot}"));
    let document = parse_documents(&policy.to_string(), "test").remove(0);
    Event::Policies(SourceEvent::Apply(document.unwrap()))
}

fn namespace_of(policy: &Value) -> &str {
    policy["metadata"]["namespace"].as_str().unwrap()
}

fn pairs(pairs: &[(&str, &str)]) -> Labels {
    let pairs = pairs.iter();
    pairs
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
        .collect()
}

fn name_of(protocol: u8) -> &'static str {
    match protocol {
        6 => "TCP",
        17 => "UDP",
        _ => "another",
    }
}

/// A pod as the reading sees it; `team` is the label of its namespace, if that is described.
fn as_read(pod: Pod, team: Option<&str>) -> reading::Pod {
    let ports = pod.ports.iter();
    let ports = ports
        .map(|(name, protocol, port)| ((*name).to_owned(), name_of(*protocol).to_owned(), *port));
    let name = ("kubernetes.io/metadata.name", pod.namespace);
    reading::Pod {
        namespace: pod.namespace.to_owned(),
        namespace_labels: team.map(|team| pairs(&[("team", team), name])),
        labels: pairs(&[("app", pod.app())]),
        ports: ports.collect(),
    }
}

/// The other side of a packet.
pub(super) enum Peer {
    Pod(reading::Pod),
    Node,
    Outside(IpAddr),
    Other,
}

impl Peer {
    fn party(&self) -> Party<'_> {
        match self {
            Self::Pod(pod) => Party::Pod(pod),
            Self::Node => Party::Node,
            Self::Outside(address) => Party::Outside(*address),
            Self::Other => Party::Other,
        }
    }
}

impl World {
    /// Adds, changes or removes a NetworkPolicy. A policy of another namespace is another document.
    pub(super) fn network_policy(&mut self, slot: u8, policy: Option<&Value>) -> Vec<Event> {
        let before = self.network_policies.remove(&slot);
        let namespace = policy.map(namespace_of);
        let mut events = Vec::new();
        if let Some(gone) = before.as_ref().map(namespace_of)
            && Some(gone) != namespace
        {
            let key = format!("NetworkPolicy/{gone}/n{slot}");
            events.push(Event::Policies(SourceEvent::Delete(key)));
        }
        if let Some(policy) = policy {
            self.network_policies.insert(slot, policy.clone());
            events.push(applied(slot, policy));
        }
        events
    }

    /// What the documents have at an address: a pod, a node or an address outside the cluster.
    pub(super) fn peer_at(&self, address: IpAddr) -> Peer {
        if let Some(pod) = self.local(address) {
            // An endpoint has only its own labels: no document has the labels of its namespace.
            Peer::Pod(as_read(pod, None))
        } else if let Some(pod) = self.cluster.at(address) {
            Peer::Pod(as_read(pod, self.cluster.team_of(pod)))
        } else if is_node(address) {
            Peer::Node
        } else if self.is_other_node(address) {
            Peer::Other
        } else {
            Peer::Outside(address)
        }
    }

    /// The verdict of the NetworkPolicies on a packet between an endpoint and a peer.
    pub(super) fn network_policies_say(
        &self,
        host: u8,
        peer: &Peer,
        (direction, protocol, port): (u8, u8, u16),
    ) -> Ruling {
        let own = as_read(self.endpoints[&host], None);
        let (own, peer) = (Party::Pod(&own), peer.party());
        let (from, to, policy_type) = match direction {
            EGRESS => (own, peer, PolicyType::Egress),
            _ => (peer, own, PolicyType::Ingress),
        };
        let protocol = name_of(protocol);
        let packet = Packet {
            from,
            to,
            protocol,
            port,
        };
        let policies: Vec<&Value> = self.network_policies.values().collect();
        ruling(&policies, packet, policy_type)
    }
}
