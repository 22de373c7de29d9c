//! Identity by label set: reference-counted numbers of one scope.

use std::collections::{BTreeMap, BTreeSet};

use foldhash::HashMap;
use shared_maps::IdentityId;

use crate::labels::LabelSet;

/// An identity with one reference more, from [`NodeLocal::acquire`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Acquired {
    pub id: IdentityId,
    /// Whether it was allocated just now: its policy is then not in any map of this run.
    pub new: bool,
    /// Whether it is in no checkpoint yet.
    pub fresh: bool,
}

/// No number is left in the scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no identity number is left between {min} and {max}: use fewer distinct selectors")]
pub(crate) struct Exhausted {
    /// Lowest number of the scope.
    pub min: IdentityId,
    /// Highest number of the scope.
    pub max: IdentityId,
}

/// Node-local numbers `min..=max`, handed out in sequence so that a freed number is not soon given
/// again.
#[derive(Debug)]
pub(crate) struct NodeLocal {
    min: u32,
    max: u32,
    next: u32,
    ids: HashMap<LabelSet, IdentityId>,
    slots: BTreeMap<IdentityId, Slot>,
    idle: BTreeSet<IdentityId>,
    withheld: BTreeMap<IdentityId, LabelSet>,
    withheld_ids: HashMap<LabelSet, IdentityId>,
}

#[derive(Debug)]
struct Slot {
    labels: LabelSet,
    references: usize,
}

impl NodeLocal {
    /// Numbers `min..=max`; `restored` keep their label sets.
    pub(crate) fn new(
        min: IdentityId,
        max: IdentityId,
        restored: Vec<(IdentityId, LabelSet)>,
    ) -> Self {
        let in_scope = |id: &IdentityId| (min..=max).contains(id);
        let withheld: BTreeMap<_, _> = restored
            .into_iter()
            .filter(|(id, _)| in_scope(id))
            .collect();
        let withheld_ids = withheld
            .iter()
            .map(|(id, labels)| (labels.clone(), *id))
            .collect();
        Self {
            min: min.0,
            max: max.0,
            next: min.0,
            ids: HashMap::default(),
            slots: BTreeMap::new(),
            idle: BTreeSet::new(),
            withheld,
            withheld_ids,
        }
    }

    /// Numbers for CIDR and FQDN label sets.
    pub(crate) fn local(restored: Vec<(IdentityId, LabelSet)>) -> Self {
        Self::new(IdentityId::LOCAL_MIN, IdentityId::LOCAL_MAX, restored)
    }

    /// Numbers for endpoints, of which new ones begin at `min`. Those of `restored` may be lower, and
    /// so may a requested number ([`Self::acquire_number`]).
    pub(crate) fn endpoints_from(min: IdentityId, restored: Vec<(IdentityId, LabelSet)>) -> Self {
        let all = Self::endpoints(restored);
        let (min, next) = (min.0, min.0);
        Self { min, next, ..all }
    }

    /// Numbers for endpoints: small enough for the mark of a packet.
    pub(crate) fn endpoints(restored: Vec<(IdentityId, LabelSet)>) -> Self {
        Self::new(IdentityId::ENDPOINT_MIN, IdentityId::ENDPOINT_MAX, restored)
    }

    /// As [`Self::acquire`]; labels that have no number, now or before a restart, get `request` if that
    /// number is withheld.
    pub(crate) fn acquire_as(
        &mut self,
        labels: &LabelSet,
        request: Option<IdentityId>,
    ) -> Result<Acquired, Exhausted> {
        let Some(id) =
            request.filter(|id| !self.has_number(labels) && self.withheld.contains_key(id))
        else {
            return self.acquire(labels);
        };
        self.unhold(id);
        self.allot(labels, id);
        Ok(Acquired {
            id,
            new: true,
            fresh: true,
        })
    }

