//! Numbers of the whole cluster: a label set has one number on every node.
//!
//! The numbers are names of objects that agents create ([`WantedIdentities`] says which). A label set without
//! an object waits for it, for [`WAIT`] at most, and has a number of this node after that. It moves to the
//! number of the cluster once that is there.

mod candidates;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    time::Duration,
};

use dns_policy::boot_time::BootTime;
use shared_maps::IdentityId;

use self::candidates::NODE_FIRST;
pub use self::candidates::{IdentityRange, RangeError, candidates, further_candidates};
pub use super::cluster_counts::ClusterCounts;
use super::{
    allocator::NodeLocal,
    cluster_object::CiliumIdentity,
    pods::{Asked, Assigned, PodIdentities},
};
use crate::labels::LabelSet;

/// How long a label set waits for its number of the cluster before it gets one of the node.
pub const WAIT: Duration = Duration::from_secs(2);
/// How long an answer of the API server counts without the list of objects.
const CONFIRM: Duration = Duration::from_mins(1);
/// How long a number whose object is gone is given to no other labels.
pub const REST: Duration = Duration::from_hours(1);

/// How many further numbers a label set may have if other labels have all of its first ones.
const FURTHER_CHOICES: usize = 64;

/// Label sets of this node that lack an object, each with how to make it.
pub type WantedIdentities = BTreeMap<LabelSet, WantedIdentity>;

/// An object that this agent is to create.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedIdentity {
    /// Numbers that it may have, the first choice first. Empty: other labels have all of them.
    pub choices: Vec<IdentityId>,
    /// Whether a Pod document of this node has exactly these labels. Otherwise only this node knows that they are
    /// in use.
    pub is_of_pod: bool,
    /// Whether its object was deleted although this node uses it.
    pub vanished: bool,
    /// Whether its namespace has as many numbers as it may have: then no object is made for now.
    pub is_beyond_share: bool,
}

/// The number of a label set according to the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GivenNumber {
    pub labels: LabelSet,
    pub id: IdentityId,
}

/// Numbers of the cluster, and numbers of this node until the cluster's are there.
///
/// Label sets move from one number to another as in [`Assigned`].
#[derive(Debug)]
pub(crate) struct ClusterWide {
    numbers: Assigned,
    range: IdentityRange,
    /// Whether label sets wait for their numbers.
    waits: bool,
    /// Label sets without a number, and since when.
    awaited: BTreeMap<LabelSet, BootTime>,
    /// Label sets that waited too long, and that nothing has asked for since.
    overdue: HashSet<LabelSet>,
    /// Numbers that the list of objects has yet to confirm, and until when.
    unconfirmed: BTreeMap<IdentityId, BootTime>,
    resting: BTreeMap<IdentityId, Rest>,
}

/// A number whose object is gone.
#[derive(Debug)]
struct Rest {
    /// `None`: the object was deleted before this agent started.
    labels: Option<LabelSet>,
    until: BootTime,
}

impl ClusterWide {
    /// The numbers in `restored` keep their label sets.
    pub(crate) fn new(range: IdentityRange, restored: Vec<(IdentityId, LabelSet)>) -> Self {
        Self {
            numbers: Assigned::with(NodeLocal::endpoints_from(NODE_FIRST, restored)),
            range,
            waits: false,
            awaited: BTreeMap::new(),
            overdue: HashSet::new(),
            unconfirmed: BTreeMap::new(),
            resting: BTreeMap::new(),
        }
    }

    /// The same, where other nodes accept numbers of this one.
    pub(crate) fn sharing(self) -> Self {
        let numbers = self.numbers.sharing();
        Self { numbers, ..self }
    }

    /// Notes that the object of a number is gone.
    fn rest(&mut self, id: IdentityId, now: BootTime) {
        self.resting.retain(|_, rest| rest.until > now);
        if let Some(labels) = self.numbers.owner(id).cloned() {
            let until = now.plus(REST);
            let labels = Some(labels);
            self.resting.insert(id, Rest { labels, until });
        }
    }

    /// Whether other labels have the number, or had it until a short time ago.
    fn is_of_others(&self, id: IdentityId, labels: &LabelSet, now: BootTime) -> bool {
        let owner = self.numbers.owner(id);
        let rest = self.resting.get(&id).filter(|rest| rest.until > now);
        let is_other = |other: &LabelSet| other != labels;
        owner.is_some_and(is_other)
            || rest.is_some_and(|rest| match &rest.labels {
                Some(other) => is_other(other),
                None => self.numbers.number_here(labels) != Some(id),
            })
    }
}

impl PodIdentities for ClusterWide {
    fn ask(&mut self, labels: &LabelSet, now: BootTime) -> Asked {
        if let Some(acquired) = self.numbers.ask_assigned(labels) {
            self.awaited.remove(labels);
            return Asked::Have(acquired);
        }
        // A set that has a number keeps it, or leaves it to its owner at once. A set whose number
        // another set still has here gets it in two steps.
        let is_known =
            self.numbers.number_here(labels).is_some() || self.numbers.assigned(labels).is_some();
        if self.waits && !is_known && !self.overdue.remove(labels) {
            self.awaited.entry(labels.clone()).or_insert(now);
            return Asked::Awaited;
        }
        self.awaited.remove(labels);
        self.numbers.ask_local(labels)
    }

