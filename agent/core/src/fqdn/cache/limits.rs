//! Limits of the cache: what makes room, and when there is none.

use std::{
    collections::{HashMap, HashSet},
    net::IpAddr,
    time::Duration,
};

use dns_policy::{boot_time::BootTime, name::Fqdn};
use shared_maps::EndpointId;

use super::{EndpointNames, NameCache, NamePair};
use crate::{fqdn::gc, labels::LabelSet};

/// A limit may be exceeded by 1/16 before the excess is removed: one sort then removes that many
/// entries, even if they are added one by one.
const SLACK: usize = 16;
/// How long an endpoint without room is not searched for room again, seconds.
const FULL: u64 = 1;

/// Limits on what each endpoint learns and keeps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Maximum number of valid addresses per endpoint and name.
    pub per_name: usize,
    /// Maximum number of pairs (name, address) per endpoint, valid or in zombies.
    pub per_endpoint: usize,
    /// Maximum number of zombies per endpoint; 0 = expired addresses are removed at once.
    pub zombies: usize,
    /// How long an idle connection counts as alive.
    pub idle_grace: Duration,
}

/// Whether a limit is exceeded by more than its slack.
pub(super) fn is_over(count: usize, limit: usize) -> bool {
    count > limit + limit / SLACK
}

impl NameCache {
    /// Whether the endpoint may learn the pair; makes room if need be.
    ///
    /// Beyond the limit a new pair is refused and nothing live is evicted for it: otherwise
    /// an attacker who makes a pod resolve enough names could close the names that it uses. Only
    /// superfluous names are removed (see `redundant`), so that many names that share few
    /// addresses, all in use, do not keep out new ones for ever.
    pub(crate) fn make_room(
        &mut self,
        endpoint: EndpointId,
        name: &Fqdn,
        address: IpAddr,
        now: BootTime,
    ) -> bool {
        let limit = self.limits.per_endpoint;
        let Some(names) = self.endpoints.get_mut(&endpoint) else {
            return limit > 0;
        };
        if names.held < limit || names.holds(name, address) {
            return true;
        }
        if names.full_until > now {
            return false;
        }
        names.full_until = now.plus_secs(FULL);
        let known = &self.names;
        let labels = |name: &Fqdn| known.get(name).and_then(|entry| entry.labels.clone());
        for (name, address) in redundant(names, labels) {
            let gone = self.forget(endpoint, &name, address, now);
            self.released.extend(gone);
        }
        self.endpoints
            .get(&endpoint)
            .is_none_or(|names| names.held < limit)
    }

    /// Makes zombies of those addresses of a name that expire first, down to the limit.
    pub(super) fn evict(&mut self, endpoint: EndpointId, name: &Fqdn, now: BootTime) {
        let addresses = self
            .endpoints
            .get(&endpoint)
            .and_then(|names| names.names.get(name));
        let mut order: Vec<_> = addresses
            .into_iter()
            .flatten()
            .map(|(address, lookup)| (lookup.expires, *address))
            .collect();
        order.sort_unstable();
        order.truncate(order.len().saturating_sub(self.limits.per_name));
        for (expires, address) in order {
            if !self.retire(endpoint, name, address, expires.max(now)) {
                let gone = self.disown(endpoint, name, address, now);
                self.released.extend(gone);
            }
        }
        let gone = self.cap_zombies(endpoint, now);
        self.released.extend(gone);
    }

    /// Releases the least valuable zombies if there are too many.
    pub(super) fn cap_zombies(&mut self, endpoint: EndpointId, now: BootTime) -> Vec<NamePair> {
        let limit = self.limits.zombies;
        let Some(names) = self.endpoints.get(&endpoint) else {
            return Vec::new();
        };
        if !is_over(names.zombies.len(), limit) {
            return Vec::new();
        }
        self.sorts += 1;
        let beyond = gc::beyond_limit(&names.zombies, limit);
        self.bury(endpoint, beyond, now)
    }
}

impl EndpointNames {
    /// Whether one more address would be near or beyond a limit of the endpoint.
    pub(super) fn is_near_limit(&self, limits: &Limits) -> bool {
        let Limits {
            per_endpoint,
            zombies,
            ..
        } = *limits;
        self.held >= per_endpoint - per_endpoint / SLACK
            || (zombies > 0 && self.zombies.len() >= zombies)
    }

    /// Removes the name from the address's zombie. True if the zombie had the name.
    pub(super) fn revive(&mut self, name: &Fqdn, address: IpAddr) -> bool {
        let Some(zombie) = self.zombies.get_mut(&address) else {
            return false;
        };
        let had = zombie.names.remove(name);
        if zombie.names.is_empty() {
            self.zombies.remove(&address);
        }
        had
    }

    fn holds(&self, name: &Fqdn, address: IpAddr) -> bool {
        let valid = self
            .names
            .get(name)
            .is_some_and(|all| all.contains_key(&address));
        let zombie = || self.zombies.get(&address);
        valid || zombie().is_some_and(|zombie| zombie.names.contains(name))
    }
}

/// Expired names whose address the endpoint holds under another name with the same labels:
/// without them the datapath is the same.
fn redundant(
    names: &EndpointNames,
    labels: impl Fn(&Fqdn) -> Option<LabelSet>,
) -> Vec<(Fqdn, IpAddr)> {
    let mut kept: HashMap<IpAddr, HashSet<Option<LabelSet>>> = HashMap::new();
    for (name, addresses) in &names.names {
        let labels = labels(name);
        for address in addresses.keys() {
            if names.zombies.contains_key(address) {
                kept.entry(*address).or_default().insert(labels.clone());
            }
        }
    }
    let mut found = Vec::new();
    for (address, zombie) in &names.zombies {
        let kept = kept.entry(*address).or_default();
        for name in &zombie.names {
            if !kept.insert(labels(name)) {
                found.push((name.clone(), *address));
            }
        }
    }
    found
}
