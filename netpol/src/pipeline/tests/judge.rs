//! Judges a packet only by the rules of a table.

use std::net::IpAddr;

use crate::{
    policy::Protocol,
    render::ruleset::{Element, Expression, Field, Table, Value, Verdict},
};

/// The first packet of a connection between two interfaces.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packet {
    pub(super) interface: u32,
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    /// `None` for a protocol without ports.
    pub(super) ports: Option<(Protocol, u16)>,
}

/// Whether the table lets a packet pass.
pub(super) fn passes(table: &Table, packet: &Packet) -> bool {
    match chain(table, "forward", packet) {
        None | Some(Verdict::Accept) => true,
        Some(Verdict::Drop) => false,
        Some(other) => panic!("{other:?} ends no chain"),
    }
}

/// The verdict that ends the evaluation of a chain; `None` if evaluation goes on after the jump.
fn chain(table: &Table, name: &str, packet: &Packet) -> Option<Verdict> {
    for rule in &table.chains[name].rules {
        match self::rule(table, &rule.0, packet) {
            None => {}
            Some(Verdict::Return) => return None,
            Some(Verdict::Jump(to)) => {
                if let Some(end) = chain(table, &to, packet) {
                    return Some(end);
                }
            }
            Some(end) => return Some(end),
        }
    }
    None
}

/// The verdict of a rule; `None` if the packet does not meet its conditions.
fn rule(table: &Table, expressions: &[Expression], packet: &Packet) -> Option<Verdict> {
    for expression in expressions {
        let holds = match expression {
            Expression::Protocol(protocol) => packet.ports.is_some_and(|(of, _)| of == *protocol),
            Expression::Within(of, first, last) => {
                field(packet, *of).is_some_and(|value| (*first..=*last).contains(&value))
            }
            Expression::In(of, set) => {
                field(packet, *of).is_some_and(|value| has(table, set, value))
            }
            Expression::PairIn(one, other, set) => pair(packet, *one, *other)
                .is_some_and(|pair| table.sets[set].elements.contains(&pair)),
            Expression::PairNotIn(one, other, set) => pair(packet, *one, *other)
                .is_some_and(|pair| !table.sets[set].elements.contains(&pair)),
            Expression::NotIn(of, set) => {
                field(packet, *of).is_some_and(|value| !has(table, set, value))
            }
            Expression::Numbered(number) => packet
                .ports
                .is_some_and(|(protocol, _)| protocol.number() == *number),
            Expression::Answer
            | Expression::Related
            | Expression::NeighbourDiscovery
            | Expression::MiddleOfTcp
            | Expression::Icmp6(_) => false,
            Expression::Count(name) => table.counters.contains(name),
            Expression::Log(..) => true,
            Expression::VerdictIn(of, map) => {
                let value = field(packet, *of)?;
                return table.maps[map].elements.get(&value).cloned();
            }
            Expression::Verdict(verdict) => return Some(verdict.clone()),
        };
        if !holds {
            return None;
        }
    }
    None
}

fn has(table: &Table, set: &str, value: Value) -> bool {
    let elements = &table.sets[set].elements;
    elements.contains(&Element::One(value))
        || elements.iter().any(|element| {
            matches!(element, Element::Range(first, last) if (*first..=*last).contains(&value))
        })
}

fn pair(packet: &Packet, one: Field, other: Field) -> Option<Element> {
    Some(Element::Pair(field(packet, one)?, field(packet, other)?))
}

fn field(packet: &Packet, of: Field) -> Option<Value> {
    match (of, packet.source, packet.destination) {
        (Field::Interface, ..) => Some(Value::Interface(packet.interface)),
        (Field::Source4, IpAddr::V4(source), _) => Some(Value::Ipv4(source)),
        (Field::Source6, IpAddr::V6(source), _) => Some(Value::Ipv6(source)),
        (Field::Destination4, _, IpAddr::V4(destination)) => Some(Value::Ipv4(destination)),
        (Field::Destination6, _, IpAddr::V6(destination)) => Some(Value::Ipv6(destination)),
        (Field::Port(protocol), ..) => {
            let (of, port) = packet.ports?;
            (of == protocol).then_some(Value::Port(port))
        }
        _ => None,
    }
}
