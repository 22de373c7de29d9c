//! Numbers of identities, and which of them are on disk.
//!
//! Owns both allocators (endpoints, and everything else), the marks of their checkpoints, the
//! labels of the host identity, and the [budget of names](super::identity_budget). It keeps one
//! invariant: a number that is not on disk is in the set of fresh ones, and its checkpoint is due,
//! until a plan begins with that checkpoint.

use std::collections::{BTreeMap, BTreeSet};

use dns_policy::boot_time::BootTime;
use ipnet::IpNet;
use shared_maps::IdentityId;

use super::identity_budget::IdentityBudget;
use crate::{
    identity::{
        allocator::Acquired,
        checkpoint::IdentityFile,
        cluster::{ClusterCounts, ClusterWide, GivenNumber, IdentityRange, WantedIdentity},
        cluster_object::{CiliumIdentity, NumberSource},
        endpoint_checkpoint::{EndpointCheckpoint, EndpointWrite},
        namespace_shares::NamespaceShares,
        pods::{Asked, Assigned, PodIdentities},
        scopes::LocalScopes,
    },
    labels::{Label, LabelSet, RESERVED},
};

/// The checkpoints that a plan has to begin with, and the identities that they save.
#[derive(Debug, Default)]
pub(crate) struct Checkpoints {
    pub(crate) local: Option<String>,
    pub(crate) endpoints: Option<EndpointWrite>,
    pub(crate) fresh: BTreeSet<IdentityId>,
}

/// Who gives numbers to label sets of pods.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Givers {
    /// Range of the numbers for identity objects that are to be made; `None` = none are.
    pub(crate) objects: Option<IdentityRange>,
    /// Whether other nodes accept the numbers of this one.
    pub(crate) shares: bool,
}

/// The allocators of identities, and which of their numbers are on disk.
#[derive(Debug)]
pub(crate) struct IdentityNumbers {
    local: LocalScopes,
    local_file: IdentityFile,
    endpoints: Box<dyn PodIdentities>,
    /// Objects that give numbers, and duplicates of them.
    objects: BTreeMap<IdentityId, CiliumIdentity>,
    shares: NamespaceShares,
    /// Range of the numbers for identity objects that are to be made; `None` = none are.
    range: Option<IdentityRange>,
    local_is_due: bool,
    endpoint_checkpoint: EndpointCheckpoint,
    fresh: BTreeSet<IdentityId>,
    /// Whether the label sets that lack an object may have changed.
    is_changed: bool,
    /// Labels of those node addresses that have more than the host's own labels. The host identity
    /// has all of them.
    host_labels: BTreeMap<IpNet, LabelSet>,
    budget: IdentityBudget,
}

impl IdentityNumbers {
    /// Starts with the numbers that an earlier run had.
    pub(crate) fn new(
        local: Vec<(IdentityId, LabelSet)>,
        endpoints: Vec<(IdentityId, LabelSet)>,
        givers: Givers,
    ) -> Self {
        let endpoints: Box<dyn PodIdentities> = match (givers.objects, givers.shares) {
            (Some(range), false) => Box::new(ClusterWide::new(range, endpoints)),
            (Some(range), true) => Box::new(ClusterWide::new(range, endpoints).sharing()),
            (None, false) => Box::new(Assigned::new(endpoints)),
            (None, true) => Box::new(Assigned::shared(endpoints)),
        };
        Self {
            local: LocalScopes::new(local),
            local_file: IdentityFile::default(),
            endpoints,
            objects: BTreeMap::new(),
            shares: NamespaceShares::default(),
            range: givers.objects,
            local_is_due: false,
            endpoint_checkpoint: EndpointCheckpoint::default(),
            fresh: BTreeSet::new(),
            is_changed: false,
            host_labels: BTreeMap::new(),
            budget: IdentityBudget::default(),
        }
    }

    pub(crate) fn budget(&self) -> &IdentityBudget {
        &self.budget
    }

    pub(crate) fn budget_mut(&mut self) -> &mut IdentityBudget {
        &mut self.budget
    }

    /// Acquires the identity of labels of addresses outside the cluster, with this number if it is
    /// free. `None` if no number is left.
    pub(crate) fn acquire_local(
        &mut self,
        labels: &LabelSet,
        request: Option<IdentityId>,
    ) -> Option<Acquired> {
        let acquired = self.local.acquire_as(labels, request).ok()?;
        if acquired.fresh {
            self.local_is_due = true;
            self.fresh.insert(acquired.id);
        }
        Some(acquired)
    }