    /// Identity of `labels` with the number `id`; `None` if other labels have it, or had it before the
    /// restart. Other numbers of these labels stay until their references are gone.
    pub(crate) fn acquire_number(&mut self, labels: &LabelSet, id: IdentityId) -> Option<Acquired> {
        match self.slots.get_mut(&id) {
            Some(slot) if slot.labels != *labels => return None,
            Some(slot) => {
                slot.references += 1;
                self.idle.remove(&id);
                self.ids.insert(labels.clone(), id);
                return Some(Acquired {
                    id,
                    new: false,
                    fresh: false,
                });
            }
            None => {}
        }
        let held_for = self.withheld.get(&id);
        if held_for.is_some_and(|owner| owner != labels) {
            return None;
        }
        let was_theirs = held_for.is_some();
        self.unhold(id);
        self.allot(labels, id);
        Some(Acquired {
            id,
            new: true,
            fresh: !was_theirs,
        })
    }

    /// As [`Self::acquire`], with a number that `is_free` allows.
    pub(crate) fn acquire_where(
        &mut self,
        labels: &LabelSet,
        is_free: &dyn Fn(IdentityId) -> bool,
    ) -> Result<Acquired, Exhausted> {
        let known = self.ids.get(labels).copied();
        if let Some(id) = known.filter(|id| is_free(*id)) {
            if let Some(slot) = self.slots.get_mut(&id) {
                slot.references += 1;
            }
            self.idle.remove(&id);
            return Ok(Acquired {
                id,
                new: false,
                fresh: false,
            });
        }
        let held = self.withheld_ids.get(labels).copied();
        let (id, fresh) = match held.filter(|id| known.is_none() && is_free(*id)) {
            Some(id) => {
                self.unhold(id);
                (id, false)
            }
            None => {
                let exhausted = Exhausted {
                    min: IdentityId(self.min),
                    max: IdentityId(self.max),
                };
                (self.free_number(is_free).ok_or(exhausted)?, true)
            }
        };
        self.allot(labels, id);
        Ok(Acquired {
            id,
            new: true,
            fresh,
        })
    }

    fn allot(&mut self, labels: &LabelSet, id: IdentityId) {
        self.ids.insert(labels.clone(), id);
        let slot = Slot {
            labels: labels.clone(),
            references: 1,
        };
        self.slots.insert(id, slot);
    }

    /// Whether these labels have a number, or had one before the restart.
    pub(crate) fn has_number(&self, labels: &LabelSet) -> bool {
        self.ids.contains_key(labels) || self.withheld_ids.contains_key(labels)
    }

    /// The number of these labels, now or before the restart.
    pub(crate) fn number_of(&self, labels: &LabelSet) -> Option<IdentityId> {
        let known = self.ids.get(labels);
        known.or_else(|| self.withheld_ids.get(labels)).copied()
    }

    /// Labels that a number had before the restart, while it is held for them.
    pub(crate) fn withheld_labels(&self, id: IdentityId) -> Option<&LabelSet> {
        self.withheld.get(&id)
    }

    /// Every number that is held for the labels that had it before the restart.
    pub(crate) fn withheld(&self) -> impl Iterator<Item = (IdentityId, &LabelSet)> {
        self.withheld.iter().map(|(id, labels)| (*id, labels))
    }

    fn free_number(&mut self, is_free: &dyn Fn(IdentityId) -> bool) -> Option<IdentityId> {
        let taken = |id: IdentityId| self.slots.contains_key(&id) || !is_free(id);
        let span = self.max - self.min + 1;
        let candidates = |start: u32, min: u32| {
            (0..span).map(move |step| IdentityId(min + (start - min + step) % span))
        };
        let unused = (self.used() < span as usize)
            .then(|| {
                candidates(self.next, self.min)
                    .find(|id| !taken(*id) && !self.withheld.contains_key(id))
            })
            .flatten();
        // Better a number held for a restart than none.
        let mut held = self.withheld.range(IdentityId(self.min)..);
        let id = unused.or_else(|| held.find_map(|(id, _)| (!taken(*id)).then_some(*id)))?;
        self.unhold(id);
        self.next = if id.0 == self.max { self.min } else { id.0 + 1 };
        Some(id)
    }

