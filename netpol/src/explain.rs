//! Which rules decide a connection: those of the sender's pod and those of the receiver's.

use std::{collections::BTreeMap, net::IpAddr};

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

/// What decides a connection: a side for each of `pods` that claims an end and has policies about the
/// direction. No side: it passes. A pod's packets to itself always do.
pub(crate) fn sides(
    cache: &Cache,
    pods: &BTreeMap<PodId, PodPolicies>,
    opening: &Opening,
) -> Vec<Side> {
    if opening.from == opening.to {
        return Vec::new();
    }
    let ends = [(opening.from, Flow::Egress), (opening.to, Flow::Ingress)];
    let sides = ends.into_iter().flat_map(|(address, flow)| {
        let here = cache.local_at(address).into_iter();
        here.filter_map(move |id| side(cache, id, pods.get(id)?, flow, opening))
    });
    sides.collect()
}

/// The policies of `pod`, which is one end of the connection, about its direction. None if no policy
/// restricts it.
fn side(
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

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

    /// Each side as `direction of pod: rule`.
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
        // Another node has its own say; a pod reaches itself.
        let to_far = ["Egress of a: shop/out spec.egress[1]"];
        assert_eq!(shown(&node, 1, 3, None), to_far);
        assert_eq!(shown(&node, 3, 1, None), [""; 0]);
        assert_eq!(shown(&node, 2, 2, None), [""; 0]);
    }
}
