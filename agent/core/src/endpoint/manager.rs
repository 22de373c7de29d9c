//! All endpoints: by number, by key and by address; numbers are reused oldest first.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    net::IpAddr,
    ops::Bound,
};

use shared_maps::EndpointId;

use super::endpoint::Endpoint;

/// The endpoints of the node.
#[derive(Debug, Default)]
pub(crate) struct Endpoints {
    by_id: BTreeMap<EndpointId, Endpoint>,
    by_key: HashMap<String, EndpointId>,
    by_address: HashMap<IpAddr, EndpointId>,
    numbers: Numbers,
}

/// Which endpoint numbers, from 1 to 65535, may be used.
#[derive(Debug, Default)]
struct Numbers {
    last: u16,
    freed: VecDeque<EndpointId>,
    /// Numbers that no endpoint has any more, but under which something is left.
    held: BTreeSet<EndpointId>,
}

impl Endpoints {
    /// A free number: one never used in this run, else the one freed longest ago.
    pub(crate) fn free_number(&mut self) -> Option<EndpointId> {
        while let Some(next) = self.numbers.last.checked_add(1) {
            self.numbers.last = next;
            let id = EndpointId(next);
            let numbers = &self.numbers;
            let used = self.by_id.contains_key(&id) || numbers.held.contains(&id);
            if !used && !numbers.freed.contains(&id) {
                return Some(id);
            }
        }
        self.numbers.freed.pop_front()
    }

    /// Keeps a number from being used, because an earlier run left something under it.
    pub(crate) fn hold(&mut self, id: EndpointId) {
        self.numbers.held.insert(id);
    }

    /// Numbers that [`Endpoints::hold`] or [`Endpoints::remove`] keep from being used.
    pub(crate) fn held(&self) -> impl Iterator<Item = EndpointId> {
        self.numbers.held.iter().copied()
    }

    /// Lets a number be used again: nothing of its endpoint is left.
    pub(crate) fn free(&mut self, id: EndpointId) {
        self.numbers.held.remove(&id);
        if !self.numbers.freed.contains(&id) {
            self.numbers.freed.push_back(id);
        }
    }

    /// Adds an endpoint under its number, its key and its addresses.
    pub(crate) fn insert(&mut self, endpoint: Endpoint) {
        let id = endpoint.id;
        self.numbers.held.remove(&id);
        self.by_key.insert(endpoint.spec.key.clone(), id);
        for address in endpoint.addresses() {
            self.by_address.insert(address, id);
        }
        self.by_id.insert(id, endpoint);
    }

    /// Takes an endpoint out; its number is not free yet.
    pub(crate) fn remove(&mut self, id: EndpointId) -> Option<Endpoint> {
        let endpoint = self.by_id.remove(&id)?;
        self.numbers.held.insert(id);
        self.by_key.remove(&endpoint.spec.key);
        for address in endpoint.addresses() {
            self.by_address.remove(&address);
        }
        Some(endpoint)
    }

    pub(crate) fn get(&self, id: EndpointId) -> Option<&Endpoint> {
        self.by_id.get(&id)
    }

    pub(crate) fn get_mut(&mut self, id: EndpointId) -> Option<&mut Endpoint> {
        self.by_id.get_mut(&id)
    }

    /// The endpoint to which its source gave this key.
    pub(crate) fn by_key(&self, key: &str) -> Option<EndpointId> {
        self.by_key.get(key).copied()
    }

    pub(crate) fn by_address(&self, address: IpAddr) -> Option<EndpointId> {
        self.by_address.get(&address).copied()
    }

    /// All endpoints in the order of their numbers.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Endpoint> {
        self.by_id.values()
    }

    /// Endpoints with numbers in a range, ascending.
    pub(crate) fn range(
        &self,
        range: (Bound<EndpointId>, Bound<EndpointId>),
    ) -> impl Iterator<Item = &Endpoint> {
        self.by_id.range(range).map(|(_, endpoint)| endpoint)
    }

    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_reused_oldest_first() {
        let mut endpoints = Endpoints::default();
        let first = endpoints.free_number().unwrap();
        let second = endpoints.free_number().unwrap();
        endpoints.free(second);
        endpoints.free(first);
        let third = endpoints.free_number().unwrap();
        assert!(third != first && third != second);
        endpoints.numbers.last = u16::MAX;
        assert_eq!(endpoints.free_number(), Some(second));
        assert_eq!(endpoints.free_number(), Some(first));
        assert_eq!(endpoints.free_number(), None);
    }
}