    /// Acquires the identity of a pod's labels, if there is one.
    pub(crate) fn ask_pod(&mut self, labels: &LabelSet, now: BootTime) -> Asked {
        // Pods of other nodes change often, mostly between label sets that have objects. Such a change makes no object
        // necessary.
        self.is_changed |= self.endpoints.lacks(labels) || self.endpoints.next_deadline().is_some();
        let asked = self.endpoints.ask(labels, now);
        if let Asked::Have(acquired) = asked
            && acquired.fresh
        {
            self.endpoint_checkpoint.add(acquired.id, labels);
            self.fresh.insert(acquired.id);
        }
        asked
    }

    /// Notes the cluster's object for a number; `None` if there is none any more.
    pub(crate) fn learn(&mut self, id: IdentityId, object: Option<&CiliumIdentity>, now: BootTime) {
        self.is_changed = true;
        let before = match object {
            Some(object) => self.objects.insert(id, object.clone()),
            None => self.objects.remove(&id),
        };
        if let Some(before) = before {
            self.shares.remove(&before.labels);
        }
        if let Some(object) = object {
            self.shares.add(&object.labels);
        }
        let object = object.filter(|object| !object.is_duplicate);
        self.endpoints.learn(id, object, now);
    }

    /// Notes that everything an earlier run left has its numbers.
    pub(crate) fn begin(&mut self) {
        self.endpoints.begin();
    }

    /// Notes that every object is listed: from now on other nodes accept the numbers of this one.
    pub(crate) fn share(&mut self) {
        self.is_changed = true;
        self.endpoints.share();
    }

    /// The object of a number.
    pub(crate) fn object(&self, id: IdentityId) -> Option<&CiliumIdentity> {
        self.objects.get(&id)
    }

    /// Notes the API server's answer that a label set has this number.
    pub(crate) fn give(&mut self, given: &GivenNumber, now: BootTime) {
        self.is_changed = true;
        self.endpoints.given(&given.labels, given.id, now);
    }

    /// Notes that objects of these numbers were deleted before this agent could see it.
    pub(crate) fn rest(&mut self, ids: &[IdentityId], now: BootTime) {
        self.is_changed = true;
        self.endpoints.rested(ids, now);
    }

    /// Makes label sets that waited too long for a number of the cluster request a number again.
    pub(crate) fn end_waiting(&mut self, now: BootTime) {
        if self.next_deadline().is_some_and(|due| due <= now) {
            self.is_changed = true;
            self.endpoints.waited_too_long(now);
        }
    }

    /// When [`Self::end_waiting`] is due.
    pub(crate) fn next_deadline(&self) -> Option<BootTime> {
        self.endpoints.next_deadline()
    }

