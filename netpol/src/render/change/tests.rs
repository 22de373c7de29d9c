//! Changes between many tables, made step by step in a model of the kernel.

use std::net::Ipv4Addr;

use super::*;
use crate::render::ruleset::{Chain, Expression, Field, Set, VerdictMap};

fn address(last: u8) -> Value {
    Value::Ipv4(Ipv4Addr::new(10, 0, 0, last))
}

/// A table with the parts whose bits are set in `bits`.
fn table(bits: u32) -> Table {
    let has = |bit: u32| bits & 1 << bit != 0;
    let mut table = Table::new("t");
    table.counters = (0..2)
        .filter(|n| has(*n))
        .map(|n| format!("c{n}"))
        .collect();
    if has(2) {
        let members = (0..4).filter(|n| has(3 + n)).zip(1..);
        let elements = members.map(|(_, n)| Element::One(address(n))).collect();
        let key = Key::One(Type::Ipv4);
        table.sets.insert("g".to_owned(), Set { key, elements });
    }
    let jump = |to: &str| Verdict::Jump(to.to_owned());
    for (bit, name) in [(7, "i_a"), (8, "i_b")] {
        if has(bit) {
            let rules = if has(9) {
                vec![Rule(vec![Expression::Verdict(Verdict::Return)])]
            } else {
                Vec::new()
            };
            let entry = Entry::Jump;
            table.chains.insert(name.to_owned(), Chain { entry, rules });
        }
    }
    if has(10) {
        let mut elements = BTreeMap::new();
        if has(7) {
            elements.insert(address(1), jump("i_a"));
        }
        if has(8) {
            let key = if has(11) { 1 } else { 2 };
            elements.insert(address(key), jump("i_b"));
        }
        let key = Type::Ipv4;
        table
            .maps
            .insert("to".to_owned(), VerdictMap { key, elements });
        let rules = vec![Rule(vec![Expression::VerdictIn(
            Field::Destination4,
            "to".to_owned(),
        )])];
        let entry = Entry::Forward;
        table
            .chains
            .insert("forward".to_owned(), Chain { entry, rules });
    }
    table
}

/// Applies a step to a model of the kernel. It panics if the kernel would refuse the step.
fn apply(table: &mut Table, step: &Step) {
    match step.clone() {
        Step::AddTable => {}
        Step::DeleteTable => *table = Table::new(&table.name),
        Step::AddCounter(name) => assert!(table.counters.insert(name)),
        Step::AddSet(name, key) => {
            let elements = BTreeSet::new();
            assert!(table.sets.insert(name, Set { key, elements }).is_none());
        }
        Step::AddMap(name, key) => {
            let elements = BTreeMap::new();
            assert!(
                table
                    .maps
                    .insert(name, VerdictMap { key, elements })
                    .is_none()
            );
        }
        Step::AddChain(name, entry) => {
            let rules = Vec::new();
            assert!(table.chains.insert(name, Chain { entry, rules }).is_none());
        }
        Step::DeleteElements(name, elements) => {
            let set = table.sets.get_mut(&name).expect("a set");
            elements
                .iter()
                .for_each(|element| assert!(set.elements.remove(element)));
        }
        Step::DeleteVerdicts(name, pairs) => {
            let map = table.maps.get_mut(&name).expect("a map");
            for (value, verdict) in pairs {
                assert_eq!(map.elements.remove(&value), Some(verdict));
            }
        }
        Step::FlushChain(name) => table.chains.get_mut(&name).expect("a chain").rules.clear(),
        Step::AddRule(name, rule) => {
            assert!(names(&rule).all(|name| is_there(table, name)), "{rule}");
            table
                .chains
                .get_mut(&name)
                .expect("a chain")
                .rules
                .push(rule);
        }
        Step::AddElements(name, elements) => {
            let set = table.sets.get_mut(&name).expect("a set");
            elements
                .iter()
                .for_each(|element| assert!(set.elements.insert(*element)));
        }
        Step::AddVerdicts(name, pairs) => {
            for (value, verdict) in pairs {
                if let Verdict::Jump(chain) = &verdict {
                    assert!(table.chains.contains_key(chain), "{chain}");
                }
                let map = table.maps.get_mut(&name).expect("a map");
                assert_eq!(map.elements.insert(value, verdict), None);
            }
        }
        Step::DeleteChain(name) => {
            assert!(
                table
                    .chains
                    .remove(&name)
                    .expect("a chain")
                    .rules
                    .is_empty()
            );
            assert!(!is_named(table, &name), "{name}");
        }
        Step::DeleteMap(name) => {
            assert!(table.maps.remove(&name).is_some());
            assert!(!is_named(table, &name), "{name}");
        }
        Step::DeleteSet(name) => {
            assert!(table.sets.remove(&name).is_some());
            assert!(!is_named(table, &name), "{name}");
        }
        Step::DeleteCounter(name) => {
            assert!(table.counters.remove(&name));
            assert!(!is_named(table, &name), "{name}");
        }
    }
}

