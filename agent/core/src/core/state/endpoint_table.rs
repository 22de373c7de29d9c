//! Endpoints in the model, removed endpoints of which something is left, and endpoints that cannot
//! be in force.
//!
//! Owns every endpoint with its number, the marks of endpoints that lack entries or programs, and
//! the specifications that wait for an address or a number. It keeps two invariants: a number is
//! free only once nothing of its endpoint is left in the datapath, and an endpoint that lacks
//! something is marked.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    ops::Bound,
};

use shared_maps::{
    EndpointId,
    policy::{PolicyKey, PolicyValue},
};

use crate::{
    core::state::left_behind::LeftBehind,
    endpoint::{endpoint::Endpoint, manager::Endpoints, spec::EndpointSpec},
};

/// The endpoints of the model, and the remaining state of removed ones.
#[derive(Debug, Default)]
pub(crate) struct EndpointTable {
    present: Endpoints,
    /// Endpoints that their source removed and of which something is left.
    leaving: BTreeMap<EndpointId, Endpoint>,
    /// Numbers without an endpoint under which a policy map is left.
    orphans: BTreeSet<EndpointId>,
    left: LeftBehind,
    dirty: BTreeSet<EndpointId>,
    /// Endpoints that programs of an earlier run may judge. This alone does not mark them, because each plan looks at
    /// all marked endpoints.
    former: BTreeSet<EndpointId>,
    /// Endpoints that cannot be in force now, and why, by key.
    waiting: BTreeMap<String, (EndpointSpec, String)>,
    /// Keys of the endpoints that wait because no identity is free.
    without_identity: BTreeSet<String>,
    /// How many entries the policy maps of an earlier run have room for.
    map_sizes: BTreeMap<EndpointId, usize>,
}

/// Endpoints that are present in the model.
impl EndpointTable {
    pub(crate) fn new(map_sizes: BTreeMap<EndpointId, usize>) -> Self {
        Self {
            map_sizes,
            ..Self::default()
        }
    }

    pub(crate) fn get(&self, id: EndpointId) -> Option<&Endpoint> {
        self.present.get(id)
    }

    pub(crate) fn get_mut(&mut self, id: EndpointId) -> Option<&mut Endpoint> {
        self.present.get_mut(id)
    }

    pub(crate) fn by_key(&self, key: &str) -> Option<EndpointId> {
        self.present.by_key(key)
    }

    pub(crate) fn by_address(&self, address: IpAddr) -> Option<EndpointId> {
        self.present.by_address(address)
    }

    /// All endpoints in the order of their numbers.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Endpoint> {
        self.present.iter()
    }

    /// Endpoints with a greater number, ascending.
    pub(crate) fn after(&self, id: Option<EndpointId>) -> impl Iterator<Item = &Endpoint> {
        let from = id.map_or(Bound::Unbounded, Bound::Excluded);
        self.present.range((from, Bound::Unbounded))
    }

    pub(crate) fn len(&self) -> usize {
        self.present.len()
    }

    /// Adds an endpoint, or puts one back that was taken out.
    pub(crate) fn insert(&mut self, endpoint: Endpoint) {
        self.present.insert(endpoint);
    }

    /// Takes an endpoint out. It has to be put back, or passed to [`Self::leave`].
    pub(crate) fn take(&mut self, id: EndpointId) -> Option<Endpoint> {
        self.present.remove(id)
    }

    /// How many entries the policy map of an endpoint has room for; at most `max`.
    pub(crate) fn map_size(&self, id: EndpointId, max: usize) -> usize {
        self.map_sizes.get(&id).map_or(max, |size| max.min(*size))
    }

    /// Forgets the size of an endpoint's policy map: the endpoint gets a new map.
    pub(crate) fn forget_map_size(&mut self, id: EndpointId) {
        self.map_sizes.remove(&id);
    }
}

