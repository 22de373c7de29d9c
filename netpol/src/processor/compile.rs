//! Compiles a NetworkPolicy to matches, which are the same for every pod that it selects.

use std::collections::BTreeSet;

use crate::{
    contiv::{ContivPolicy, Flow, InNamespaces, Match, MatchPeers, PodSet, PolicyId, PolicyType},
    policy::{Direction, Namespaces, NetworkPolicy, Peer, Peers},
};

/// Compiles a policy; `None` if it restricts neither direction.
pub(super) fn policy(policy: &NetworkPolicy) -> Option<ContivPolicy> {
    let restricts = match (&policy.ingress, &policy.egress) {
        (Direction::Open, Direction::Open) => return None,
        (Direction::Restricted(_), Direction::Open) => PolicyType::Ingress,
        (Direction::Open, Direction::Restricted(_)) => PolicyType::Egress,
        (Direction::Restricted(_), Direction::Restricted(_)) => PolicyType::All,
    };
    let matches = |flow, direction: &Direction| {
        let rules = direction.rules().iter().map(move |rule| Match {
            flow,
            path: rule.path.clone(),
            peers: peers(&rule.peers, &policy.namespace),
            ports: rule.ports.clone(),
        });
        rules.collect::<Vec<Match>>()
    };
    let mut all = matches(Flow::Ingress, &policy.ingress);
    all.extend(matches(Flow::Egress, &policy.egress));
    Some(ContivPolicy {
        id: PolicyId {
            namespace: policy.namespace.as_str().into(),
            name: policy.name.as_str().into(),
        },
        restricts,
        matches: all,
    })
}

fn peers(peers: &Peers, own: &str) -> MatchPeers {
    let peers = match peers {
        Peers::Any => return MatchPeers::Everyone,
        Peers::Of(peers) => peers,
    };
    let (mut groups, mut blocks) = (BTreeSet::new(), Vec::new());
    for peer in peers {
        match peer {
            Peer::Pods { namespaces, pods } => {
                let namespaces = match namespaces {
                    Namespaces::Own => InNamespaces::Named(own.into()),
                    Namespaces::Selected(selector) => InNamespaces::Selected(selector.clone()),
                };
                let pods = pods.clone();
                groups.insert(PodSet { namespaces, pods });
            }
            Peer::Block(block) => blocks.push(block.clone()),
        }
    }
    MatchPeers::Of { groups, blocks }
}
