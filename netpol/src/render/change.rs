//! A change of a table in the kernel, with its steps in an order that the kernel accepts.

use std::collections::{BTreeMap, BTreeSet};

use super::ruleset::{Element, Entry, Key, Rule, Table, TableFamily, Type, Value, Verdict};

/// Steps that the kernel makes all at once or not at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The kind of packets that the table sees.
    pub family: TableFamily,
    /// Name of the table.
    pub table: String,
    /// Steps in order. A rule or verdict comes after the objects that it names.
    pub steps: Vec<Step>,
}

/// A part of a change. The text is the name of the object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Makes the table, if it does not exist.
    AddTable,
    /// Deletes the table with everything in it.
    DeleteTable,
    /// A counter that starts at zero.
    AddCounter(String),
    /// An empty set.
    AddSet(String, Key),
    /// An empty verdict map.
    AddMap(String, Type),
    /// A chain without rules.
    AddChain(String, Entry),
    /// Removes members from a set.
    DeleteElements(String, Vec<Element>),
    /// Removes keys from a verdict map.
    DeleteVerdicts(String, Vec<(Value, Verdict)>),
    /// Removes all rules from a chain.
    FlushChain(String),
    /// Adds a rule after the chain's other rules.
    AddRule(String, Rule),
    /// Adds members to a set.
    AddElements(String, Vec<Element>),
    /// Adds keys to a verdict map.
    AddVerdicts(String, Vec<(Value, Verdict)>),
    /// Deletes a chain with its rules.
    DeleteChain(String),
    /// Deletes a verdict map with its keys.
    DeleteMap(String),
    /// Deletes a set with its members.
    DeleteSet(String),
    /// Deletes a counter, whose value is lost.
    DeleteCounter(String),
}

impl Change {
    /// The smallest change from `old`, which the kernel has, to `new`, which has the same family
    /// and name. If an object keeps its name but changes its type, the change is a
    /// [`replacement`](Self::replacement). An empty table does not exist in the kernel.
    pub fn between(old: &Table, new: &Table) -> Self {
        let is_needed = !new.is_empty();
        if !is_like(old, new) || (!is_needed && !old.is_empty()) {
            return Self::replacement(new);
        }
        let mut steps = Vec::new();
        if old.is_empty() && is_needed {
            steps.push(Step::AddTable);
        }
        change_counters(old, new, &mut steps);
        change_sets(old, new, &mut steps);
        change_maps(old, new, &mut steps);
        change_chains(old, new, &mut steps);
        Self::of(new.family, &new.name, steps)
    }

    /// A change of these steps, which are brought into an order that the kernel accepts. The rules
    /// of a chain keep their order.
    pub fn of(family: TableFamily, table: &str, mut steps: Vec<Step>) -> Self {
        steps.sort_by_key(Step::turn);
        Self {
            family,
            table: table.to_owned(),
            steps,
        }
    }

    /// Makes `table` in place of any table with its name. The counters start again at zero.
    pub fn replacement(table: &Table) -> Self {
        let mut change = Self::between(&Table::of(table.family, &table.name), table);
        // A table that may not exist is created first, because only a table that exists can be deleted.
        let head = [Step::AddTable, Step::DeleteTable];
        change.steps.splice(0..0, head);
        change
    }

    /// Deletes the table of this name, whether it exists or not.
    pub fn deletion(family: TableFamily, table: &str) -> Self {
        Self {
            family,
            table: table.to_owned(),
            steps: vec![Step::AddTable, Step::DeleteTable],
        }
    }

    /// Whether the change has no steps.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Number of members and keys that the change adds or deletes.
    pub fn elements(&self) -> usize {
        let elements = self.steps.iter().map(|step| match step {
            Step::AddElements(_, elements) | Step::DeleteElements(_, elements) => elements.len(),
            Step::AddVerdicts(_, verdicts) | Step::DeleteVerdicts(_, verdicts) => verdicts.len(),
            _ => 0,
        });
        elements.sum()
    }
}

impl Step {
    /// The step's place among the steps of a change. An object is deleted after the last rule or
    /// key of a map that names it.
    const fn turn(&self) -> u8 {
        match self {
            Self::AddTable | Self::DeleteTable => 0,
            Self::AddCounter(_) | Self::AddSet(..) | Self::AddMap(..) | Self::AddChain(..) => 1,
            Self::DeleteElements(..) | Self::DeleteVerdicts(..) => 2,
            Self::FlushChain(_) | Self::AddRule(..) => 3,
            Self::AddElements(..) | Self::AddVerdicts(..) => 4,
            Self::DeleteMap(_) | Self::DeleteSet(_) | Self::DeleteCounter(_) => 5,
            Self::DeleteChain(_) => 6,
        }
    }
}

