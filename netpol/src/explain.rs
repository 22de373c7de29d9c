//! Which rules decide a connection: those of the sender's pod and those of the receiver's.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::{
    cache::Cache,
    contiv::{ContivPolicy, Flow, Match, MatchPeers, PolicyId},
    name::PortName,
    pod::{Pod, PodId},
    policy::{Block, PortRange, Ports, Protocol},
    processor::PodPolicies,
};

/// The first packet of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    /// Address of the sender.
    pub from: IpAddr,
    /// Address of the receiver.
    pub to: IpAddr,
    /// Protocol and destination port; none for protocols without ports.
    pub port: Option<(Protocol, u16)>,
}

/// The policies of a pod about one direction of a connection, and the rule that allows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Side {
    /// The restricted pod, which is the sender (egress) or the receiver (ingress).
    pub pod: PodId,
    /// The direction, seen from the pod.
    pub flow: Flow,
    /// Policies that restrict the direction, at least one.
    pub policies: Vec<PolicyId>,
    /// The first rule that allows the connection: its policy and field. None: it is denied.
    pub allowed_by: Option<(PolicyId, String)>,
}

/// The policies of `pod`, which is one end of the connection, about its direction. None if no policy
/// restricts it.
pub(crate) fn side(
    cache: &Cache,
    id: &PodId,
    pod: &PodPolicies,
    flow: Flow,
    opening: &Opening,
) -> Option<Side> {
    let judge = Judge {
        cache,
        pod,
        flow,
        opening,
    };
    let policies: Vec<&ContivPolicy> = pod.restricting(flow).collect();
    if policies.is_empty() {
        return None;
    }
    let rules = policies.iter().flat_map(|policy| {
        let matches = policy.matches.iter().filter(|one| one.flow == flow);
        matches.map(|one| (&policy.id, one))
    });
    let allowing = rules.into_iter().find(|(_, one)| judge.allows(one));
    Some(Side {
        pod: id.clone(),
        flow,
        policies: policies.iter().map(|policy| policy.id.clone()).collect(),
        allowed_by: allowing.map(|(id, one)| (id.clone(), one.path.clone())),
    })
}

struct Judge<'a> {
    cache: &'a Cache,
    pod: &'a PodPolicies,
    flow: Flow,
    opening: &'a Opening,
}

impl Judge<'_> {
    fn allows(&self, rule: &Match) -> bool {
        let peer = match self.flow {
            Flow::Ingress => self.opening.from,
            Flow::Egress => self.opening.to,
        };
        let pod = self.cache.pod_at(peer).map(AsRef::as_ref);
        let is_peer = match &rule.peers {
            MatchPeers::Everyone => true,
            MatchPeers::Of { groups, blocks } => {
                let selects = |pod: &Pod| {
                    let namespace = self.cache.namespace_labels(&pod.id.namespace);
                    groups.iter().any(|group| group.selects(pod, &namespace))
                };
                pod.is_some_and(selects) || blocks.iter().any(|block| covers(block, peer))
            }
        };
        is_peer && self.is_at(&rule.ports, pod)
    }

    fn is_at(&self, ports: &Ports, peer: Option<&Pod>) -> bool {
        let Ports::Of(ports) = ports else {
            return true;
        };
        let Some((protocol, number)) = self.opening.port else {
            return false;
        };
        let of_protocol = ports.iter().filter(|port| port.protocol == protocol);
        let mut ranges = of_protocol.map(|port| &port.ports);
        ranges.any(|range| match range {
            PortRange::All => true,
            PortRange::Numbers(numbers) => (numbers.first()..=numbers.last()).contains(&number),
            PortRange::Named(name) => self.named(name, protocol, peer) == Some(number),
        })
    }

    /// The number that a port name has at the receiver.
    fn named(&self, name: &PortName, protocol: Protocol, peer: Option<&Pod>) -> Option<u16> {
        match self.flow {
            Flow::Ingress => self.pod.ports.get(&(name.clone(), protocol)).copied(),
            Flow::Egress => peer?.port(name, protocol),
        }
    }
}

fn covers(block: &Block, address: IpAddr) -> bool {
    let within = |prefix: &IpNet| prefix.contains(&address);
    within(&block.prefix()) && !block.except().iter().any(within)
}
