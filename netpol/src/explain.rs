//! The rules that decide a connection: the rules of the sender's pod and of the receiver's pod.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use ipnet::IpNet;

use crate::{
    cache::Cache,
    contiv::{Flow, Match, MatchPeers, PolicyId},
    name::PortName,
    open_ports::OpenPorts,
    pod::{Pod, PodId},
    policy::{Block, Port, PortRange, Ports, Protocol},
    ports::Span,
    processor::PodPolicies,
};

/// The first packet of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    /// Address of the sender.
    pub from: IpAddr,
    /// Address of the receiver.
    pub to: IpAddr,
    /// Protocol and destination port; `None` for protocols without ports.
    pub port: Option<(Protocol, u16)>,
}

/// The policies of a pod for one direction of a connection, and the rule that allows the
/// connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Side {
    /// The restricted pod, which is the sender (egress) or the receiver (ingress).
    pub pod: PodId,
    /// The direction, seen from the pod.
    pub flow: Flow,
    /// Policies that restrict the direction, at least one.
    pub policies: Vec<PolicyId>,
    /// The first rule that allows the connection: its policy and field. `None`: the connection is denied.
    pub allowed_by: Option<(PolicyId, String)>,
}

/// The policies of a pod for one direction between two addresses, and the ports that they open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenSide {
    /// The restricted pod, which is the sender (egress) or the receiver (ingress).
    pub pod: PodId,
    /// The direction, seen from the pod.
    pub flow: Flow,
    /// Policies that restrict the direction, at least one.
    pub policies: Vec<PolicyId>,
    /// The rules that open ports, each with its policy and field.
    pub rules: Vec<(PolicyId, String)>,
    /// The ports that these rules open.
    pub open: OpenPorts,
}

/// The sides that decide a connection: one for each of `pods` that claims an end and has policies
/// for the direction. Without a side, the connection passes. A pod's packets to itself always pass.
pub(crate) fn sides(
    cache: &Cache,
    pods: &BTreeMap<PodId, PodPolicies>,
    opening: &Opening,
) -> Vec<Side> {
    let judges = judges(cache, pods, opening.from, opening.to).into_iter();
    let sides = judges.map(|judge| {
        let allowing = judge
            .rules()
            .find(|(_, rule)| judge.is_peer(rule) && judge.is_at(&rule.ports, opening.port));
        Side {
            pod: judge.id.clone(),
            flow: judge.flow,
            policies: judge.policies(),
            allowed_by: allowing.map(|(id, one)| (id.clone(), one.path.clone())),
        }
    });
    sides.collect()
}

/// The ports that are open between two addresses, with a side for the same pods.
pub(crate) fn open_sides(
    cache: &Cache,
    pods: &BTreeMap<PodId, PodPolicies>,
    from: IpAddr,
    to: IpAddr,
) -> Vec<OpenSide> {
    let judges = judges(cache, pods, from, to).into_iter();
    let sides = judges.map(|judge| {
        let rules = judge.rules().filter(|(_, rule)| judge.is_peer(rule));
        let open = rules.map(|(id, rule)| (id, rule, judge.open(&rule.ports)));
        let open: Vec<_> = open.filter(|(_, _, open)| !open.is_empty()).collect();
        OpenSide {
            pod: judge.id.clone(),
            flow: judge.flow,
            policies: judge.policies(),
            rules: open
                .iter()
                .map(|(id, rule, _)| ((*id).clone(), rule.path.clone()))
                .collect(),
            open: open
                .into_iter()
                .fold(OpenPorts::none(), |all, (_, _, open)| all.or(open)),
        }
    });
    sides.collect()
}

