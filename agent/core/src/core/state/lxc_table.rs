//! `cilium_lxc`: which address belongs to which endpoint, or to the node.
//!
//! Owns the intended entries, the entries that the datapath has once all plans are applied, and the
//! addresses of the node. It keeps two invariants: every address at which the two tables differ is
//! marked, and an address of the node is never an endpoint's.

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
};

use shared_maps::{
    EndpointId,
    lxc::{FLAG_HOST, LxcKey, LxcValue},
    user::{lxc_address, lxc_key},
};

/// An entry to be written, and the one that it replaces.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LxcChange {
    pub(crate) key: LxcKey,
    pub(crate) value: LxcValue,
    pub(crate) before: Option<LxcValue>,
}

/// How the addresses of the node changed.
#[derive(Debug, Default)]
pub(crate) struct NodeChange {
    pub(crate) removed: Vec<IpAddr>,
    pub(crate) added: Vec<IpAddr>,
}

/// The entries of `cilium_lxc`, as intended and as planned.
#[derive(Debug, Default)]
pub(crate) struct LxcTable {
    wanted: HashMap<LxcKey, LxcValue>,
    planned: HashMap<LxcKey, LxcValue>,
    dirty: BTreeSet<IpAddr>,
    node: BTreeSet<IpAddr>,
}

impl LxcTable {
    /// Starts with the entries that an earlier run left, all of them marked.
    pub(crate) fn new(entries: &[(LxcKey, LxcValue)]) -> Self {
        Self {
            planned: entries.iter().copied().collect(),
            dirty: entries
                .iter()
                .filter_map(|(key, _)| lxc_address(key))
                .collect(),
            ..Self::default()
        }
    }

    /// Whether an address is one of the node's.
    pub(crate) fn is_node_address(&self, address: IpAddr) -> bool {
        self.node.contains(&address)
    }

    pub(crate) fn node_addresses(&self) -> &BTreeSet<IpAddr> {
        &self.node
    }

    /// Replaces the addresses of the node. An endpoint that has one of the removed addresses has
    /// to claim it again.
    pub(crate) fn set_node_addresses(&mut self, addresses: BTreeSet<IpAddr>) -> NodeChange {
        let old = std::mem::replace(&mut self.node, addresses);
        let change = NodeChange {
            removed: old.difference(&self.node).copied().collect(),
            added: self.node.difference(&old).copied().collect(),
        };
        for address in &change.removed {
            self.wanted.remove(&lxc_key(*address));
        }
        for address in &change.added {
            let value = LxcValue {
                flags: FLAG_HOST,
                ..LxcValue::default()
            };
            self.wanted.insert(lxc_key(*address), value);
        }
        self.dirty
            .extend(change.removed.iter().chain(&change.added));
        change
    }

    /// Gives an endpoint this address, unless it is the node's.
    pub(crate) fn claim(&mut self, address: IpAddr, value: LxcValue) {
        if !self.is_node_address(address) {
            self.wanted.insert(lxc_key(address), value);
            self.dirty.insert(address);
        }
    }

    /// Takes this address from an endpoint.
    pub(crate) fn unclaim(&mut self, address: IpAddr) {
        if !self.is_node_address(address) {
            self.wanted.remove(&lxc_key(address));
            self.dirty.insert(address);
        }
    }

    /// Plans the writes of intended entries whose addresses are ready. The others stay marked.
    pub(crate) fn plan_sets(&mut self, is_ready: impl Fn(IpAddr) -> bool) -> Vec<LxcChange> {
        let mut changes = Vec::new();
        let (wanted, planned) = (&self.wanted, &mut self.planned);
        self.dirty.retain(|address| {
            let key = lxc_key(*address);
            let before = planned.get(&key).copied();
            match wanted.get(&key).copied() {
                value if value == before => false,
                Some(value) if is_ready(*address) => {
                    planned.insert(key, value);
                    changes.push(LxcChange { key, value, before });
                    false
                }
                Some(_) | None => true,
            }
        });
        changes
    }

    /// Plans the removal of entries that are not intended. Returns them as they were.
    pub(crate) fn plan_removals(&mut self) -> Vec<(LxcKey, LxcValue)> {
        let mut removed = Vec::new();
        let (wanted, planned) = (&self.wanted, &mut self.planned);
        self.dirty.retain(|address| {
            let key = lxc_key(*address);
            let is_wanted = wanted.contains_key(&key);
            if !is_wanted && let Some(before) = planned.remove(&key) {
                removed.push((key, before));
            }
            is_wanted
        });
        removed
    }

    /// Marked entries of endpoints in the datapath at addresses that must have none.
    pub(crate) fn unwanted(&self) -> Vec<(IpAddr, LxcKey, LxcValue)> {
        let marked = self
            .dirty
            .iter()
            .map(|address| (*address, lxc_key(*address)));
        let planned = marked.filter_map(|(address, key)| {
            let value = self.planned.get(&key).copied()?;
            Some((address, key, value))
        });
        let unwanted = planned.filter(|(_, key, value)| {
            !self.wanted.contains_key(key) && value.flags & FLAG_HOST == 0
        });
        unwanted.collect()
    }

    /// Plans the removal of one entry.
    pub(crate) fn remove(&mut self, key: &LxcKey) {
        self.planned.remove(key);
    }

    /// Undoes a failed step: the datapath still has `before`.
    pub(crate) fn rollback(&mut self, key: LxcKey, before: Option<LxcValue>) {
        match before {
            Some(value) => self.planned.insert(key, value),
            None => self.planned.remove(&key),
        };
        self.dirty.extend(lxc_address(&key));
    }

    /// Notes that the datapath turned out to have `value`. True if something else was planned.
    pub(crate) fn correct(&mut self, key: &LxcKey, value: Option<&LxcValue>) -> bool {
        if lxc_address(key).is_none() || self.planned.get(key) == value {
            return false;
        }
        self.rollback(*key, value.copied());
        true
    }

    /// Endpoints that have an entry in the datapath.
    pub(crate) fn endpoints(&self) -> BTreeSet<EndpointId> {
        let values = self.planned.values();
        values.map(|value| EndpointId(value.lxc_id)).collect()
    }

    /// Keys of the entries that the datapath has, in an order that lasts until one is added or
    /// removed.
    pub(crate) fn keys(&self) -> impl ExactSizeIterator<Item = &LxcKey> {
        self.planned.keys()
    }
}
