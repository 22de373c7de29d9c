//! Registered selectors and the identities each selects, kept up to date.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use shared_maps::IdentityId;

use super::selector::{Selector, Subject};
use crate::labels::LabelSet;

/// Number of a registered selector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SelectorId(u32);

/// Selectors × identities.
#[derive(Debug, Default)]
pub struct SelectorCache {
    ids: HashMap<Arc<Selector>, SelectorId>,
    entries: BTreeMap<SelectorId, Entry>,
    identities: BTreeMap<IdentityId, Subject>,
    /// Selectors that select an identity.
    selecting: BTreeMap<IdentityId, BTreeSet<SelectorId>>,
    next: u32,
}

/// One registered selector.
#[derive(Debug)]
pub struct Entry {
    /// The selector.
    pub selector: Arc<Selector>,
    /// Times it was registered.
    pub users: usize,
    /// Identities it selects.
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
        let selections = self
            .identities
            .values()
            .filter(|subject| selector.matches(subject));
        let selections: BTreeSet<IdentityId> = selections.map(|subject| subject.id).collect();
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
        true
    }

    /// Number of a registered selector.
    pub fn id_of(&self, selector: &Selector) -> Option<SelectorId> {
        self.ids.get(selector).copied()
    }

    /// A new identity: gives the selectors that select it.
    pub fn add_identity(&mut self, id: IdentityId, labels: LabelSet) -> Vec<SelectorId> {
        let subject = Subject::new(id, labels);
        let mut selected_by = Vec::new();
        for (selector, entry) in &mut self.entries {
            if entry.selector.matches(&subject) && entry.selections.insert(id) {
                selected_by.push(*selector);
            }
        }
        self.identities.insert(id, subject);
        self.selecting
            .insert(id, selected_by.iter().copied().collect());
        selected_by
    }

    /// An identity is gone: gives the selectors that selected it.
    pub fn remove_identity(&mut self, id: IdentityId) -> Vec<SelectorId> {
        self.identities.remove(&id);
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

    /// All registered selectors.
    pub fn entries(&self) -> impl Iterator<Item = (SelectorId, &Entry)> {
        self.entries.iter().map(|(id, entry)| (*id, entry))
    }

    /// Number of registered selectors.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether none is registered.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Labels of an identity.
    pub fn labels(&self, id: IdentityId) -> Option<&LabelSet> {
        self.identities.get(&id).map(|subject| &subject.labels)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::selector::selector::FqdnSelector;

    fn fqdn(text: &str) -> Selector {
        Selector::Fqdn(FqdnSelector::Pattern(text.to_owned()))
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
}
