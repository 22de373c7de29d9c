//! Registered selectors and the identities each selects, kept up to date.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use foldhash::HashMap;
use shared_maps::IdentityId;

use super::{
    index::Index,
    selector::{Selector, Subject},
};
use crate::labels::LabelSet;

/// Number of a registered selector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SelectorId(u32);

/// The registered selectors and the identities that each selects.
#[derive(Debug, Default)]
pub struct SelectorCache {
    ids: HashMap<Arc<Selector>, SelectorId>,
    entries: BTreeMap<SelectorId, Entry>,
    identities: BTreeMap<IdentityId, Subject>,
    /// Selectors that select an identity.
    selecting: BTreeMap<IdentityId, BTreeSet<SelectorId>>,
    selector_index: Index<SelectorId>,
    identity_index: Index<IdentityId>,
    next: u32,
}

/// A registered selector, with what it selects.
#[derive(Debug)]
pub struct Entry {
    pub selector: Arc<Selector>,
    /// How often the selector is registered.
    pub users: usize,
    pub selections: BTreeSet<IdentityId>,
}

impl SelectorCache {
    /// Registers a selector once more. True if it was not known.
    pub fn register(&mut self, selector: &Selector) -> (SelectorId, bool) {
        if let Some(id) = self.ids.get(selector) {
            if let Some(entry) = self.entries.get_mut(id) {
                entry.users += 1;
            }
            return (*id, false);
        }
        let id = SelectorId(self.next);
        self.next = self.next.wrapping_add(1);
        let selector = Arc::new(selector.clone());
        let selects = |subject: &&Subject| selector.matches(subject);
        let selections: BTreeSet<IdentityId> = match self.identity_index.identities(&selector) {
            Some(some) => {
                let some = some.iter().filter_map(|id| self.identities.get(id));
                some.filter(selects).map(|subject| subject.id).collect()
            }
            None => {
                let all = self.identities.values();
                all.filter(selects).map(|subject| subject.id).collect()
            }
        };
        self.selector_index.add_selector(&selector, id);
        for identity in &selections {
            self.selecting.entry(*identity).or_default().insert(id);
        }
        self.ids.insert(Arc::clone(&selector), id);
        self.entries.insert(
            id,
            Entry {
                selector,
                users: 1,
                selections,
            },
        );
        (id, true)
    }

    /// Gives one registration back. True if it was the last.
    pub fn unregister(&mut self, selector: &Selector) -> bool {
        let Some(id) = self.ids.get(selector).copied() else {
            return false;
        };
        let Some(entry) = self.entries.get_mut(&id) else {
            return false;
        };
        entry.users -= 1;
        if entry.users > 0 {
            return false;
        }
        for identity in std::mem::take(&mut entry.selections) {
            if let Some(selecting) = self.selecting.get_mut(&identity) {
                selecting.remove(&id);
            }
        }
        self.entries.remove(&id);
        self.ids.remove(selector);
        self.selector_index.remove_selector(selector, id);
        true
    }

    /// Number of a registered selector.
    pub fn id_of(&self, selector: &Selector) -> Option<SelectorId> {
        self.ids.get(selector).copied()
    }

    /// Adds a new identity. Returns the selectors that select it.
    pub fn add_identity(&mut self, id: IdentityId, labels: LabelSet) -> Vec<SelectorId> {
        let subject = Subject::new(id, labels);
        let mut selected_by = Vec::new();
        for selector in self.selector_index.selectors(&subject) {
            if let Some(entry) = self.entries.get_mut(&selector)
                && entry.selector.matches(&subject)
                && entry.selections.insert(id)
            {
                selected_by.push(selector);
            }
        }
        if let Some(former) = self.identities.get(&id) {
            self.identity_index.remove_identity(former, id);
        }
        self.identity_index.add_identity(&subject, id);
        self.identities.insert(id, subject);
        self.selecting
            .insert(id, selected_by.iter().copied().collect());
        selected_by
    }

    /// Removes an identity. Returns the selectors that selected it.
    pub fn remove_identity(&mut self, id: IdentityId) -> Vec<SelectorId> {
        if let Some(subject) = self.identities.remove(&id) {
            self.identity_index.remove_identity(&subject, id);
        }
        let selecting = self.selecting.remove(&id).unwrap_or_default();
        for selector in &selecting {
            if let Some(entry) = self.entries.get_mut(selector) {
                entry.selections.remove(&id);
            }
        }
        selecting.into_iter().collect()
    }

    /// Selectors that select an identity.
    pub fn selecting(&self, id: IdentityId) -> Vec<&Selector> {
        let ids = self.selecting.get(&id).into_iter().flatten();
        let entries = ids.filter_map(|id| self.entries.get(id));
        entries.map(|entry| &*entry.selector).collect()
    }

    /// Numbers of the selectors that select an identity.
    pub fn selecting_ids(&self, id: IdentityId) -> impl Iterator<Item = SelectorId> {
        self.selecting.get(&id).into_iter().flatten().copied()
    }

    /// Whether the selector selects the identity.
    pub fn selects(&self, selector: SelectorId, id: IdentityId) -> bool {
        self.entries
            .get(&selector)
            .is_some_and(|entry| entry.selections.contains(&id))
    }

    /// Identities that a selector selects.
    pub fn selections(&self, selector: SelectorId) -> Option<&BTreeSet<IdentityId>> {
        self.entries.get(&selector).map(|entry| &entry.selections)
    }

