//! A set that counts the reasons for each member, and notes what changed in it.

use std::collections::{BTreeMap, BTreeSet};

/// Members with the number of their reasons, and the difference to the members at the last
/// [`Counted::take`].
#[derive(Debug)]
pub(crate) struct Counted<T> {
    reasons: BTreeMap<T, usize>,
    added: BTreeSet<T>,
    removed: BTreeSet<T>,
}

impl<T> Default for Counted<T> {
    fn default() -> Self {
        Self {
            reasons: BTreeMap::new(),
            added: BTreeSet::new(),
            removed: BTreeSet::new(),
        }
    }
}

impl<T: Ord + Clone> Counted<T> {
    /// Adds a reason for a member.
    pub(crate) fn add(&mut self, member: T) {
        let reasons = self.reasons.entry(member.clone()).or_default();
        *reasons += 1;
        if *reasons == 1 && !self.removed.remove(&member) {
            self.added.insert(member);
        }
    }

    /// Removes a reason for a member.
    pub(crate) fn remove(&mut self, member: &T) {
        let Some(reasons) = self.reasons.get_mut(member) else {
            return;
        };
        *reasons -= 1;
        if *reasons == 0 {
            self.reasons.remove(member);
            if !self.added.remove(member) {
                self.removed.insert(member.clone());
            }
        }
    }

    /// Number of members.
    pub(crate) fn len(&self) -> usize {
        self.reasons.len()
    }

    /// Members, including those that were added since the last [`Counted::take`].
    pub(crate) fn members(&self) -> impl Iterator<Item = &T> {
        self.reasons.keys()
    }

    /// Members that were added since the last call of [`Counted::take`].
    pub(crate) fn added(&self) -> impl Iterator<Item = &T> {
        self.added.iter()
    }

    /// Ends a round. Returns the members that were added and removed since the last call.
    pub(crate) fn take(&mut self) -> (BTreeSet<T>, BTreeSet<T>) {
        let added = std::mem::take(&mut self.added);
        (added, std::mem::take(&mut self.removed))
    }

    /// The members at the last [`Counted::take`].
    pub(crate) fn taken(&self) -> impl Iterator<Item = &T> {
        let stayed = self.reasons.keys();
        let stayed = stayed.filter(|member| !self.added.contains(*member));
        stayed.chain(&self.removed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_that_is_undone_is_none() {
        let mut set = Counted::default();
        set.add("a");
        set.add("a");
        set.add("b");
        assert_eq!(set.take(), (["a", "b"].into(), [].into()));
        set.remove(&"a");
        set.remove(&"b");
        set.add("b");
        set.add("c");
        set.remove(&"c");
        set.remove(&"unknown");
        assert_eq!(set.take(), ([].into(), [].into()));
        set.remove(&"a");
        set.add("d");
        assert_eq!(set.taken().collect::<Vec<_>>(), [&"b", &"a"]);
        assert_eq!(set.len(), 2);
        assert_eq!(set.take(), (["d"].into(), ["a"].into()));
    }
}
