//! Combines the rules of both sides of a connection in one list, for an access control that judges
//! a pod's traffic in one direction only.

use std::{collections::BTreeMap, net::IpAddr};

use super::in_order;
use crate::{
    configurator::PodRules,
    contiv::Flow,
    pod::PodId,
    policy::Protocol,
    ports::PortSet,
    rule::{Action, Net, Rule, Traffic},
};

/// The table of a pod: its rules for traffic of direction `flow`, narrowed by the rules of the
/// node's pods at the other end of that traffic. In order; empty if nothing is restricted.
pub(super) fn local(pod: &PodRules, flow: Flow, all: &BTreeMap<PodId, PodRules>) -> Vec<Rule> {
    let mut table = pod.of(flow).to_vec();
    let other_side = opposite(flow);
    // Pods that deny nothing narrow nothing.
    let narrowing = all.values().filter(|peer| denies(peer.of(other_side)));
    for peer in narrowing {
        for peer_address in &peer.addresses {
            let same_family = |own: &&IpAddr| own.is_ipv4() == peer_address.is_ipv4();
            let Some(own) = pod.addresses.iter().find(same_family) else {
                continue;
            };
            let theirs = Allowed::with(peer.of(other_side), other_side, *own);
            let ours = Allowed::with(pod.of(flow), flow, *peer_address);
            if !theirs.covers(&ours) {
                narrow(&mut table, flow, *peer_address, &ours.common(&theirs));
            }
        }
    }
    if !table.is_empty() && !table.iter().any(Rule::is_about_all) {
        table.push(Rule::PERMIT_ALL);
    }
    in_order(table)
}

/// Narrows the traffic with a peer to what is allowed.
fn narrow(table: &mut Vec<Rule>, flow: Flow, peer: IpAddr, allowed: &Allowed) {
    let peer = Net::one(peer);
    table.retain(|rule| net_of_peer(rule, flow) != peer);
    let rule = |traffic, action| {
        let (source, destination) = match flow {
            Flow::Ingress => (peer, Net::Any),
            Flow::Egress => (Net::Any, peer),
        };
        Rule {
            source,
            destination,
            traffic,
            action,
        }
    };
    for (protocol, ports) in Protocol::ALL.into_iter().zip(&allowed.ports) {
        let traffic = ports.spans().map(|span| Traffic::to(protocol, span));
        table.extend(traffic.map(|traffic| rule(traffic, Action::Permit)));
    }
    table.push(rule(Traffic::Any, Action::Deny));
}

/// What a list of rules allows with one peer address.
struct Allowed {
    /// Whether the list allows every packet, even of protocols without ports.
    everything: bool,
    /// Ports at the receiver, in the order of [`Protocol::ALL`].
    ports: [PortSet; 3],
}

impl Allowed {
    /// What rules for traffic of direction `flow` allow with a peer.
    fn with(rules: &[Rule], flow: Flow, peer: IpAddr) -> Self {
        let everything = Self {
            everything: true,
            ports: Protocol::ALL.map(|_| PortSet::all()),
        };
        if !denies(rules) {
            return everything;
        }
        let with_peer =
            |rule: &&Rule| rule.action == Action::Permit && net_of_peer(rule, flow).contains(peer);
        let allowed: Vec<Traffic> = rules
            .iter()
            .filter(with_peer)
            .map(|rule| rule.traffic)
            .collect();
        if allowed.contains(&Traffic::Any) {
            return everything;
        }
        let ports = Protocol::ALL.map(|wanted| {
            let spans = allowed.iter().filter_map(|traffic| match *traffic {
                Traffic::Ports {
                    protocol,
                    destination,
                    ..
                } if protocol == wanted => Some(destination),
                _ => None,
            });
            spans.collect()
        });
        Self {
            everything: false,
            ports,
        }
    }

    fn covers(&self, other: &Self) -> bool {
        let mut pairs = self.ports.iter().zip(&other.ports);
        self.everything || (!other.everything && pairs.all(|(own, other)| own.covers(other)))
    }

    fn common(&self, other: &Self) -> Self {
        let [tcp, udp, sctp] = &self.ports;
        let [other_tcp, other_udp, other_sctp] = &other.ports;
        Self {
            everything: self.everything && other.everything,
            ports: [
                tcp.common(other_tcp),
                udp.common(other_udp),
                sctp.common(other_sctp),
            ],
        }
    }
}

/// The other direction: a table of what a pod receives is narrowed by what other pods may send.
pub(super) const fn opposite(flow: Flow) -> Flow {
    match flow {
        Flow::Ingress => Flow::Egress,
        Flow::Egress => Flow::Ingress,
    }
}

fn denies(rules: &[Rule]) -> bool {
    rules.iter().any(|rule| rule.action == Action::Deny)
}

const fn net_of_peer(rule: &Rule, flow: Flow) -> Net {
    match flow {
        Flow::Ingress => rule.source,
        Flow::Egress => rule.destination,
    }
}
