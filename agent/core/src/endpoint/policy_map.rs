//! What an endpoint's policy map holds once all plans are carried out.

use std::{collections::BTreeMap, ops::RangeBounds};

use shared_maps::{
    IdentityId,
    policy::{PolicyKey, PolicyValue},
};

use crate::policy::compute::entries::Entries;

/// Entries by the identity that they are about.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct PolicyMap {
    peers: BTreeMap<IdentityId, Entries>,
    len: usize,
}

impl PolicyMap {
    /// Sets an entry, or removes it.
    pub(crate) fn put(&mut self, key: PolicyKey, value: Option<PolicyValue>) {
        let peer = IdentityId(key.sec_label);
        match value {
            Some(value) => {
                let entries = self.peers.entry(peer).or_default();
                self.len += usize::from(entries.insert(key, value).is_none());
            }
            None => {
                let Some(entries) = self.peers.get_mut(&peer) else {
                    return;
                };
                self.len -= usize::from(entries.remove(&key).is_some());
                if entries.is_empty() {
                    self.peers.remove(&peer);
                }
            }
        }
    }

    pub(crate) fn get(&self, peer: IdentityId) -> Option<&Entries> {
        self.peers.get(&peer)
    }

    /// Identities that it has entries of.
    pub(crate) fn peers(&self) -> impl Iterator<Item = IdentityId> {
        self.peers.keys().copied()
    }

    /// Entries of a range of identities, in order.
    pub(crate) fn range(
        &self,
        peers: impl RangeBounds<IdentityId>,
    ) -> impl Iterator<Item = &Entries> {
        self.peers.range(peers).map(|(_, entries)| entries)
    }

    /// Number of entries of all identities.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_what_it_holds() {
        let mut map = PolicyMap::default();
        let key = |peer, port| PolicyKey::new(peer, 0, 6, port, 16);
        for port in 1..4 {
            map.put(key(5, port), Some(PolicyValue::allow(key(5, port))));
        }
        map.put(key(5, 1), Some(PolicyValue::deny(key(5, 1))));
        map.put(key(6, 1), Some(PolicyValue::allow(key(6, 1))));
        map.put(key(7, 1), None);
        assert_eq!(map.len(), 4);
        map.put(key(6, 1), None);
        map.put(key(6, 1), None);
        assert_eq!(map.len(), 3);
        assert_eq!(map.peers().collect::<Vec<_>>(), [IdentityId(5)]);
        assert_eq!(map.range(..).map(Entries::len).sum::<usize>(), map.len());
    }
}