fn names(rule: &Rule) -> impl Iterator<Item = &String> {
    rule.0.iter().filter_map(|expression| match expression {
        Expression::In(_, name)
        | Expression::PairIn(_, _, name)
        | Expression::PairNotIn(_, _, name)
        | Expression::Count(name)
        | Expression::VerdictIn(_, name)
        | Expression::Verdict(Verdict::Jump(name)) => Some(name),
        _ => None,
    })
}

fn is_there(table: &Table, name: &String) -> bool {
    table.sets.contains_key(name)
        || table.maps.contains_key(name)
        || table.chains.contains_key(name)
        || table.counters.contains(name)
}

fn is_named(table: &Table, name: &String) -> bool {
    let mut rules = table.chains.values().flat_map(|chain| &chain.rules);
    let mut verdicts = table.maps.values().flat_map(|map| map.elements.values());
    rules.any(|rule| names(rule).any(|named| named == name))
        || verdicts.any(|verdict| *verdict == Verdict::Jump(name.clone()))
}

#[test]
fn a_change_leads_to_the_new_table_by_steps_that_the_kernel_accepts() {
    let parts = (0..1 << 12).map(table).collect::<Vec<_>>();
    let mut empty = 0;
    for n in 0..20_000_usize {
        let old = &parts[n * 2_654_435_761 % parts.len()];
        let new = &parts[(n * 40_503 + 17) % parts.len()];
        let change = Change::between(old, new);
        let mut table = old.clone();
        change.steps.iter().for_each(|step| apply(&mut table, step));
        assert_eq!(table, *new, "{change}");
        assert_eq!(change.is_empty(), old == new);
        empty += usize::from(change.is_empty());
        let mut table = old.clone();
        let replacement = Change::replacement(new);
        replacement
            .steps
            .iter()
            .for_each(|step| apply(&mut table, step));
        assert_eq!(table, *new);
    }
    assert!(empty < 20_000);
}

#[test]
fn one_member_more_is_one_element() {
    let old = table(0b1110_0001_1100);
    let new = table(0b1110_0011_1100);
    let change = Change::between(&old, &new);
    assert_eq!(change.to_string(), "add element inet t g { 10.0.0.3 }\n");
    assert_eq!(change.elements(), 1);
}

#[test]
fn a_set_of_another_type_makes_the_table_again() {
    let old = table(0b1100);
    let mut new = old.clone();
    let set = new.sets.get_mut("g").expect("a set");
    (set.key, set.elements) = (Key::One(Type::Ipv6), BTreeSet::new());
    assert_eq!(Change::between(&old, &new), Change::replacement(&new));
}

#[test]
fn ranges_that_overlap_or_touch_are_one() {
    let merged = |ranges: &[(u8, u8)]| {
        let ranges = ranges.iter();
        Element::merged(ranges.map(|(first, last)| (address(*first), address(*last))))
    };
    let range = |first, last| Element::Range(address(first), address(last));
    assert_eq!(merged(&[(5, 9), (1, 3), (4, 4)]), [range(1, 9)].into());
    assert_eq!(
        merged(&[(1, 9), (2, 3), (11, 11)]),
        [range(1, 9), range(11, 11)].into()
    );
    let last = Value::Ipv4(Ipv4Addr::BROADCAST);
    let all = Element::merged([(address(1), last), (last, last)]);
    assert_eq!(all, [Element::Range(address(1), last)].into());
}
