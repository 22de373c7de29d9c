//! What the policies of a pod mean, as lists of rules: one for what it may receive, one for what
//! it may send.

use std::{collections::BTreeSet, net::IpAddr};

use crate::{
    blocks::pieces,
    contiv::{ContivPolicy, Flow, Match, MatchPeers, PodSet},
    pod::Pod,
    policy::{Port, PortRange, Ports},
    ports::Span,
    rule::{Action, Net, Rule, Traffic},
};

/// The rules of a pod. In each list at most the last rule denies; an empty list restricts nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodRules {
    /// Addresses of the pod.
    pub addresses: Vec<IpAddr>,
    /// About packets to the pod; their destination is any.
    pub ingress: Vec<Rule>,
    /// About packets from the pod; their source is any.
    pub egress: Vec<Rule>,
}

impl PodRules {
    /// The list about packets of this direction.
    pub fn of(&self, flow: Flow) -> &[Rule] {
        match flow {
            Flow::Ingress => &self.ingress,
            Flow::Egress => &self.egress,
        }
    }
}

/// Who is in the groups of matches.
pub trait Members {
    /// The pods that selectors select.
    fn members(&self, of: &PodSet) -> Vec<&Pod>;
    /// Every pod, for ports with names where everyone is a peer.
    fn everyone(&self) -> Vec<&Pod>;
}

/// Makes rules of policies.
pub struct Configurator<'a> {
    /// Who is in the groups.
    pub members: &'a dyn Members,
    /// The source of packets that a pod sends to itself through a Service, if the node's NAT gives
    /// them one: it may always send to pods.
    pub nat_loopback: Option<IpAddr>,
}

impl Configurator<'_> {
    /// The rules of a pod that these policies select. Equal sets of policies give equal rules.
    pub fn rules(&self, pod: &Pod, policies: &[&ContivPolicy]) -> PodRules {
        let mut policies = policies.to_vec();
        policies.sort_unstable_by_key(|policy| &policy.id);
        let list = |flow| self.list(pod, &policies, flow);
        PodRules {
            addresses: pod.addresses.clone(),
            ingress: list(Flow::Ingress),
            egress: list(Flow::Egress),
        }
    }

    fn list(&self, pod: &Pod, policies: &[&ContivPolicy], flow: Flow) -> Vec<Rule> {
        let applicable = policies
            .iter()
            .filter(|policy| policy.restricts.restricts(flow));
        let mut list = List::default();
        let mut restricted = false;
        for policy in applicable {
            restricted = true;
            let matches = policy.matches.iter().filter(|one| one.flow == flow);
            matches.for_each(|one| self.permit(pod, one, &mut list));
        }
        if restricted && !list.seen.contains(&Rule::PERMIT_ALL) {
            if let (Flow::Ingress, Some(address)) = (flow, self.nat_loopback) {
                list.push(permission(flow, Net::one(address), Traffic::Any));
            }
            list.push(Rule::DENY_ALL);
        }
        list.rules
    }

    /// Adds a permission for each peer and port of a match.
    fn permit(&self, pod: &Pod, of: &Match, list: &mut List) {
        for peer in self.peers(of) {
            match &of.ports {
                Ports::Any if peer.by_name_only => {}
                Ports::Any => list.push(permission(of.flow, peer.net, Traffic::Any)),
                Ports::Of(ports) => {
                    let receiver = match of.flow {
                        Flow::Ingress => Some(pod),
                        Flow::Egress => peer.pod,
                    };
                    let meant = ports.iter().filter_map(|port| peer.traffic(port, receiver));
                    meant.for_each(|traffic| list.push(permission(of.flow, peer.net, traffic)));
                }
            }
        }
    }

    fn peers(&self, of: &Match) -> Vec<Peer<'_>> {
        let (mut peers, nets) = match &of.peers {
            MatchPeers::Everyone => (Vec::new(), vec![Net::Any]),
            MatchPeers::Of { groups, blocks } => {
                let pods = groups.iter().flat_map(|group| self.members.members(group));
                let blocks = blocks.iter().flat_map(pieces).map(Net::Block);
                (
                    pods.flat_map(|pod| Peer::of(pod, false)).collect(),
                    blocks.collect(),
                )
            }
        };
        peers.extend(nets.iter().map(|net| Peer {
            net: *net,
            pod: None,
            by_name_only: false,
        }));
        if of.flow == Flow::Egress && !nets.is_empty() && of.ports.has_names() {
            let pods = self.members.everyone().into_iter();
            let within = |peer: &Peer<'_>| nets.iter().any(|net| net.covers(peer.net));
            peers.extend(pods.flat_map(|pod| Peer::of(pod, true)).filter(within));
        }
        peers
    }
}

/// The other side of a permission.
struct Peer<'a> {
    net: Net,
    /// The pod, if the permission is about one.
    pod: Option<&'a Pod>,
    /// Numbers of ports, and all ports, are another peer's.
    by_name_only: bool,
}

impl<'a> Peer<'a> {
    /// A pod, once for each of its addresses.
    fn of(pod: &'a Pod, by_name_only: bool) -> impl Iterator<Item = Self> {
        pod.addresses.iter().map(move |address| Self {
            net: Net::one(*address),
            pod: Some(pod),
            by_name_only,
        })
    }

    /// What a port means at the pod that receives, if that is one: a name that it does not have
    /// means nothing.
    fn traffic(&self, port: &Port, receiver: Option<&Pod>) -> Option<Traffic> {
        let span = match &port.ports {
            PortRange::Named(name) => Span::one(receiver?.port(name, port.protocol)?),
            _ if self.by_name_only => return None,
            PortRange::All => Span::ALL,
            PortRange::Numbers(numbers) => Span::from(*numbers),
        };
        Some(Traffic::to(port.protocol, span))
    }
}

/// Rules in the order of the first addition.
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
