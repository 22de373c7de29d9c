//! Identities of pods: the interface to what gives label sets their numbers.
//!
//! The core is synchronous. A giver that has to ask others for a number answers [`Asked::Awaited`],
//! and names the label set in [`PodIdentities::renumbered`] once the number is there.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use dns_policy::boot_time::BootTime;
use shared_maps::{IdentityId, tunnel::LAST_SHARED};

use super::{
    allocator::{Acquired, NodeLocal},
    cluster_counts::ClusterCounts,
    cluster_object::CiliumIdentity,
};
use crate::labels::LabelSet;

/// Gives label sets of pods their numbers, and counts references as
/// [`NodeLocal`] does.
pub(crate) trait PodIdentities: std::fmt::Debug + Send {
    /// Identity of `labels`, with one reference more if there is one.
    fn ask(&mut self, labels: &LabelSet, now: BootTime) -> Asked;
    /// Notes the cluster's object for a number; `None` if there is none any more. If several objects
    /// have one label set, only the one that [counts](super::cluster_object::Precedence) is given.
    fn learn(&mut self, id: IdentityId, object: Option<&CiliumIdentity>, now: BootTime);
    /// Takes the label sets whose number is new or changed: their holders ask again.
    fn renumbered(&mut self) -> BTreeSet<LabelSet>;
    /// Gives one reference back. Without references an identity stays until [`Self::sweep`].
    fn release(&mut self, id: IdentityId);
    /// Frees identities without references, except those that the datapath has (`in_force`).
    fn sweep(&mut self, in_force: &dyn Fn(IdentityId) -> bool) -> Vec<IdentityId>;
    /// Takes a sweep of `id` back, without references. False if other labels have the number now.
    fn revive(&mut self, id: IdentityId, labels: LabelSet) -> bool;
    /// Every identity that a checkpoint has to keep.
    fn kept(&self) -> Vec<(IdentityId, LabelSet)>;
    /// Allocated identities, with their references.
    fn allocated(&self) -> Vec<(IdentityId, LabelSet, usize)>;
    /// How many identities are allocated, without withheld ones.
    fn len(&self) -> usize;
    /// Releases restored numbers that nothing has requested.
    fn release_withheld(&mut self);

    /// Notes that everything an earlier run left has its numbers: from now on label sets may wait
    /// for theirs.
    fn begin(&mut self) {}
    /// Notes the API server's answer that these labels have this number. The list of objects has yet to
    /// confirm it.
    fn given(&mut self, _labels: &LabelSet, _id: IdentityId, _now: BootTime) {}
    /// Notes that objects of these numbers were deleted before this agent could see it: no other labels get them
    /// for a time.
    fn rested(&mut self, _ids: &[IdentityId], _now: BootTime) {}
    /// Has label sets that waited too long ask again: they get a number of this node.
    fn waited_too_long(&mut self, _now: BootTime) {}
    /// When [`Self::waited_too_long`] is due.
    fn next_deadline(&self) -> Option<BootTime> {
        None
    }
    /// Whether these labels lack an object, which is then to be made.
    fn lacks(&self, _labels: &LabelSet) -> bool {
        false
    }
    /// As [`Self::lacks`], for the labels that have this number here.
    fn lacks_object(&self, _id: IdentityId) -> bool {
        false
    }
    /// The numbers that an object of these labels may have, the first choice first.
    fn choices(&self, _labels: &LabelSet, _now: BootTime) -> Vec<IdentityId> {
        Vec::new()
    }
    /// Notes that every object is listed, and that other nodes accept the numbers of this one from now on:
    /// label sets that have one of the cluster's numbers without an object ask again.
    fn share(&mut self) {}
    /// Whether the object of these labels is gone although they have its number here.
    fn vanished(&self, _labels: &LabelSet) -> bool {
        false
    }
    /// How many label sets have a number of the cluster; `None` if no objects are to be made.
    fn counts(&self) -> Option<ClusterCounts> {
        None
    }
}

/// What [`PodIdentities::ask`] has for a label set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// The label set has this identity.
    Have(Acquired),
    /// The number is not there yet: [`PodIdentities::renumbered`] will name the label set.
    Awaited,
    Exhausted,
}

