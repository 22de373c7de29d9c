//! The meaning of a pod's policies, as lists of rules: one list for what the pod may receive, and
//! one for what it may send.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use crate::{
    blocks::pieces,
    cache::Cache,
    contiv::{Flow, Match, MatchPeers},
    name::PortName,
    pod::Pod,
    policy::{Port, PortRange, Ports, Protocol},
    ports::Span,
    processor::PodPolicies,
    rule::{Action, Net, Rule, Traffic},
};

/// The rules of a pod. In each list at most the last rule denies; an empty list restricts nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodRules {
    /// Addresses of the pod, of both families.
    pub addresses: Vec<IpAddr>,
    /// Rules for packets to the pod. Their destination is any address.
    pub ingress: Vec<Rule>,
    /// Rules for packets from the pod. Their source is any address.
    pub egress: Vec<Rule>,
}

impl PodRules {
    /// The list for packets of this direction.
    pub fn of(&self, flow: Flow) -> &[Rule] {
        match flow {
            Flow::Ingress => &self.ingress,
            Flow::Egress => &self.egress,
        }
    }
}

/// Makes rules from pods' policies.
#[derive(Clone, Copy, Debug)]
pub struct Configurator<'a> {
    /// All objects, from which groups select pods.
    pub cache: &'a Cache,
    /// The source of packets that a pod sends to itself through a Service, if the node's NAT gives
    /// such packets a source of their own. This address may always send to pods.
    pub nat_loopback: Option<IpAddr>,
}

impl Configurator<'_> {
    /// The rules of a pod. Equal sets of policies result in equal rules.
    pub fn rules(&self, pod: &PodPolicies) -> PodRules {
        let list = |flow| self.list(pod, flow);
        PodRules {
            addresses: pod.addresses.clone(),
            ingress: list(Flow::Ingress),
            egress: list(Flow::Egress),
        }
    }

    fn list(&self, pod: &PodPolicies, flow: Flow) -> Vec<Rule> {
        let mut list = List::default();
        let matches = pod.restricting(flow).flat_map(|policy| &policy.matches);
        for one in matches.filter(|one| one.flow == flow) {
            self.permit(pod, one, &mut list);
        }
        if pod.is_restricted(flow) && !list.seen.contains(&Rule::PERMIT_ALL) {
            if let (Flow::Ingress, Some(address)) = (flow, self.nat_loopback) {
                list.push(permission(flow, Net::one(address), Traffic::Any));
            }
            list.push(Rule::DENY_ALL);
        }
        list.rules
    }

    /// Adds a permission for each peer and port of a match.
    fn permit(&self, pod: &PodPolicies, of: &Match, list: &mut List) {
        for peer in self.peers(of) {
            match &of.ports {
                Ports::Any if peer.by_name_only => {}
                Ports::Any => list.push(permission(of.flow, peer.net, Traffic::Any)),
                Ports::Of(ports) => {
                    // A name means the port of the pod that receives the traffic.
                    let names = match of.flow {
                        Flow::Ingress => Some(&pod.ports),
                        Flow::Egress => peer.pod.map(|pod| &pod.ports),
                    };
                    let meant = ports.iter().filter_map(|port| peer.traffic(port, names));
                    meant.for_each(|traffic| list.push(permission(of.flow, peer.net, traffic)));
                }
            }
        }
    }

    fn peers(&self, of: &Match) -> Vec<Peer<'_>> {
        let mut peers = Vec::new();
        let nets: Vec<Net> = match &of.peers {
            MatchPeers::Everyone => vec![Net::Any],
            MatchPeers::Of { groups, blocks } => {
                let pods = groups.iter().flat_map(|group| self.cache.selected(group));
                peers.extend(pods.flat_map(|pod| self.peer(pod, false)));
                blocks.iter().flat_map(pieces).map(Net::Block).collect()
            }
        };
        peers.extend(nets.iter().map(|net| Peer {
            net: *net,
            pod: None,
            by_name_only: false,
        }));
        if of.flow == Flow::Egress && !nets.is_empty() && of.ports.has_names() {
            let pods = self.cache.pods().flat_map(|pod| self.peer(pod, true));
            peers.extend(pods.filter(|peer| nets.iter().any(|net| net.covers(peer.net))));
        }
        peers
    }

    /// A pod as a peer, once for each of its addresses.
    fn peer<'a>(&'a self, pod: &'a Pod, by_name_only: bool) -> impl Iterator<Item = Peer<'a>> {
        self.cache.addresses(pod).map(move |address| Peer {
            net: Net::one(address),
            pod: Some(pod),
            by_name_only,
        })
    }
}

/// Numbers of named ports.
type Names = BTreeMap<(PortName, Protocol), u16>;

/// The other side of a permission.
struct Peer<'a> {
    net: Net,
    /// The pod, if the peer is a pod.
    pod: Option<&'a Pod>,
    /// Whether the pod is a peer for named ports only. For all other ports, a block or everyone is
    /// the peer.
    by_name_only: bool,
}

impl Peer<'_> {
    /// The traffic that a port allows; `None` for a name that the receiver does not have.
    fn traffic(&self, port: &Port, names: Option<&Names>) -> Option<Traffic> {
        let span = match &port.ports {
            PortRange::Named(name) => Span::one(*names?.get(&(name.clone(), port.protocol))?),
            _ if self.by_name_only => return None,
            PortRange::All => Span::ALL,
            PortRange::Numbers(numbers) => Span::from(*numbers),
        };
        Some(Traffic::to(port.protocol, span))
    }
}

/// Rules in the order in which they were first added.
#[derive(Default)]
struct List {
    rules: Vec<Rule>,
    seen: BTreeSet<Rule>,
}

impl List {
    fn push(&mut self, rule: Rule) {
        if self.seen.insert(rule) {
            self.rules.push(rule);
        }
    }
}

fn permission(flow: Flow, peer: Net, traffic: Traffic) -> Rule {
    let (source, destination) = match flow {
        Flow::Ingress => (peer, Net::Any),
        Flow::Egress => (Net::Any, peer),
    };
    Rule {
        source,
        destination,
        traffic,
        action: Action::Permit,
    }
}
