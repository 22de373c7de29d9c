//! From a prefix to its intended identity, and to the identity that the datapath has.

use std::{collections::BTreeSet, net::IpAddr};

use foldhash::HashMap;
use ipnet::IpNet;
use shared_maps::{IdentityId, ipcache::IpcacheKey, user::ipcache_prefix};

use super::{
    metadata::{Claim, Metadata},
    resolve::{self, World},
    trie::PrefixMap,
};
use crate::{ipcache::owners::Owner, labels::LabelSet};

/// All prefixes, each with its labels, its intended identity and the one in the datapath.
#[derive(Debug)]
pub struct Ipcache {
    prefixes: PrefixMap<Metadata>,
    dirty: Vec<IpNet>,
    world: World,
    realised: usize,
    /// How many prefixes the datapath maps to each identity.
    in_force: HashMap<IdentityId, usize>,
    /// Prefixes of the identities that callers have requested.
    watched: HashMap<IdentityId, BTreeSet<IpNet>>,
}

/// Above this many watched identities, those that the present caller did not request are removed.
const WATCHED: usize = 1024;

impl Ipcache {
    /// An empty ipcache; `dual_stack` decides the world labels.
    pub fn new(dual_stack: bool) -> Self {
        Self {
            prefixes: PrefixMap::default(),
            dirty: Vec::new(),
            world: World::new(dual_stack),
            realised: 0,
            in_force: HashMap::default(),
            watched: HashMap::default(),
        }
    }

    /// The same, for a node that does not read pods of other nodes.
    pub fn pruned(self, is_pruned: bool) -> Self {
        let world = self.world.pruned(is_pruned);
        Self { world, ..self }
    }

    pub fn world(&self) -> &World {
        &self.world
    }

    /// Sets what `owner` says of `prefix`.
    pub fn claim(&mut self, prefix: IpNet, owner: Owner, claim: Claim) {
        let prefix = prefix.trunc();
        let metadata = self.prefixes.entry(prefix);
        if !metadata.set(owner, claim) {
            return;
        }
        if prefix.prefix_len() < prefix.max_prefix_len() {
            self.touch(prefix);
        } else if !std::mem::replace(&mut metadata.dirty, true) {
            self.dirty.push(prefix);
        }
    }

    /// Removes what `owner` says of `prefix`.
    pub fn unclaim(&mut self, prefix: IpNet, owner: &Owner) {
        let prefix = prefix.trunc();
        if self
            .prefixes
            .get_mut(prefix)
            .is_some_and(|metadata| metadata.unset(owner))
        {
            self.touch(prefix);
        }
    }

    /// Follows a changed prefix: only the prefix and its descendants are resolved again.
    fn touch(&mut self, prefix: IpNet) {
        if prefix.prefix_len() == prefix.max_prefix_len() {
            self.mark(prefix);
            return;
        }
        for below in self.prefixes.descendants(prefix) {
            self.mark(below);
        }
    }

    /// Marks `prefix`, so that it is resolved, or planned, once more.
    pub fn mark(&mut self, prefix: IpNet) {
        let metadata = self.prefixes.entry(prefix);
        if !metadata.dirty {
            metadata.dirty = true;
            self.dirty.push(prefix);
        }
    }

    /// Takes the prefixes that have to be resolved.
    pub fn take_dirty(&mut self) -> Vec<IpNet> {
        let dirty = std::mem::take(&mut self.dirty);
        for prefix in &dirty {
            if let Some(metadata) = self.prefixes.get_mut(*prefix) {
                metadata.dirty = false;
            }
        }
        dirty
    }

    /// Whether nothing is to be resolved.
    pub fn is_settled(&self) -> bool {
        self.dirty.is_empty()
    }

    pub fn get(&self, prefix: IpNet) -> Option<&Metadata> {
        self.prefixes.get(prefix)
    }

    /// Effective labels of a prefix.
    pub fn labels(&self, prefix: IpNet) -> LabelSet {
        resolve::labels(&self.prefixes, prefix, &self.world)
    }

