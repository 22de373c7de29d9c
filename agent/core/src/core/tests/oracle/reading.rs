//! The verdict of the policies on a packet, rule by rule.

use std::net::IpAddr;

use dns_policy::name::Fqdn;
use shared_maps::policy::{EGRESS, INGRESS};

use super::{
    super::network_policy_reading::Ruling, Pod, World, is_node, language::ServicePort, matcher,
    network_policies::Peer, packets::Fate, parse,
};
use crate::{
    labels::{CIDR_GROUP, Label, LabelSet},
    policy::{
        document::PolicyDocument,
        mode::PolicyMode,
        rule::{Direction, Peers},
    },
    selector::selector::{Entity, Selector, group_label},
};

impl World {
    /// What happens to a packet, by the policies read from scratch.
    pub(super) fn verdict(
        &self,
        host: u8,
        remote: IpAddr,
        direction: u8,
        protocol: u8,
        port: u16,
    ) -> Fate {
        if let Some(ports) = self.cluster.service_at(remote) {
            return self.verdict_on_service(host, ports, direction, protocol, port);
        }
        let pod = self.endpoints[&host];
        let receiver = match direction {
            EGRESS => self.pod_at(remote),
            _ => Some(pod),
        };
        let nobody = Pod::WEB;
        let (sides, restricted) = self.sides(host, direction);
        if pod.mode == Some(PolicyMode::Never) {
            return Fate::Passed;
        }
        if direction == EGRESS && self.firewall_denies(host, remote, protocol, port) {
            return Fate::Dropped;
        }
        let mut fates = Vec::new();
        for rule in sides.iter().flat_map(|side| &side.peers) {
            let meant = match &rule.peers {
                Peers::Any => true,
                Peers::Selectors(list) => {
                    list.iter().any(|selector| self.selects(selector, remote))
                }
            };
            let ports: Vec<_> = rule
                .ports
                .iter()
                .filter(|p| receiver.unwrap_or(nobody).is_at(p, protocol, port))
                .collect();
            if !meant || (ports.is_empty() && !rule.ports.is_empty()) {
                continue;
            }
            if rule.deny {
                return Fate::Dropped;
            }
            let proxied = ports.iter().any(|p| p.dns.is_some());
            fates.push(if proxied { Fate::Proxied } else { Fate::Passed });
        }
        let packet = (direction, protocol, port);
        if self.network_policies_say(host, &self.peer_at(remote), packet) == Ruling::Allowed {
            fates.push(Fate::Passed);
        }
        let passed = match direction {
            EGRESS => self.seen(host, protocol, port, Fate::Passed),
            _ => Fate::Passed,
        };
        if fates.contains(&Fate::Proxied) {
            Fate::Proxied
        } else if !fates.is_empty() {
            passed
        } else if !restricted && direction == EGRESS && self.limits_names(host) {
            Fate::Passed
        } else if !restricted {
            passed
        } else if direction == INGRESS && is_node(remote) {
            // What the node itself sends needs no rule.
            Fate::Passed
        } else {
            Fate::Dropped
        }
    }

    /// Rules of a pod in one direction, and whether it is restricted.
    pub(super) fn sides(&self, host: u8, direction: u8) -> (Vec<&Direction>, bool) {
        let pod = self.endpoints[&host];
        let own = pod.labels();
        let rules = self.policies.values().flat_map(|document| document.rules());
        let rules = rules.filter(|rule| rule.subject.matches(&own));
        let sides = rules.map(|rule| match direction {
            EGRESS => &rule.egress,
            _ => &rule.ingress,
        });
        let sides: Vec<&Direction> = sides.collect();
        let restricted = match pod.mode {
            Some(PolicyMode::Never) => false,
            Some(PolicyMode::Always) => true,
            Some(PolicyMode::Default) | None => {
                sides.iter().any(|side| side.default_deny)
                    || self.network_policies_say(host, &Peer::Other, (direction, 0, 0))
                        != Ruling::NotRestricted
            }
        };
        (sides, restricted)
    }

