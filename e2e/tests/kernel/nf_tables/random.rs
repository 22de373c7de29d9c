//! Random tables of policies, as large as a few nodes need.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{Ipv4Addr, Ipv6Addr},
};

use netpol::{
    policy::Protocol,
    render::ruleset::{
        Chain, Element, Entry, Expression, Field, Key, Rule, Set, Table, TableFamily, Type, Value,
        Verdict, VerdictMap,
    },
};
use rand::{Rng as _, rngs::StdRng};

/// Sets of a random table. The name of a set determines its type: two tables may differ in
/// everything else.
const SETS: [(&str, Key); 11] = [
    ("links", Key::One(Type::Interface)),
    ("behind4", Key::Pair(Type::Interface, Type::Ipv4)),
    ("behind6", Key::Pair(Type::Interface, Type::Ipv6)),
    ("self4", Key::Pair(Type::Ipv4, Type::Ipv4)),
    ("self6", Key::Pair(Type::Ipv6, Type::Ipv6)),
    ("p4", Key::Pair(Type::Ipv4, Type::Port)),
    ("p6", Key::Pair(Type::Ipv6, Type::Port)),
    ("g4_a", Key::One(Type::Ipv4)),
    ("g6_a", Key::One(Type::Ipv6)),
    ("ports", Key::Ranges(Type::Port)),
    ("judged", Key::One(Type::EtherType)),
];
const BLOCKS: [(&str, Key); 2] = [
    ("b4", Key::Ranges(Type::Ipv4)),
    ("b6", Key::Ranges(Type::Ipv6)),
];
const COUNTERS: [&str; 3] = ["dropped_in", "dropped_out", "spoofed"];

/// A table of this name that is not empty.
pub(super) fn table(rng: &mut StdRng, family: TableFamily, name: &str) -> Table {
    let mut table = Table::of(family, name);
    table.counters.insert("always".to_owned());
    for counter in COUNTERS {
        if rng.random() {
            table.counters.insert(counter.to_owned());
        }
    }
    for (name, key) in SETS.into_iter().chain(BLOCKS) {
        if rng.random_bool(0.7) {
            let elements = elements(rng, key);
            table.sets.insert(name.to_owned(), Set { key, elements });
        }
    }
    let chains: Vec<String> = (0..rng.random_range(0..7))
        .map(|n| format!("i_{n}"))
        .collect();
    for (at, chain) in chains.iter().enumerate() {
        // Jumps lead to later chains: no packet goes in a circle.
        let rules = rules(rng, &table, &chains[at + 1..], &[]);
        let entry = Entry::Jump;
        table.chains.insert(chain.clone(), Chain { entry, rules });
    }
    let maps = [("from4", Type::Ipv4), ("to6", Type::Ipv6)];
    let maps: Vec<_> = maps.into_iter().filter(|_| rng.random_bool(0.8)).collect();
    for (name, key) in &maps {
        let elements = verdicts(rng, *key, &chains);
        let map = VerdictMap {
            key: *key,
            elements,
        };
        table.maps.insert((*name).to_owned(), map);
    }
    let entries = match family {
        TableFamily::Inet => [("forward", Entry::Forward), ("input", Entry::Input)],
        TableFamily::Bridge => [("arriving", Entry::Arriving), ("leaving", Entry::Leaving)],
    };
    for (name, entry) in entries {
        if rng.random_bool(0.8) {
            let rules = rules(rng, &table, &chains, &maps);
            table.chains.insert(name.to_owned(), Chain { entry, rules });
        }
    }
    table
}

fn verdicts(rng: &mut StdRng, key: Type, chains: &[String]) -> BTreeMap<Value, Verdict> {
    let number = rng.random_range(0..5);
    (0..number)
        .map(|_| (value(rng, key), verdict(rng, chains)))
        .collect()
}

fn verdict(rng: &mut StdRng, chains: &[String]) -> Verdict {
    match rng.random_range(0..4 + chains.len()) {
        0 => Verdict::Accept,
        1 => Verdict::Drop,
        2 | 3 => Verdict::Return,
        chain => Verdict::Jump(chains[chain - 4].clone()),
    }
}

fn elements(rng: &mut StdRng, key: Key) -> BTreeSet<Element> {
    let number = match rng.random_range(0..20) {
        0 => rng.random_range(1_000..3_000),
        _ => rng.random_range(0..6),
    };
    match key {
        Key::One(of) => (0..number).map(|_| Element::One(value(rng, of))).collect(),
        Key::Pair(first, second) => (0..number)
            .map(|_| Element::Pair(value(rng, first), value(rng, second)))
            .collect(),
        Key::Ranges(of) => Element::merged((0..number).map(|_| range(rng, of))),
    }
}