/// Numbers that the cluster has for label sets, and numbers of this node for all others.
///
/// A label set moves to the number that the cluster gives it. If another label set has that number
/// here, this takes two steps: the other set gets another number, and the first one gets the number
/// once the datapath no longer has it. A number that had another meaning before a restart also
/// waits, for the end of the grace.
#[derive(Debug)]
pub(crate) struct Assigned {
    local: NodeLocal,
    by_number: BTreeMap<IdentityId, LabelSet>,
    by_labels: HashMap<LabelSet, IdentityId>,
    renumbered: BTreeSet<LabelSet>,
    /// `None`: numbers mean nothing to other nodes.
    sharing: Option<Sharing>,
}

/// Numbers that other nodes accept with the meaning that objects give them.
#[derive(Debug, Default)]
struct Sharing {
    /// The label sets to which objects gave numbers in this run, even if the object is gone.
    given: BTreeMap<IdentityId, LabelSet>,
    /// Whether every object is listed.
    is_listed: bool,
}

impl Sharing {
    /// Whether these labels may have the number: it means nothing to other nodes, or the same.
    fn allows(&self, id: IdentityId, labels: &LabelSet) -> bool {
        !self.is_listed || id > LAST_SHARED || self.given.get(&id) == Some(labels)
    }
}

impl Assigned {
    /// The numbers in `restored` keep their label sets.
    pub(crate) fn new(restored: Vec<(IdentityId, LabelSet)>) -> Self {
        Self::with(NodeLocal::endpoints(restored))
    }

    /// With these numbers of the node.
    pub(super) fn with(local: NodeLocal) -> Self {
        Self {
            local,
            by_number: BTreeMap::new(),
            by_labels: HashMap::new(),
            renumbered: BTreeSet::new(),
            sharing: None,
        }
    }

    /// The same, where other nodes accept numbers of this one.
    pub(super) fn sharing(self) -> Self {
        let sharing = Some(Sharing::default());
        Self { sharing, ..self }
    }

    /// For nodes whose pods' packets carry the numbers: only objects give numbers of the cluster.
    pub(crate) fn shared(restored: Vec<(IdentityId, LabelSet)>) -> Self {
        let first = IdentityId(LAST_SHARED.0 + 1);
        Self::with(NodeLocal::endpoints_from(first, restored)).sharing()
    }

    /// The number that the cluster has for these labels.
    pub(super) fn assigned(&self, labels: &LabelSet) -> Option<IdentityId> {
        self.by_labels.get(labels).copied()
    }

    /// The labels that the cluster has for this number.
    pub(super) fn owner(&self, id: IdentityId) -> Option<&LabelSet> {
        self.by_number.get(&id)
    }

    /// How many numbers the cluster has given.
    pub(super) fn assigned_len(&self) -> usize {
        self.by_number.len()
    }

    /// The number that these labels have here, now or before the restart.
    pub(super) fn number_here(&self, labels: &LabelSet) -> Option<IdentityId> {
        self.local.number_of(labels)
    }

    /// The labels that have this number here.
    pub(super) fn labels_here(&self, id: IdentityId) -> Option<&LabelSet> {
        self.local.labels(id)
    }

    /// Has label sets ask again.
    pub(super) fn renumber(&mut self, sets: impl IntoIterator<Item = LabelSet>) {
        self.renumbered.extend(sets);
    }

    /// Identity of `labels` with the number of the cluster, with one reference more. `None` if there is none, or
    /// if another label set has the number here.
    pub(super) fn ask_assigned(&mut self, labels: &LabelSet) -> Option<Acquired> {
        let id = self.assigned(labels)?;
        self.local.acquire_number(labels, id)
    }

    /// Identity of `labels` with a number of this node, with one reference more.
    pub(super) fn ask_local(&mut self, labels: &LabelSet) -> Asked {
        let others = &self.by_number;
        let sharing = self.sharing.as_ref();
        let is_free = |id: IdentityId| {
            others.get(&id).is_none_or(|owner| owner == labels)
                && sharing.is_none_or(|sharing| sharing.allows(id, labels))
        };
        match self.local.acquire_where(labels, &is_free) {
            Ok(acquired) => Asked::Have(acquired),
            Err(_exhausted) => Asked::Exhausted,
        }
    }

