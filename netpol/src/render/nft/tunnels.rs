//! Packets of pods to tunnels of their own node. The tunnel unpacks them, and what it finds inside would
//! pass as a packet of another pod or node.
//!
//! ```text
//! chain input   { hook input: packets of this node's pods jump to the other chain }
//! chain tunnels { udp dport @tunnel_ports, and the protocols that have packets inside, are dropped }
//! ```

use std::collections::{BTreeMap, BTreeSet};

use super::{
    base::{add_set, address_type, source},
    ranges,
};
use crate::{
    group::Family,
    links::{NodeLinks, TUNNEL_PORTS},
    policy::Protocol,
    render::ruleset::{
        Chain, Element, Entry, Expression, Field, Key, Rule, Table, Type, Value, Verdict,
    },
};

/// The counter of packets of pods to tunnels of their node.
pub const TUNNELS: &str = "tunnels";

const SENDERS: &str = "senders";
const PORTS: &str = "tunnel_ports";
/// IPv4 in IP, IPv6 in IP, GRE, MPLS in IP.
const PROTOCOLS: [u8; 4] = [4, 41, 47, 137];

const fn local(family: Family) -> &'static str {
    match family {
        Family::V4 => "local4",
        Family::V6 => "local6",
    }
}

/// Adds the chains and their sets, without the members that depend on the node: [`members`] gives these.
pub(super) fn add(table: &mut Table) {
    let none = BTreeSet::new;
    table.counters.insert(TUNNELS.to_owned());
    add_set(table, SENDERS, Key::One(Type::Interface), none());
    let ports = TUNNEL_PORTS.map(|port| Element::One(Value::Port(port)));
    add_set(table, PORTS, Key::One(Type::Port), ports.into());
    for family in Family::ALL {
        add_set(table, local(family), Key::One(address_type(family)), none());
    }
    let senders = [
        (Field::Interface, SENDERS),
        (source(Family::V4), local(Family::V4)),
        (source(Family::V6), local(Family::V6)),
    ];
    let input = senders.map(|(field, set)| {
        Rule(vec![
            Expression::In(field, set.to_owned()),
            Expression::Verdict(Verdict::Jump(TUNNELS.to_owned())),
        ])
    });
    let port = Expression::In(Field::Port(Protocol::Udp), PORTS.to_owned());
    let tunnels = [port]
        .into_iter()
        .chain(PROTOCOLS.map(Expression::Numbered));
    let tunnels = tunnels.map(|packet| {
        let count = Expression::Count(TUNNELS.to_owned());
        Rule(vec![packet, count, Expression::Verdict(Verdict::Drop)])
    });
    for (name, entry, rules) in [
        ("input", Entry::Input, input.into()),
        (TUNNELS, Entry::Jump, tunnels.collect()),
    ] {
        table.chains.insert(name.to_owned(), Chain { entry, rules });
    }
}

/// For each set, the members that depend on the interfaces, tunnels and pods of the node.
pub(super) fn members(links: &NodeLinks) -> BTreeMap<&'static str, BTreeSet<Element>> {
    let senders = links.senders.iter();
    let senders = senders.map(|link| Element::One(Value::Interface(*link)));
    let ports = links.tunnel_ports.iter();
    let ports = ports.filter(|port| !TUNNEL_PORTS.contains(port));
    let ports = ports.map(|port| Element::One(Value::Port(*port)));
    let mut members = BTreeMap::from([(SENDERS, senders.collect()), (PORTS, ports.collect())]);
    for family in Family::ALL {
        let addresses = links.addresses.iter().copied();
        let addresses = addresses.filter(|address| Family::of(*address) == family);
        let addresses = addresses.map(|address| Element::One(ranges::address(address)));
        members.insert(local(family), addresses.collect());
    }
    members
}
