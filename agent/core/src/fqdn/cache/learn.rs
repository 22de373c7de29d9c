//! How pairs come into the cache: by answers, from files of an earlier run, and by rules that know
//! a name's addresses.

use std::{cmp::Reverse, net::IpAddr};

use dns_policy::{boot_time::BootTime, name::Fqdn};
use foldhash::HashMap;
use shared_maps::EndpointId;

use super::{Due, Lookup, NameCache, NameEntry, Pair, limits};
use crate::{fqdn::gc::Zombie, labels::LabelSet};

/// Whether an address came from a trusted DNS server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trust {
    Trusted,
    Untrusted,
}

/// An answer to be learned.
#[derive(Clone, Debug)]
pub(crate) struct Answer<'a> {
    /// Endpoint that received the answer.
    pub endpoint: EndpointId,
    pub name: &'a Fqdn,
    /// Labels that its addresses carry, if the node does not know the name yet.
    pub labels: Option<&'a LabelSet>,
    pub address: IpAddr,
    pub seen: BootTime,
    /// TTL, seconds.
    pub ttl: u32,
    pub expires: BootTime,
    /// End of the lease that it would have, if it may have one.
    pub lease_end: Option<BootTime>,
    /// When it ends for rules for which only trusted DNS servers count; `None` if another server
    /// gave it.
    pub trusted_until: Option<BootTime>,
}

impl Lookup {
    fn of(answer: &Answer<'_>) -> Self {
        Self {
            seen: answer.seen,
            expires: answer.expires,
            ttl: answer.ttl,
            trusted_until: answer.trusted_until,
            queued: answer.expires,
        }
    }

    fn renew(&mut self, answer: &Answer<'_>) {
        let before = (self.expires, self.seen, self.ttl);
        let later = before.max((answer.expires, answer.seen, answer.ttl));
        (self.expires, self.seen, self.ttl) = later;
        self.trusted_until = self.trusted_until.max(answer.trusted_until);
    }
}

impl NameCache {
    /// Learns one address. True if it has the lease that was asked for: no lease is given near a limit
    /// of the endpoint, or while the pair's lease is being revoked. Merging is commutative: the later
    /// expiry and the later lease win; of two lookups that expire at the same time, the one seen last
    /// wins.
    pub(crate) fn learn(&mut self, answer: &Answer<'_>) -> bool {
        let (endpoint, name, address) = (answer.endpoint, answer.name, answer.address);
        let names = self.endpoints.entry(endpoint).or_default();
        let near_limit = names.is_near_limit(&self.limits);
        let zombies = names.zombies.len();
        let was_zombie = names.revive(name, address);
        self.zombies -= zombies - names.zombies.len();
        let addresses = match names.names.get_mut(name) {
            Some(addresses) => addresses,
            None => names.names.entry(name.clone()).or_default(),
        };
        let is_full = addresses.len() >= self.limits.per_name;
        let was_live = match addresses.get_mut(&address) {
            Some(lookup) => {
                lookup.renew(answer);
                true
            }
            None => {
                addresses.insert(address, Lookup::of(answer));
                self.live += 1;
                let due = Due::Lookup(endpoint, name.clone(), address);
                self.due.push(Reverse((answer.expires, due)));
                false
            }
        };
        let is_owned = was_zombie || was_live;
        names.held += usize::from(!is_owned);
        let over = limits::is_over(addresses.len(), self.limits.per_name);
        let pair = self.pair(name, address, answer.labels);
        pair.owners += u32::from(!is_owned);
        pair.trusted_until = pair.trusted_until.max(answer.trusted_until);
        let may_lease = !near_limit && !is_full && !pair.revoking;
        let lease_end = answer.lease_end.filter(|_| may_lease);
        if let Some(end) = lease_end {
            pair.lease_end = pair.lease_end.max(Some(end));
        }
        if over {
            self.evict(endpoint, name, answer.seen);
        }
        self.compact();
        lease_end.is_some()
    }

    /// The pair of a name and an address, made if the node does not know it. A new name gets
    /// `labels`.
    fn pair(&mut self, name: &Fqdn, address: IpAddr, labels: Option<&LabelSet>) -> &mut Pair {
        let entry = self.names.entry(name.clone()).or_insert_with(|| NameEntry {
            labels: labels.cloned(),
            pairs: HashMap::default(),
        });
        entry.pairs.entry(address).or_insert_with(|| {
            self.pairs += 1;
            Pair::default()
        })
    }

    /// Restores a zombie: it needs two complete scans before it may go.
    pub(crate) fn restore_zombie(
        &mut self,
        endpoint: EndpointId,
        name: &Fqdn,
        address: IpAddr,
        alive_at: Option<BootTime>,
        delete_pending: BootTime,
        trust: Trust,
    ) {
        let names = self.endpoints.entry(endpoint).or_default();
        if names
            .names
            .get(name)
            .is_some_and(|all| all.contains_key(&address))
        {
            return;
        }
        let zombies = &mut self.zombies;
        let zombie = names.zombies.entry(address).or_insert_with(|| {
            *zombies += 1;
            Zombie {
                names: [].into(),
                alive_at,
                delete_pending,
                born: self.scans.count,
            }
        });
        if zombie.names.insert(name.clone()) {
            names.held += 1;
            let pair = self.pair(name, address, None);
            pair.owners += 1;
            if trust == Trust::Trusted {
                pair.trusted_until = pair.trusted_until.max(Some(delete_pending));
            }
        }
    }

    /// Keeps a pair until a time, for every endpoint.
    pub(crate) fn know_until(&mut self, name: &Fqdn, address: IpAddr, until: BootTime) {
        let pair = self.pair(name, address, None);
        let until = pair.known_until.map_or(until, |known| known.max(until));
        pair.known_until = Some(until);
        let due = Due::Lease(name.clone(), address);
        self.due.push(Reverse((until, due)));
    }
}
