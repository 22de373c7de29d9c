//! The learned pairs: for each endpoint while they are valid or in use, and for the node as
//! pairs (name, address) that must stay plumbed.

mod expired;
mod learn;
mod limits;

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap},
    net::IpAddr,
};

use dns_policy::{boot_time::BootTime, name::Fqdn};
use foldhash::HashMap;
use shared_maps::EndpointId;

pub(crate) use self::{
    expired::Expired,
    learn::{Answer, Trust},
    limits::Limits,
};
use super::gc::{self, ConntrackScans, Zombie};
use crate::labels::LabelSet;

/// How long a pair stays after its lease ended, in seconds (docs/src/grpc.md, "Mappings and
/// leases").
const AFTER_LEASE: u64 = 5;

/// The time until which a pair stays if its lease, or its last answer, ends at `end`.
pub(crate) fn after_lease(end: BootTime) -> BootTime {
    end.plus_secs(AFTER_LEASE)
}

/// An address that is valid for an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lookup {
    pub seen: BootTime,
    pub expires: BootTime,
    /// TTL, seconds.
    pub ttl: u32,
    /// As [`Pair::trusted_until`], but only for this endpoint's answers.
    pub trusted_until: Option<BootTime>,
    queued: BootTime,
}

/// Addresses of names that one endpoint learned.
#[derive(Debug, Default)]
pub(crate) struct EndpointNames {
    /// Addresses whose TTL has not ended, by name.
    pub names: HashMap<Fqdn, HashMap<IpAddr, Lookup>>,
    /// Expired addresses that may be in use.
    pub zombies: HashMap<IpAddr, Zombie>,
    /// Number of pairs (name, address) in `names` and `zombies` together.
    pub held: usize,
    /// Until this time the endpoint has no room, and none is looked for.
    full_until: BootTime,
}

/// A name known on the node.
#[derive(Debug, Default)]
pub(crate) struct NameEntry {
    /// Labels that its addresses carry.
    pub labels: Option<LabelSet>,
    pub pairs: HashMap<IpAddr, Pair>,
}

/// One address of a name.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pair {
    /// Endpoints for which it is valid or a zombie.
    pub owners: u32,
    /// Until when a lease promises that it stays.
    pub lease_end: Option<BootTime>,
    /// Until when it is known without anybody asking ([`super::pre_cache`]).
    pub known_until: Option<BootTime>,
    /// Whether it is being revoked: it then gets no new lease.
    pub revoking: bool,
    /// End of the TTL of the answers in which trusted DNS servers gave it; `None` if no trusted
    /// server gave it.
    pub trusted_until: Option<BootTime>,
}

impl Pair {
    /// Until when it stays although no endpoint holds it.
    fn kept_until(&self) -> Option<BootTime> {
        self.known_until.max(self.lease_end.map(after_lease))
    }
}

/// A name and an address.
pub(crate) type NamePair = (Fqdn, IpAddr);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    Lookup(EndpointId, Fqdn, IpAddr),
    Lease(Fqdn, IpAddr),
}

/// The learned pairs of every endpoint, and of the node as a whole.
#[derive(Debug)]
pub(crate) struct NameCache {
    limits: Limits,
    endpoints: BTreeMap<EndpointId, EndpointNames>,
    names: HashMap<Fqdn, NameEntry>,
    due: BinaryHeap<Reverse<(BootTime, Due)>>,
    scans: ConntrackScans,
    live: usize,
    zombies: usize,
    pairs: usize,
    released: Vec<NamePair>,
    /// How often zombies were sorted to find the least valuable ones.
    sorts: usize,
}