/// Whether every object that keeps its name keeps its type.
fn is_like(old: &Table, new: &Table) -> bool {
    both(&old.sets, &new.sets).all(|(old, new)| old.key == new.key)
        && both(&old.maps, &new.maps).all(|(old, new)| old.key == new.key)
        && both(&old.chains, &new.chains).all(|(old, new)| old.entry == new.entry)
        && !old.sets.keys().any(|name| new.maps.contains_key(name))
        && !old.maps.keys().any(|name| new.sets.contains_key(name))
}

fn both<'a, T>(
    old: &'a BTreeMap<String, T>,
    new: &'a BTreeMap<String, T>,
) -> impl Iterator<Item = (&'a T, &'a T)> {
    old.iter()
        .filter_map(|(name, old)| Some((old, new.get(name)?)))
}

fn change_counters(old: &Table, new: &Table, steps: &mut Vec<Step>) {
    let added = new.counters.difference(&old.counters).cloned();
    steps.extend(added.map(Step::AddCounter));
    let deleted = old.counters.difference(&new.counters).cloned();
    steps.extend(deleted.map(Step::DeleteCounter));
}

fn change_sets(old: &Table, new: &Table, steps: &mut Vec<Step>) {
    let none = BTreeSet::new();
    for (name, set) in &new.sets {
        let before = old.sets.get(name).map(|set| &set.elements);
        if before.is_none() {
            steps.push(Step::AddSet(name.clone(), set.key));
        }
        let before = before.unwrap_or(&none);
        let deleted: Vec<Element> = before.difference(&set.elements).copied().collect();
        let added: Vec<Element> = set.elements.difference(before).copied().collect();
        push(steps, Step::DeleteElements, name, deleted);
        push(steps, Step::AddElements, name, added);
    }
    let deleted = old.sets.keys().filter(|name| !new.sets.contains_key(*name));
    steps.extend(deleted.cloned().map(Step::DeleteSet));
}

fn change_maps(old: &Table, new: &Table, steps: &mut Vec<Step>) {
    let none = BTreeMap::new();
    for (name, map) in &new.maps {
        let before = old.maps.get(name).map(|map| &map.elements);
        if before.is_none() {
            steps.push(Step::AddMap(name.clone(), map.key));
        }
        let before = before.unwrap_or(&none);
        push(
            steps,
            Step::DeleteVerdicts,
            name,
            without(before, &map.elements),
        );
        push(
            steps,
            Step::AddVerdicts,
            name,
            without(&map.elements, before),
        );
    }
    let deleted = old.maps.keys().filter(|name| !new.maps.contains_key(*name));
    steps.extend(deleted.cloned().map(Step::DeleteMap));
}

/// The pairs of `of` that are not in `others`.
fn without(
    of: &BTreeMap<Value, Verdict>,
    others: &BTreeMap<Value, Verdict>,
) -> Vec<(Value, Verdict)> {
    let pairs = of.iter();
    let only = pairs.filter(|(value, verdict)| others.get(*value) != Some(*verdict));
    only.map(|(value, verdict)| (*value, verdict.clone()))
        .collect()
}

fn push<T>(
    steps: &mut Vec<Step>,
    step: impl Fn(String, Vec<T>) -> Step,
    name: &str,
    elements: Vec<T>,
) {
    if !elements.is_empty() {
        steps.push(step(name.to_owned(), elements));
    }
}

fn change_chains(old: &Table, new: &Table, steps: &mut Vec<Step>) {
    for (name, chain) in &new.chains {
        let before = old.chains.get(name).map_or(&[][..], |chain| &chain.rules);
        if !old.chains.contains_key(name) {
            steps.push(Step::AddChain(name.clone(), chain.entry));
        }
        if before == chain.rules {
            continue;
        }
        if !before.is_empty() {
            steps.push(Step::FlushChain(name.clone()));
        }
        let rules = chain.rules.iter().cloned();
        steps.extend(rules.map(|rule| Step::AddRule(name.clone(), rule)));
    }
    for name in old
        .chains
        .keys()
        .filter(|name| !new.chains.contains_key(*name))
    {
        steps.extend([
            Step::FlushChain(name.clone()),
            Step::DeleteChain(name.clone()),
        ]);
    }
}

#[cfg(test)]
mod tests;