/// The pods that claim an end and have policies for its direction.
fn judges<'a>(
    cache: &'a Cache,
    pods: &'a BTreeMap<PodId, PodPolicies>,
    from: IpAddr,
    to: IpAddr,
) -> Vec<Judge<'a>> {
    if from == to {
        return Vec::new();
    }
    let ends = [(from, to, Flow::Egress), (to, from, Flow::Ingress)];
    let judges = ends.into_iter().flat_map(|(address, peer, flow)| {
        let here = cache.local_at(address).into_iter();
        here.filter_map(move |id| {
            let (id, pod) = pods.get_key_value(id)?;
            pod.is_restricted(flow).then_some(Judge {
                cache,
                id,
                pod,
                flow,
                peer,
            })
        })
    });
    judges.collect()
}

/// The policies of a pod for one direction, and its peer.
struct Judge<'a> {
    cache: &'a Cache,
    id: &'a PodId,
    pod: &'a PodPolicies,
    flow: Flow,
    peer: IpAddr,
}

impl<'a> Judge<'a> {
    fn policies(&self) -> Vec<PolicyId> {
        let policies = self.pod.restricting(self.flow);
        policies.map(|policy| policy.id.clone()).collect()
    }

    fn rules(&self) -> impl Iterator<Item = (&'a PolicyId, &'a Match)> {
        let (pod, flow) = (self.pod, self.flow);
        pod.restricting(flow).flat_map(move |policy| {
            let matches = policy.matches.iter().filter(move |one| one.flow == flow);
            matches.map(|one| (&policy.id, one))
        })
    }

    fn is_peer(&self, rule: &Match) -> bool {
        let MatchPeers::Of { groups, blocks } = &rule.peers else {
            return true;
        };
        let selects = |pod: &Arc<Pod>| {
            let namespace = self.cache.namespace_labels(&pod.id.namespace);
            groups.iter().any(|group| group.selects(pod, &namespace))
        };
        self.cache.pod_at(self.peer).is_some_and(selects)
            || blocks.iter().any(|block| covers(block, self.peer))
    }

    fn is_at(&self, ports: &Ports, port: Option<(Protocol, u16)>) -> bool {
        let (Ports::Of(ports), Some((protocol, number))) = (ports, port) else {
            return *ports == Ports::Any;
        };
        let mut of_protocol = ports.iter().filter(|port| port.protocol == protocol);
        of_protocol.any(|port| self.span(port).is_some_and(|span| span.contains(number)))
    }

    fn open(&self, ports: &Ports) -> OpenPorts {
        let Ports::Of(ports) = ports else {
            return OpenPorts::All;
        };
        let spans = ports
            .iter()
            .filter_map(|port| Some((port.protocol, self.span(port)?)));
        spans.collect()
    }

    /// The numbers of a port; `None` for a name that the receiver does not have.
    fn span(&self, port: &Port) -> Option<Span> {
        match &port.ports {
            PortRange::All => Some(Span::ALL),
            PortRange::Numbers(numbers) => Some(Span::from(*numbers)),
            PortRange::Named(name) => self.named(name, port.protocol).map(Span::one),
        }
    }

    /// The number that a port name has at the receiver.
    fn named(&self, name: &PortName, protocol: Protocol) -> Option<u16> {
        match self.flow {
            Flow::Ingress => self.pod.ports.get(&(name.clone(), protocol)).copied(),
            Flow::Egress => self.cache.pod_at(self.peer)?.port(name, protocol),
        }
    }
}