    fn learn(&mut self, id: IdentityId, object: Option<&CiliumIdentity>, now: BootTime) {
        self.unconfirmed.remove(&id);
        match object {
            Some(_) => drop(self.resting.remove(&id)),
            None => self.rest(id, now),
        }
        self.numbers.assign(id, object.map(|object| &object.labels));
    }

    fn renumbered(&mut self) -> BTreeSet<LabelSet> {
        self.numbers.renumbered()
    }

    fn release(&mut self, id: IdentityId) {
        self.numbers.release(id);
    }

    fn sweep(&mut self, in_force: &dyn Fn(IdentityId) -> bool) -> Vec<IdentityId> {
        self.numbers.sweep(in_force)
    }

    fn revive(&mut self, id: IdentityId, labels: LabelSet) -> bool {
        self.numbers.revive(id, labels)
    }

    fn kept(&self) -> Vec<(IdentityId, LabelSet)> {
        self.numbers.kept()
    }

    fn allocated(&self) -> Vec<(IdentityId, LabelSet, usize)> {
        self.numbers.allocated()
    }

    fn len(&self) -> usize {
        self.numbers.len()
    }

    fn release_withheld(&mut self) {
        self.numbers.release_withheld();
    }

    fn begin(&mut self) {
        self.waits = true;
    }

    fn share(&mut self) {
        self.numbers.end_listing();
    }

    fn given(&mut self, labels: &LabelSet, id: IdentityId, now: BootTime) {
        // The list counts: it has both of two objects with one label set.
        let known = self.numbers.assigned(labels);
        let is_listed = known.is_some_and(|known| !self.unconfirmed.contains_key(&known));
        let is_taken = self.numbers.owner(id).is_some();
        if is_listed || is_taken {
            return;
        }
        self.numbers.assign(id, Some(labels));
        self.unconfirmed.insert(id, now.plus(CONFIRM));
    }

    fn rested(&mut self, ids: &[IdentityId], now: BootTime) {
        let until = now.plus(REST);
        for id in ids {
            if self.numbers.owner(*id).is_none() {
                let labels = None;
                self.resting.entry(*id).or_insert(Rest { labels, until });
            }
        }
    }

    fn waited_too_long(&mut self, now: BootTime) {
        let is_due = |since: &BootTime| since.plus(WAIT) <= now;
        let due = self.awaited.extract_if(.., |_, since| is_due(since));
        // The label sets that were overdue so far were not requested again.
        self.overdue = due.map(|(labels, _)| labels).collect();
        self.numbers.renumber(self.overdue.iter().cloned());
        let lost: Vec<_> = self
            .unconfirmed
            .extract_if(.., |_, until| *until <= now)
            .collect();
        for (id, _) in lost {
            self.numbers.assign(id, None);
        }
    }

    fn next_deadline(&self) -> Option<BootTime> {
        let waits = self.awaited.values().map(|since| since.plus(WAIT));
        waits.chain(self.unconfirmed.values().copied()).min()
    }

    fn lacks(&self, labels: &LabelSet) -> bool {
        self.numbers.assigned(labels).is_none()
    }

    fn lacks_object(&self, id: IdentityId) -> bool {
        let labels = self.numbers.labels_here(id);
        labels.is_some_and(|labels| self.lacks(labels))
    }

    fn choices(&self, labels: &LabelSet, now: BootTime) -> Vec<IdentityId> {
        let mut all: Vec<IdentityId> = candidates(labels, self.range).collect();
        // The number that these labels have here, although its object was deleted.
        let here = self.numbers.number_here(labels).filter(|id| {
            let rest = self.resting.get(id);
            let was_theirs = rest.is_some_and(|rest| rest.labels.as_ref() == Some(labels));
            self.range.contains(*id) && (was_theirs || all.contains(id))
        });
        let mut seen = BTreeSet::new();
        all.splice(0..0, here);
        all.retain(|id| seen.insert(*id) && !self.is_of_others(*id, labels, now));
        // A full range is not searched for each label set.
        let may_have_room = (self.numbers.assigned_len() as u64) < self.range.size();
        if all.is_empty() && may_have_room {
            let further = further_candidates(labels, self.range);
            let free = further.filter(|id| !self.is_of_others(*id, labels, now));
            all.extend(free.take(FURTHER_CHOICES));
        }
        all
    }

    fn vanished(&self, labels: &LabelSet) -> bool {
        let here = self.numbers.number_here(labels);
        let rest = here.and_then(|id| self.resting.get(&id));
        rest.is_some_and(|rest| rest.labels.as_ref() == Some(labels))
    }

    fn counts(&self) -> Option<ClusterCounts> {
        let allocated = self.numbers.allocated().into_iter();
        let is_local =
            |labels: &LabelSet, id: IdentityId| self.numbers.assigned(labels) != Some(id);
        let local = allocated.filter(|(id, labels, held)| *held > 0 && is_local(labels, *id));
        Some(ClusterCounts {
            known: self.numbers.assigned_len(),
            local: local.count(),
            waiting: self.awaited.len(),
        })
    }
}
