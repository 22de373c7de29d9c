//! The table of family `bridge`: ports of pods exchange no frame that the table of policies does not see.
//!
//! ```text
//! table bridge holdfast_policies_v1 {
//!   set other_ports { ports that lead to no pod of this node }
//!   set judged      { IPv4, ARP, IPv6 }
//!   chain arriving  { prerouting: of the other ports pass; what is not judged is dropped, and what only
//!                     routers send }
//!   chain leaving   { forward: to the other ports pass; what is not judged is dropped }
//! }
//! ```
//! br_netfilter shows IPv4 and IPv6 to the rules of family `inet`, but not under a VLAN tag, in PPPoE or
//! in a frame of another kind. A pod that unpacks such a frame would receive what its policy denies. The
//! receiver takes a tag of VLAN 0 for none, so that it needs no rights for that.

use super::base::{TABLE, add_set};
use crate::{
    links::NodeLinks,
    render::ruleset::{
        Chain, Element, Entry, Expression, Field, Key, Rule, Table, TableFamily, Type, Value,
        Verdict,
    },
};

/// The counter of frames from or to a pod's port that the table of policies would not see, and of messages
/// of routers that pods send.
pub const FRAMES: &str = "frames";

const OTHER_PORTS: &str = "other_ports";
const JUDGED: &str = "judged";
/// `ETH_P_IP`, `ETH_P_ARP`, `ETH_P_IPV6`.
const IPV4: u16 = 0x0800;
const ARP: u16 = 0x0806;
const IPV6: u16 = 0x86dd;
/// Router advertisement, redirect: with these a pod would lead packets of others to itself.
const OF_ROUTERS: [u8; 2] = [134, 137];

/// The table; empty while no pod is on a bridge.
pub(super) fn table(links: &NodeLinks) -> Table {
    let mut table = Table::of(TableFamily::Bridge, TABLE);
    if links.bridges.is_empty() {
        return table;
    }
    table.counters.insert(FRAMES.to_owned());
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
            dropped([Expression::NotIn(Field::EtherType, JUDGED.to_owned())]),
        ];
        if entry == Entry::Arriving {
            let ipv6 = Value::EtherType(IPV6);
            let is_ipv6 = || Expression::Within(Field::EtherType, ipv6, ipv6);
            let of_router = OF_ROUTERS.map(|kind| dropped([is_ipv6(), Expression::Icmp6(kind)]));
            rules.extend(of_router);
        }
        table.chains.insert(name.to_owned(), Chain { entry, rules });
    }
    table
}

fn dropped(conditions: impl IntoIterator<Item = Expression>) -> Rule {
    let mut rule: Vec<Expression> = conditions.into_iter().collect();
    rule.push(Expression::Count(FRAMES.to_owned()));
    rule.push(Expression::Verdict(Verdict::Drop));
    Rule(rule)
}
