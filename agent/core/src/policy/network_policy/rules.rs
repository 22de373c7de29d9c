//! A NetworkPolicy as a rule over identities.
//!
//! | NetworkPolicy | rule |
//! |---|---|
//! | `podSelector` and its namespace | subject: labels of source `k8s` |
//! | a direction in `policyTypes` | default deny, also without a rule |
//! | an element without `from` or `to` | everyone |
//! | `podSelector`, `namespaceSelector` or both | one label selector with the requirements of both |
//! | `ipBlock` | a block of addresses outside of the cluster |

use std::{collections::BTreeSet, sync::Arc};

use netpol::{
    policy::{self, Block, Namespaces, NetworkPolicy, Peer, Port, PortRange},
    selector::{self, Condition},
};

use crate::{
    labels::{K8S, NAMESPACE_KEY, NAMESPACE_LABELS, NAMESPACE_NAME},
    policy::{
        rule::{Direction, PeerRule, Peers, PortRule, Ports, Rule},
        trace::FlowDirection,
    },
    selector::selector::{CidrSelector, LabelSelector, Operator, Requirement, Selector},
};

/// Compiles a NetworkPolicy into a rule over identities.
pub(super) fn rule(policy: &NetworkPolicy) -> Rule {
    let namespace = policy.namespace.as_str();
    Rule {
        subject: pods(&Namespaces::Own, &policy.pods, namespace),
        egress: direction(&policy.egress, FlowDirection::Egress, namespace),
        ingress: direction(&policy.ingress, FlowDirection::Ingress, namespace),
        tier: Vec::new(),
    }
}

fn direction(direction: &policy::Direction, flow: FlowDirection, namespace: &str) -> Direction {
    let rules = direction.rules().iter();
    let peers = rules.flat_map(|rule| {
        let rule = peer_rule(rule, namespace);
        match flow {
            FlowDirection::Egress => rule.with_named_ports_of_endpoints(),
            FlowDirection::Ingress => vec![rule],
        }
    });
    Direction {
        default_deny: matches!(direction, policy::Direction::Restricted(_)),
        peers: peers.map(Arc::new).collect(),
    }
}

fn peer_rule(rule: &policy::Rule, namespace: &str) -> PeerRule {
    let peers = match &rule.peers {
        policy::Peers::Any => Peers::Any,
        policy::Peers::Of(peers) => Peers::Selectors(
            peers
                .iter()
                .map(|peer| peer_selector(peer, namespace))
                .collect(),
        ),
    };
    let ports = match &rule.ports {
        policy::Ports::Any => Vec::new(),
        policy::Ports::Of(ports) => ports.iter().map(port_rule).collect(),
    };
    PeerRule {
        path: rule.path.as_str().into(),
        deny: false,
        peers,
        ports,
    }
}

fn peer_selector(peer: &Peer, namespace: &str) -> Selector {
    match peer {
        Peer::Pods {
            namespaces,
            pods: selected,
        } => Selector::Labels(pods(namespaces, selected, namespace)),
        Peer::Block(block) => Selector::Cidr(block_selector(block)),
    }
}

fn block_selector(block: &Block) -> CidrSelector {
    CidrSelector {
        prefix: block.prefix(),
        except: block.except().clone(),
        nodes: false,
    }
}

/// Pods that both selectors select. A pod carries the labels of its namespace under a prefix, so
/// that both are requirements on its own labels. `own` is the policy's namespace.
fn pods(namespaces: &Namespaces, pods: &selector::Selector, own: &str) -> LabelSelector {
    let mut requirements: BTreeSet<Requirement> = pods
        .requirements()
        .map(|r| requirement(&r.key, &r.condition))
        .collect();
    match namespaces {
        Namespaces::Own => {
            let own = Condition::In([own.to_owned()].into());
            requirements.insert(requirement(NAMESPACE_KEY, &own));
        }
        Namespaces::Selected(selector) => {
            if selector.selects_all() {
                requirements.insert(requirement(NAMESPACE_KEY, &Condition::Exists));
            }
            requirements.extend(selector.requirements().map(of_namespace));
            if selector.requirements().any(is_about_absence) {
                let known = format!("{NAMESPACE_LABELS}{NAMESPACE_NAME}");
                requirements.insert(requirement(&known, &Condition::Exists));
            }
        }
    }
    LabelSelector { requirements }
}

/// Whether a namespace without the label meets the requirement. Such a requirement selects only pods
/// whose namespace's labels are known: otherwise a namespace without a document would count as one
/// without labels.
fn is_about_absence(wanted: &selector::Requirement) -> bool {
    let absent = matches!(
        wanted.condition,
        Condition::NotIn(_) | Condition::DoesNotExist
    );
    absent && wanted.key != NAMESPACE_NAME
}

/// A requirement on the labels of a pod's namespace. The name of the namespace is a label that
/// every pod carries, also while the namespace's own labels are unknown.
fn of_namespace(wanted: &selector::Requirement) -> Requirement {
    if wanted.key == NAMESPACE_NAME {
        return requirement(NAMESPACE_KEY, &wanted.condition);
    }
    requirement(
        &format!("{NAMESPACE_LABELS}{}", wanted.key),
        &wanted.condition,
    )
}

fn requirement(key: &str, condition: &Condition) -> Requirement {
    Requirement {
        source: Some(K8S.to_owned()),
        key: key.to_owned(),
        operator: match condition {
            Condition::In(values) => Operator::In(values.clone()),
            Condition::NotIn(values) => Operator::NotIn(values.clone()),
            Condition::Exists => Operator::Exists,
            Condition::DoesNotExist => Operator::DoesNotExist,
        },
    }
}

fn port_rule(port: &Port) -> PortRule {
    PortRule {
        protocol: port.protocol.into(),
        ports: match &port.ports {
            PortRange::All => Ports::Range(0, u16::MAX),
            PortRange::Numbers(numbers) => Ports::Range(numbers.first(), numbers.last()),
            PortRange::Named(name) => Ports::Named(name.clone()),
        },
        dns: None,
    }
}
