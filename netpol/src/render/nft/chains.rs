//! Chains, which pods with equal rows share, and the sets that chains share.
//!
//! Chains and sets that are no longer used stay until [`Chains::take`]. If they are needed again
//! earlier, the table does not change.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    Size, base,
    names::Names,
    ranges::{self, RangeSet, Ranges},
    rows::{Row, RowPorts},
};
use crate::{
    contiv::Flow,
    group::{Family, Group, Groups, Member, Slot, SlotId},
    render::{
        change::Step,
        ruleset::{
            Chain, Element, Entry, Expression, Field, Key, Rule, Set, Table, Type, Value, Verdict,
        },
    },
};

/// The number of a chain. No number is used twice.
pub(super) type ChainId = u64;

/// Chains and the sets that their rules name.
#[derive(Debug, Default)]
pub(super) struct Chains {
    chains: BTreeMap<ChainId, PodChain>,
    by_content: BTreeMap<Arc<Content>, ChainId>,
    ranges: BTreeMap<RangeSet, Shared>,
    groups: BTreeMap<SlotId, GroupSet>,
    names: Names,
    /// Whether chains came into use or out of use since the last [`Chains::take`].
    changed: bool,
    next: ChainId,
}

/// The content of a chain.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Content {
    flow: Flow,
    family: Family,
    rows: BTreeSet<Row>,
    /// Names of the chains to which this chain leads one after another, instead of having rows.
    joined: BTreeSet<String>,
}

#[derive(Debug)]
struct PodChain {
    content: Arc<Content>,
    joined: BTreeSet<ChainId>,
    rules: Vec<Rule>,
    shared: Shared,
}

/// A part of the table that several other parts use.
#[derive(Debug)]
struct Shared {
    name: String,
    users: usize,
    in_force: bool,
}

#[derive(Debug)]
struct GroupSet {
    name: String,
    key: Key,
    in_force: bool,
}

impl Chains {
    /// Adds a use of the chain with these rows, which is made if it does not exist.
    pub(super) fn acquire(
        &mut self,
        groups: &mut Groups,
        flow: Flow,
        family: Family,
        rows: BTreeSet<Row>,
    ) -> ChainId {
        let content = Content {
            flow,
            family,
            rows,
            joined: BTreeSet::new(),
        };
        let (known, is_used) = self.use_known(&content);
        if !is_used {
            self.changed = true;
            self.acquire_sets(groups, &content);
        }
        known.unwrap_or_else(|| self.create(groups, content))
    }

    /// Adds a use of a chain that lets pass what any of these chains lets pass. These chains are in
    /// use.
    pub(super) fn join(&mut self, flow: Flow, family: Family, of: &BTreeSet<ChainId>) -> ChainId {
        let names = of.iter().filter_map(|id| self.name(*id));
        let content = Content {
            flow,
            family,
            rows: BTreeSet::new(),
            joined: names.map(str::to_owned).collect(),
        };
        let (known, is_used) = self.use_known(&content);
        if !is_used {
            self.changed = true;
            for id in of {
                self.add_user(*id);
            }
        }
        known.unwrap_or_else(|| {
            let rules = content.joined.iter();
            let rules =
                rules.map(|name| Rule(vec![Expression::Verdict(Verdict::Jump(name.clone()))]));
            let rules = rules.collect();
            self.insert(content, rules, of.clone())
        })
    }

    /// Adds a use of the chain with this content, if it exists. Also returns whether it was already
    /// in use.
    fn use_known(&mut self, content: &Content) -> (Option<ChainId>, bool) {
        let known = self.by_content.get(content).copied();
        (known, known.is_some_and(|id| self.add_user(id) > 1))
    }

    /// Adds a use of a chain. Returns the number of its uses.
    fn add_user(&mut self, id: ChainId) -> usize {
        self.chains.get_mut(&id).map_or(0, |chain| {
            chain.shared.users += 1;
            chain.shared.users
        })
    }

    /// Makes a chain with one use. Its sets are in use.
    fn create(&mut self, groups: &Groups, content: Content) -> ChainId {
        let rules = self.rules(groups, &content);
        self.insert(content, rules, BTreeSet::new())
    }

    fn insert(&mut self, content: Content, rules: Vec<Rule>, joined: BTreeSet<ChainId>) -> ChainId {
        let id = self.next;
        self.next += 1;
        let prefix = match (content.flow, content.family) {
            (Flow::Ingress, Family::V4) => "i4",
            (Flow::Ingress, Family::V6) => "i6",
            (Flow::Egress, Family::V4) => "e4",
            (Flow::Egress, Family::V6) => "e6",
        };
        let content = Arc::new(content);
        let chain = PodChain {
            rules,
            joined,
            shared: Shared {
                name: self.names.give(prefix, &content),
                users: 1,
                in_force: false,
            },
            content: Arc::clone(&content),
        };
        self.by_content.insert(content, id);
        self.chains.insert(id, chain);
        id
    }