/// A block, a range, one value, or a range to the end.
fn range(rng: &mut StdRng, of: Type) -> (Value, Value) {
    let (one, other) = (value(rng, of), value(rng, of));
    match (rng.random_range(0..8), one) {
        (0, Value::Ipv4(_)) => (one, Value::Ipv4(Ipv4Addr::BROADCAST)),
        (0, Value::Port(_)) => (one, Value::Port(u16::MAX)),
        (1, _) => (one.min(other), one.max(other)),
        (2..5, Value::Ipv4(address)) => {
            let host = u32::MAX >> rng.random_range(8..32);
            let first = address.to_bits() & !host;
            let address = |bits| Value::Ipv4(Ipv4Addr::from_bits(bits));
            (address(first), address(first | host))
        }
        (2..5, Value::Ipv6(address)) => {
            let host = u128::MAX >> rng.random_range(8..128);
            let first = address.to_bits() & !host;
            let address = |bits| Value::Ipv6(Ipv6Addr::from_bits(bits));
            (address(first), address(first | host))
        }
        _ => (one, one),
    }
}

fn value(rng: &mut StdRng, of: Type) -> Value {
    match of {
        Type::Interface => Value::Interface(rng.random_range(1..2_000)),
        Type::Ipv4 => Value::Ipv4(Ipv4Addr::from_bits(rng.random())),
        Type::Ipv6 => Value::Ipv6(Ipv6Addr::from_bits(rng.random())),
        Type::Port => Value::Port(rng.random_range(1..=u16::MAX)),
        Type::EtherType => Value::EtherType(rng.random_range(0x600..=u16::MAX)),
    }
}

fn rules(rng: &mut StdRng, table: &Table, chains: &[String], maps: &[(&str, Type)]) -> Vec<Rule> {
    let number = match rng.random_range(0..20) {
        0 => rng.random_range(50..200),
        _ => rng.random_range(0..6),
    };
    (0..number)
        .map(|_| match table.family {
            TableFamily::Inet => Rule(rule(rng, table, chains, maps)),
            TableFamily::Bridge => Rule(frame_rule(rng, table, chains)),
        })
        .collect()
}

/// Conditions on a frame, then an action.
fn frame_rule(rng: &mut StdRng, table: &Table, chains: &[String]) -> Vec<Expression> {
    const IPV4: Value = Value::EtherType(0x0800);
    const IPV6: Value = Value::EtherType(0x86dd);
    let fields = [Field::Interface, Field::OutInterface, Field::EtherType];
    let mut rule = Vec::new();
    for field in fields {
        let set = any_set(rng, table, &[field]);
        rule.extend(set.filter(|_| rng.random()).map(|set| match rng.random() {
            true => Expression::In(field, set),
            false => Expression::NotIn(field, set),
        }));
    }
    let of = |kind| Expression::Within(Field::EtherType, kind, kind);
    match rng.random_range(0..6) {
        0 => rule.extend([of(IPV6), Expression::Icmp6(rng.random_range(1..=255))]),
        1 => rule.extend([of(IPV6), within(rng, Field::Destination6, Type::Ipv6)]),
        2 => rule.extend([of(IPV4), within(rng, Field::Destination4, Type::Ipv4)]),
        3 => rule.extend([of(IPV4), Expression::Numbered(2)]),
        4 => rule.extend([
            of(IPV4),
            within(rng, Field::Port(Protocol::Udp), Type::Port),
        ]),
        _ => {
            let field = Field::Destination4;
            let set = any_set(rng, table, &[field]);
            rule.extend(
                set.into_iter()
                    .flat_map(|set| [of(IPV4), Expression::In(field, set)]),
            );
        }
    }
    let counters = table.counters.iter();
    rule.extend(counters.take(1).cloned().map(Expression::Count));
    rule.push(Expression::Verdict(verdict(rng, chains)));
    rule
}