    /// Notes the labels to which the cluster gave this number; `None` if it has no labels any more.
    pub(super) fn assign(&mut self, id: IdentityId, labels: Option<&LabelSet>) {
        if self.by_number.get(&id) == labels {
            return;
        }
        if let Some(before) = self.by_number.remove(&id)
            && self.by_labels.get(&before) == Some(&id)
        {
            self.by_labels.remove(&before);
        }
        let Some(labels) = labels else {
            return;
        };
        if let Some(sharing) = &mut self.sharing {
            sharing.given.insert(id, labels.clone());
        }
        // Labels that have the number now get another one.
        let holder = self.local.labels(id).filter(|holder| *holder != labels);
        self.renumbered.extend(holder.cloned());
        self.renumbered.insert(labels.clone());
        self.by_number.insert(id, labels.clone());
        self.by_labels.insert(labels.clone(), id);
    }

    /// Ends the listing of objects: label sets with a number of the cluster and without an object ask
    /// again.
    pub(super) fn end_listing(&mut self) {
        let Some(sharing) = &mut self.sharing else {
            return;
        };
        sharing.is_listed = true;
        let held = self.local.allocated().into_iter();
        let alone = held.filter(|(id, labels, _)| !sharing.allows(*id, labels));
        self.renumbered.extend(alone.map(|(_, labels, _)| labels));
    }
}

impl PodIdentities for Assigned {
    fn ask(&mut self, labels: &LabelSet, _: BootTime) -> Asked {
        match self.ask_assigned(labels) {
            Some(acquired) => Asked::Have(acquired),
            None => self.ask_local(labels),
        }
    }

    fn learn(&mut self, id: IdentityId, object: Option<&CiliumIdentity>, _: BootTime) {
        self.assign(id, object.map(|object| &object.labels));
    }

    fn renumbered(&mut self) -> BTreeSet<LabelSet> {
        std::mem::take(&mut self.renumbered)
    }

    fn release(&mut self, id: IdentityId) {
        self.local.release(id);
    }

    fn sweep(&mut self, in_force: &dyn Fn(IdentityId) -> bool) -> Vec<IdentityId> {
        let swept = self.local.sweep_labelled(in_force);
        // An owner that had its number here has no pod, and does not ask again.
        let owners = swept.iter().filter_map(|(id, labels)| {
            let owner = self.by_number.get(id)?;
            (owner != labels).then(|| owner.clone())
        });
        self.renumbered.extend(owners);
        swept.into_iter().map(|(id, _)| id).collect()
    }

    fn revive(&mut self, id: IdentityId, labels: LabelSet) -> bool {
        self.local.revive(id, labels)
    }

    fn kept(&self) -> Vec<(IdentityId, LabelSet)> {
        self.local.kept()
    }

    fn share(&mut self) {
        self.end_listing();
    }

    fn allocated(&self) -> Vec<(IdentityId, LabelSet, usize)> {
        self.local.allocated()
    }

    fn len(&self) -> usize {
        self.local.len()
    }