    /// How many numbers for new label sets are in use or held: never too low, and exact once they may be
    /// used up.
    fn used(&self) -> usize {
        let all = self.slots.len() + self.withheld.len();
        let span = (self.max - self.min + 1) as usize;
        if all < span {
            return all;
        }
        let from = IdentityId(self.min)..;
        self.slots.range(from.clone()).count() + self.withheld.range(from).count()
    }

    fn unhold(&mut self, id: IdentityId) -> bool {
        let Some(labels) = self.withheld.remove(&id) else {
            return false;
        };
        if self.withheld_ids.get(&labels) == Some(&id) {
            self.withheld_ids.remove(&labels);
        }
        true
    }

    /// Identity of `labels`, with one reference more. A `fresh` one must be on disk before a map has it.
    pub(crate) fn acquire(&mut self, labels: &LabelSet) -> Result<Acquired, Exhausted> {
        self.acquire_where(labels, &|_| true)
    }

    /// Gives one reference back; true if it was the last. Without references an identity stays
    /// until [`Self::sweep`].
    pub(crate) fn release(&mut self, id: IdentityId) -> bool {
        let Some(slot) = self.slots.get_mut(&id) else {
            return false;
        };
        slot.references = slot.references.saturating_sub(1);
        slot.references == 0 && self.idle.insert(id)
    }

    /// Frees identities without references, except those that the datapath still has (`in_force`): they
    /// wait for a later sweep.
    pub(crate) fn sweep(&mut self, in_force: &dyn Fn(IdentityId) -> bool) -> Vec<IdentityId> {
        let swept = self.sweep_labelled(in_force).into_iter();
        swept.map(|(id, _)| id).collect()
    }

    /// As [`Self::sweep`]. Gives also the labels that the numbers had.
    pub(super) fn sweep_labelled(
        &mut self,
        in_force: &dyn Fn(IdentityId) -> bool,
    ) -> Vec<(IdentityId, LabelSet)> {
        let (kept, swept): (BTreeSet<_>, BTreeSet<_>) = std::mem::take(&mut self.idle)
            .into_iter()
            .partition(|id| in_force(*id));
        self.idle = kept;
        let mut freed = Vec::with_capacity(swept.len());
        for id in swept {
            let Some(slot) = self.slots.remove(&id) else {
                continue;
            };
            // Labels whose identity was revived may have got a newer number.
            if self.ids.get(&slot.labels) == Some(&id) {
                self.ids.remove(&slot.labels);
            }
            freed.push((id, slot.labels));
        }
        freed
    }

    /// Takes a sweep of `id` back, without references. False if other labels have the number now.
    pub(crate) fn revive(&mut self, id: IdentityId, labels: LabelSet) -> bool {
        if self.slots.contains_key(&id) {
            return false;
        }
        self.unhold(id);
        self.ids.entry(labels.clone()).or_insert(id);
        let references = 0;
        self.slots.insert(id, Slot { labels, references });
        self.idle.insert(id);
        true
    }

    /// Labels of an allocated identity.
    pub(crate) fn labels(&self, id: IdentityId) -> Option<&LabelSet> {
        self.slots.get(&id).map(|slot| &slot.labels)
    }

    /// Every identity that a checkpoint has to keep: allocated or held for a restart.
    pub(crate) fn kept(&self) -> Vec<(IdentityId, LabelSet)> {
        let allocated = self
            .slots
            .iter()
            .map(|(id, slot)| (*id, slot.labels.clone()));
        let withheld = self
            .withheld
            .iter()
            .map(|(id, labels)| (*id, labels.clone()));
        allocated.chain(withheld).collect()
    }

    /// Allocated identities, with their references.
    pub(crate) fn allocated(&self) -> Vec<(IdentityId, LabelSet, usize)> {
        let slots = self.slots.iter();
        slots
            .map(|(id, slot)| (*id, slot.labels.clone(), slot.references))
            .collect()
    }

