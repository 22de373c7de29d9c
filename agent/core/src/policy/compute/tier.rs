//! Tiers: ordered lists that take traffic away, whatever the other rules allow.
//!
//! A policy map has no order. Its longest match within an identity comes first, and only then does
//! precedence count, against the entry for everyone. So an ordered list is not written as allows and
//! denies. For each identity that a list selects, the verdict on every protocol and port is computed:
//!
//! | first rule of the list that selects the identity and covers the port | verdict |
//! |---|---|
//! | a deny | dropped |
//! | a pass, or none | as the other rules say: the identity's own and everyone's |
//!
//! The entries of the identity are then the *table* of this verdict: one entry for every protocol,
//! one for each protocol that differs from it, and disjoint blocks of ports that differ from these.
//! A table leaves nothing to the entries for everyone.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use shared_maps::{
    Be16, IdentityId,
    policy::{EGRESS, PRECEDENCE_ALLOW, PRECEDENCE_DENY, PolicyKey, PolicyValue},
};

use crate::{
    policy::{
        compute::entries::{Entries, blocks},
        model::Side,
        rule::{TierAction, TierRule},
    },
    selector::cache::{SelectorCache, SelectorId},
};

/// Precedence of the entries of tables. Only a deny for everyone is above it, and a table denies
/// whatever such a deny denies.
const PRECEDENCE: u32 = PRECEDENCE_DENY - 1;

/// Maximum number of tables that are kept while the rules stay. Most identities share one of a few
/// tables.
const KEPT: usize = 4096;

/// Whether an entry is one of a table.
pub(crate) const fn is_of_table(value: &PolicyValue) -> bool {
    value.precedence == PRECEDENCE
}

/// Whether the entries of an identity are a table.
pub(crate) fn is_table(identity: IdentityId, entries: &Entries) -> bool {
    let everything = PolicyKey::new(identity.0, EGRESS, 0, 0, 0);
    entries.get(&everything).is_some_and(is_of_table)
}

/// The ordered rules of a policy, by the selectors that they use.
#[derive(Debug)]
pub(super) struct Tier {
    rules: Vec<Arc<TierRule>>,
    /// Positions in `rules` of the rules that use a selector.
    by_selector: HashMap<SelectorId, Vec<usize>>,
    everyone: Vec<Block>,
    tables: HashMap<Question, Arc<[Row]>>,
}

/// What a table depends on, besides the entries for everyone: positions of the ordered rules that
/// select an identity, and its entries by the other rules.
type Question = (Vec<usize>, Vec<Block>);

/// What an entry of the other rules means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Block {
    /// `None` = every protocol and port.
    protocol: Option<u8>,
    first: u16,
    last: u16,
    says: Says,
}

/// What entries of the other rules say: the greatest wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Says {
    Allow,
    Redirect,
    Deny,
}

/// What a table does with packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Drop,
    Redirect,
    Pass,
}

/// An entry of a table, whatever the identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Row {
    /// IP protocol number; 0 = any.
    protocol: u8,
    port: u16,
    port_bits: u8,
    verdict: Verdict,
}

impl Tier {
    /// The tier of a side's ordered rules, whose selectors are registered; `None` if the side has no
    /// such rule. It takes the entries for everyone from `before`.
    pub(super) fn of(
        side: &Side,
        selectors: &SelectorCache,
        before: Option<Box<Self>>,
    ) -> Option<Box<Self>> {
        if side.tier.is_empty() {
            return None;
        }
        let rules = side.tier.iter().map(|rule| Arc::clone(&rule.rule));
        let rules: Vec<Arc<TierRule>> = rules.collect();
        let mut by_selector: HashMap<SelectorId, Vec<usize>> = HashMap::new();
        for (position, rule) in rules.iter().enumerate() {
            for id in rule.selectors.iter().filter_map(|s| selectors.id_of(s)) {
                by_selector.entry(id).or_default().push(position);
            }
        }
        Some(Box::new(Self {
            rules,
            by_selector,
            everyone: before.map(|tier| tier.everyone).unwrap_or_default(),
            tables: HashMap::new(),
        }))
    }

    /// Selectors that its rules use.
    pub(super) fn selectors(&self) -> impl Iterator<Item = SelectorId> {
        self.by_selector.keys().copied()
    }

    /// Whether a rule uses this selector.
    pub(super) fn uses(&self, selector: SelectorId) -> bool {
        self.by_selector.contains_key(&selector)
    }

    /// Takes the entries for everyone. True if the ones of egress changed.
    pub(super) fn follow_everyone(&mut self, entries: &Entries) -> bool {
        let blocks = Block::all(entries, EGRESS);
        if self.everyone == blocks {
            return false;
        }
        self.everyone = blocks;
        self.tables.clear();
        true
    }