    fn release_withheld(&mut self) {
        let freed = self.local.withheld().map(|(id, _)| id);
        let owners = freed.filter_map(|id| self.by_number.get(&id));
        self.renumbered.extend(owners.cloned());
        self.local.release_withheld();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> LabelSet {
        LabelSet::parse(&[text]).unwrap()
    }

    fn object(number: u32, labels: &LabelSet) -> CiliumIdentity {
        CiliumIdentity {
            id: IdentityId(number),
            labels: labels.clone(),
            created: None,
            is_ours: false,
            uid: None,
            is_document: true,
            is_duplicate: false,
        }
    }

    fn have(numbers: &mut Assigned, labels: &LabelSet) -> u32 {
        match numbers.ask(labels, BootTime::START) {
            Asked::Have(acquired) => acquired.id.0,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_label_set_has_the_number_of_the_cluster_and_others_avoid_it() {
        let mut numbers = Assigned::new(Vec::new());
        let [web, db] = ["k8s:app=web", "k8s:app=db"].map(set);
        numbers.learn(IdentityId(256), Some(&object(256, &web)), BootTime::START);
        assert_eq!(have(&mut numbers, &db), 257);
        assert_eq!(have(&mut numbers, &web), 256);
        assert_eq!(have(&mut numbers, &web), 256);
        assert_eq!(numbers.allocated().len(), 2);
    }

    #[test]
    fn a_label_set_moves_to_the_number_that_the_cluster_gives_it_later() {
        let mut numbers = Assigned::new(Vec::new());
        let web = set("k8s:app=web");
        assert_eq!(have(&mut numbers, &web), 256);
        numbers.learn(IdentityId(5000), Some(&object(5000, &web)), BootTime::START);
        assert_eq!(numbers.renumbered(), [web.clone()].into());
        assert_eq!(have(&mut numbers, &web), 5000);
        numbers.release(IdentityId(256));
        assert_eq!(numbers.sweep(&|_| false), [IdentityId(256)]);
        assert!(numbers.renumbered().is_empty());
        assert_eq!(have(&mut numbers, &web), 5000);
        // The document is removed: the number stays while it is held.
        numbers.learn(IdentityId(5000), None, BootTime::START);
        assert_eq!(have(&mut numbers, &web), 5000);
    }

    /// Renumbering would look at every pod of the cluster.
    #[test]
    fn a_label_set_that_loses_its_last_pod_renumbers_nothing() {
        let mut numbers = Assigned::new(Vec::new());
        let web = set("k8s:app=web");
        numbers.learn(IdentityId(5000), Some(&object(5000, &web)), BootTime::START);
        assert_eq!(have(&mut numbers, &web), 5000);
        numbers.renumbered();
        numbers.release(IdentityId(5000));
        assert_eq!(numbers.sweep(&|_| false), [IdentityId(5000)]);
        assert!(numbers.renumbered().is_empty());
        assert_eq!(have(&mut numbers, &web), 5000);
    }

    #[test]
    fn a_number_of_another_label_set_is_cleared_first() {
        let mut numbers = Assigned::new(Vec::new());
        let [web, db] = ["k8s:app=web", "k8s:app=db"].map(set);
        assert_eq!(have(&mut numbers, &db), 256);
        numbers.learn(IdentityId(256), Some(&object(256, &web)), BootTime::START);
        assert_eq!(numbers.renumbered(), [web.clone(), db.clone()].into());
        assert_eq!(have(&mut numbers, &db), 257);
        assert_eq!(have(&mut numbers, &web), 258);
        numbers.release(IdentityId(256));
        assert!(numbers.sweep(&|id| id.0 == 256).is_empty());
        assert_eq!(have(&mut numbers, &web), 258);
        assert_eq!(numbers.sweep(&|_| false), [IdentityId(256)]);
        assert_eq!(numbers.renumbered(), [web.clone()].into());
        assert_eq!(have(&mut numbers, &web), 256);
        assert_eq!(have(&mut numbers, &db), 257);
    }

    #[test]
    fn high_scale_numbers_of_the_cluster_are_those_of_objects() {
        let [web, db, api] = ["k8s:app=web", "k8s:app=db", "k8s:app=api"].map(set);
        // A run without the tunnel gave these numbers by itself: they mean other labels elsewhere.
        let restored = vec![
            (IdentityId(256), web.clone()),
            (IdentityId(257), db.clone()),
        ];
        let mut numbers = Assigned::shared(restored);
        assert_eq!(
            (have(&mut numbers, &web), have(&mut numbers, &db)),
            (256, 257)
        );
        numbers.learn(IdentityId(257), Some(&object(257, &db)), BootTime::START);
        numbers.renumbered();
        numbers.share();
        assert_eq!(numbers.renumbered(), [web.clone()].into());
        assert_eq!(
            (have(&mut numbers, &web), have(&mut numbers, &db)),
            (61_440, 257)
        );
        assert_eq!(have(&mut numbers, &api), 61_441);
        // The number of an object that is gone was the same on all nodes.
        numbers.learn(IdentityId(257), None, BootTime::START);
        assert_eq!(have(&mut numbers, &db), 257);
    }

    #[test]
    fn a_number_that_had_another_meaning_before_a_restart_is_given_after_the_grace() {
        let [web, db] = ["k8s:app=web", "k8s:app=db"].map(set);
        let mut numbers = Assigned::new(vec![(IdentityId(300), db.clone())]);
        numbers.learn(IdentityId(300), Some(&object(300, &web)), BootTime::START);
        assert_ne!(have(&mut numbers, &db), 300);
        assert_ne!(have(&mut numbers, &web), 300);
        numbers.renumbered();
        numbers.release_withheld();
        assert_eq!(numbers.renumbered(), [web.clone()].into());
        assert_eq!(have(&mut numbers, &web), 300);
    }
}