    /// Removes a use of a chain.
    pub(super) fn release(&mut self, groups: &mut Groups, id: ChainId) {
        let Some(chain) = self.chains.get_mut(&id) else {
            return;
        };
        chain.shared.users -= 1;
        if chain.shared.users == 0 {
            self.changed = true;
            let joined = chain.joined.clone();
            for row in &chain.content.rows {
                for ranges in sets_of(row) {
                    if let Some(shared) = self.ranges.get_mut(ranges) {
                        shared.users -= 1;
                    }
                }
                if let Some(group) = row.peer.group.as_ref().and_then(|group| groups.id(group)) {
                    groups.release(group);
                }
            }
            for id in joined {
                self.release(groups, id);
            }
        }
    }

    pub(super) fn name(&self, id: ChainId) -> Option<&str> {
        Some(&self.chains.get(&id)?.shared.name)
    }

    /// Size of the table with everything that is in use.
    pub(super) fn size(&self, groups: &Groups) -> Size {
        let chains = self.chains.values();
        let chains = chains.filter(|chain| chain.shared.users > 0);
        let ranges = self.ranges.iter().filter(|(_, shared)| shared.users > 0);
        let ranges: usize = ranges.map(|(ranges, _)| ranges.elements.len()).sum();
        let of_groups = groups.size();
        let mut size = Size {
            groups: of_groups.groups,
            addresses: of_groups.members + ranges,
            ..Size::default()
        };
        for chain in chains {
            size.chains += 1;
            if chain.joined.is_empty() {
                size.rows += chain.rules.len();
            }
        }
        size
    }

    /// Adds the steps from the chains and sets at the last call to those in use.
    pub(super) fn take(&mut self, groups: &mut Groups, steps: &mut Vec<Step>) {
        let sets = &mut self.groups;
        groups.visit_changed(|id, slot| {
            if let Some(set) = sets.get_mut(&id) {
                set.take(slot, steps);
            }
        });
        if self.changed {
            self.take_chains(steps);
        }
        for id in groups.sweep() {
            if let Some(set) = self.groups.remove(&id) {
                self.names.release(&set.name);
            }
        }
    }

    fn take_chains(&mut self, steps: &mut Vec<Step>) {
        for (ranges, shared) in &mut self.ranges {
            let name = &shared.name.clone();
            match shared.turn() {
                Turn::Comes => {
                    steps.push(Step::AddSet(name.clone(), Key::Ranges(ranges.of_type)));
                    let elements = ranges.elements.iter().copied().collect();
                    steps.push(Step::AddElements(name.clone(), elements));
                }
                Turn::Goes => steps.push(Step::DeleteSet(name.clone())),
                Turn::Stays => {}
            }
        }
        for chain in self.chains.values_mut() {
            let name = &chain.shared.name.clone();
            match chain.shared.turn() {
                Turn::Comes => {
                    steps.push(Step::AddChain(name.clone(), Entry::Jump));
                    let rules = chain.rules.iter().cloned();
                    steps.extend(rules.map(|rule| Step::AddRule(name.clone(), rule)));
                }
                Turn::Goes => {
                    steps.extend([
                        Step::FlushChain(name.clone()),
                        Step::DeleteChain(name.clone()),
                    ]);
                }
                Turn::Stays => {}
            }
        }
        self.sweep();
    }

    /// Puts the chains and sets at the last [`Chains::take`] into a table.
    pub(super) fn fill(&self, groups: &Groups, table: &mut Table) {
        for (ranges, shared) in self.ranges.iter().filter(|(_, shared)| shared.in_force) {
            let set = Set {
                key: Key::Ranges(ranges.of_type),
                elements: ranges.elements.clone(),
            };
            table.sets.insert(shared.name.clone(), set);
        }
        for (id, slot) in groups.slots() {
            if let Some(set) = self.groups.get(&id).filter(|set| set.in_force) {
                let elements = slot.members.taken().map(element).collect();
                let key = set.key;
                table.sets.insert(set.name.clone(), Set { key, elements });
            }
        }
        for chain in self.chains.values().filter(|chain| chain.shared.in_force) {
            let rules = chain.rules.clone();
            let (entry, name) = (Entry::Jump, chain.shared.name.clone());
            table.chains.insert(name, Chain { entry, rules });
        }
    }

    /// Removes chains and ranges that are not used.
    fn sweep(&mut self) {
        self.changed = false;
        let names = &mut self.names;
        let mut keep = |shared: &Shared| {
            if shared.users == 0 {
                names.release(&shared.name);
            }
            shared.users > 0
        };
        self.ranges.retain(|_, shared| keep(shared));
        self.chains.retain(|_, chain| {
            let keep = keep(&chain.shared);
            if !keep {
                self.by_content.remove(&chain.content);
            }
            keep
        });
    }

    /// Adds a use of the sets of a chain.
    fn acquire_sets(&mut self, groups: &mut Groups, content: &Content) {
        for row in &content.rows {
            for ranges in sets_of(row) {
                if let Some(shared) = self.ranges.get_mut(ranges) {
                    shared.users += 1;
                    continue;
                }
                let shared = Shared {
                    name: self.names.give("r", ranges),
                    users: 1,
                    in_force: false,
                };
                self.ranges.insert(ranges.clone(), shared);
            }
            if let Some(group) = &row.peer.group {
                let id = groups.acquire(group);
                let names = &mut self.names;
                let set = self.groups.entry(id);
                set.or_insert_with(|| GroupSet::new(group, names));
            }
        }
    }