    /// Whether the label sets that lack an object may have changed since the last call.
    pub(crate) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.is_changed)
    }

    /// The object that is to be made for these labels; `None` if they need none. `is_of_pod` says whether a Pod
    /// document of this node has them.
    pub(crate) fn wanted(
        &self,
        labels: &LabelSet,
        is_of_pod: bool,
        now: BootTime,
    ) -> Option<WantedIdentity> {
        let range = self.range.filter(|_| self.endpoints.lacks(labels))?;
        let is_beyond_share = !self.shares.has_room(labels, range.size());
        let choices = match is_beyond_share {
            true => Vec::new(),
            false => self.endpoints.choices(labels, now),
        };
        Some(WantedIdentity {
            choices,
            is_of_pod,
            vanished: self.endpoints.vanished(labels),
            is_beyond_share,
        })
    }

    /// How many label sets of pods have a number of the cluster; `None` if no objects are to be
    /// made.
    pub(crate) fn cluster_counts(&self) -> Option<ClusterCounts> {
        self.endpoints.counts()
    }

    /// Where a number comes from, and when its object was made, in seconds since 1970.
    pub(crate) fn origin(&self, id: IdentityId) -> (NumberSource, Option<u64>) {
        let object = self.objects.get(&id);
        let object = object.filter(|object| !object.is_duplicate);
        object.map_or_else(Default::default, |object| (object.source(), object.created))
    }

    /// Objects that give numbers, and duplicates of them.
    pub(crate) fn objects(&self) -> impl Iterator<Item = &CiliumIdentity> {
        self.objects.values()
    }

    /// Takes the label sets of pods whose number is new or changed.
    pub(crate) fn take_renumbered(&mut self) -> BTreeSet<LabelSet> {
        self.endpoints.renumbered()
    }

    /// Replaces the usual giver of numbers.
    #[cfg(test)]
    pub(crate) fn with_pods(&mut self, pods: Box<dyn PodIdentities>) {
        self.endpoints = pods;
    }

    /// Releases an identity of addresses outside the cluster. True if nothing else holds it.
    pub(crate) fn release_local(&mut self, id: IdentityId) -> bool {
        self.local.release(id)
    }

    /// Releases one reference to an endpoint's identity.
    pub(crate) fn release_endpoint(&mut self, id: IdentityId) {
        self.is_changed |= self.endpoints.lacks_object(id);
        self.endpoints.release(id);
    }

    /// Takes the identities that nothing holds and that no prefix has in the datapath.
    pub(crate) fn sweep(&mut self, is_in_force: &dyn Fn(IdentityId) -> bool) -> Vec<IdentityId> {
        let mut idle = self.local.sweep(is_in_force);
        idle.extend(self.endpoints.sweep(is_in_force));
        idle
    }

    /// Gives a number that was swept to its former holder. True if it was free.
    pub(crate) fn revive(&mut self, id: IdentityId, labels: LabelSet) -> bool {
        if id.is_endpoint() {
            self.endpoint_checkpoint.add(id, &labels);
            self.endpoints.revive(id, labels)
        } else {
            self.local_is_due = true;
            self.local.revive(id, labels)
        }
    }

    /// Releases the numbers of an earlier run that nothing asked for.
    pub(crate) fn release_withheld(&mut self) {
        self.local.release_withheld();
        self.endpoints.release_withheld();
    }

    /// Takes the checkpoints that are due.
    pub(crate) fn take_checkpoints(&mut self) -> Checkpoints {
        let mut due = Checkpoints::default();
        if std::mem::take(&mut self.local_is_due) {
            due.local = Some(self.local_file.render(&self.local.kept()));
        }
        due.endpoints = self.endpoint_checkpoint.take(|| self.endpoints.kept());
        due.fresh = std::mem::take(&mut self.fresh);
        due
    }

    /// Notes that a checkpoint failed: both are due again.
    pub(crate) fn undo_checkpoint(&mut self) {
        self.local_is_due = true;
        self.endpoint_checkpoint.undo();
    }

    /// Notes identities that are not on disk after all.
    pub(crate) fn mark_fresh(&mut self, unsaved: BTreeSet<IdentityId>) {
        self.fresh.extend(unsaved);
    }

    /// Labels of an allocated identity of addresses outside the cluster.
    pub(crate) fn local_labels(&self, id: IdentityId) -> Option<&LabelSet> {
        self.local.labels(id)
    }

    /// Whether the labels have an identity.
    pub(crate) fn knows_local(&self, labels: &LabelSet) -> bool {
        self.local.has_number(labels)
    }

    /// Labels that a number of an earlier run had, if nothing asked for it yet.
    pub(crate) fn withheld_labels(&self, id: IdentityId) -> Option<&LabelSet> {
        self.local.withheld_labels(id)
    }

    /// Numbers of an earlier run that nothing asked for yet.
    pub(crate) fn withheld(&self) -> impl Iterator<Item = (IdentityId, &LabelSet)> {
        self.local.withheld()
    }

    /// Every allocated identity with its labels and the number of its holders.
    pub(crate) fn allocated(&self) -> Vec<(IdentityId, LabelSet, usize)> {
        let mut all = self.allocated_local();
        all.extend(self.endpoints.allocated());
        all
    }

    /// Allocated identities of addresses outside the cluster, each with its labels and the number
    /// of its holders.
    pub(crate) fn allocated_local(&self) -> Vec<(IdentityId, LabelSet, usize)> {
        self.local.allocated()
    }

    /// How many identities of addresses outside the cluster are allocated.
    pub(crate) fn local_len(&self) -> usize {
        self.local.len()
    }

    /// How many identities of endpoints are allocated.
    pub(crate) fn endpoints_len(&self) -> usize {
        self.endpoints.len()
    }

    /// Sets the labels of one of the node's addresses. Returns the labels of the host identity if
    /// they changed with it.
    pub(crate) fn set_host_labels(
        &mut self,
        prefix: IpNet,
        labels: Option<LabelSet>,
    ) -> Option<LabelSet> {
        let changed = match labels.filter(|labels| labels.as_slice().len() > 1) {
            Some(labels) => self.host_labels.insert(prefix, labels.clone()) != Some(labels),
            None => self.host_labels.remove(&prefix).is_some(),
        };
        let all = self.host_labels.values().flat_map(LabelSet::iter).cloned();
        let host = [Label::new(RESERVED, "host", "")];
        changed.then(|| LabelSet::new(all.chain(host).collect()))
    }
}
