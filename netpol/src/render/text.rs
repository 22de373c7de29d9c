//! Tables and changes in the language of nft(8): `nft -f` accepts both.

use std::fmt::{self, Display, Formatter};

use super::{
    change::{Change, Step},
    ruleset::{
        Element, Entry, Expression, Field, Key, Rule, Table, TableFamily, Type, Value, Verdict,
    },
};
use crate::policy::Protocol;

impl Display for Table {
    /// One element or rule per line, so that two texts can be compared line by line.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "table {} {} {{", self.family, self.name)?;
        for name in &self.counters {
            writeln!(f, "\tcounter {name} {{\n\t}}")?;
        }
        for (name, set) in &self.sets {
            writeln!(f, "\tset {name} {{\n\t\t{}", set.key)?;
            write_elements(f, set.elements.iter())?;
            writeln!(f, "\t}}")?;
        }
        for (name, map) in &self.maps {
            writeln!(f, "\tmap {name} {{\n\t\ttype {} : verdict", map.key)?;
            let pairs = map.elements.iter();
            write_elements(f, pairs.map(|(value, verdict)| Pair(value, verdict)))?;
            writeln!(f, "\t}}")?;
        }
        for (name, chain) in &self.chains {
            writeln!(f, "\tchain {name} {{")?;
            if let Some(hook) = hook(chain.entry) {
                writeln!(f, "\t\t{hook}")?;
            }
            for rule in &chain.rules {
                writeln!(f, "\t\t{rule}")?;
            }
            writeln!(f, "\t}}")?;
        }
        writeln!(f, "}}")
    }
}

/// Type, hook and policy of a chain.
const fn hook(entry: Entry) -> Option<&'static str> {
    match entry {
        Entry::Jump => None,
        Entry::Forward => Some("type filter hook forward priority filter; policy accept;"),
        Entry::Input => Some("type filter hook input priority filter; policy accept;"),
        Entry::Arriving => Some("type filter hook prerouting priority -300; policy accept;"),
        Entry::Leaving => Some("type filter hook forward priority -300; policy accept;"),
    }
}

impl Display for TableFamily {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Inet => "inet",
            Self::Bridge => "bridge",
        })
    }
}

fn write_elements<T: Display>(
    f: &mut Formatter<'_>,
    mut elements: impl Iterator<Item = T>,
) -> fmt::Result {
    let Some(first) = elements.next() else {
        return Ok(());
    };
    write!(f, "\t\telements = {{\n\t\t\t{first}")?;
    for element in elements {
        write!(f, ",\n\t\t\t{element}")?;
    }
    writeln!(f, "\n\t\t}}")
}

impl Display for Change {
    /// One command per line.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for step in &self.steps {
            write_step(f, self, step)?;
            writeln!(f)?;
        }
        Ok(())
    }
}

fn write_step(f: &mut Formatter<'_>, of: &Change, step: &Step) -> fmt::Result {
    let (family, table) = (of.family, &of.table);
    let mut command = |verb: &str, object: &str| write!(f, "{verb} {family} {table}{object}");
    match step {
        Step::AddTable => command("add table", ""),
        Step::DeleteTable => command("delete table", ""),
        Step::AddCounter(name) => command("add counter", &format!(" {name}")),
        Step::AddSet(name, key) => command("add set", &format!(" {name} {{ {key}; }}")),
        Step::AddMap(name, key) => {
            command("add map", &format!(" {name} {{ type {key} : verdict; }}"))
        }
        Step::AddChain(name, entry) => match hook(*entry) {
            None => command("add chain", &format!(" {name}")),
            Some(hook) => command("add chain", &format!(" {name} {{ {hook} }}")),
        },
        Step::DeleteElements(name, elements) => {
            command("delete element", &in_braces(name, elements.iter()))
        }
        Step::DeleteVerdicts(name, pairs) => {
            let keys = pairs.iter().map(|(value, _)| value);
            command("delete element", &in_braces(name, keys))
        }
        Step::FlushChain(name) => command("flush chain", &format!(" {name}")),
        Step::AddRule(name, rule) => command("add rule", &format!(" {name} {rule}")),
        Step::AddElements(name, elements) => {
            command("add element", &in_braces(name, elements.iter()))
        }
        Step::AddVerdicts(name, pairs) => {
            let pairs = pairs.iter().map(|(value, verdict)| Pair(value, verdict));
            command("add element", &in_braces(name, pairs))
        }
        Step::DeleteChain(name) => command("delete chain", &format!(" {name}")),
        Step::DeleteMap(name) => command("delete map", &format!(" {name}")),
        Step::DeleteSet(name) => command("delete set", &format!(" {name}")),
        Step::DeleteCounter(name) => command("delete counter", &format!(" {name}")),
    }
}

fn in_braces<T: Display>(name: &str, elements: impl Iterator<Item = T>) -> String {
    let elements: Vec<String> = elements.map(|element| element.to_string()).collect();
    format!(" {name} {{ {} }}", elements.join(", "))
}

/// A key of a verdict map with its verdict.
struct Pair<'a>(&'a Value, &'a Verdict);

impl Display for Pair<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{} : {}", self.0, self.1)
    }
}

impl Display for Key {
    /// The declaration of a set.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(of) => write!(f, "type {of}"),
            Self::Pair(first, second) => write!(f, "type {first} . {second}"),
            Self::Ranges(of) => write!(f, "type {of}; flags interval"),
        }
    }
}