/// Endpoints that lack entries or programs.
impl EndpointTable {
    /// Marks an endpoint that lacks entries or programs.
    pub(crate) fn mark(&mut self, id: EndpointId) {
        self.dirty.insert(id);
    }

    /// Marks an endpoint, and returns it to be changed.
    pub(crate) fn mark_mut(&mut self, id: EndpointId) -> Option<&mut Endpoint> {
        let endpoint = self.present.get_mut(id)?;
        self.dirty.insert(id);
        Some(endpoint)
    }

    pub(crate) fn dirty(&self) -> impl Iterator<Item = &Endpoint> {
        self.dirty.iter().filter_map(|id| self.present.get(*id))
    }

    /// Numbers of the endpoints that are marked.
    pub(crate) fn dirty_ids(&self) -> Vec<EndpointId> {
        self.dirty.iter().copied().collect()
    }

    /// Keeps the marks of endpoints that still lack something.
    pub(crate) fn retain_dirty(&mut self, lacks: impl Fn(&Endpoint) -> bool) {
        let (present, former) = (&self.present, &mut self.former);
        self.dirty.retain(|id| {
            let Some(endpoint) = present.get(*id) else {
                return false;
            };
            if endpoint.is_judged_by_former_programs() {
                former.insert(*id);
            }
            lacks(endpoint)
        });
    }

    /// Endpoints that programs of an earlier run judge.
    pub(crate) fn former(&self) -> impl Iterator<Item = &Endpoint> {
        let former = self.former.iter().filter_map(|id| self.present.get(*id));
        former.filter(|endpoint| endpoint.is_judged_by_former_programs())
    }

    /// The endpoint gets programs of this run.
    pub(crate) fn end_former(&mut self, id: EndpointId) {
        self.former.remove(&id);
    }
}

/// Removed endpoints of which something may be left.
impl EndpointTable {
    /// Keeps a removed endpoint, of which the datapath still has something.
    pub(crate) fn leave(&mut self, endpoint: Endpoint) {
        self.leaving.insert(endpoint.id, endpoint);
    }

    pub(crate) fn has_leaving(&self) -> bool {
        !self.leaving.is_empty()
    }

    pub(crate) fn is_leaving(&self, id: EndpointId) -> bool {
        self.leaving.contains_key(&id)
    }

    /// Removed endpoints of which something is left.
    pub(crate) fn leaving_mut(&mut self) -> impl Iterator<Item = &mut Endpoint> {
        self.leaving.values_mut()
    }

    pub(crate) fn get_leaving_mut(&mut self, id: EndpointId) -> Option<&mut Endpoint> {
        self.leaving.get_mut(&id)
    }

    /// Endpoints of which the datapath may have something.
    pub(crate) fn with_leaving(&self) -> impl Iterator<Item = &Endpoint> {
        self.present.iter().chain(self.leaving.values())
    }

    /// An endpoint of which the datapath may have something, to be changed.
    pub(crate) fn get_any_mut(&mut self, id: EndpointId) -> Option<&mut Endpoint> {
        match self.leaving.get_mut(&id) {
            Some(leaving) => Some(leaving),
            None => self.present.get_mut(id),
        }
    }

    /// Notes that a policy map without an endpoint is left under this number.
    pub(crate) fn add_orphan(&mut self, id: EndpointId) {
        self.present.hold(id);
        self.orphans.insert(id);
    }

    /// Notes programs of a number without an endpoint: the interfaces to which they are attached,
    /// and the entries of the number's policy map.
    pub(crate) fn add_left(
        &mut self,
        id: EndpointId,
        interfaces: BTreeSet<u32>,
        entries: Vec<(PolicyKey, PolicyValue)>,
    ) {
        self.present.hold(id);
        self.left.add(id, interfaces, entries);
    }

    /// Programs of numbers without an endpoint.
    pub(crate) fn left(&self) -> &LeftBehind {
        &self.left
    }