    pub fn entries(&self) -> impl Iterator<Item = (SelectorId, &Entry)> {
        self.entries.iter().map(|(id, entry)| (*id, entry))
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Every identity in use.
    pub fn identities(&self) -> impl ExactSizeIterator<Item = IdentityId> {
        self.identities.keys().copied()
    }

    /// Labels of an identity; `None` if it is unknown.
    pub fn labels(&self, id: IdentityId) -> Option<&LabelSet> {
        self.identities.get(&id).map(|subject| &subject.labels)
    }
}

#[cfg(test)]
mod tests {
    use dns_policy::rule::NameRule;
    use proptest::prelude::*;

    use super::*;
    use crate::selector::selector::{CidrSelector, Entity, LabelSelector, Operator, Requirement};

    fn fqdn(text: &str) -> Selector {
        Selector::Fqdn(NameRule::Pattern(text.to_owned()))
    }

    /// CFP-28427, "Are overlapping FQDN selectors handled correctly?"
    #[test]
    fn overlapping_fqdn_selectors() {
        let mut cache = SelectorCache::default();
        let (wide, _) = cache.register(&fqdn("*.cilium.io"));
        let (narrow, _) = cache.register(&fqdn("www.cilium.io"));
        let both = LabelSet::parse(&["fqdn:*.cilium.io", "fqdn:www.cilium.io"]).unwrap();
        let one = LabelSet::parse(&["fqdn:*.cilium.io"]).unwrap();
        assert_eq!(cache.add_identity(IdentityId(1), both), [wide, narrow]);
        assert_eq!(cache.add_identity(IdentityId(2), one), [wide]);
        assert_eq!(cache.selections(wide).unwrap().len(), 2);
        assert_eq!(cache.selections(narrow).unwrap().len(), 1);
        assert_eq!(cache.remove_identity(IdentityId(1)), [wide, narrow]);
        assert_eq!(cache.selections(wide).unwrap().len(), 1);
    }

    #[test]
    fn a_selector_lives_while_someone_uses_it() {
        let mut cache = SelectorCache::default();
        assert!(cache.register(&fqdn("a")).1);
        assert!(!cache.register(&fqdn("a")).1);
        assert!(!cache.unregister(&fqdn("a")));
        assert!(cache.unregister(&fqdn("a")));
        assert!(cache.is_empty());
    }

    const LABELS: [&str; 9] = [
        "k8s:app=web",
        "k8s:app=db",
        "any:app=web",
        "k8s:tier",
        "fqdn:app",
        "fqdn:www.cilium.io",
        "cidr:10.0.0.0/8",
        "cidr:10.1.0.0/16",
        "reserved:world-ipv4",
    ];

    fn some_selector() -> impl Strategy<Value = Selector> {
        let values = prop::collection::btree_set(prop::sample::select(vec!["web", "db", ""]), 0..3);
        let operator = values.prop_flat_map(|values| {
            let values: BTreeSet<String> = values.into_iter().map(str::to_owned).collect();
            prop::sample::select(vec![
                Operator::In(values.clone()),
                Operator::NotIn(values),
                Operator::Exists,
                Operator::DoesNotExist,
            ])
        });
        let key = prop::sample::select(vec!["app", "k8s:app", "tier", "reserved:world-ipv4"]);
        let requirement = (key, operator).prop_map(|(key, op)| Requirement::new(key, op));
        let labels = prop::collection::btree_set(requirement, 0..3);
        let block = prop::sample::select(vec!["0.0.0.0/0", "10.0.0.0/8", "10.1.0.0/16", "::/0"]);
        prop_oneof![
            labels.prop_map(|requirements| Selector::Labels(LabelSelector { requirements })),
            block.prop_map(|prefix| Selector::Cidr(CidrSelector {
                prefix: prefix.parse().unwrap(),
                except: BTreeSet::new(),
                nodes: false,
            })),
            prop::sample::select(vec!["app", "www.cilium.io"]).prop_map(fqdn),
            Just(Selector::Entity(Entity::World)),
            Just(Selector::Entity(Entity::Cluster)),
        ]
    }

    proptest! {
        /// Entries that the index leaves out would not have been selected.
        #[test]
        fn selects_like_each_selector_matched_against_each_identity(
            acts in prop::collection::vec(
                (some_selector(), 0u32..6, prop::sample::subsequence(LABELS.to_vec(), 0..5), 0..4),
                1..40,
            ),
        ) {
            let mut cache = SelectorCache::default();
            let mut identities = BTreeMap::new();
            for (selector, number, labels, act) in acts {
                // The identity of a pod, or of addresses outside the cluster.
                let id = IdentityId(if number < 3 { 300 + number } else { 1 << 24 | number });
                match act {
                    0 => {
                        cache.unregister(&selector);
                    }
                    1 => {
                        cache.remove_identity(id);
                        identities.remove(&id);
                    }
                    2 if !identities.contains_key(&id) => {
                        let labels = LabelSet::parse(&labels).unwrap();
                        cache.add_identity(id, labels.clone());
                        identities.insert(id, Subject::new(id, labels));
                    }
                    _ => {
                        cache.register(&selector);
                    }
                }
                for (_, entry) in cache.entries() {
                    let selected = identities.values().filter(|s| entry.selector.matches(s));
                    let selected: BTreeSet<_> = selected.map(|subject| subject.id).collect();
                    prop_assert_eq!(&entry.selections, &selected, "{}", entry.selector);
                }
            }
        }
    }
}