    /// How many identities are allocated, without withheld ones.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Releases restored numbers that no policy or endpoint has requested.
    pub(crate) fn release_withheld(&mut self) {
        self.withheld.clear();
        self.withheld_ids.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> LabelSet {
        LabelSet::parse(&[text]).unwrap()
    }

    #[test]
    fn one_number_per_label_set_until_the_last_reference() {
        let mut allocator = NodeLocal::local(Vec::new());
        let first = allocator.acquire(&set("fqdn:a")).unwrap();
        assert_eq!(
            first,
            Acquired {
                id: IdentityId(16_777_217),
                new: true,
                fresh: true
            }
        );
        assert_eq!(allocator.acquire(&set("fqdn:a")).unwrap().id, first.id);
        allocator.release(first.id);
        assert!(allocator.sweep(&|_| false).is_empty());
        allocator.release(first.id);
        // Requested again before the sweep: nothing is lost.
        assert!(!allocator.acquire(&set("fqdn:a")).unwrap().new);
        allocator.release(first.id);
        assert!(allocator.sweep(&|id| id == first.id).is_empty());
        assert_eq!(allocator.sweep(&|_| false), [first.id]);
        assert!(allocator.revive(first.id, set("fqdn:a")));
        assert_eq!(allocator.acquire(&set("fqdn:a")).unwrap().id, first.id);
        allocator.release(first.id);
        assert_eq!(allocator.sweep(&|_| false), [first.id]);
        // The next label set gets the next number, not the one just freed.
        assert_eq!(
            allocator.acquire(&set("fqdn:b")).unwrap().id,
            IdentityId(16_777_218)
        );
    }

    #[test]
    fn restored_label_sets_keep_their_numbers() {
        let restored = vec![(IdentityId(16_777_220), set("fqdn:a"))];
        let mut allocator = NodeLocal::local(restored);
        for name in ["fqdn:x", "fqdn:y", "fqdn:z", "fqdn:w"] {
            assert_ne!(
                allocator.acquire(&set(name)).unwrap().id,
                IdentityId(16_777_220)
            );
        }
        let again = allocator.acquire(&set("fqdn:a")).unwrap();
        assert_eq!(
            again,
            Acquired {
                id: IdentityId(16_777_220),
                new: true,
                fresh: false
            }
        );
    }

    #[test]
    fn a_withheld_number_can_be_requested_for_new_labels() {
        let held = |n: u32| {
            (
                IdentityId(16_777_217 + n),
                set(&format!("cidr:10.0.0.{n}/32")),
            )
        };
        let mut allocator = NodeLocal::local((0..3).map(held).collect());
        let mut ask = |labels: &str, n: u32| {
            let request = Some(IdentityId(16_777_217 + n));
            allocator.acquire_as(&set(labels), request).unwrap().id.0 - 16_777_217
        };
        assert_eq!(ask("fqdn:a", 1), 1);
        assert_eq!(ask("fqdn:a", 2), 1, "labels have one number");
        assert_eq!(
            ask("cidr:10.0.0.0/32", 2),
            0,
            "their own of before goes first"
        );
        assert!(ask("fqdn:b", 1) > 2, "it is taken");
        assert!(ask("fqdn:c", 9) > 2, "no owner held it");
    }

    #[test]
    fn exhaustion_is_an_error_and_uses_withheld_numbers_last() {
        let restored = vec![(IdentityId(257), set("k8s:old"))];
        let mut allocator = NodeLocal::new(IdentityId(256), IdentityId(258), restored);
        assert_eq!(
            allocator.acquire(&set("k8s:a")).unwrap().id,
            IdentityId(256)
        );
        assert_eq!(
            allocator.acquire(&set("k8s:b")).unwrap().id,
            IdentityId(258)
        );
        assert_eq!(
            allocator.acquire(&set("k8s:c")).unwrap().id,
            IdentityId(257)
        );
        assert!(allocator.acquire(&set("k8s:d")).is_err());
        allocator.release(IdentityId(258));
        allocator.sweep(&|_| false);
        assert_eq!(
            allocator.acquire(&set("k8s:d")).unwrap().id,
            IdentityId(258)
        );
    }
}