    /// Sets the intended identity of a prefix.
    pub fn desire(&mut self, prefix: IpNet, identity: Option<IdentityId>, held: bool) {
        let metadata = self.prefixes.entry(prefix);
        let before = std::mem::replace(&mut metadata.desired, identity);
        metadata.held = held;
        metadata.unresolved = false;
        if before != identity {
            if let Some(prefixes) = before.and_then(|id| self.watched.get_mut(&id)) {
                prefixes.remove(&prefix);
            }
            if let Some(prefixes) = identity.and_then(|id| self.watched.get_mut(&id)) {
                prefixes.insert(prefix);
            }
        }
        if metadata.is_spent() {
            self.prefixes.remove(prefix);
        }
    }

    /// Notes that a prefix's labels got no identity: the prefix keeps its previous one.
    pub fn leave_unresolved(&mut self, prefix: IpNet) {
        if let Some(metadata) = self.prefixes.get_mut(prefix) {
            metadata.unresolved = true;
        }
    }

    /// Notes what the datapath has.
    pub fn realise(&mut self, prefix: IpNet, identity: Option<IdentityId>) {
        let metadata = self.prefixes.entry(prefix);
        let before = std::mem::replace(&mut metadata.realised, identity);
        if metadata.is_spent() {
            self.prefixes.remove(prefix);
        }
        if let Some(identity) = identity {
            self.realised += 1;
            *self.in_force.entry(identity).or_default() += 1;
        }
        if let Some(before) = before {
            self.realised -= 1;
            if let Some(prefixes) = self.in_force.get_mut(&before) {
                *prefixes -= 1;
                if *prefixes == 0 {
                    self.in_force.remove(&before);
                }
            }
        }
    }

    /// Number of entries the datapath has.
    pub fn realised(&self) -> usize {
        self.realised
    }

    /// Identity that the datapath has for the addresses of `prefix` now; `None` if it has no entry
    /// that covers them.
    pub fn in_force_at(&self, prefix: IpNet) -> Option<IdentityId> {
        let covering = self.prefixes.covering(prefix).into_iter().rev();
        covering
            .filter_map(|(_, metadata)| metadata.realised)
            .next()
    }

    /// Whether the datapath maps any prefix to the identity.
    pub fn is_in_force(&self, identity: IdentityId) -> bool {
        self.in_force.contains_key(&identity)
    }

    /// Identity of an address: longest prefix that has one.
    pub fn identity_of(&self, address: IpAddr) -> Option<IdentityId> {
        self.longest(address)
            .and_then(|(_, metadata)| metadata.desired)
    }

    /// Longest prefix of an address with an intended identity.
    pub fn longest(&self, address: IpAddr) -> Option<(IpNet, &Metadata)> {
        self.prefixes
            .longest(address, |metadata| metadata.desired.is_some())
    }

    /// Longest prefix of an address that an owner claims.
    pub(crate) fn longest_claimed(&self, address: IpAddr) -> Option<(IpNet, &Metadata)> {
        self.prefixes
            .longest(address, |metadata| !metadata.is_unclaimed())
    }

    /// Whether an address is claimed as the node's, an endpoint's, or a pod's of the cluster.
    pub fn is_of_cluster(&self, address: IpAddr) -> bool {
        self.get(IpNet::from(address))
            .is_some_and(|metadata| metadata.identity().is_some())
    }

    /// Prefixes whose intended identity is one of these, at most `limit` of each. The first
    /// request for an identity walks over all prefixes.
    pub fn prefixes_of(
        &mut self,
        identities: &BTreeSet<IdentityId>,
        limit: usize,
    ) -> Vec<(IpNet, IdentityId)> {
        if identities.iter().any(|id| !self.watched.contains_key(id)) {
            self.watch(identities);
        }
        let mut found = Vec::new();
        for id in identities {
            let prefixes = self.watched.get(id).into_iter().flatten().take(limit);
            found.extend(prefixes.map(|prefix| (*prefix, *id)));
        }
        found
    }

