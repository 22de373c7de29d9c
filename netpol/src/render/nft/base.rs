//! The parts of the table that every node has: maps, sets for pods and interfaces, and the chain
//! that forwarded packets enter.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv6Addr},
};

use super::ranges;
use crate::{
    contiv::Flow,
    group::Family,
    render::ruleset::{
        Chain, Element, Entry, Expression, Field, Key, Rule, Set, Table, Type, Value, Verdict,
        VerdictMap,
    },
};

/// Name of the table. A change of its form that an older agent must not undo gets a new name.
pub const TABLE: &str = "holdfast_policies_v1";
/// The counter of packets from an interface whose pod has another address, and of packets with
/// link-local addresses between bridge ports.
pub const SPOOFED: &str = "spoofed";
/// The counter of TCP segments from or to a restricted pod that open no connection and belong to no
/// connection known to conntrack.
pub const MIDDLE: &str = "tcp_middle";
/// The set of interfaces whose addresses are known.
pub(super) const LINKS: &str = "links";

/// The set of bridges on which pods do not reach each other by link-local addresses.
pub(super) const BRIDGES: &str = "bridges";
/// The first and the last link-local address.
const LINK_LOCAL: (Ipv6Addr, Ipv6Addr) = (
    Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0),
    Ipv6Addr::from_bits((0xfebf << 112) | (u128::MAX >> 16)),
);

const FORWARD: &str = "forward";

/// The counter of packets that policies of this direction drop.
pub const fn dropped(flow: Flow) -> &'static str {
    match flow {
        Flow::Ingress => "dropped_in",
        Flow::Egress => "dropped_out",
    }
}

/// The map from addresses of restricted pods to the chain of their packets.
pub(super) const fn map(flow: Flow, family: Family) -> &'static str {
    match (flow, family) {
        (Flow::Ingress, Family::V4) => "to4",
        (Flow::Ingress, Family::V6) => "to6",
        (Flow::Egress, Family::V4) => "from4",
        (Flow::Egress, Family::V6) => "from6",
    }
}

/// The set of pairs of an interface and an address behind it.
pub(super) const fn behind(family: Family) -> &'static str {
    match family {
        Family::V4 => "behind4",
        Family::V6 => "behind6",
    }
}

/// The set of addresses whose interface is known.
pub(super) const fn routed(family: Family) -> &'static str {
    match family {
        Family::V4 => "routed4",
        Family::V6 => "routed6",
    }
}

/// The set of pairs of a restricted pod's address with itself.
pub(super) const fn own(family: Family) -> &'static str {
    match family {
        Family::V4 => "self4",
        Family::V6 => "self6",
    }
}

/// The type of addresses.
pub(super) const fn address_type(family: Family) -> Type {
    match family {
        Family::V4 => Type::Ipv4,
        Family::V6 => Type::Ipv6,
    }
}

/// The field of a packet that has the address of the pod's peer.
pub(super) const fn peer_field(flow: Flow, family: Family) -> Field {
    match flow {
        Flow::Ingress => source(family),
        Flow::Egress => destination(family),
    }
}

pub(super) const fn source(family: Family) -> Field {
    match family {
        Family::V4 => Field::Source4,
        Family::V6 => Field::Source6,
    }
}

const fn destination(family: Family) -> Field {
    match family {
        Family::V4 => Field::Destination4,
        Family::V6 => Field::Destination6,
    }
}

/// The table of a node without pods.
pub(super) fn table() -> Table {
    let none = BTreeSet::new;
    let mut table = Table::new(TABLE);
    let counters = [
        SPOOFED,
        MIDDLE,
        dropped(Flow::Ingress),
        dropped(Flow::Egress),
    ];
    table.counters.extend(counters.map(str::to_owned));
    add_set(&mut table, LINKS, Key::One(Type::Interface), none());
    add_set(&mut table, BRIDGES, Key::One(Type::Interface), none());
    for family in Family::ALL {
        let address = address_type(family);
        add_set(
            &mut table,
            behind(family),
            Key::Pair(Type::Interface, address),
            none(),
        );
        add_set(&mut table, routed(family), Key::One(address), none());
        add_set(&mut table, own(family), Key::Pair(address, address), none());
        for flow in Flow::ALL {
            let map = VerdictMap {
                key: address,
                elements: [].into(),
            };
            table.maps.insert(self::map(flow, family).to_owned(), map);
        }
    }
    let forward = Chain {
        entry: Entry::Forward,
        rules: forward(),
    };
    table.chains.insert(FORWARD.to_owned(), forward);
    table
}

