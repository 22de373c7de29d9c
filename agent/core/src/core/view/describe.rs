//! Adds the model's data to packets that the datapath reported: identity, names and rules.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    net::IpAddr,
};

use shared_maps::{EndpointId, IdentityId};

use crate::{
    core::{Core, packet_view::PacketView},
    policy::trace::{FlowDirection, Port, RuleView},
};

type Names = HashMap<IpAddr, Vec<String>>;
type Flow = (EndpointId, bool, u32, Port);

impl Core {
    /// Fills in identity, names and rules. Costs a walk over the names of the endpoints in
    /// question, and a judgement of each flow.
    pub fn describe(&self, packets: &mut [PacketView]) {
        let mut wanted: BTreeMap<EndpointId, HashSet<IpAddr>> = BTreeMap::new();
        for packet in packets.iter() {
            let remotes = wanted.entry(EndpointId(packet.endpoint)).or_default();
            remotes.extend(packet.remote());
        }
        let names: BTreeMap<EndpointId, Names> = wanted
            .iter()
            .map(|(id, remotes)| (*id, self.names_among(*id, remotes)))
            .collect();
        let mut judged: BTreeMap<Flow, Vec<RuleView>> = BTreeMap::new();
        for packet in packets {
            let id = EndpointId(packet.endpoint);
            let Some(endpoint) = self.state.endpoints.get(id) else {
                continue;
            };
            packet.identity = endpoint.identity.0;
            packet.key.clone_from(&endpoint.spec.key);
            let known = names.get(&id).zip(packet.remote());
            let known = known.and_then(|(names, remote)| names.get(&remote));
            packet.names = known.cloned().unwrap_or_default();
            packet.object = packet.remote().and_then(|remote| self.object_at(remote));
            let Some(port) = packet.port().filter(|_| packet.is_judged()) else {
                continue;
            };
            let direction = match packet.direction.as_str() {
                "egress" => FlowDirection::Egress,
                _ => FlowDirection::Ingress,
            };
            let peer = packet.remote_identity;
            let flow = (id, direction == FlowDirection::Egress, peer, port);
            let rules = judged.entry(flow).or_insert_with(|| {
                let found = self.peer(id, direction, IdentityId(peer), Some(port));
                found.deciding()
            });
            packet.rules.clone_from(rules);
        }
    }

    fn names_among(&self, endpoint: EndpointId, remotes: &HashSet<IpAddr>) -> Names {
        let mut found = Names::new();
        let Some(names) = self.state.learned.names.endpoint(endpoint) else {
            return found;
        };
        let mut note = |address: &IpAddr, name: &dns_policy::name::Fqdn| {
            if remotes.contains(address) {
                let name = name.as_str().trim_end_matches('.').to_owned();
                found.entry(*address).or_default().push(name);
            }
        };
        for (name, addresses) in &names.names {
            addresses.keys().for_each(|address| note(address, name));
        }
        for (address, zombie) in &names.zombies {
            zombie.names.iter().for_each(|name| note(address, name));
        }
        found.values_mut().for_each(|names| names.sort_unstable());
        found
    }
}
