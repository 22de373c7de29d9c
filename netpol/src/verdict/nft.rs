//! Judges by the table of nf_tables, as the kernel judges the first packet of a connection.

use std::net::IpAddr;

use super::{By, Verdict};
use crate::{
    contiv::Flow,
    packet::Packet,
    render::ruleset::{self, Element, Entry, Expression, Field, Table, Value},
};

/// The verdict by the chains for forwarded packets. The interface by which the packet came is not
/// known.
pub(crate) fn by_table<'a>(table: &'a Table, packet: &Packet) -> Verdict<'a> {
    let mut judge = Judge {
        table,
        packet,
        by: Vec::new(),
    };
    let entries = table
        .chains
        .iter()
        .filter(|(_, chain)| chain.entry == Entry::Forward);
    let passes = entries.fold(true, |passes, (name, _)| {
        passes && judge.chain(name) != Some(false)
    });
    if judge.by.is_empty() {
        judge.by.push(By::Open(Flow::Ingress));
    }
    Verdict {
        passes,
        by: judge.by,
    }
}

struct Judge<'a, 'p> {
    table: &'a Table,
    packet: &'p Packet,
    by: Vec<By<'a>>,
}

/// How a rule ends.
enum End<'a> {
    /// A condition does not hold, or there is no verdict: the next rule follows.
    Next,
    Verdict(&'a ruleset::Verdict),
}

impl<'a> Judge<'a, '_> {
    /// Whether a chain lets the packet pass; `None` if the chain that jumped to it decides.
    fn chain(&mut self, name: &'a str) -> Option<bool> {
        for rule in &self.table.chains.get(name)?.rules {
            let End::Verdict(verdict) = self.rule(rule) else {
                continue;
            };
            if !matches!(verdict, ruleset::Verdict::Jump(_)) {
                self.by.push(By::Nft(name, rule));
            }
            match verdict {
                ruleset::Verdict::Accept => return Some(true),
                ruleset::Verdict::Drop => return Some(false),
                ruleset::Verdict::Return => return None,
                ruleset::Verdict::Jump(to) => {
                    if let Some(passes) = self.chain(to) {
                        return Some(passes);
                    }
                }
            }
        }
        None
    }

    fn rule(&self, rule: &'a ruleset::Rule) -> End<'a> {
        for expression in &rule.0 {
            let holds = match expression {
                Expression::Verdict(verdict) => return End::Verdict(verdict),
                Expression::VerdictIn(field, map) => match self.verdict_in(*field, map) {
                    Some(verdict) => return End::Verdict(verdict),
                    None => true,
                },
                Expression::Count(_) | Expression::Log(..) => true,
                // The packet is the first of its connection.
                Expression::Answer
                | Expression::Related
                | Expression::NeighbourDiscovery
                | Expression::MiddleOfTcp
                | Expression::Icmp6(_) => false,
                Expression::Numbered(number) => self
                    .packet
                    .ports
                    .is_some_and(|ports| ports.protocol.number() == *number),
                Expression::Protocol(protocol) => self
                    .packet
                    .ports
                    .is_some_and(|ports| ports.protocol == *protocol),
                Expression::Within(field, first, last) => self
                    .value(*field)
                    .is_some_and(|value| (*first..=*last).contains(&value)),
                Expression::In(field, set) => {
                    self.value(*field).is_some_and(|value| self.has(set, value))
                }
                Expression::NotIn(field, set) => self
                    .value(*field)
                    .is_some_and(|value| !self.has(set, value)),
                Expression::PairIn(one, other, set) => self
                    .pair(*one, *other)
                    .is_some_and(|pair| self.has_pair(set, pair)),
                Expression::PairNotIn(one, other, set) => self
                    .pair(*one, *other)
                    .is_some_and(|pair| !self.has_pair(set, pair)),
            };
            if !holds {
                return End::Next;
            }
        }
        End::Next
    }

    fn verdict_in(&self, field: Field, map: &str) -> Option<&'a ruleset::Verdict> {
        self.table.maps.get(map)?.elements.get(&self.value(field)?)
    }

    /// The value of a field; `None` if the packet does not have it.
    fn value(&self, field: Field) -> Option<Value> {
        let Packet {
            source,
            destination,
            ports,
        } = *self.packet;
        match (field, source, destination) {
            (Field::Source4, IpAddr::V4(address), _)
            | (Field::Destination4, _, IpAddr::V4(address)) => Some(Value::Ipv4(address)),
            (Field::Source6, IpAddr::V6(address), _)
            | (Field::Destination6, _, IpAddr::V6(address)) => Some(Value::Ipv6(address)),
            (Field::Port(protocol), ..) => {
                let ports = ports.filter(|ports| ports.protocol == protocol)?;
                Some(Value::Port(ports.destination))
            }
            _ => None,
        }
    }

    fn pair(&self, one: Field, other: Field) -> Option<(Value, Value)> {
        Some((self.value(one)?, self.value(other)?))
    }

    fn has(&self, set: &str, value: Value) -> bool {
        self.table.sets.get(set).is_some_and(|set| {
            set.elements.contains(&Element::One(value))
                || set.elements.iter().any(|element| match element {
                    Element::Range(first, last) => (*first..=*last).contains(&value),
                    Element::One(_) | Element::Pair(..) => false,
                })
        })
    }

    fn has_pair(&self, set: &str, (one, other): (Value, Value)) -> bool {
        let set = self.table.sets.get(set);
        set.is_some_and(|set| set.elements.contains(&Element::Pair(one, other)))
    }
}