impl NameCache {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            endpoints: BTreeMap::new(),
            names: HashMap::default(),
            due: BinaryHeap::new(),
            scans: ConntrackScans::default(),
            live: 0,
            zombies: 0,
            pairs: 0,
            released: Vec::new(),
            sorts: 0,
        }
    }

    /// Takes a lookup out of an endpoint's valid ones. True if the endpoint keeps the address
    /// as a zombie.
    fn retire(
        &mut self,
        endpoint: EndpointId,
        name: &Fqdn,
        address: IpAddr,
        expired: BootTime,
    ) -> bool {
        let Some(names) = self.endpoints.get_mut(&endpoint) else {
            return false;
        };
        if let Some(addresses) = names.names.get_mut(name) {
            if addresses.remove(&address).is_some() {
                self.live -= 1;
            }
            if addresses.is_empty() {
                names.names.remove(name);
            }
        }
        if self.limits.zombies == 0 {
            return false;
        }
        let zombies = &mut self.zombies;
        let zombie = names.zombies.entry(address).or_insert_with(|| {
            *zombies += 1;
            Zombie {
                names: [].into(),
                alive_at: None,
                delete_pending: expired,
                born: self.scans.count,
            }
        });
        zombie.names.insert(name.clone());
        zombie.delete_pending = zombie.delete_pending.max(expired);
        zombie.born = self.scans.count;
        true
    }

    /// Ends the endpoint's hold of the pair. Gives the pair if it was removed, because nothing else
    /// keeps it.
    fn disown(
        &mut self,
        endpoint: EndpointId,
        name: &Fqdn,
        address: IpAddr,
        now: BootTime,
    ) -> Option<NamePair> {
        if let Some(names) = self.endpoints.get_mut(&endpoint) {
            names.held -= 1;
        }
        let entry = self.names.get_mut(name)?;
        let pair = entry.pairs.get_mut(&address)?;
        pair.owners = pair.owners.saturating_sub(1);
        self.drop_if_free(name, address, now)
    }

    fn drop_if_free(&mut self, name: &Fqdn, address: IpAddr, now: BootTime) -> Option<NamePair> {
        let entry = self.names.get_mut(name)?;
        let pair = entry.pairs.get(&address)?;
        if pair.owners > 0 {
            return None;
        }
        if let Some(until) = pair.kept_until().filter(|until| *until > now) {
            self.due
                .push(Reverse((until, Due::Lease(name.clone(), address))));
            return None;
        }
        entry.pairs.remove(&address);
        self.pairs -= 1;
        if entry.pairs.is_empty() {
            self.names.remove(name);
        }
        Some((name.clone(), address))
    }

    /// Removes expired entries. Returns the pairs that have no other use.
    pub(crate) fn expire(&mut self, now: BootTime) -> Expired {
        let mut expired = Expired {
            pairs: std::mem::take(&mut self.released),
            endpoints: Vec::new(),
        };
        let mut retired = BTreeSet::new();
        while let Some(Reverse((at, _))) = self.due.peek()
            && *at <= now
        {
            let Some(Reverse((at, due))) = self.due.pop() else {
                break;
            };
            match due {
                Due::Lookup(endpoint, name, address) => {
                    let names = self.endpoints.get_mut(&endpoint);
                    let lookup = names
                        .and_then(|names| names.names.get_mut(&name))
                        .and_then(|addresses| addresses.get_mut(&address));
                    let Some(lookup) = lookup.filter(|lookup| lookup.queued == at) else {
                        continue;
                    };
                    if lookup.expires > now {
                        lookup.queued = lookup.expires;
                        self.due.push(Reverse((
                            lookup.expires,
                            Due::Lookup(endpoint, name, address),
                        )));
                        continue;
                    }
                    let since = lookup.expires;
                    expired.endpoints.push(endpoint);
                    if self.retire(endpoint, &name, address, since) {
                        retired.insert(endpoint);
                    } else {
                        expired
                            .pairs
                            .extend(self.disown(endpoint, &name, address, now));
                    }
                }
                Due::Lease(name, address) => {
                    expired.pairs.extend(self.drop_if_free(&name, address, now));
                }
            }
        }
        for endpoint in retired {
            expired.pairs.extend(self.cap_zombies(endpoint, now));
        }
        expired
    }

    fn bury(
        &mut self,
        endpoint: EndpointId,
        addresses: impl IntoIterator<Item = IpAddr>,
        now: BootTime,
    ) -> Vec<NamePair> {
        let mut gone = Vec::new();
        for address in addresses {
            let names = self.endpoints.get_mut(&endpoint);
            let Some(zombie) = names.and_then(|names| names.zombies.remove(&address)) else {
                continue;
            };
            self.zombies -= 1;
            for name in &zombie.names {
                gone.extend(self.disown(endpoint, name, address, now));
            }
        }
        gone
    }

    /// Notes that conntrack vouches for an address.
    pub(crate) fn mark_alive(&mut self, endpoint: EndpointId, address: IpAddr, gc_start: BootTime) {
        let zombie = self
            .endpoints
            .get_mut(&endpoint)
            .and_then(|n| n.zombies.get_mut(&address));
        if let Some(zombie) = zombie {
            let until = gc_start.plus(self.limits.idle_grace);
            zombie.alive_at = zombie.alive_at.max(Some(until));
        }
    }

    /// A complete conntrack scan ended: removes zombies without a connection.
    pub(crate) fn scanned(&mut self, gc_start: BootTime, now: BootTime) -> Expired {
        self.scans.count += 1;
        self.scans.last = self.scans.last.max(gc_start);
        let mut expired = Expired::default();
        let endpoints: Vec<EndpointId> = self.endpoints.keys().copied().collect();
        for endpoint in endpoints {
            let Some(names) = self.endpoints.get(&endpoint) else {
                continue;
            };
            let Limits {
                per_name,
                idle_grace,
                ..
            } = self.limits;
            let dead = gc::dead(&names.zombies, self.scans, idle_grace, per_name);
            if !dead.is_empty() {
                expired.endpoints.push(endpoint);
                expired.pairs.extend(self.bury(endpoint, dead, now));
            }
        }
        expired
    }

    /// Removes an endpoint that is gone. Gives the pairs that nothing else keeps.
    pub(crate) fn remove_endpoint(&mut self, endpoint: EndpointId, now: BootTime) -> Vec<NamePair> {
        let Some(names) = self.endpoints.remove(&endpoint) else {
            return Vec::new();
        };
        self.zombies -= names.zombies.len();
        let mut gone = Vec::new();
        for (name, addresses) in names.names {
            self.live -= addresses.len();
            for address in addresses.into_keys() {
                gone.extend(self.disown(endpoint, &name, address, now));
            }
        }
        for (address, zombie) in names.zombies {
            for name in &zombie.names {
                gone.extend(self.disown(endpoint, name, address, now));
            }
        }
        gone
    }

    /// Forgets one pair at one endpoint, valid or zombie. The lease is honoured unless it was
    /// revoked ([`NameCache::revoked`]).
    pub(crate) fn forget(
        &mut self,
        endpoint: EndpointId,
        name: &Fqdn,
        address: IpAddr,
        now: BootTime,
    ) -> Option<NamePair> {
        let names = self.endpoints.get_mut(&endpoint)?;
        let mut held = false;
        if let Some(addresses) = names.names.get_mut(name) {
            if addresses.remove(&address).is_some() {
                self.live -= 1;
                held = true;
            }
            if addresses.is_empty() {
                names.names.remove(name);
            }
        }
        if let Some(zombie) = names.zombies.get_mut(&address) {
            held |= zombie.names.remove(name);
            if zombie.names.is_empty() {
                names.zombies.remove(&address);
                self.zombies -= 1;
            }
        }
        if held {
            self.disown(endpoint, name, address, now)
        } else {
            None
        }
    }

    /// Notes that all streams dropped the lease of a pair: the lease no longer keeps the pair.
    pub(crate) fn revoked(
        &mut self,
        name: &Fqdn,
        address: IpAddr,
        now: BootTime,
    ) -> Option<NamePair> {
        let pair = self.names.get_mut(name)?.pairs.get_mut(&address)?;
        pair.lease_end = None;
        pair.revoking = false;
        self.drop_if_free(name, address, now)
    }

    /// Whether an endpoint has a pair from an answer that ended, or will end, after `end`.
    pub(crate) fn is_kept_after(&self, name: &Fqdn, address: IpAddr, end: BootTime) -> bool {
        self.endpoints.values().any(|endpoint| {
            let lookup = endpoint.names.get(name).and_then(|all| all.get(&address));
            let zombie = endpoint.zombies.get(&address);
            let zombie = zombie.filter(|zombie| zombie.names.contains(name));
            lookup.is_some_and(|lookup| lookup.expires > end)
                || zombie.is_some_and(|zombie| zombie.delete_pending > end)
        })
    }

    /// Ends the time for which these names are known without a query ([`Pair::known_until`]). Returns
    /// their pairs that no endpoint holds: [`NameCache::release`] removes those that nothing else
    /// keeps.
    pub(crate) fn forget_known(&mut self, which: impl Fn(&Fqdn) -> bool) -> Vec<NamePair> {
        let mut free = Vec::new();
        for (name, entry) in self.names.iter_mut().filter(|(name, _)| which(name)) {
            for (address, pair) in &mut entry.pairs {
                let known = pair.known_until.take().is_some();
                if known && pair.owners == 0 {
                    free.push((name.clone(), *address));
                }
            }
        }
        free
    }

    /// Removes the pair if nothing keeps it, and gives the removed pair.
    pub(crate) fn release(
        &mut self,
        name: &Fqdn,
        address: IpAddr,
        now: BootTime,
    ) -> Option<NamePair> {
        self.drop_if_free(name, address, now)
    }

    /// A name known on the node.
    pub(crate) fn name(&self, name: &Fqdn) -> Option<&NameEntry> {
        self.names.get(name)
    }

    /// A name known on the node.
    pub(crate) fn name_mut(&mut self, name: &Fqdn) -> Option<&mut NameEntry> {
        self.names.get_mut(name)
    }

    /// All names known on the node.
    pub(crate) fn names(&self) -> impl Iterator<Item = (&Fqdn, &NameEntry)> {
        self.names.iter()
    }

    pub(crate) fn endpoints(&self) -> impl Iterator<Item = (EndpointId, &EndpointNames)> {
        self.endpoints.iter().map(|(id, names)| (*id, names))
    }

    pub(crate) fn endpoint(&self, endpoint: EndpointId) -> Option<&EndpointNames> {
        self.endpoints.get(&endpoint)
    }

    /// When the next lookup or lease has to be checked; `None` if there is none.
    pub(crate) fn next_deadline(&self) -> Option<BootTime> {
        self.due.peek().map(|Reverse((at, _))| *at)
    }

    /// Number of valid triples (endpoint, name, address).
    pub(crate) fn live(&self) -> usize {
        self.live
    }

    /// Number of zombies: expired addresses that connections may still use.
    pub(crate) fn zombies(&self) -> usize {
        self.zombies
    }

    /// Pairs (name, address) on the node.
    pub(crate) fn pairs(&self) -> usize {
        self.pairs
    }

    /// Rebuilds the heap once most of it is about entries long gone.
    fn compact(&mut self) {
        if self.due.len() < 2 * (self.live + self.pairs) + 1024 {
            return;
        }
        let mut due = Vec::with_capacity(self.live);
        for (endpoint, names) in &self.endpoints {
            for (name, addresses) in &names.names {
                for (address, lookup) in addresses {
                    let item = Due::Lookup(*endpoint, name.clone(), *address);
                    due.push(Reverse((lookup.queued, item)));
                }
            }
        }
        for (name, entry) in &self.names {
            for (address, pair) in entry.pairs.iter().filter(|(_, pair)| pair.owners == 0) {
                let until = pair.kept_until().unwrap_or_default();
                due.push(Reverse((until, Due::Lease(name.clone(), *address))));
            }
        }
        self.due = due.into();
    }
}

#[cfg(test)]
mod tests;