/// Conditions on one family and one protocol, in any order, then an action.
fn rule(
    rng: &mut StdRng,
    table: &Table,
    chains: &[String],
    maps: &[(&str, Type)],
) -> Vec<Expression> {
    let is_ipv6 = rng.random();
    let (source, destination, key) = if is_ipv6 {
        (Field::Source6, Field::Destination6, Type::Ipv6)
    } else {
        (Field::Source4, Field::Destination4, Type::Ipv4)
    };
    let protocol = Protocol::ALL[rng.random_range(0..3)];
    let port = Field::Port(protocol);
    let address = if rng.random() { source } else { destination };
    let mut rule = Vec::new();
    for _ in 0..rng.random_range(0..4) {
        let opener = if is_ipv6 {
            Field::Opener6
        } else {
            Field::Opener4
        };
        let answerer = if is_ipv6 {
            Field::Answerer6
        } else {
            Field::Answerer4
        };
        let fields = match rng.random_range(0..5) {
            3 => vec![opener, source],
            4 => vec![answerer, source],
            0 => vec![Field::Interface, source],
            1 => vec![source, destination],
            _ => vec![destination, port],
        };
        let condition = match rng.random_range(0..15) {
            0 => Some(Expression::Protocol(protocol)),
            1 => Some(within(rng, port, Type::Port)),
            2 => Some(within(rng, address, key)),
            3 => any_set(rng, table, &[address]).map(|set| Expression::In(address, set)),
            4 | 5 => any_set(rng, table, &[port]).map(|set| Expression::In(port, set)),
            6 => {
                let field = Field::Interface;
                any_set(rng, table, &[field]).map(|set| Expression::In(field, set))
            }
            7 => any_set(rng, table, &fields)
                .map(|set| Expression::PairIn(fields[0], fields[1], set)),
            8 => any_set(rng, table, &fields)
                .map(|set| Expression::PairNotIn(fields[0], fields[1], set)),
            9 => Some(Expression::Answer),
            10 => Some(Expression::MiddleOfTcp).filter(|_| protocol == Protocol::Tcp),
            11 => any_set(rng, table, &[address]).map(|set| Expression::NotIn(address, set)),
            12 if rule.is_empty() => {
                // A protocol without ports: no condition on a port may follow.
                let numbers = [4, 41, 47, 137];
                rule.push(Expression::Numbered(numbers[rng.random_range(0..4)]));
                break;
            }
            13 => {
                let field = Field::OutInterface;
                any_set(rng, table, &[field]).map(|set| Expression::In(field, set))
            }
            _ => Some(Expression::Related),
        };
        rule.extend(condition);
    }
    if is_ipv6 && rule.is_empty() && rng.random_bool(0.5) {
        rule.push(Expression::NeighbourDiscovery);
    }
    let counter = table
        .counters
        .iter()
        .nth(rng.random_range(0..COUNTERS.len()));
    rule.extend(counter.cloned().map(Expression::Count));
    let map = maps.iter().find(|(_, of)| *of == key);
    match map {
        Some((map, _)) if rng.random() => {
            rule.push(Expression::VerdictIn(address, (*map).to_owned()));
        }
        _ => rule.push(Expression::Verdict(verdict(rng, chains))),
    }
    rule
}

fn within(rng: &mut StdRng, field: Field, of: Type) -> Expression {
    let (one, other) = (value(rng, of), value(rng, of));
    let last = if rng.random() { one } else { one.max(other) };
    Expression::Within(field, one.min(last), last)
}

/// A set of the table whose members are values of these fields.
fn any_set(rng: &mut StdRng, table: &Table, fields: &[Field]) -> Option<String> {
    let types: Vec<Type> = fields.iter().map(|field| type_of(*field)).collect();
    let fits = |key: &Key| match (*key, types.as_slice()) {
        (Key::One(of) | Key::Ranges(of), [wanted]) => of == *wanted,
        (Key::Pair(first, second), [one, two]) => first == *one && second == *two,
        _ => false,
    };
    let sets: Vec<&String> = table
        .sets
        .iter()
        .filter(|(_, set)| fits(&set.key))
        .map(|(name, _)| name)
        .collect();
    let at = rng.random_range(0..sets.len().max(1));
    sets.get(at).map(|name| (*name).clone())
}

const fn type_of(field: Field) -> Type {
    match field {
        Field::Interface | Field::OutInterface => Type::Interface,
        Field::EtherType => Type::EtherType,
        Field::Source4 | Field::Destination4 | Field::Opener4 | Field::Answerer4 => Type::Ipv4,
        Field::Source6 | Field::Destination6 | Field::Opener6 | Field::Answerer6 => Type::Ipv6,
        Field::Port(_) => Type::Port,
    }
}