fn covers(block: &Block, address: IpAddr) -> bool {
    let within = |prefix: &IpNet| prefix.contains(&address);
    within(&block.prefix()) && !block.except().iter().any(within)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{cache::Object, processor::Processor};

    type Node = (Cache, Processor);

    fn pod(name: &str, node: &str, last: u8) -> Object {
        let port = (PortName::new("web").unwrap(), Protocol::Tcp);
        Object::Pod(Arc::new(Pod {
            id: PodId::new("shop", name),
            labels: [("app".to_owned(), name.to_owned())].into(),
            node: Some(node.into()),
            addresses: vec![IpAddr::from([10, 0, 0, last])],
            created: None,
            ports: [(port, 8080)].into(),
        }))
    }

    fn policy(name: &str, spec: &serde_json::Value) -> Object {
        let document = json!({
            "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
            "metadata": {"name": name, "namespace": "shop"}, "spec": spec,
        });
        Object::Policy(Arc::new(crate::read(&document).unwrap()))
    }

    /// Each side as the text `direction of pod: rule`.
    fn shown(node: &Node, from: u8, to: u8, port: Option<(Protocol, u16)>) -> Vec<String> {
        let opening = Opening {
            from: IpAddr::from([10, 0, 0, from]),
            to: IpAddr::from([10, 0, 0, to]),
            port,
        };
        let (cache, processor) = node;
        let sides = sides(cache, processor.pods(), &opening);
        let sides = sides.into_iter().map(|side| {
            let rule = side
                .allowed_by
                .map(|(policy, field)| format!("{policy} {field}"));
            let rule = rule.unwrap_or_else(|| format!("denied by {}", side.policies.len()));
            format!("{:?} of {}: {rule}", side.flow, side.pod.name)
        });
        sides.collect()
    }

    #[test]
    fn both_ends_on_this_node_have_a_say() {
        let (mut cache, mut processor) = (Cache::new("n1"), Processor::default());
        for object in [
            pod("a", "n1", 1),
            pod("b", "n1", 2),
            pod("far", "n2", 3),
            policy(
                "out",
                &json!({
                    "podSelector": {"matchLabels": {"app": "a"}}, "policyTypes": ["Egress"],
                    "egress": [
                        {"to": [{"podSelector": {"matchLabels": {"app": "b"}}}], "ports": [{"port": "web"}]},
                        {"to": [{"ipBlock": {"cidr": "10.0.0.0/24", "except": ["10.0.0.2/32"]}}]},
                    ],
                }),
            ),
            policy(
                "in",
                &json!({
                    "podSelector": {"matchLabels": {"app": "b"}},
                    "ingress": [{"ports": [{"port": 8000, "endPort": 8080}]}],
                }),
            ),
            policy(
                "closed",
                &json!({"podSelector": {"matchLabels": {"app": "b"}}}),
            ),
        ] {
            cache.put(object);
        }
        let touched = cache.take_touched();
        processor.process(&cache, &touched);
        let node = (cache, processor);
        let tcp = |port| Some((Protocol::Tcp, port));
        let both = |egress: &str, ingress: &str| {
            vec![
                format!("Egress of a: {egress}"),
                format!("Ingress of b: {ingress}"),
            ]
        };
        let allowed = both("shop/out spec.egress[0]", "shop/in spec.ingress[0]");
        assert_eq!(shown(&node, 1, 2, tcp(8080)), allowed);
        let denied = both("denied by 1", "denied by 2");
        assert_eq!(shown(&node, 1, 2, tcp(80)), denied);
        assert_eq!(shown(&node, 1, 2, Some((Protocol::Udp, 8080))), denied);
        assert_eq!(shown(&node, 1, 2, None), denied);
        // Each node decides only about its own pods, and a pod reaches itself.
        let to_far = ["Egress of a: shop/out spec.egress[1]"];
        assert_eq!(shown(&node, 1, 3, None), to_far);
        assert_eq!(shown(&node, 3, 1, None), [""; 0]);
        assert_eq!(shown(&node, 2, 2, None), [""; 0]);

        let open = |from: u8, to: u8| -> Vec<(usize, String)> {
            let address = |last| IpAddr::from([10, 0, 0, last]);
            let (cache, processor) = &node;
            let sides = open_sides(cache, processor.pods(), address(from), address(to));
            let sides = sides.into_iter();
            sides
                .map(|side| (side.rules.len(), side.open.texts().join(", ")))
                .collect()
        };
        let both = [(1, "8080/TCP".to_owned()), (1, "8000-8080/TCP".to_owned())];
        assert_eq!(open(1, 2), both);
        assert_eq!(open(1, 3), [(1, "any".to_owned())]);
        assert_eq!(open(1, 1), []);
    }
}
