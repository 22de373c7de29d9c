//! The table of family `bridge`: ports of pods exchange no frames that the table of policies does
//! not see.
//!
//! ```text
//! table bridge holdfast_policies_v1 {
//!   set other_ports { ports that lead to no pod of this node }
//!   set judged      { IPv4, ARP, IPv6 }
//!   chain arriving  { prerouting: of the other ports pass; what is not judged is dropped, and what only
//!                     routers send }
//!   chain leaving   { forward: to the other ports pass; what is not judged is dropped, and while a pod
//!                     on a bridge has an ingress policy, datagrams to all of a group }
//! }
//! ```
//! br_netfilter shows IPv4 and IPv6 packets to the rules of family `inet`, but not packets under a
//! VLAN tag, in PPPoE or in frames of other kinds. A pod that unpacks such a frame would receive
//! what its policy denies. For a tag of VLAN 0 the pod needs no privileges, because a receiver
//! ignores that tag.

use std::net::{Ipv4Addr, Ipv6Addr};

use super::base::{TABLE, add_set};
use crate::{
    links::NodeLinks,
    policy::Protocol,
    render::ruleset::{
        Chain, Element, Entry, Expression, Field, Key, Rule, Table, TableFamily, Type, Value,
        Verdict,
    },
};

/// The counter of frames from or to a pod's port that the table of policies would not see, and of
/// router messages that pods send.
pub const FRAMES: &str = "frames";

/// The counter of datagrams to groups and broadcast addresses that would leave by the port of a
/// pod.
pub const TO_ALL: &str = "to_all";

const BROADCASTS: &str = "broadcasts";
const OTHER_PORTS: &str = "other_ports";
const JUDGED: &str = "judged";
/// `ETH_P_IP`, `ETH_P_ARP`, `ETH_P_IPV6`.
const IPV4: u16 = 0x0800;
const ARP: u16 = 0x0806;
const IPV6: u16 = 0x86dd;
/// Router advertisement and redirect: with them, a pod could lead packets of others to itself.
const OF_ROUTERS: [u8; 2] = [134, 137];
/// Solicitations and advertisements of routers and neighbours.
const NEIGHBOUR_DISCOVERY: [u8; 4] = [133, 134, 135, 136];
const IGMP: u8 = 2;
const DHCP_CLIENT: u16 = 68;
/// The first and the last multicast address.
const GROUPS4: (Ipv4Addr, Ipv4Addr) = (
    Ipv4Addr::new(224, 0, 0, 0),
    Ipv4Addr::new(239, 255, 255, 255),
);
const GROUPS6: (Ipv6Addr, Ipv6Addr) = (
    Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0),
    Ipv6Addr::from_bits(u128::MAX),
);

/// The table, which is empty while no pod is on a bridge. `is_quiet`: whether a pod on a bridge is
/// restricted in what it receives.
pub(super) fn table(links: &NodeLinks, is_quiet: bool) -> Table {
    let mut table = Table::of(TableFamily::Bridge, TABLE);
    if links.bridges.is_empty() {
        return table;
    }
    table.counters.extend([FRAMES, TO_ALL].map(str::to_owned));
    let broadcasts = links.broadcasts.iter().chain([&Ipv4Addr::BROADCAST]);
    let broadcasts = broadcasts.map(|address| Element::One(Value::Ipv4(*address)));
    add_set(
        &mut table,
        BROADCASTS,
        Key::One(Type::Ipv4),
        broadcasts.collect(),
    );
    let ports = links.other_ports.iter();
    let ports = ports.map(|port| Element::One(Value::Interface(*port)));
    add_set(
        &mut table,
        OTHER_PORTS,
        Key::One(Type::Interface),
        ports.collect(),
    );
    let kinds = [IPV4, ARP, IPV6].map(|kind| Element::One(Value::EtherType(kind)));
    add_set(&mut table, JUDGED, Key::One(Type::EtherType), kinds.into());
    for (name, entry, port) in [
        ("arriving", Entry::Arriving, Field::Interface),
        ("leaving", Entry::Leaving, Field::OutInterface),
    ] {
        let mut rules = vec![
            Rule(vec![
                Expression::In(port, OTHER_PORTS.to_owned()),
                Expression::Verdict(Verdict::Accept),
            ]),
            dropped(
                FRAMES,
                [Expression::NotIn(Field::EtherType, JUDGED.to_owned())],
            ),
        ];
        match entry {
            Entry::Arriving => rules.extend(
                OF_ROUTERS.map(|kind| dropped(FRAMES, [of(IPV6), Expression::Icmp6(kind)])),
            ),
            _ if is_quiet => rules.extend(to_all()),
            _ => {}
        }
        table.chains.insert(name.to_owned(), Chain { entry, rules });
    }
    table
}

/// Drops datagrams to groups and broadcast addresses at ports of pods, except for those that a
/// network needs: neighbour discovery and, from ports that lead to no pod, also DHCP and queries
/// for members of groups.
fn to_all() -> Vec<Rule> {
    use Expression::{Icmp6, In, Numbered, Verdict as End, Within};
    let is_other = || In(Field::Interface, OTHER_PORTS.to_owned());
    let client = Value::Port(DHCP_CLIENT);
    let passing = [
        vec![is_other(), of(IPV4), Numbered(IGMP)],
        vec![
            is_other(),
            of(IPV4),
            Within(Field::Port(Protocol::Udp), client, client),
        ],
    ];
    let discovery = NEIGHBOUR_DISCOVERY.map(|kind| vec![of(IPV6), Icmp6(kind)]);
    let passing = passing.into_iter().chain(discovery).map(|mut rule| {
        rule.push(End(Verdict::Accept));
        Rule(rule)
    });
    let (first, last) = GROUPS4;
    let (first, last) = (Value::Ipv4(first), Value::Ipv4(last));
    let groups4 = Within(Field::Destination4, first, last);
    let networks = In(Field::Destination4, BROADCASTS.to_owned());
    let (first, last) = GROUPS6;
    let (first, last) = (Value::Ipv6(first), Value::Ipv6(last));
    let groups6 = Within(Field::Destination6, first, last);
    let dropped = [
        dropped(TO_ALL, [of(IPV4), groups4]),
        dropped(TO_ALL, [of(IPV4), networks]),
        dropped(TO_ALL, [of(IPV6), groups6]),
    ];
    passing.chain(dropped).collect()
}

/// The condition that the frame has this protocol.
fn of(kind: u16) -> Expression {
    let kind = Value::EtherType(kind);
    Expression::Within(Field::EtherType, kind, kind)
}

fn dropped(counter: &str, conditions: impl IntoIterator<Item = Expression>) -> Rule {
    let mut rule: Vec<Expression> = conditions.into_iter().collect();
    rule.push(Expression::Count(counter.to_owned()));
    rule.push(Expression::Verdict(Verdict::Drop));
    Rule(rule)
}