    /// The table of an identity; `None` if no ordered rule uses one of the selectors `selecting`,
    /// which select the identity. `own` are its entries of egress by the other rules.
    pub(super) fn table(
        &mut self,
        identity: IdentityId,
        selecting: impl Iterator<Item = SelectorId>,
        own: &Entries,
        proxy_port: u16,
    ) -> Option<Entries> {
        let selecting = selecting.filter_map(|id| self.by_selector.get(&id));
        let mut positions: Vec<usize> = selecting.flatten().copied().collect();
        if positions.is_empty() {
            return None;
        }
        positions.sort_unstable();
        positions.dedup();
        // The rules after one that covers every port get no packet.
        let covers_all = |position: &usize| {
            let rule = self.rules.get(*position);
            rule.is_some_and(|rule| rule.ports.is_empty())
        };
        if let Some(last) = positions.iter().position(covers_all) {
            positions.truncate(last + 1);
        }
        let question = (positions, Block::all(own, EGRESS));
        let rows = match self.tables.get(&question) {
            Some(rows) => Arc::clone(rows),
            None => {
                let rows: Arc<[Row]> = self.rows(&question).into();
                if self.tables.len() >= KEPT {
                    self.tables.clear();
                }
                self.tables.insert(question, Arc::clone(&rows));
                rows
            }
        };
        let entries = rows.iter();
        Some(
            entries
                .map(|row| row.entry(identity, EGRESS, proxy_port))
                .collect(),
        )
    }

    fn rows(&self, (positions, own): &Question) -> Vec<Row> {
        let rules = positions.iter().filter_map(|at| self.rules.get(*at));
        let rules: Vec<&TierRule> = rules.map(AsRef::as_ref).collect();
        rows(&rules, own, &self.everyone)
    }
}

/// The table of an identity that no ordered rule selects: what its `own` entries and those for
/// everyone mean together in one direction.
pub(super) fn table_without_rules(
    identity: IdentityId,
    direction: u8,
    (own, everyone): (&Entries, &Entries),
    proxy_port: u16,
) -> Entries {
    let (own, everyone) = (Block::all(own, direction), Block::all(everyone, direction));
    let rows = rows(&[], &own, &everyone).into_iter();
    rows.map(|row| row.entry(identity, direction, proxy_port))
        .collect()
}

fn rows(rules: &[&TierRule], own: &[Block], everyone: &[Block]) -> Vec<Row> {
    let everything = whole(rules, own, everyone);
    let mut rows = vec![Row {
        protocol: 0,
        port: 0,
        port_bits: 0,
        verdict: everything,
    }];
    let blocks = own.iter().chain(everyone);
    let mut protocols: BTreeSet<u8> = blocks.filter_map(|block| block.protocol).collect();
    let ports = rules.iter().flat_map(|rule| &rule.ports);
    protocols.extend(
        ports
            .flat_map(|port| port.at(None))
            .map(|(number, ..)| number),
    );
    for protocol in protocols {
        let spans = spans(rules, own, everyone, protocol);
        rows_of(&mut rows, protocol, &spans, everything);
    }
    rows
}

impl Block {
    /// The blocks of the entries of one direction.
    fn all(entries: &Entries, direction: u8) -> Vec<Self> {
        let entries = entries.iter().filter(|(key, _)| key.egress == direction);
        entries.map(|(key, value)| Self::of(key, value)).collect()
    }

    fn of(key: &PolicyKey, value: &PolicyValue) -> Self {
        let port_bits = key.lpm_len().saturating_sub(8).min(16);
        let first = key.dport.get();
        Self {
            protocol: (key.lpm_len() > 0).then_some(key.protocol),
            first,
            last: first | u16::MAX.checked_shr(port_bits.into()).unwrap_or(0),
            says: if value.is_deny() {
                Says::Deny
            } else if value.proxy_port != Be16::ZERO {
                Says::Redirect
            } else {
                debug_assert_eq!(value.precedence, PRECEDENCE_ALLOW);
                Says::Allow
            },
        }
    }
}

impl Row {
    fn entry(
        self,
        identity: IdentityId,
        direction: u8,
        proxy_port: u16,
    ) -> (PolicyKey, PolicyValue) {
        let key = PolicyKey::new(
            identity.0,
            direction,
            self.protocol,
            self.port,
            self.port_bits,
        );
        let value = match self.verdict {
            Verdict::Drop => PolicyValue::deny(key),
            Verdict::Redirect => PolicyValue::dns_redirect(key, proxy_port),
            Verdict::Pass => PolicyValue::allow(key),
        };
        let precedence = PRECEDENCE;
        (
            key,
            PolicyValue {
                precedence,
                ..value
            },
        )
    }
}

/// The verdict of the other rules: of the identity's own entry and the one for everyone.
fn of_rules(own: Option<Says>, everyone: Option<Says>) -> Verdict {
    match own.max(everyone) {
        Some(Says::Allow) => Verdict::Pass,
        Some(Says::Redirect) => Verdict::Redirect,
        Some(Says::Deny) | None => Verdict::Drop,
    }
}

fn decides(action: Option<TierAction>, own: Option<Says>, everyone: Option<Says>) -> Verdict {
    match action {
        Some(TierAction::Deny) => Verdict::Drop,
        Some(TierAction::Pass) | None => of_rules(own, everyone),
    }
}

