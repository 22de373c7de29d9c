//! Programs and policy maps of numbers without an endpoint.

use std::collections::{BTreeMap, BTreeSet};

use shared_maps::{
    EndpointId,
    policy::{PolicyKey, PolicyValue},
};

use crate::policy::compute::set_order::set_order;

/// What is left under one number.
#[derive(Debug, Default)]
pub(crate) struct Left {
    pub(crate) interfaces: BTreeSet<u32>,
    /// Entries that the policy map still has.
    entries: Vec<(PolicyKey, PolicyValue)>,
}

/// Programs without an endpoint, by the number under which they were attached.
#[derive(Debug, Default)]
pub(crate) struct LeftBehind(pub(crate) BTreeMap<EndpointId, Left>);

impl LeftBehind {
    /// Adds programs that are attached to these interfaces.
    pub(crate) fn add(
        &mut self,
        id: EndpointId,
        interfaces: BTreeSet<u32>,
        entries: Vec<(PolicyKey, PolicyValue)>,
    ) {
        let left = Left {
            interfaces,
            entries,
        };
        self.0.insert(id, left);
    }

    /// Keeps an entry that could not be removed.
    pub(crate) fn keep(&mut self, id: EndpointId, key: PolicyKey, value: PolicyValue) {
        if let Some(left) = self.0.get_mut(&id) {
            left.entries.push((key, value));
        }
    }

    /// Whether programs are left under this number.
    pub(crate) fn has(&self, id: EndpointId) -> bool {
        self.0.contains_key(&id)
    }

    /// Each number, with each of its interfaces.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (EndpointId, u32)> {
        let all = self.0.iter();
        all.flat_map(|(id, left)| left.interfaces.iter().map(|interface| (*id, *interface)))
    }

    pub(crate) fn interfaces(&self) -> impl Iterator<Item = (EndpointId, &BTreeSet<u32>)> {
        self.0.iter().map(|(id, left)| (*id, &left.interfaces))
    }

    /// Takes the entries of a policy map, in the order in which they are to be removed.
    pub(crate) fn take_entries(&mut self, id: EndpointId) -> Vec<(PolicyKey, PolicyValue)> {
        let left = self.0.get_mut(&id);
        let mut entries = left.map_or_else(Vec::new, |left| std::mem::take(&mut left.entries));
        entries.sort_by_key(|(key, value)| (std::cmp::Reverse(set_order(key, value)), *key));
        entries
    }
}
