//! Which selectors may select an identity, and which identities a selector may select, without asking
//! each one: both are indexed by the keys that they have in common.

use std::collections::BTreeSet;

use foldhash::HashMap;
use ipnet::IpNet;

use super::selector::{Operator, Selector, Subject};
use crate::ipcache::trie::PrefixMap;

/// Selectors by what they ask for, or identities by what they have.
#[derive(Debug)]
pub(super) struct Index<T> {
    /// Members by key of a label.
    keys: HashMap<Box<str>, BTreeSet<T>>,
    /// Members by key and value of a label, if the value is not empty.
    values: HashMap<Box<str>, HashMap<Box<str>, BTreeSet<T>>>,
    blocks: PrefixMap<BTreeSet<T>>,
    /// Members without any of these keys.
    rest: BTreeSet<T>,
}

impl<T> Default for Index<T> {
    fn default() -> Self {
        Self {
            keys: HashMap::default(),
            values: HashMap::default(),
            blocks: PrefixMap::default(),
            rest: BTreeSet::new(),
        }
    }
}

/// A key under which the index lists a selector or an identity.
#[derive(Clone, Copy, Debug)]
enum IndexKey<'a> {
    Key(&'a str),
    Value(&'a str, &'a str),
    Block(IpNet),
    /// No key at all: each member is compared.
    Anything,
}

/// Keys of a selector. An identity that it selects has at least one of them.
fn keys_of_selector(selector: &Selector) -> Vec<IndexKey<'_>> {
    match selector {
        Selector::Fqdn(fqdn) => vec![IndexKey::Key(fqdn.text())],
        Selector::DnsName(name) => vec![IndexKey::Key(name.text())],
        Selector::Cidr(cidr) if cidr.prefix.prefix_len() > 0 => vec![IndexKey::Block(cidr.prefix)],
        Selector::Labels(labels) | Selector::Node(labels) => {
            let keys = labels.requirements.iter().filter_map(|requirement| {
                let key = requirement.key.as_str();
                match &requirement.operator {
                    Operator::In(values) => Some(values.iter().map(|v| valued(key, v)).collect()),
                    Operator::Exists => Some(vec![IndexKey::Key(key)]),
                    Operator::NotIn(_) | Operator::DoesNotExist => None,
                }
            });
            // A value narrows the search more than a key.
            keys.min_by_key(|keys: &Vec<_>| keys.iter().any(|c| matches!(c, IndexKey::Key(_))))
                .unwrap_or_else(|| vec![IndexKey::Anything])
        }
        Selector::Group(group) => vec![group.key().map_or(IndexKey::Anything, IndexKey::Key)],
        Selector::Cidr(_) | Selector::Entity(_) => vec![IndexKey::Anything],
    }
}

/// Keys of an identity: its labels and its blocks.
fn keys_of_identity(subject: &Subject) -> Vec<IndexKey<'_>> {
    let labels = subject.labels.iter();
    let mut keys: Vec<IndexKey<'_>> = labels
        .flat_map(|label| {
            let value = (!label.value().is_empty()).then(|| valued(label.key(), label.value()));
            [Some(IndexKey::Key(label.key())), value]
        })
        .flatten()
        .collect();
    let blocks = subject.cidr.iter().chain(&subject.node_cidrs);
    keys.extend(blocks.map(|block| IndexKey::Block(*block)));
    keys
}

fn valued<'a>(key: &'a str, value: &'a str) -> IndexKey<'a> {
    if value.is_empty() {
        IndexKey::Key(key)
    } else {
        IndexKey::Value(key, value)
    }
}

impl<T: Ord + Copy> Index<T> {
    /// Adds a selector under its keys.
    pub(super) fn add_selector(&mut self, selector: &Selector, what: T) {
        self.add(keys_of_selector(selector), what);
    }

    /// Removes a selector from its keys.
    pub(super) fn remove_selector(&mut self, selector: &Selector, what: T) {
        self.remove(keys_of_selector(selector), what);
    }

    /// Adds an identity under its keys.
    pub(super) fn add_identity(&mut self, subject: &Subject, what: T) {
        self.add(keys_of_identity(subject), what);
    }

    /// Removes an identity from its keys.
    pub(super) fn remove_identity(&mut self, subject: &Subject, what: T) {
        self.remove(keys_of_identity(subject), what);
    }

    /// Selectors that may select an identity.
    pub(super) fn selectors(&self, subject: &Subject) -> BTreeSet<T> {
        let mut found = self.rest.clone();
        for key in keys_of_identity(subject) {
            match key {
                IndexKey::Block(block) => {
                    let covering = self.blocks.covering(block).into_iter();
                    found.extend(covering.flat_map(|(_, set)| set));
                }
                key => found.extend(self.at(key).into_iter().flatten()),
            }
        }
        found
    }

    /// Identities that a selector may select; `None` = any.
    pub(super) fn identities(&self, selector: &Selector) -> Option<BTreeSet<T>> {
        let mut found = BTreeSet::new();
        for key in keys_of_selector(selector) {
            match key {
                IndexKey::Anything => return None,
                IndexKey::Block(block) => {
                    for inside in self.blocks.descendants(block) {
                        found.extend(self.blocks.get(inside).into_iter().flatten());
                    }
                }
                key => found.extend(self.at(key).into_iter().flatten()),
            }
        }
        Some(found)
    }

    fn at(&self, key: IndexKey<'_>) -> Option<&BTreeSet<T>> {
        match key {
            IndexKey::Key(key) => self.keys.get(key),
            IndexKey::Value(key, value) => self.values.get(key)?.get(value),
            IndexKey::Block(block) => self.blocks.get(block),
            IndexKey::Anything => Some(&self.rest),
        }
    }

    fn add(&mut self, keys: Vec<IndexKey<'_>>, what: T) {
        for key in keys {
            match key {
                IndexKey::Key(key) => entry(&mut self.keys, key).insert(what),
                IndexKey::Value(key, value) => {
                    entry(entry(&mut self.values, key), value).insert(what)
                }
                IndexKey::Block(block) => self.blocks.entry(block).insert(what),
                IndexKey::Anything => self.rest.insert(what),
            };
        }
    }

    fn remove(&mut self, keys: Vec<IndexKey<'_>>, what: T) {
        for key in keys {
            match key {
                IndexKey::Key(key) => remove_from(&mut self.keys, key, &what),
                IndexKey::Value(key, value) => {
                    if let Some(values) = self.values.get_mut(key) {
                        remove_from(values, value, &what);
                        if values.is_empty() {
                            self.values.remove(key);
                        }
                    }
                }
                IndexKey::Block(block) => {
                    if let Some(set) = self.blocks.get_mut(block) {
                        set.remove(&what);
                        if set.is_empty() {
                            self.blocks.remove(block);
                        }
                    }
                }
                IndexKey::Anything => {
                    self.rest.remove(&what);
                }
            }
        }
    }
}

fn entry<'a, T: Default>(map: &'a mut HashMap<Box<str>, T>, key: &str) -> &'a mut T {
    if !map.contains_key(key) {
        map.insert(key.into(), T::default());
    }
    map.get_mut(key).expect("it is there now")
}

fn remove_from<T: Ord>(map: &mut HashMap<Box<str>, BTreeSet<T>>, key: &str, what: &T) {
    if let Some(set) = map.get_mut(key) {
        set.remove(what);
        if set.is_empty() {
            map.remove(key);
        }
    }
}
