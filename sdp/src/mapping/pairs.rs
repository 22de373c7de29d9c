//! Every unexpired pair, kept so that the proxy can send it to an agent that starts again.
//!
//! The table has one entry for each endpoint, server, name and address. When it is full, the
//! endpoint with the most pairs loses the pairs that end soonest, and they are counted. No
//! operation on an answer walks more entries than the answer has addresses.

mod acknowledged;
mod key;
mod name_pairs;
mod pair;

use std::{
    cmp::Reverse,
    collections::{HashMap, hash_map::Entry},
    net::IpAddr,
};

use dns_policy::{boot_time::BootTime, mapping::Mapping, name::Fqdn};
use foldhash::quality::RandomState;

pub(crate) use self::{
    acknowledged::{Acknowledged, Session},
    key::{Asked, Key},
    pair::AgentAck,
};
use self::{name_pairs::NamePairs, pair::Pair};
use dns_wire::answer::MAX_ADDRESSES;

use super::holdings::{Holdings, Serial};
#[cfg(test)]
use super::steps;

/// Time for which a pair that no agent has made durable is kept after its TTL, seconds.
const UNSETTLED_SECS: u64 = 300;

/// Maximum number of times that a pair is sent again if the agent could not accept it yet.
const TRIES: u8 = 30;

/// While an agent is connected, a pair may end earlier on the disk than in memory, by up to its
/// duration divided by this number. That time is lost only if both processes are killed at once.
const BEHIND: u64 = 8;

/// Time by which a pair may end earlier on the disk while no agent is connected, nanoseconds. So
/// answers that come within one second are written once.
const BEHIND_AWAY: u64 = 1_000_000_000;

/// Maximum number of pairs of one name of one endpoint. Above it, the quarter of them that ends
/// soonest is dropped. The agent accepts a quarter of this number from one answer, and by default
/// about as many for one name.
const PER_NAME: usize = 4 * MAX_ADDRESSES;

/// Number of pairs that are evicted at once, all of the holder with the most pairs.
const EVICTED_AT_ONCE: usize = 32;

/// The part of a mapping that is not on disk yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unwritten {
    /// Nothing, or only an extension that is too short for a write.
    Nothing,
    /// Pairs are on a disk, and end earlier there than in memory.
    Longer,
    /// A pair is on no disk.
    Pair,
}

/// Origin of a mapping that is added to the table.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    Answer,
    Leased,
    Journal,
}

type NamesByAsked = HashMap<Asked, NamePairs, RandomState>;

/// All unexpired pairs that the proxy can send to an agent, up to a limit.
#[derive(Debug)]
pub(crate) struct PairTable {
    /// The first key is the name, because a revocation names no endpoint.
    names: HashMap<Fqdn, NamesByAsked, RandomState>,
    holdings: Holdings<PairKey>,
    dropped: u64,
}

#[derive(Clone, Debug)]
struct PairKey {
    key: Key,
    address: IpAddr,
}