    /// The rules of a chain. A packet that matches a row returns to judge the other side; all other
    /// packets are dropped.
    fn rules(&self, groups: &Groups, content: &Content) -> Vec<Rule> {
        let field = base::peer_field(content.flow, content.family);
        let rows = content.rows.iter();
        let rules = rows.filter_map(|row| self.rule(groups, field, row));
        let rest = Rule(vec![
            Expression::Count(base::dropped(content.flow).to_owned()),
            Expression::Verdict(Verdict::Drop),
        ]);
        rules.chain([rest]).collect()
    }

    /// The rule of a row, whose sets are in use.
    fn rule(&self, groups: &Groups, field: Field, row: &Row) -> Option<Rule> {
        let mut all = Vec::new();
        if let Some(within) = &row.peer.within {
            all.push(self.within(field, within)?);
        }
        if let Some(group) = &row.peer.group {
            let set = self.groups.get(&groups.id(group)?)?.name.clone();
            all.push(match row.ports {
                RowPorts::OfGroup(protocol) => {
                    Expression::PairIn(field, Field::Port(protocol), set)
                }
                _ => Expression::In(field, set),
            });
        }
        match &row.ports {
            RowPorts::Any | RowPorts::OfGroup(_) => {}
            RowPorts::All(protocol) => all.push(Expression::Protocol(*protocol)),
            RowPorts::Numbers(protocol, numbers) => {
                all.push(self.within(Field::Port(*protocol), numbers)?);
            }
        }
        all.push(Expression::Verdict(Verdict::Return));
        Some(Rule(all))
    }

    fn within(&self, field: Field, ranges: &Ranges) -> Option<Expression> {
        Some(match ranges {
            Ranges::One(first, last) => Expression::Within(field, *first, *last),
            Ranges::Several(set) => Expression::In(field, self.ranges.get(set)?.name.clone()),
        })
    }
}

/// The sets of ranges that the rule of a row names.
fn sets_of(row: &Row) -> impl Iterator<Item = &RangeSet> {
    let numbers = match &row.ports {
        RowPorts::Numbers(_, numbers) => Some(numbers),
        _ => None,
    };
    let ranges = row.peer.within.iter().chain(numbers);
    ranges.filter_map(|ranges| match ranges {
        Ranges::One(..) => None,
        Ranges::Several(set) => Some(set),
    })
}

/// The transition of a part of the table.
enum Turn {
    Comes,
    /// The part stays as it is, in force or not.
    Stays,
    Goes,
}

impl Turn {
    /// Brings a part into force if it is used, and out of force otherwise.
    fn of(is_used: bool, in_force: &mut bool) -> Self {
        let turn = match (is_used, *in_force) {
            (true, false) => Self::Comes,
            (false, true) => Self::Goes,
            (true, true) | (false, false) => Self::Stays,
        };
        *in_force = is_used;
        turn
    }
}

impl Shared {
    fn turn(&mut self) -> Turn {
        Turn::of(self.users > 0, &mut self.in_force)
    }
}

impl GroupSet {
    fn new(group: &Group, names: &mut Names) -> Self {
        let address = base::address_type(group.family);
        let (prefix, key) = match (group.family, &group.port) {
            (Family::V4, None) => ("g4", Key::One(address)),
            (Family::V6, None) => ("g6", Key::One(address)),
            (Family::V4, Some(_)) => ("p4", Key::Pair(address, Type::Port)),
            (Family::V6, Some(_)) => ("p6", Key::Pair(address, Type::Port)),
        };
        Self {
            name: names.give(prefix, group),
            key,
            in_force: false,
        }
    }

    fn take(&mut self, slot: &mut Slot, steps: &mut Vec<Step>) {
        let name = &self.name;
        match Turn::of(slot.is_used(), &mut self.in_force) {
            Turn::Goes => return steps.push(Step::DeleteSet(name.clone())),
            Turn::Comes => steps.push(Step::AddSet(name.clone(), self.key)),
            Turn::Stays if !self.in_force => return,
            Turn::Stays => {}
        }
        let (added, removed) = slot.members.take();
        push_elements(steps, Step::DeleteElements, name, &removed);
        push_elements(steps, Step::AddElements, name, &added);
    }
}

fn push_elements(
    steps: &mut Vec<Step>,
    step: impl Fn(String, Vec<Element>) -> Step,
    name: &str,
    members: &BTreeSet<Member>,
) {
    if !members.is_empty() {
        let elements = members.iter().map(element).collect();
        steps.push(step(name.to_owned(), elements));
    }
}

/// A member of a group as a member of its set.
fn element(member: &Member) -> Element {
    let address = ranges::address(member.address);
    match member.port {
        Some(port) => Element::Pair(address, Value::Port(port)),
        None => Element::One(address),
    }
}