impl Display for Type {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Interface => "iface_index",
            Self::Ipv4 => "ipv4_addr",
            Self::Ipv6 => "ipv6_addr",
            Self::Port => "inet_service",
            Self::EtherType => "ether_type",
        })
    }
}

impl Display for Element {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(value) => value.fmt(f),
            Self::Pair(first, second) => write!(f, "{first} . {second}"),
            Self::Range(first, last) => write_range(f, *first, *last),
        }
    }
}

/// Writes a range. A range of addresses that is a block is written as a block.
fn write_range(f: &mut Formatter<'_>, first: Value, last: Value) -> fmt::Result {
    if first == last {
        return first.fmt(f);
    }
    match block_length(first, last) {
        Some(length) => write!(f, "{first}/{length}"),
        None => write!(f, "{first}-{last}"),
    }
}

/// Length of the prefix that has exactly these addresses.
fn block_length(first: Value, last: Value) -> Option<u32> {
    let (first, last, bits) = match (first, last) {
        (Value::Ipv4(first), Value::Ipv4(last)) => {
            (first.to_bits().into(), last.to_bits().into(), 32)
        }
        (Value::Ipv6(first), Value::Ipv6(last)) => (first.to_bits(), last.to_bits(), 128),
        _ => return None,
    };
    let host: u128 = first ^ last;
    let is_block = host & host.wrapping_add(1) == 0 && first & host == 0;
    is_block.then(|| bits - host.count_ones())
}

impl Display for Value {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Interface(index) => index.fmt(f),
            Self::Ipv4(address) => address.fmt(f),
            Self::Ipv6(address) => address.fmt(f),
            Self::Port(port) => port.fmt(f),
            Self::EtherType(number) => write!(f, "{number:#06x}"),
        }
    }
}

impl Display for Rule {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for (at, expression) in self.0.iter().enumerate() {
            if at > 0 {
                f.write_str(" ")?;
            }
            expression.fmt(f)?;
        }
        Ok(())
    }
}

impl Display for Expression {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Protocol(protocol) => write!(f, "meta l4proto {}", name(*protocol)),
            Self::Numbered(number) => write!(f, "meta l4proto {number}"),
            Self::Within(field, first, last) if first == last => write!(f, "{field} {first}"),
            Self::Within(field, first, last) => write!(f, "{field} {first}-{last}"),
            Self::In(field, set) => write!(f, "{field} @{set}"),
            Self::NotIn(field, set) => write!(f, "{field} != @{set}"),
            Self::PairIn(first, second, set) => write!(f, "{first} . {second} @{set}"),
            Self::PairNotIn(first, second, set) => write!(f, "{first} . {second} != @{set}"),
            Self::Answer => f.write_str("ct direction reply ct state established"),
            Self::Related => f.write_str("ct state related"),
            Self::MiddleOfTcp => {
                f.write_str("ct state new tcp flags & (fin | syn | rst | ack) != syn")
            }
            Self::Icmp6(kind) => write!(f, "icmpv6 type {kind}"),
            Self::NeighbourDiscovery => f.write_str("icmpv6 type 133-137 ip6 hoplimit 255"),
            Self::Count(counter) => write!(f, "counter name {counter}"),
            Self::Log(text, group) => write!(f, "log prefix \"{text}\" group {group}"),
            Self::VerdictIn(field, map) => write!(f, "{field} vmap @{map}"),
            Self::Verdict(verdict) => verdict.fmt(f),
        }
    }
}

impl Display for Field {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Interface => f.write_str("iif"),
            Self::OutInterface => f.write_str("oif"),
            Self::EtherType => f.write_str("ether type"),
            Self::Source4 => f.write_str("ip saddr"),
            Self::Destination4 => f.write_str("ip daddr"),
            Self::Source6 => f.write_str("ip6 saddr"),
            Self::Destination6 => f.write_str("ip6 daddr"),
            Self::Opener4 => f.write_str("ct original ip saddr"),
            Self::Opener6 => f.write_str("ct original ip6 saddr"),
            Self::Answerer4 => f.write_str("ct reply ip saddr"),
            Self::Answerer6 => f.write_str("ct reply ip6 saddr"),
            Self::Port(protocol) => write!(f, "{} dport", name(*protocol)),
        }
    }
}

const fn name(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
        Protocol::Sctp => "sctp",
    }
}

impl Display for Verdict {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Accept => f.write_str("accept"),
            Self::Drop => f.write_str("drop"),
            Self::Return => f.write_str("return"),
            Self::Jump(chain) => write!(f, "jump {chain}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    #[test]
    fn a_range_is_a_block_where_it_is_one() {
        let four = |bits: u32| Value::Ipv4(Ipv4Addr::from_bits(bits));
        let six = |bits: u128| Value::Ipv6(Ipv6Addr::from_bits(bits));
        for (first, last, text) in [
            (four(0x0a00_0000), four(0x0aff_ffff), "10.0.0.0/8"),
            (four(0), four(u32::MAX), "0.0.0.0/0"),
            (six(0), six(u128::MAX), "::/0"),
            (four(1), four(2), "0.0.0.1-0.0.0.2"),
            (four(0x0a00_0001), four(0x0a00_0008), "10.0.0.1-10.0.0.8"),
            (four(3), four(3), "0.0.0.3"),
            (Value::Port(0), Value::Port(1023), "0-1023"),
        ] {
            assert_eq!(Element::Range(first, last).to_string(), text);
        }
    }
}
