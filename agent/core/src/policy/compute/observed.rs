//! Endpoints whose DNS answers the proxy has to see although no DNS rule says so: an ordered list
//! names destinations by DNS name.
//!
//! Queries to port 53 that policy lets pass then go through the proxy. It allows every name where a
//! rule without names allows the port. What DNS rules allow is not widened.

use dns_policy::rule::{NameRule, Transport};
use shared_maps::{
    IdentityId,
    policy::{EGRESS, PRECEDENCE_ALLOW, PolicyKey, PolicyValue},
};

use super::{is_within, put};
use crate::{
    policy::{
        compute::{
            dns_ports::{DnsPort, dns_ports},
            entries::Entries,
        },
        model::Side,
        rule::{DnsNames, PortRule, Ports},
    },
    selector::selector::Selector,
};

/// Ports at which answers are observed.
pub(super) const PORTS: [DnsPort; 2] = [(PORT, Transport::Udp), (PORT, Transport::Tcp)];

const PORT: u16 = 53;

/// Which queries to port 53 pass the proxy, besides those that DNS rules are about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Observed {
    /// No queries besides those of DNS rules.
    #[default]
    Nothing,
    /// Queries that rules allow. Unrestricted egress does not go through the proxy if DNS rules limit
    /// names: the proxy has no way to allow every name at all servers except some.
    Allowed,
    /// All queries that pass, for any reason.
    Everything,
}

impl Observed {
    /// What the proxy must see because of the egress of a policy.
    pub(crate) fn of(side: &Side) -> Self {
        let selectors = side.tier.iter().flat_map(|rule| &rule.rule.selectors);
        let mut selectors = selectors.into_iter();
        if !selectors.any(|selector| matches!(selector, Selector::DnsName(_))) {
            return Self::Nothing;
        }
        let mut limits =
            dns_ports(side).filter(|(_, port, names)| may_be_at(port) && !is_all(names));
        match side.enforced || limits.next().is_some() {
            true => Self::Allowed,
            false => Self::Everything,
        }
    }

    /// Whether queries to a port pass the proxy where policy lets them pass.
    pub(crate) fn is_at(self, protocol: u8, port: u16) -> bool {
        let at = Transport::from_number(protocol).map(|transport| (port, transport));
        self != Self::Nothing && at.is_some_and(|at| PORTS.contains(&at))
    }
}

fn may_be_at(port: &PortRule) -> bool {
    match &port.ports {
        Ports::Range(first, last) => (*first..=*last).contains(&PORT),
        Ports::Named(_) => true,
    }
}

/// Whether every name is allowed.
fn is_all(names: &DnsNames) -> bool {
    let every = |rule: &NameRule| matches!(rule, NameRule::Pattern(pattern) if pattern == "*");
    match names {
        DnsNames::All => true,
        DnsNames::Names(list) => list.iter().any(every),
    }
}

/// Redirects what drafts of egress allow at the observed ports.
pub(super) fn redirect(drafts: &mut Entries, identity: IdentityId, proxy_port: u16) {
    for (port, transport) in PORTS {
        let key = PolicyKey::new(identity.0, EGRESS, transport.number(), port, 16);
        let about = drafts.iter().filter(|(other, _)| is_within(&key, other));
        let strongest = about.map(|(_, value)| value.precedence).max();
        if strongest == Some(PRECEDENCE_ALLOW) {
            put(drafts, key, PolicyValue::dns_redirect(key, proxy_port));
        }
    }
}
