//! Port rules that have DNS names.

use dns_policy::rule::Transport;

use crate::policy::{
    model::Side,
    rule::{DnsNames, PeerRule, PortRule},
};

/// Port and transport at which queries are judged.
pub(crate) type DnsPort = (u16, Transport);

/// Port rules with DNS names among the allows of a direction.
pub(crate) fn dns_ports(side: &Side) -> impl Iterator<Item = (&PeerRule, &PortRule, &DnsNames)> {
    allows(side).flat_map(|rule| {
        let ports = rule.ports.iter();
        ports.filter_map(move |port| port.dns.as_ref().map(|names| (rule, port, names)))
    })
}

pub(crate) fn allows(side: &Side) -> impl Iterator<Item = &PeerRule> {
    let rules = side.rules.iter().map(|rule| &*rule.rule);
    rules.filter(|rule| !rule.deny)
}