impl PairTable {
    /// A table of at most `limit` pairs.
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            names: HashMap::default(),
            holdings: Holdings::new(limit),
            dropped: 0,
        }
    }

    /// Keeps a mapping's pairs; `min_ttl` is the floor of TTLs, seconds.
    pub(crate) fn keep(&mut self, mapping: &Mapping, min_ttl: u32) {
        self.take(mapping, min_ttl, Source::Answer);
    }

    /// Like [`Self::keep`], for an answer whose pairs have leases for its whole TTL.
    pub(crate) fn keep_leased(&mut self, mapping: &Mapping, min_ttl: u32) {
        self.take(mapping, min_ttl, Source::Leased);
    }

    /// Keeps a mapping that is already in a journal; `min_ttl` as for [`Self::keep`].
    pub(crate) fn take_over(&mut self, mapping: &Mapping, min_ttl: u32) {
        self.take(mapping, min_ttl, Source::Journal);
    }

    fn take(&mut self, mapping: &Mapping, min_ttl: u32, source: Source) {
        if mapping.addresses.is_empty() {
            return;
        }
        let expires = mapping.seen_at.plus_secs(mapping.ttl.max(min_ttl).into());
        let endpoint = mapping.endpoint;
        let asked = self.names.entry(mapping.name.clone()).or_default();
        let name = asked
            .entry(Asked::of(mapping))
            .or_insert_with(|| NamePairs {
                transport: mapping.transport,
                pairs: HashMap::default(),
            });
        name.transport = mapping.transport;
        for address in &mapping.addresses {
            #[cfg(test)]
            steps::count();
            match name.pairs.entry(*address) {
                Entry::Occupied(mut found) => {
                    let pair = found.get_mut();
                    let fresh = Pair::new(mapping, expires, source, pair.serial);
                    // The lease outlasts the answer, so the agent does not need the time of the
                    // answer.
                    if source == Source::Leased && pair.is_settled() {
                        pair.durable.seen = pair.durable.seen.max(fresh.seen_at);
                    }
                    *pair = pair.merged(fresh);
                }
                Entry::Vacant(place) => {
                    let key = PairKey {
                        key: Key::of(mapping),
                        address: *address,
                    };
                    let serial = self.holdings.enter(endpoint.into(), expires, key);
                    place.insert(Pair::new(mapping, expires, source, serial));
                }
            }
        }
        if name.pairs.len() > PER_NAME {
            self.trim(mapping);
        }
        let names = &self.names;
        let end_of = |key: &PairKey, serial| end_of(names, key, serial);
        self.holdings.tidy(endpoint.into(), end_of);
        self.evict(self.holdings.excess());
    }

    /// Drops the quarter of a name's pairs that ends soonest.
    fn trim(&mut self, mapping: &Mapping) {
        let key = Key::of(mapping);
        let Some(name) = self.name(&key) else { return };
        let ends = name
            .pairs
            .iter()
            .map(|(address, pair)| (pair.until(), *address));
        let mut ends: Vec<_> = ends.collect();
        let (first, ..) = ends.select_nth_unstable(PER_NAME / 4);
        let first: Vec<IpAddr> = first.iter().map(|(_, address)| *address).collect();
        self.retain_pairs(&key, &first, |_| false);
        self.dropped += first.len() as u64;
    }

    /// Decides which part of a mapping that was just kept must be written. That part then counts as
    /// written. Pairs on the agent's disk are not written: no later message would remove them from
    /// the journal.
    pub(crate) fn take_unwritten(&mut self, mapping: &Mapping, away: bool) -> Unwritten {
        let Some(asked) = self.names.get_mut(&mapping.name) else {
            return Unwritten::Nothing;
        };
        let Some(name) = asked.get_mut(&Asked::of(mapping)) else {
            return Unwritten::Nothing;
        };
        let mut found = Unwritten::Nothing;
        for address in &mapping.addresses {
            #[cfg(test)]
            steps::count();
            let Some(pair) = name.pairs.get(address).filter(|pair| !pair.is_settled()) else {
                continue;
            };
            let lasts = pair.expires.nanos().saturating_sub(pair.seen_at.nanos());
            let slack = if away { BEHIND_AWAY } else { lasts / BEHIND };
            let behind = |written: BootTime, now: BootTime| {
                written.nanos().saturating_add(slack) < now.nanos()
            };
            if pair.written == BootTime::START {
                found = Unwritten::Pair;
                break;
            }
            if behind(pair.written, pair.expires) || behind(pair.seen_written, pair.seen_at) {
                found = Unwritten::Longer;
            }
        }
        if found != Unwritten::Nothing {
            for address in &mapping.addresses {
                #[cfg(test)]
                steps::count();
                if let Some(pair) = name.pairs.get_mut(address)
                    && !pair.is_settled()
                {
                    pair.note_written();
                }
            }
        }
        found
    }

    /// Mappings that no agent has made durable and that end earlier on the disk than in memory.
    /// From then on they count as written. Each comes with the number of seconds from `seen_at` for
    /// which it counts.
    pub(crate) fn all_to_write(&mut self) -> Vec<(Mapping, u32)> {
        let mut found = Vec::new();
        for key in self.keys(false) {
            let Some(name) = self.name_mut(&key) else {
                continue;
            };
            let behind = |pair: &Pair| {
                !pair.is_settled()
                    && (pair.written < pair.expires || pair.seen_written < pair.seen_at)
            };
            if name.pairs.values().any(behind) {
                name.pairs.values_mut().for_each(Pair::note_written);
                found.extend(self.unexpired(&key, BootTime::START));
            }
        }
        found
    }

    /// Notes that the agent has made these pairs durable, in the state `ack` in which they were
    /// sent.
    pub(crate) fn settle(&mut self, key: &Key, addresses: &[IpAddr], ack: AgentAck) {
        let Some(name) = self.name_mut(key) else {
            return;
        };
        for address in addresses {
            #[cfg(test)]
            steps::count();
            let Some(pair) = name.pairs.get_mut(address) else {
                continue;
            };
            pair.durable = pair.durable.and(ack);
            if pair.is_settled() {
                pair.written = pair.expires;
                pair.seen_written = pair.seen_at;
            }
        }
    }

    /// Like [`Self::settle`], but also drops the pairs that have not changed since they were sent.
    pub(crate) fn drop_settled(&mut self, key: &Key, addresses: &[IpAddr], ack: AgentAck) {
        self.settle(key, addresses, ack);
        self.retain_pairs(key, addresses, |pair| !pair.is_settled());
    }

    /// Forgets pairs that the agent refused for good. Pairs that were seen again since they were
    /// sent stay, because the agent may accept them.
    pub(crate) fn forget(&mut self, key: &Key, addresses: &[IpAddr], ack: AgentAck) {
        self.retain_pairs(key, addresses, |pair| pair.seen_at > ack.seen);
    }

    /// Notes that the agent could not accept these pairs yet. Drops pairs that were sent [`TRIES`]
    /// times. Returns whether there are other pairs, which must be sent again.
    pub(crate) fn retry(&mut self, key: &Key, addresses: &[IpAddr]) -> bool {
        let mut any = false;
        self.retain_pairs(key, addresses, |pair| {
            pair.tries = pair.tries.saturating_add(1);
            let again = pair.tries < TRIES;
            any |= again;
            again
        });
        any
    }

    fn name(&self, key: &Key) -> Option<&NamePairs> {
        self.names.get(&key.name)?.get(&key.asked)
    }

    fn name_mut(&mut self, key: &Key) -> Option<&mut NamePairs> {
        self.names.get_mut(&key.name)?.get_mut(&key.asked)
    }

    /// Removes the pairs of all endpoints that the agent revokes. No name stands for all names, and
    /// no addresses for all addresses of the name.
    pub(crate) fn revoke(&mut self, name: Option<&Fqdn>, addresses: &[IpAddr]) {
        let Some(name) = name else {
            self.names.clear();
            self.holdings.clear();
            return;
        };
        let Some(asked) = self.names.get(name) else {
            return;
        };
        let keys = asked.keys().map(|asked| Key {
            asked: *asked,
            name: name.clone(),
        });
        let keys: Vec<Key> = keys.collect();
        for key in keys {
            if addresses.is_empty() {
                let pairs = self.name(&key).map(|name| &name.pairs);
                let all: Vec<_> = pairs.into_iter().flat_map(HashMap::keys).copied().collect();
                self.retain_pairs(&key, &all, |_| false);
            } else {
                self.retain_pairs(&key, addresses, |_| false);
            }
        }
    }

    /// Removes the pairs of these addresses for which `keep` returns false.
    fn retain_pairs(
        &mut self,
        key: &Key,
        addresses: &[IpAddr],
        mut keep: impl FnMut(&mut Pair) -> bool,
    ) {
        let Some(asked) = self.names.get_mut(&key.name) else {
            return;
        };
        let Some(name) = asked.get_mut(&key.asked) else {
            return;
        };
        for address in addresses {
            #[cfg(test)]
            steps::count();
            if let Some(pair) = name.pairs.get_mut(address)
                && !keep(pair)
            {
                name.pairs.remove(address);
                self.holdings.leave(key.asked.endpoint.into());
            }
        }
        if name.pairs.is_empty() {
            asked.remove(&key.asked);
            if asked.is_empty() {
                self.names.remove(&key.name);
            }
        }
    }

    /// Removes the pairs that need not be stored any longer at `now`.
    pub(crate) fn expire(&mut self, now: BootTime) {
        let names = &self.names;
        let ended = self
            .holdings
            .ended(now, |key, serial| end_of(names, key, serial));
        self.remove(&ended);
    }

    fn remove(&mut self, pairs: &[PairKey]) {
        for pair in pairs {
            self.retain_pairs(&pair.key, &[pair.address], |_| false);
        }
    }

    fn all(&self) -> impl Iterator<Item = (&Fqdn, &Asked, &NamePairs)> {
        let names = self.names.iter();
        names.flat_map(|(name, asked)| asked.iter().map(move |(by, pairs)| (name, by, pairs)))
    }

    /// Drops a sixteenth of all pairs.
    pub(crate) fn shrink(&mut self) {
        self.evict((self.len() / 16).max(1));
    }

    /// Drops `excess` pairs, [`EVICTED_AT_ONCE`] at a time: each time the pairs that end soonest,
    /// of the endpoint that then has the most pairs.
    fn evict(&mut self, mut excess: usize) {
        while excess > 0 {
            let names = &self.names;
            let most = excess.min(EVICTED_AT_ONCE);
            let end_of = |key: &PairKey, serial| end_of(names, key, serial);
            let evicted = self.holdings.of_largest(most, end_of);
            if evicted.is_empty() {
                return;
            }
            self.remove(&evicted);
            excess = excess.saturating_sub(evicted.len());
            self.dropped += evicted.len() as u64;
        }
    }

    /// Keys of the names to send again: all names, or only names with a pair that is not durable. Names with such a pair
    /// are first, the latest answer before the others, because a client has just asked for it.
    pub(crate) fn keys(&self, all: bool) -> Vec<Key> {
        let undurable = |name: &NamePairs| {
            let pairs = name.pairs.values().filter(|pair| !pair.is_settled());
            pairs.map(|pair| pair.seen_at).max()
        };
        let names = self.all();
        let names = names.map(|(name, asked, pairs)| (undurable(pairs), name, asked));
        let mut names: Vec<_> = names.filter(|(since, ..)| all || since.is_some()).collect();
        names.sort_unstable_by_key(|(since, ..)| Reverse(*since));
        let keys = names.into_iter().map(|(_, name, asked)| Key {
            asked: *asked,
            name: name.clone(),
        });
        keys.collect()
    }

    /// A name's unexpired pairs as mappings to send again: one mapping for each answer time and TTL.
    pub(crate) fn replay(&self, key: &Key, now: BootTime) -> Vec<Mapping> {
        let found = self.unexpired(key, now).into_iter();
        found.map(|(mapping, _)| mapping).collect()
    }

    /// A name's unexpired pairs as mappings, each with the number of seconds from `seen_at` for
    /// which it counts.
    pub(crate) fn unexpired(&self, key: &Key, now: BootTime) -> Vec<(Mapping, u32)> {
        self.mappings(key, |pair| pair.until() > now)
    }

    /// A name's pairs with these addresses as mappings, each with the number of seconds from
    /// `seen_at` for which it counts.
    pub(crate) fn of(&self, key: &Key, addresses: &[IpAddr]) -> Vec<(Mapping, u32)> {
        let Some(name) = self.name(key) else {
            return Vec::new();
        };
        let pairs = addresses.iter().copied();
        name.mappings(
            key,
            pairs.filter_map(|address| Some((address, name.pairs.get(&address)?))),
        )
    }

    /// Addresses of the mapping's pairs that no agent has made durable.
    pub(crate) fn undurable(&self, mapping: &Mapping) -> Vec<IpAddr> {
        let asked = self.names.get(&mapping.name);
        let Some(name) = asked.and_then(|asked| asked.get(&Asked::of(mapping))) else {
            return Vec::new();
        };
        let is_undurable = |address: &&IpAddr| {
            #[cfg(test)]
            steps::count();
            name.pairs
                .get(*address)
                .is_some_and(|pair| !pair.is_settled())
        };
        mapping
            .addresses
            .iter()
            .filter(is_undurable)
            .copied()
            .collect()
    }

    /// Mappings with the pairs of a name that no agent has made durable in their present state.
    pub(crate) fn unsettled(&self, key: &Key) -> Vec<Mapping> {
        let found = self.mappings(key, |pair| !pair.is_settled()).into_iter();
        found
            .map(|(mapping, _)| Mapping {
                replayed: false,
                ..mapping
            })
            .collect()
    }

    fn mappings(&self, key: &Key, which: impl Fn(&Pair) -> bool) -> Vec<(Mapping, u32)> {
        let Some(name) = self.name(key) else {
            return Vec::new();
        };
        let pairs = name.pairs.iter().map(|(address, pair)| (*address, pair));
        name.mappings(key, pairs.filter(|(_, pair)| which(pair)))
    }

    pub(crate) fn len(&self) -> usize {
        self.holdings.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Pairs dropped because there were too many.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped
    }
}

fn end_of(
    names: &HashMap<Fqdn, NamesByAsked, RandomState>,
    pair: &PairKey,
    serial: Serial,
) -> Option<BootTime> {
    let name = names.get(&pair.key.name)?.get(&pair.key.asked)?;
    let pair = name.pairs.get(&pair.address)?;
    (pair.serial == serial).then(|| pair.until())
}

#[cfg(test)]
pub(crate) mod tests;