    /// Programs of numbers without an endpoint.
    pub(crate) fn left_mut(&mut self) -> &mut LeftBehind {
        &mut self.left
    }

    /// Notes that the removal of the state that is left under this number failed.
    pub(crate) fn restore_orphan(&mut self, id: EndpointId) {
        self.orphans.insert(id);
    }

    /// Takes the numbers under which something without an endpoint is left.
    pub(crate) fn take_orphans(&mut self) -> BTreeSet<EndpointId> {
        let mut orphans = std::mem::take(&mut self.orphans);
        // The policy map of a number that has programs is removed with the programs.
        orphans.retain(|id| self.present.get(*id).is_none() && !self.left.has(*id));
        orphans
    }

    /// A number that no endpoint has; `None` if all are in use. It is not given again before
    /// [`Self::free`].
    pub(crate) fn free_number(&mut self) -> Option<EndpointId> {
        self.present.free_number()
    }

    /// Frees a number that is not used after all.
    pub(crate) fn free(&mut self, id: EndpointId) {
        self.present.free(id);
    }

    /// Frees the numbers of removed endpoints of which nothing is left. `has_more` says whether the
    /// datapath has anything of an endpoint besides its programs and its policy map.
    pub(crate) fn free_numbers(&mut self, has_more: impl Fn(EndpointId) -> bool) {
        self.leaving.retain(|id, endpoint| {
            endpoint.attached.is_some() || endpoint.policy_map.is_some() || has_more(*id)
        });
        let (leaving, orphans) = (&self.leaving, &self.orphans);
        let held = self.present.held();
        let left = &self.left;
        let free =
            held.filter(|id| !leaving.contains_key(id) && !orphans.contains(id) && !left.has(*id));
        for id in free.collect::<Vec<_>>() {
            self.present.free(id);
        }
    }
}

/// Endpoints that cannot be in force now.
impl EndpointTable {
    /// Notes an endpoint that cannot be in force now.
    pub(crate) fn wait(&mut self, spec: EndpointSpec, reason: String) {
        self.waiting.insert(spec.key.clone(), (spec, reason));
    }

    /// Ends the wait of an endpoint. Returns the reason for the wait.
    pub(crate) fn end_wait(&mut self, key: &str) -> Option<String> {
        self.without_identity.remove(key);
        self.waiting.remove(key).map(|(_, reason)| reason)
    }

    /// Takes all endpoints that wait, to be tried again.
    pub(crate) fn take_waiting(&mut self) -> Vec<EndpointSpec> {
        self.without_identity.clear();
        let waiting = std::mem::take(&mut self.waiting).into_values();
        waiting.map(|(spec, _)| spec).collect()
    }

    /// Notes that an endpoint waits for an identity.
    pub(crate) fn await_identity(&mut self, spec: EndpointSpec, reason: String) {
        self.without_identity.insert(spec.key.clone());
        self.wait(spec, reason);
    }

    /// Takes the endpoints that wait for an identity, to be tried again.
    pub(crate) fn take_without_identity(&mut self) -> Vec<EndpointSpec> {
        let keys = std::mem::take(&mut self.without_identity).into_iter();
        let waiting = keys.filter_map(|key| self.waiting.get(&key));
        waiting.map(|(spec, _)| spec.clone()).collect()
    }

    /// Endpoints that wait for an identity.
    pub(crate) fn without_identity(&self) -> impl Iterator<Item = &EndpointSpec> {
        let keys = self.without_identity.iter();
        let waiting = keys.filter_map(|key| self.waiting.get(key));
        waiting.map(|(spec, _)| spec)
    }

    /// Whether endpoints wait for an identity.
    pub(crate) fn lacks_identities(&self) -> bool {
        !self.without_identity.is_empty()
    }

    /// Endpoints that cannot be in force now, each with the reason.
    pub(crate) fn waiting(&self) -> impl ExactSizeIterator<Item = &(EndpointSpec, String)> {
        self.waiting.values()
    }
}