/// The verdict on a protocol that nothing names.
fn whole(rules: &[&TierRule], own: &[Block], everyone: &[Block]) -> Verdict {
    let first = rules.iter().find(|rule| rule.ports.is_empty());
    let says = |blocks: &[Block]| {
        let block = blocks.iter().find(|block| block.protocol.is_none());
        block.map(|block| block.says)
    };
    decides(first.map(|rule| rule.action), says(own), says(everyone))
}

/// Ports with one verdict: the first, and the verdict. Each ends where the next one begins.
type Span = (u16, Verdict);

/// The verdict on each port of a protocol.
fn spans(rules: &[&TierRule], own: &[Block], everyone: &[Block], protocol: u8) -> Vec<Span> {
    let ordered = rules.iter().flat_map(|rule| {
        let ports = rule.ports.iter().flat_map(|port| port.at(None));
        let ports = ports.filter(|(number, ..)| *number == protocol);
        let ports = ports.map(|(_, first, last)| (first, last));
        let all = rule.ports.is_empty().then_some((0, u16::MAX));
        ports
            .chain(all)
            .map(|(first, last)| (first, last, rule.action))
    });
    let ordered: Vec<(u16, u16, TierAction)> = ordered.collect();
    let (own, everyone) = (
        longest_first(own, protocol),
        longest_first(everyone, protocol),
    );
    let ends = |first: u16, last: u16| [Some(first), last.checked_add(1)].into_iter().flatten();
    let of_rules = ordered
        .iter()
        .flat_map(|(first, last, _)| ends(*first, *last));
    let of_blocks = own.iter().chain(&everyone);
    let of_blocks = of_blocks.flat_map(|(first, last, _)| ends(*first, *last));
    let mut cuts: Vec<u16> = of_rules.chain(of_blocks).chain([0]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    let (ordered, own, everyone) = (
        painted(&cuts, &ordered),
        painted(&cuts, &own),
        painted(&cuts, &everyone),
    );
    let verdicts = ordered.into_iter().zip(own).zip(everyone);
    let verdicts = verdicts.map(|((action, own), everyone)| decides(action, own, everyone));
    let mut spans: Vec<Span> = cuts.into_iter().zip(verdicts).collect();
    spans.dedup_by_key(|(_, verdict)| *verdict);
    spans
}

/// Blocks that are about a protocol, the longest match first: entries come shortest first.
fn longest_first(blocks: &[Block], protocol: u8) -> Vec<(u16, u16, Says)> {
    let about = blocks.iter().rev();
    let about = about.filter(|block| block.protocol.is_none_or(|of| of == protocol));
    about
        .map(|block| (block.first, block.last, block.says))
        .collect()
}

/// What each span from one cut to the next gets: the first of `layers` that covers it. A span is
/// visited once, however many layers there are.
fn painted<T: Copy>(cuts: &[u16], layers: &[(u16, u16, T)]) -> Vec<Option<T>> {
    let mut found = vec![None; cuts.len()];
    // For each span: the next one without a layer, or one from which the search goes on.
    let mut free: Vec<usize> = (0..=cuts.len()).collect();
    for (first, last, layer) in layers {
        let end = cuts.partition_point(|cut| cut <= last);
        let mut at = next_free(&mut free, cuts.partition_point(|cut| cut < first));
        while at < end {
            if let (Some(span), Some(next)) = (found.get_mut(at), free.get_mut(at)) {
                *span = Some(*layer);
                *next = at + 1;
            }
            at = next_free(&mut free, at + 1);
        }
    }
    found
}

fn next_free(free: &mut [usize], from: usize) -> usize {
    let mut at = from;
    while let Some(next) = free.get(at).copied()
        && next != at
    {
        let over = free.get(next).copied().unwrap_or(next);
        if let Some(known) = free.get_mut(at) {
            *known = over;
        }
        at = next;
    }
    at
}

/// Adds the rows of a protocol: the fewest that say the same.
fn rows_of(rows: &mut Vec<Row>, protocol: u8, spans: &[Span], everything: Verdict) {
    let ends = spans.iter().skip(1).map(|(next, _)| next - 1);
    let runs = spans.iter().zip(ends.chain([u16::MAX]));
    let runs = runs.map(|((first, verdict), last)| (*verdict, blocks(*first, last)));
    let runs: Vec<(Verdict, Vec<(u16, u8)>)> = runs.collect();
    let cost = |wild: &Verdict| {
        let others = runs.iter().filter(|(verdict, _)| verdict != wild);
        let others: usize = others.map(|(_, blocks)| blocks.len()).sum();
        others + usize::from(*wild != everything)
    };
    let candidates = [everything, Verdict::Drop, Verdict::Redirect, Verdict::Pass];
    let wild = candidates
        .into_iter()
        .min_by_key(cost)
        .unwrap_or(everything);
    let mut add = |verdict: Verdict, port: u16, port_bits: u8| {
        rows.push(Row {
            protocol,
            port,
            port_bits,
            verdict,
        });
    };
    if wild != everything {
        add(wild, 0, 0);
    }
    for (verdict, blocks) in runs.iter().filter(|(verdict, _)| *verdict != wild) {
        for (port, port_bits) in blocks {
            add(*verdict, *port, *port_bits);
        }
    }
}

#[cfg(test)]
mod tests;
