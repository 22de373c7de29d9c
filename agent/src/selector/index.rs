//! Which selectors may select an identity, and which identities a selector, without asking
//! each one: both are kept on shelves by what they have in common.

use std::collections::BTreeSet;

use foldhash::HashMap;
use ipnet::IpNet;

use super::selector::{Operator, Selector, Subject};
use crate::ipcache::trie::PrefixMap;

/// Things by what a selector asks for, or by what an identity has.
#[derive(Debug)]
pub(super) struct Shelves<T> {
    /// By key of a label.
    keys: HashMap<Box<str>, BTreeSet<T>>,
    /// By key and value, if that is not empty.
    values: HashMap<Box<str>, HashMap<Box<str>, BTreeSet<T>>>,
    blocks: PrefixMap<BTreeSet<T>>,
    /// On no other shelf.
    rest: BTreeSet<T>,
}

impl<T> Default for Shelves<T> {
    fn default() -> Self {
        Self {
            keys: HashMap::default(),
            values: HashMap::default(),
            blocks: PrefixMap::default(),
            rest: BTreeSet::new(),
        }
    }
}

/// What is found on one shelf.
#[derive(Clone, Copy, Debug)]
enum Clue<'a> {
    Key(&'a str),
    Value(&'a str, &'a str),
    Block(IpNet),
    /// None of them: everything has to be asked.
    Anything,
}

/// What an identity that the selector selects has: one of these.
fn asked(selector: &Selector) -> Vec<Clue<'_>> {
    match selector {
        Selector::Fqdn(fqdn) => vec![Clue::Key(fqdn.text())],
        Selector::Cidr(cidr) if cidr.prefix.prefix_len() > 0 => vec![Clue::Block(cidr.prefix)],
        Selector::Labels(labels) => {
            let clues = labels.requirements.iter().filter_map(|requirement| {
                let key = requirement.key.as_str();
                match &requirement.operator {
                    Operator::In(values) => Some(values.iter().map(|v| valued(key, v)).collect()),
                    Operator::Exists => Some(vec![Clue::Key(key)]),
                    Operator::NotIn(_) | Operator::DoesNotExist => None,
                }
            });
            // A value says more than a key.
            clues
                .min_by_key(|clues: &Vec<_>| clues.iter().any(|c| matches!(c, Clue::Key(_))))
                .unwrap_or_else(|| vec![Clue::Anything])
        }
        Selector::Group(group) => vec![group.key().map_or(Clue::Anything, Clue::Key)],
        Selector::Cidr(_) | Selector::Entity(_) => vec![Clue::Anything],
    }
}

/// What an identity has.
fn had(subject: &Subject) -> Vec<Clue<'_>> {
    let labels = subject.labels.iter();
    let mut clues: Vec<Clue<'_>> = labels
        .flat_map(|label| {
            let value = (!label.value().is_empty()).then(|| valued(label.key(), label.value()));
            [Some(Clue::Key(label.key())), value]
        })
        .flatten()
        .collect();
    clues.extend(subject.cidr.map(Clue::Block));
    clues
}

fn valued<'a>(key: &'a str, value: &'a str) -> Clue<'a> {
    if value.is_empty() {
        Clue::Key(key)
    } else {
        Clue::Value(key, value)
    }
}

impl<T: Ord + Copy> Shelves<T> {
    /// Puts a selector where the identities it selects look for it.
    pub(super) fn put_selector(&mut self, selector: &Selector, what: T) {
        self.put(asked(selector), what);
    }

    /// Takes it away.
    pub(super) fn take_selector(&mut self, selector: &Selector, what: T) {
        self.take(asked(selector), what);
    }

    /// Puts an identity where the selectors that select it look for it.
    pub(super) fn put_identity(&mut self, subject: &Subject, what: T) {
        self.put(had(subject), what);
    }

    /// Takes it away.
    pub(super) fn take_identity(&mut self, subject: &Subject, what: T) {
        self.take(had(subject), what);
    }

    /// Selectors that may select an identity.
    pub(super) fn selectors(&self, subject: &Subject) -> BTreeSet<T> {
        let mut found = self.rest.clone();
        for clue in had(subject) {
            match clue {
                Clue::Block(block) => {
                    let covering = self.blocks.covering(block).into_iter();
                    found.extend(covering.flat_map(|(_, set)| set));
                }
                clue => found.extend(self.at(clue).into_iter().flatten()),
            }
        }
        found
    }

    /// Identities that a selector may select; none = any.
    pub(super) fn identities(&self, selector: &Selector) -> Option<BTreeSet<T>> {
        let mut found = BTreeSet::new();
        for clue in asked(selector) {
            match clue {
                Clue::Anything => return None,
                Clue::Block(block) => {
                    for inside in self.blocks.descendants(block) {
                        found.extend(self.blocks.get(inside).into_iter().flatten());
                    }
                }
                clue => found.extend(self.at(clue).into_iter().flatten()),
            }
        }
        Some(found)
    }

    fn at(&self, clue: Clue<'_>) -> Option<&BTreeSet<T>> {
        match clue {
            Clue::Key(key) => self.keys.get(key),
            Clue::Value(key, value) => self.values.get(key)?.get(value),
            Clue::Block(block) => self.blocks.get(block),
            Clue::Anything => Some(&self.rest),
        }
    }

    fn put(&mut self, clues: Vec<Clue<'_>>, what: T) {
        for clue in clues {
            match clue {
                Clue::Key(key) => shelf(&mut self.keys, key).insert(what),
                Clue::Value(key, value) => shelf(shelf(&mut self.values, key), value).insert(what),
                Clue::Block(block) => self.blocks.entry(block).insert(what),
                Clue::Anything => self.rest.insert(what),
            };
        }
    }

    fn take(&mut self, clues: Vec<Clue<'_>>, what: T) {
        for clue in clues {
            match clue {
                Clue::Key(key) => take_from(&mut self.keys, key, &what),
                Clue::Value(key, value) => {
                    if let Some(values) = self.values.get_mut(key) {
                        take_from(values, value, &what);
                        if values.is_empty() {
                            self.values.remove(key);
                        }
                    }
                }
                Clue::Block(block) => {
                    if let Some(set) = self.blocks.get_mut(block) {
                        set.remove(&what);
                        if set.is_empty() {
                            self.blocks.remove(block);
                        }
                    }
                }
                Clue::Anything => {
                    self.rest.remove(&what);
                }
            }
        }
    }
}

fn shelf<'a, T: Default>(shelves: &'a mut HashMap<Box<str>, T>, key: &str) -> &'a mut T {
    if !shelves.contains_key(key) {
        shelves.insert(key.into(), T::default());
    }
    shelves.get_mut(key).expect("it is there now")
}

fn take_from<T: Ord>(shelves: &mut HashMap<Box<str>, BTreeSet<T>>, key: &str, what: &T) {
    if let Some(set) = shelves.get_mut(key) {
        set.remove(what);
        if set.is_empty() {
            shelves.remove(key);
        }
    }
}
