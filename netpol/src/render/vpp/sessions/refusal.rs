//! Policies that session rules cannot express.

use super::MAX_PORTS;
use crate::{
    contiv::{ContivPolicy, Match, MatchPeers},
    pod::PodId,
    policy::{PortRange, Ports, Protocol},
    ports::Span,
    processor::PodPolicies,
    rule::Rule,
};

pub(super) const SCTP: &str = "VPPTCP has TCP and UDP only, and this is about SCTP";
pub(super) const IPV6: &str = "VPPTCP has IPv4 only, and this is an address of IPv6";
pub(super) const PORTS: &str = "VPPTCP has single ports, and these are more than 1,024";
pub(super) const SOURCE_PORTS: &str = "VPPTCP has no rule about the ports of a sender here";

/// Why there are no session rules.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {reason}; use the ACLs, which can express this")]
pub struct NoSessionRules {
    /// Policy and field, or otherwise the pod or the rule.
    pub at: String,
    /// The feature that session rules do not have.
    pub reason: &'static str,
}

impl NoSessionRules {
    pub(super) fn of(rule: &Rule, reason: &'static str) -> Self {
        Self {
            at: format!("rule {rule}"),
            reason,
        }
    }
}

/// Why a pod with these policies cannot have session rules.
pub(crate) fn refusal(id: &PodId, pod: &PodPolicies) -> Option<NoSessionRules> {
    if let Some(address) = pod.addresses.iter().find(|address| address.is_ipv6()) {
        return Some(NoSessionRules {
            at: format!("pod {id}, {address}"),
            reason: IPV6,
        });
    }
    pod.policies.iter().find_map(|policy| {
        let mut refused = policy.matches.iter().filter_map(|one| refused(one, policy));
        refused.next()
    })
}

fn refused(of: &Match, policy: &ContivPolicy) -> Option<NoSessionRules> {
    let at = |field: &str| format!("NetworkPolicy/{} {field}", policy.id);
    if let MatchPeers::Of { blocks, .. } = &of.peers
        && let Some(block) = blocks.iter().find(|block| block.prefix().addr().is_ipv6())
    {
        let at = at(block.path());
        return Some(NoSessionRules { at, reason: IPV6 });
    }
    let Ports::Of(ports) = &of.ports else {
        return None;
    };
    ports.iter().enumerate().find_map(|(n, port)| {
        let reason = match &port.ports {
            _ if port.protocol == Protocol::Sctp => SCTP,
            PortRange::Numbers(numbers) if Span::from(*numbers).len() > MAX_PORTS => PORTS,
            _ => return None,
        };
        let at = at(&format!("{}.ports[{n}]", of.path));
        Some(NoSessionRules { at, reason })
    })
}
