//! Judges by the exports for a VPP vswitch, as the vswitch would.

use std::cmp::Reverse;

use super::{By, Local, Verdict};
use crate::{
    contiv::Flow,
    packet::Packet,
    pod::PodId,
    policy::Protocol,
    render::vpp::{
        acl::{Acl, Interface, RowAction},
        sessions::{Scope, SessionRule},
    },
    rule::Action,
};

/// The verdict by the access lists of a node.
pub fn by_acls<'a>(acls: &'a [Acl], local: &Local, packet: &Packet) -> Verdict<'a> {
    let (from, to) = local.sides(packet);
    if from.is_some() && from == to {
        return Verdict::passed(By::Itself);
    }
    let leaves_by = |interface: &Interface| match (interface, to) {
        (Interface::Pod(pod), Some(to)) => pod == to,
        (Interface::Node(_), None) => from.is_some(),
        _ => false,
    };
    let applied = acls.iter().filter(|acl| acl.output.iter().any(leaves_by));
    let by_one = |acl: &'a Acl| {
        let row = acl.rows.iter().find(|row| row.matches(packet));
        Verdict {
            passes: row.is_some_and(|row| row.action != RowAction::Deny),
            by: vec![row.map_or(By::NoRow(&acl.name), |row| By::Row(&acl.name, row))],
        }
    };
    let verdicts = applied.map(by_one);
    let all = verdicts.reduce(|before, next| before.then(|| next));
    all.unwrap_or_else(|| Verdict::passed(By::Open(Flow::Ingress)))
}

/// The verdict by the session rules of a node, which exist only for TCP and UDP; `None` for other
/// packets.
pub(crate) fn by_sessions<'a>(
    rules: &'a [SessionRule],
    local: &Local,
    packet: &Packet,
) -> Option<Verdict<'a>> {
    let judged = [Protocol::Tcp, Protocol::Udp];
    let ports = packet
        .ports
        .filter(|ports| judged.contains(&ports.protocol))?;
    let (from, to) = local.sides(packet);
    if from.is_some() && from == to {
        return Some(Verdict::passed(By::Itself));
    }
    let scope = match (from, to) {
        (Some(from), _) => Scope::Local(PodId::clone(from)),
        (None, Some(_)) => Scope::Global,
        (None, None) => return Some(Verdict::passed(By::Open(Flow::Ingress))),
    };
    let (own, own_port, other, other_port) = match scope {
        Scope::Local(_) => (
            packet.source,
            ports.source,
            packet.destination,
            ports.destination,
        ),
        Scope::Global => (
            packet.destination,
            ports.destination,
            packet.source,
            ports.source,
        ),
    };
    let is_port = |wanted: u16, port| wanted == 0 || wanted == port;
    let about = rules.iter().filter(|rule| {
        rule.scope == scope
            && rule.protocol == ports.protocol
            && rule
                .local
                .is_none_or(|net| ipnet::IpNet::V4(net).contains(&own))
            && ipnet::IpNet::V4(rule.remote).contains(&other)
            && is_port(rule.local_port, own_port)
            && is_port(rule.remote_port, other_port)
    });
    let closest = about.min_by_key(|rule| {
        let specific = |port| Reverse(port > 0);
        let ports = (specific(rule.local_port), specific(rule.remote_port));
        (Reverse(rule.remote.prefix_len()), ports)
    });
    Some(Verdict {
        passes: closest.is_none_or(|rule| rule.action == Action::Permit),
        by: vec![closest.map_or(By::Open(Flow::Egress), By::Session)],
    })
}