    fn watch(&mut self, identities: &BTreeSet<IdentityId>) {
        if self.watched.len() > WATCHED {
            self.watched.retain(|id, _| identities.contains(id));
        }
        let new = identities
            .iter()
            .filter(|id| !self.watched.contains_key(id));
        let mut new: HashMap<IdentityId, BTreeSet<IpNet>> =
            new.map(|id| (*id, BTreeSet::new())).collect();
        self.prefixes.for_each(|prefix, metadata| {
            if let Some(prefixes) = metadata.desired.and_then(|id| new.get_mut(&id)) {
                prefixes.insert(prefix);
            }
        });
        self.watched.extend(new);
    }

    /// At most `limit` prefixes after this one.
    pub fn after(&self, prefix: Option<IpNet>, limit: usize) -> Vec<(IpNet, &Metadata)> {
        self.prefixes.after(prefix, limit)
    }

    /// Calls `visit` for every prefix.
    pub fn for_each(&self, visit: impl FnMut(IpNet, &Metadata)) {
        self.prefixes.for_each(visit);
    }
}

/// Map key of a prefix.
pub(crate) fn key_of(prefix: IpNet) -> IpcacheKey {
    match prefix.trunc() {
        IpNet::V4(net) => IpcacheKey::v4(net.addr().octets(), net.prefix_len()),
        IpNet::V6(net) => IpcacheKey::v6(net.addr().octets(), net.prefix_len()),
    }
}

/// Prefix of a map key; `None` if the key belongs to another cluster or is malformed.
pub fn prefix_of(key: &IpcacheKey) -> Option<IpNet> {
    let (address, len) = ipcache_prefix(key)?;
    IpNet::new(address, len).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    #[test]
    fn a_change_marks_descendants_only() {
        let mut ipcache = Ipcache::new(false);
        let label = |text: &str| Claim::Labels(LabelSet::parse(&[text]).unwrap());
        for prefix in ["10.0.0.0/8", "10.1.1.1/32", "11.0.0.0/8", "11.1.1.1/32"] {
            ipcache.claim(net(prefix), Owner::Policy, label("k8s:x=1"));
        }
        ipcache.take_dirty();
        ipcache.claim(net("10.0.0.0/8"), Owner::Policy, label("k8s:x=2"));
        assert_eq!(
            ipcache.take_dirty(),
            [net("10.0.0.0/8"), net("10.1.1.1/32")]
        );
        ipcache.claim(net("10.0.0.0/8"), Owner::Policy, label("k8s:x=2"));
        assert!(ipcache.is_settled());
    }

    #[test]
    fn prefixes_of_an_identity_are_followed() {
        let mut ipcache = Ipcache::new(false);
        let (one, other) = (IdentityId(1 << 24), IdentityId(1 << 24 | 1));
        ipcache.desire(net("10.0.0.1/32"), Some(one), true);
        ipcache.desire(net("10.0.0.2/32"), Some(other), true);
        let ask = |ipcache: &mut Ipcache, id| ipcache.prefixes_of(&[id].into(), 8);
        assert_eq!(ask(&mut ipcache, one), [(net("10.0.0.1/32"), one)]);
        ipcache.desire(net("10.0.0.3/32"), Some(one), true);
        ipcache.desire(net("10.0.0.1/32"), Some(other), true);
        assert_eq!(ask(&mut ipcache, one), [(net("10.0.0.3/32"), one)]);
        assert_eq!(ask(&mut ipcache, other).len(), 2);
        ipcache.desire(net("10.0.0.2/32"), None, false);
        assert_eq!(ask(&mut ipcache, other), [(net("10.0.0.1/32"), other)]);
        assert_eq!(ipcache.prefixes_of(&[one, other].into(), 0), []);
    }

    #[test]
    fn keys_read_back() {
        for prefix in [
            "10.0.0.0/8",
            "0.0.0.0/0",
            "1.2.3.4/32",
            "fd00::/8",
            "::1/128",
        ] {
            assert_eq!(prefix_of(&key_of(net(prefix))), Some(net(prefix)));
        }
    }
}
