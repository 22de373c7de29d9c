//! Judges by the documents themselves, without any of the steps that renderings share.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use super::{By, Verdict};
use crate::{
    cache::Object,
    contiv::{Flow, PolicyId},
    packet::{Packet, PacketPorts},
    pod::{Namespace, Pod},
    policy::{self, Namespaces, NetworkPolicy, Peer, Peers, PortRange, Ports},
    selector::Selector,
};

/// Label whose value is the name of its namespace.
const NAME: &str = "kubernetes.io/metadata.name";

/// All objects that matter for policies.
#[derive(Clone, Debug, Default)]
pub struct World {
    /// Pods. If several claim an address, the youngest is the peer.
    pub pods: Vec<Pod>,
    /// Namespaces that have an object.
    pub namespaces: Vec<Namespace>,
    /// The policies that are in force.
    pub policies: Vec<NetworkPolicy>,
    /// Policies that allow nothing, because they are set aside.
    pub set_aside: BTreeSet<PolicyId>,
}

impl World {
    /// The world of these objects.
    pub fn new(objects: &[Object]) -> Self {
        let mut world = Self::default();
        for object in objects {
            match object {
                Object::Pod(pod) => world.pods.push(Pod::clone(pod)),
                Object::Namespace(namespace) => world.namespaces.push(Namespace::clone(namespace)),
                Object::Policy(policy) => world.policies.push(NetworkPolicy::clone(policy)),
            }
        }
        world
    }

    /// The pod that has an address.
    pub fn pod_at(&self, address: IpAddr) -> Option<&Pod> {
        let claiming = self.claiming(address);
        claiming.max_by_key(|pod| (pod.created, Reverse(&pod.id)))
    }

    fn claiming(&self, address: IpAddr) -> impl Iterator<Item = &Pod> {
        let pods = self.pods.iter();
        pods.filter(move |pod| pod.addresses.contains(&address))
    }

    /// The verdict by the policies of every pod that claims the sender's or the receiver's address.
    /// Pods for which `judged` is false are left to another node.
    pub fn judge(&self, packet: &Packet, judged: impl Fn(&Pod) -> bool) -> Verdict<'_> {
        let (from, to) = (self.pod_at(packet.source), self.pod_at(packet.destination));
        if let (Some(from), Some(to)) = (from, to)
            && from.id == to.id
        {
            return Verdict::passed(By::Itself);
        }
        let side = |address, flow| {
            let mut pods = self.claiming(address).filter(|pod| judged(pod));
            let first = pods.next().map(|pod| self.side(pod, flow, packet));
            let first = first.unwrap_or_else(|| Verdict::passed(By::Open(flow)));
            pods.fold(first, |all, pod| all.then(|| self.side(pod, flow, packet)))
        };
        side(packet.source, Flow::Egress).then(|| side(packet.destination, Flow::Ingress))
    }

    fn side(&self, pod: &Pod, flow: Flow, packet: &Packet) -> Verdict<'_> {
        let mut restricting = Vec::new();
        for policy in &self.policies {
            let direction = match flow {
                Flow::Ingress => &policy.ingress,
                Flow::Egress => &policy.egress,
            };
            let selects =
                *policy.namespace == *pod.id.namespace && policy.pods.matches(&pod.labels);
            let policy::Direction::Restricted(rules) = direction else {
                continue;
            };
            if !selects {
                continue;
            }
            restricting.push(policy);
            if self.is_set_aside(policy) {
                continue;
            }
            let mut rules = rules.iter();
            let receiver = match flow {
                Flow::Ingress => Some(pod),
                Flow::Egress => self.pod_at(packet.destination),
            };
            if let Some(rule) = rules.find(|rule| self.allows(rule, policy, flow, packet, receiver))
            {
                return Verdict::passed(By::Policy(flow, policy, &rule.path));
            }
        }
        let is_open = restricting.is_empty();
        Verdict {
            passes: is_open,
            by: vec![match is_open {
                true => By::Open(flow),
                false => By::NoPolicy(flow, restricting),
            }],
        }
    }

    fn is_set_aside(&self, policy: &NetworkPolicy) -> bool {
        let mut ids = self.set_aside.iter();
        ids.any(|id| *id.namespace == *policy.namespace && *id.name == *policy.name)
    }

    fn allows(
        &self,
        rule: &policy::Rule,
        policy: &NetworkPolicy,
        flow: Flow,
        packet: &Packet,
        receiver: Option<&Pod>,
    ) -> bool {
        let peer = match flow {
            Flow::Ingress => packet.source,
            Flow::Egress => packet.destination,
        };
        let is_peer = match &rule.peers {
            Peers::Any => true,
            Peers::Of(peers) => peers.iter().any(|one| self.is_peer(one, policy, peer)),
        };
        is_peer
            && match (&rule.ports, packet.ports) {
                (Ports::Any, _) => true,
                (Ports::Of(_), None) => false,
                (Ports::Of(ports), Some(of)) => {
                    ports.iter().any(|port| is_port(port, of, receiver))
                }
            }
    }

    fn is_peer(&self, peer: &Peer, policy: &NetworkPolicy, address: IpAddr) -> bool {
        match peer {
            Peer::Block(block) => {
                block.prefix().contains(&address)
                    && !block.except().iter().any(|part| part.contains(&address))
            }
            Peer::Pods { namespaces, pods } => self.pod_at(address).is_some_and(|pod| {
                let in_namespace = match namespaces {
                    Namespaces::Own => *pod.id.namespace == *policy.namespace,
                    Namespaces::Selected(selector) => self.selects(selector, &pod.id.namespace),
                };
                in_namespace && pods.matches(&pod.labels)
            }),
        }
    }

    /// Whether a selector selects a namespace. Of a namespace without an object, only the name is
    /// known, so that only requirements on the name can hold.
    fn selects(&self, selector: &Selector, namespace: &str) -> bool {
        let known = self
            .namespaces
            .iter()
            .find(|known| *known.name == *namespace);
        if let Some(known) = known {
            return selector.matches(&known.labels);
        }
        let name = BTreeMap::from([(NAME.to_owned(), namespace.to_owned())]);
        selector.requirements().all(|r| r.key == NAME) && selector.matches(&name)
    }
}

fn is_port(port: &policy::Port, of: PacketPorts, receiver: Option<&Pod>) -> bool {
    port.protocol == of.protocol
        && match &port.ports {
            PortRange::All => true,
            PortRange::Numbers(numbers) => {
                (numbers.first()..=numbers.last()).contains(&of.destination)
            }
            PortRange::Named(name) => {
                let number = receiver.and_then(|pod| pod.port(name, port.protocol));
                number == Some(of.destination)
            }
        }
}