    /// What happens to a packet to a Service: every backend is judged by itself.
    fn verdict_on_service(
        &self,
        host: u8,
        ports: &[ServicePort],
        direction: u8,
        protocol: u8,
        port: u16,
    ) -> Fate {
        let pod = self.endpoints[&host];
        let (sides, restricted) = self.sides(host, direction);
        let all = sides.iter().flat_map(|side| &side.peers);
        let all = all.filter(|rule| rule.peers == Peers::Any && rule.ports.is_empty());
        let denies: Vec<bool> = all.map(|rule| rule.deny).collect();
        // Only a rule without peers and ports is about such a packet.
        let said = self.network_policies_say(host, &Peer::Other, (direction, 0, 0));
        let is_closed = denies.is_empty() && said != Ruling::Allowed && restricted;
        let everything = match (denies.contains(&true), is_closed) {
            _ if pod.mode == Some(PolicyMode::Never) => return Fate::Passed,
            (false, false) => Fate::Passed,
            _ => Fate::Dropped,
        };
        if direction != EGRESS {
            return everything;
        }
        let of = |(protocol, _, to, backends): &ServicePort| -> Option<Fate> {
            let fates = backends
                .iter()
                .map(|at| self.verdict(host, at.parse().unwrap(), EGRESS, *protocol, *to));
            // The backend that is treated the most strictly decides.
            fates.min()
        };
        let own = ports
            .iter()
            .find(|known| (known.0, known.1) == (protocol, port));
        if let Some(fate) = own.and_then(of) {
            return self.seen(host, protocol, port, fate);
        }
        match ports.iter().any(|port| of(port) == Some(Fate::Dropped)) {
            true => Fate::Dropped,
            false => everything,
        }
    }

    fn selects(&self, selector: &Selector, remote: IpAddr) -> bool {
        let local = self.pod_at(remote);
        let other = self.is_other_node(remote);
        let outside = local.is_none() && !is_node(remote) && !other;
        match selector {
            Selector::Labels(selector) => {
                let labels = self.labels_at(remote);
                labels.is_some_and(|labels| selector.matches(&labels))
            }
            Selector::Cidr(cidr) => {
                outside
                    && cidr.prefix.contains(&remote)
                    && !cidr.except.iter().any(|except| except.contains(&remote))
            }
            Selector::Group(group) => {
                let holds = |document: &&PolicyDocument| {
                    let blocks = document
                        .group()
                        .into_iter()
                        .flat_map(|group| &group.prefixes);
                    blocks.into_iter().any(|block| block.contains(&remote))
                };
                let selected = |document: &&PolicyDocument| {
                    let own = document.group().into_iter().flat_map(|group| &group.own);
                    let own = own.map(|(key, value)| Label::new(CIDR_GROUP, key, value));
                    let name = document.key.rsplit('/').next().map(group_label);
                    group
                        .labels
                        .matches(&LabelSet::new(own.chain(name).collect()))
                };
                let mut documents = self.policies.values().filter(holds);
                outside
                    && documents.any(|document| selected(&document))
                    && !group.except.iter().any(|except| except.contains(&remote))
            }
            Selector::Fqdn(fqdn) => {
                let live = self.pairs.keys().filter(|(_, address)| *address == remote);
                outside
                    && live
                        .clone()
                        .any(|(n, _)| matcher(fqdn).matches(&Fqdn::normalise(n)))
            }
            Selector::Entity(Entity::World | Entity::WorldIpv4) => outside,
            Selector::Entity(Entity::Cluster) => !outside,
            Selector::Entity(Entity::Host) => is_node(remote),
            Selector::Entity(Entity::RemoteNode) => other,
            Selector::Entity(Entity::KubeApiserver) => {
                local.is_none() && parse(self.api_servers).any(|a| a == remote)
            }
            // These select nothing in this test.
            Selector::Entity(_) | Selector::DnsName(_) | Selector::Node(_) => false,
        }
    }
}