pub(super) fn add_set(table: &mut Table, name: &str, key: Key, elements: BTreeSet<Element>) {
    table.sets.insert(name.to_owned(), Set { key, elements });
}

/// First, packets with false sources are dropped. Then answers and packets that belong to no policy
/// pass. Then the chains of both sides judge. Packets of the original direction are always judged,
/// so that a policy also applies to open connections.
fn forward() -> Vec<Rule> {
    use Expression::{
        Answer, Count, In, MiddleOfTcp, NeighbourDiscovery, PairIn, Verdict as End, VerdictIn,
        Within,
    };
    let link_local = |field| {
        let (first, last) = LINK_LOCAL;
        Rule(vec![
            In(Field::Interface, BRIDGES.to_owned()),
            Within(field, Value::Ipv6(first), Value::Ipv6(last)),
            Count(SPOOFED.to_owned()),
            End(Verdict::Drop),
        ])
    };
    // The kernel takes such a segment for the first one of a connection (nf_conntrack_tcp_loose).
    // If it passed, all packets of the opposite direction would pass as answers.
    let middle = |(family, field)| {
        Rule(vec![
            MiddleOfTcp,
            PairIn(field, field, own(family).to_owned()),
            Count(MIDDLE.to_owned()),
            End(Verdict::Drop),
        ])
    };
    let to_itself = |family| {
        let pair = PairIn(source(family), destination(family), own(family).to_owned());
        Rule(vec![pair, End(Verdict::Accept)])
    };
    let judged = |flow, family| {
        let field = match flow {
            Flow::Egress => source(family),
            Flow::Ingress => destination(family),
        };
        Rule(vec![VerdictIn(field, map(flow, family).to_owned())])
    };
    let mut rules: Vec<Rule> = Family::ALL.into_iter().flat_map(spoofed).collect();
    let passing = |packet| Rule(vec![packet, End(Verdict::Accept)]);
    rules.push(passing(Answer));
    rules.extend(Family::ALL.into_iter().flat_map(related));
    rules.push(passing(NeighbourDiscovery));
    let ends = Family::ALL
        .into_iter()
        .flat_map(|family| [source(family), destination(family)].map(|field| (family, field)));
    rules.extend(ends.map(middle));
    rules.extend([Field::Source6, Field::Destination6].map(link_local));
    rules.extend(Family::ALL.map(to_itself));
    for flow in [Flow::Egress, Flow::Ingress] {
        rules.extend(Family::ALL.map(|family| judged(flow, family)));
    }
    rules
}

/// Drops packets of a known interface from an address that is not behind it, and packets from a
/// known address that came by another interface.
fn spoofed(family: Family) -> [Rule; 2] {
    let guards = [(Field::Interface, LINKS), (source(family), routed(family))];
    guards.map(|(field, set)| {
        Rule(vec![
            Expression::In(field, set.to_owned()),
            Expression::PairNotIn(Field::Interface, source(family), behind(family).to_owned()),
            Expression::Count(SPOOFED.to_owned()),
            Expression::Verdict(Verdict::Drop),
        ])
    })
}

/// Errors about open connections pass if they come from a router or from an end of the connection.
/// A restricted pod must not send errors about connections of others.
fn related(family: Family) -> [Rule; 3] {
    use Expression::{PairIn, PairNotIn, Related, Verdict as End};
    let (opener, answerer) = match family {
        Family::V4 => (Field::Opener4, Field::Answerer4),
        Family::V6 => (Field::Opener6, Field::Answerer6),
    };
    let (source, own) = (source(family), || own(family).to_owned());
    [
        PairNotIn(source, source, own()),
        PairIn(opener, source, own()),
        PairIn(answerer, source, own()),
    ]
    .map(|sender| Rule(vec![Related, sender, End(Verdict::Accept)]))
}

/// The pair of an address with itself.
pub(super) fn itself(address: &IpAddr) -> Element {
    let address = ranges::address(*address);
    Element::Pair(address, address)
}

/// The pair of an interface and an address behind it.
pub(super) fn behind_link((link, address): &(u32, IpAddr)) -> Element {
    Element::Pair(Value::Interface(*link), ranges::address(*address))
}
