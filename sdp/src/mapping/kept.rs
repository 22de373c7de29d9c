//! Every unexpired mapping, kept so that an agent that comes back can be told again.
//!
//! One entry per endpoint, name and address. Bounded: what expires soonest is
//! dropped first, and counted.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
};

use super::{BootTime, EndpointInstance, Mapping};
use crate::{name::Fqdn, policy::rule::Transport};

/// How long after its TTL a pair that no agent has made durable is still kept, seconds.
const UNSETTLED_SECS: u64 = 300;

/// How often a pair that the agent could not take yet is sent again.
const TRIES: u8 = 30;

/// While an agent is there, what is on a disk may fall behind by this part of the TTL: only if
/// both processes are killed at once is that time lost.
const BEHIND: u64 = 8;

/// The same while none is there: answers within a second are written once.
const BEHIND_AWAY: u64 = 1_000_000_000;

/// A name that an endpoint asked for.
pub type Key = (EndpointInstance, Fqdn);

/// What of a mapping is on no disk yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unwritten {
    /// Nothing worth a write.
    Nothing,
    /// Pairs that last longer than a disk says.
    Longer,
    /// A pair that no disk knows.
    Pair,
}

/// Rounded up: what is told again must not end sooner.
fn seconds_between(from: BootTime, to: BootTime) -> u32 {
    let seconds = to.0.saturating_sub(from.0).div_ceil(1_000_000_000);
    u32::try_from(seconds).unwrap_or(u32::MAX)
}

/// What an agent was told of pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// When they were seen.
    pub seen: BootTime,
    /// Until when they count.
    pub until: BootTime,
}

impl Told {
    fn and(self, other: Self) -> Self {
        Self {
            seen: self.seen.max(other.seen),
            until: self.until.max(other.until),
        }
    }
}

/// Where a mapping comes from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    Answer,
    Leased,
    Journal,
}

/// The table.
#[derive(Debug)]
pub struct Kept {
    /// By name first: a revocation names no endpoint.
    names: HashMap<Fqdn, HashMap<EndpointInstance, KeptName>>,
    pairs: usize,
    limit: usize,
    dropped: u64,
}

#[derive(Debug)]
struct KeptName {
    server: SocketAddr,
    transport: Transport,
    pairs: Vec<Pair>,
}

#[derive(Clone, Copy, Debug)]
struct Pair {
    address: IpAddr,
    /// Of the answer that came last, whichever lasts longest.
    seen_at: BootTime,
    ttl: u32,
    expires: BootTime,
    /// What an agent has made durable: the last and the longest of what it was told. An answer
    /// is told as it came, so these may be of two.
    durable: Told,
    tries: u8,
    /// Until when a disk, the agent's or the journal's, says that it counts.
    written: BootTime,
    /// When it was seen as far as a disk knows.
    seen_written: BootTime,
}

impl Pair {
    /// Two answers are one that was seen when the last came and lasts as long as the longer: what
    /// an agent forgot on purpose before the last one is open again because of it.
    fn merged(self, fresh: Self) -> Self {
        let (longer, shorter) = if self.expires <= fresh.expires {
            (fresh, self)
        } else {
            (self, fresh)
        };
        let mut merged = longer;
        if shorter.seen_at > longer.seen_at {
            merged.seen_at = shorter.seen_at;
            merged.ttl = seconds_between(merged.seen_at, merged.expires);
        }
        merged.durable = self.durable.and(fresh.durable);
        merged.written = self.written.max(fresh.written);
        merged.seen_written = self.seen_written.max(fresh.seen_written);
        merged
    }

    /// From the last answer to the end, whole seconds.
    fn lasts(&self) -> u32 {
        seconds_between(self.seen_at, self.expires)
    }

    fn is_settled(&self) -> bool {
        self.expires <= self.durable.until && self.seen_at <= self.durable.seen
    }

    fn until(&self) -> BootTime {
        if self.is_settled() {
            self.expires
        } else {
            self.expires.plus_secs(UNSETTLED_SECS)
        }
    }
}

impl Kept {
    /// Keeps `limit` pairs at most.
    pub fn new(limit: usize) -> Self {
        Self {
            names: HashMap::new(),
            pairs: 0,
            limit,
            dropped: 0,
        }
    }

    /// Keeps a mapping's pairs; `min_ttl` is the floor of TTLs, seconds.
    pub fn keep(&mut self, mapping: &Mapping, min_ttl: u32) {
        self.take(mapping, min_ttl, Source::Answer);
    }

    /// The same for an answer whose pairs the agent has promised to keep open for its time.
    pub fn keep_leased(&mut self, mapping: &Mapping, min_ttl: u32) {
        self.take(mapping, min_ttl, Source::Leased);
    }

    /// Keeps what a journal says already; `min_ttl` as for [`Self::keep`].
    pub fn take_over(&mut self, mapping: &Mapping, min_ttl: u32) {
        self.take(mapping, min_ttl, Source::Journal);
    }

    fn take(&mut self, mapping: &Mapping, min_ttl: u32, source: Source) {
        let expires = mapping.seen_at.plus_secs(mapping.ttl.max(min_ttl).into());
        let on_disk = |instant| match source {
            Source::Journal => instant,
            Source::Answer | Source::Leased => BootTime(0),
        };
        let asked = self.names.entry(mapping.name.clone()).or_default();
        let name = asked.entry(mapping.endpoint).or_insert_with(|| KeptName {
            server: mapping.server,
            transport: mapping.transport,
            pairs: Vec::new(),
        });
        name.server = mapping.server;
        name.transport = mapping.transport;
        for address in &mapping.addresses {
            let fresh = Pair {
                address: *address,
                seen_at: mapping.seen_at,
                ttl: mapping.ttl,
                expires,
                durable: Told::default(),
                tries: 0,
                written: on_disk(expires),
                seen_written: on_disk(mapping.seen_at),
            };
            match name.pairs.iter_mut().find(|pair| pair.address == *address) {
                Some(pair) => {
                    // A promise covers what it outlasts: the agent need not hear of it.
                    if source == Source::Leased && pair.is_settled() {
                        pair.durable.seen = pair.durable.seen.max(fresh.seen_at);
                    }
                    *pair = pair.merged(fresh);
                }
                None => {
                    name.pairs.push(fresh);
                    self.pairs += 1;
                }
            }
        }
        if self.pairs > self.limit {
            self.shrink();
        }
    }

    /// What of a mapping just kept is worth a write; from now on it counts as written. What the
    /// agent's disk has is not: nobody would tell when the journal may let go of it.
    pub fn to_write(&mut self, mapping: &Mapping, away: bool) -> Unwritten {
        let Some(asked) = self.names.get_mut(&mapping.name) else {
            return Unwritten::Nothing;
        };
        let Some(name) = asked.get_mut(&mapping.endpoint) else {
            return Unwritten::Nothing;
        };
        let mut found = Unwritten::Nothing;
        let own =
            |pair: &&mut Pair| !pair.is_settled() && mapping.addresses.contains(&pair.address);
        for pair in name.pairs.iter_mut().filter(own) {
            let lasts = pair.expires.0.saturating_sub(pair.seen_at.0);
            let slack = if away { BEHIND_AWAY } else { lasts / BEHIND };
            let behind = |written: BootTime, now: BootTime| written.0.saturating_add(slack) < now.0;
            if pair.written == BootTime(0) {
                found = Unwritten::Pair;
            } else if behind(pair.written, pair.expires) || behind(pair.seen_written, pair.seen_at)
            {
                found = match found {
                    Unwritten::Pair => Unwritten::Pair,
                    _ => Unwritten::Longer,
                };
            }
        }
        if found != Unwritten::Nothing {
            for pair in name.pairs.iter_mut().filter(own) {
                pair.written = pair.written.max(pair.expires);
                pair.seen_written = pair.seen_at;
            }
        }
        found
    }

    /// Everything that no agent has made durable and that lasts longer than a disk says; from
    /// now on it counts as written. With each, for how many seconds it counts.
    pub fn all_to_write(&mut self) -> Vec<(Mapping, u32)> {
        let mut found = Vec::new();
        for key in self.keys(false) {
            let Some(name) = self.name_mut(&key) else {
                continue;
            };
            let behind = |pair: &Pair| {
                !pair.is_settled()
                    && (pair.written < pair.expires || pair.seen_written < pair.seen_at)
            };
            if name.pairs.iter().any(behind) {
                for pair in &mut name.pairs {
                    pair.written = pair.written.max(pair.expires);
                    pair.seen_written = pair.seen_at;
                }
                found.extend(self.unexpired(&key, BootTime(0)));
            }
        }
        found
    }

    /// The agent has made these pairs durable as far as told.
    pub fn settle(&mut self, key: &Key, addresses: &[IpAddr], told: Told) {
        let Some(name) = self.name_mut(key) else {
            return;
        };
        for pair in &mut name.pairs {
            if !addresses.contains(&pair.address) {
                continue;
            }
            pair.durable = pair.durable.and(told);
            if pair.is_settled() {
                pair.written = pair.expires;
                pair.seen_written = pair.seen_at;
            }
        }
    }

    /// Lets go of pairs that the agent has made durable as far as told.
    pub fn drop_settled(&mut self, key: &Key, addresses: &[IpAddr], told: Told) {
        self.settle(key, addresses, told);
        self.retain_pairs(key, |pair| {
            !(pair.is_settled() && addresses.contains(&pair.address))
        });
    }

    /// The agent will never take these pairs as told; of those seen again since it may.
    pub fn forget(&mut self, key: &Key, addresses: &[IpAddr], told: Told) {
        self.retain_pairs(key, |pair| {
            pair.seen_at > told.seen || !addresses.contains(&pair.address)
        });
    }

    /// Whether it is worth sending these pairs again after the agent could not
    /// take them yet; those tried too often are dropped.
    pub fn retry(&mut self, key: &Key) -> bool {
        self.retain_pairs(key, |pair| {
            pair.tries = pair.tries.saturating_add(1);
            pair.tries < TRIES
        });
        self.name(key).is_some()
    }

    fn name(&self, key: &Key) -> Option<&KeptName> {
        self.names.get(&key.1)?.get(&key.0)
    }

    fn name_mut(&mut self, key: &Key) -> Option<&mut KeptName> {
        self.names.get_mut(&key.1)?.get_mut(&key.0)
    }

    /// The agent takes these pairs back, from whichever endpoint: without a
    /// name all of them, without addresses all of the name.
    pub fn revoke(&mut self, name: Option<&Fqdn>, addresses: &[IpAddr]) {
        let Some(name) = name else {
            self.names.clear();
            self.pairs = 0;
            return;
        };
        let Some(asked) = self.names.get(name) else {
            return;
        };
        let keys: Vec<Key> = asked.keys().map(|by| (*by, name.clone())).collect();
        for key in keys {
            self.retain_pairs(&key, |pair| {
                !addresses.is_empty() && !addresses.contains(&pair.address)
            });
        }
    }

    fn retain_pairs(&mut self, key: &Key, keep: impl FnMut(&mut Pair) -> bool) {
        let Some(name) = self.name_mut(key) else {
            return;
        };
        let before = name.pairs.len();
        name.pairs.retain_mut(keep);
        let after = name.pairs.len();
        self.pairs -= before - after;
        if after == 0
            && let Some(asked) = self.names.get_mut(&key.1)
        {
            asked.remove(&key.0);
            if asked.is_empty() {
                self.names.remove(&key.1);
            }
        }
    }

    /// Drops what has expired.
    pub fn expire(&mut self, now: BootTime) {
        self.retain_all(|pair| pair.until() > now);
    }

    fn retain_all(&mut self, mut keep: impl FnMut(&Pair) -> bool) {
        self.names.retain(|_, asked| {
            asked.retain(|_, name| {
                name.pairs.retain(&mut keep);
                !name.pairs.is_empty()
            });
            !asked.is_empty()
        });
        self.pairs = self.all().map(|(_, _, name)| name.pairs.len()).sum();
    }

    fn all(&self) -> impl Iterator<Item = (&Fqdn, &EndpointInstance, &KeptName)> {
        let names = self.names.iter();
        names.flat_map(|(name, asked)| asked.iter().map(move |(by, kept)| (name, by, kept)))
    }

    /// Drops the sixteenth that ends soonest, so that the next ones are cheap.
    pub fn shrink(&mut self) {
        let mut ends: Vec<_> = self
            .all()
            .flat_map(|(_, _, name)| name.pairs.iter().map(Pair::until))
            .collect();
        let last = (ends.len() / 16).min(ends.len().saturating_sub(1));
        let (_, bound, _) = ends.select_nth_unstable(last);
        let bound = *bound;
        let before = self.pairs;
        let mut quota = last + 1;
        self.retain_all(|pair| {
            let goes = pair.until() <= bound && quota > 0;
            quota -= usize::from(goes);
            !goes
        });
        self.dropped += u64::try_from(before - self.pairs).unwrap_or(u64::MAX);
    }

    /// Names to send again: those that no agent has made durable, or all.
    pub fn keys(&self, all: bool) -> Vec<Key> {
        self.all()
            .filter(|(_, _, kept)| all || kept.pairs.iter().any(|pair| !pair.is_settled()))
            .map(|(name, by, _)| (*by, name.clone()))
            .collect()
    }

    /// A name's pairs as mappings to send again: one per instant and TTL.
    pub fn replay(&self, key: &Key, now: BootTime) -> Vec<Mapping> {
        let found = self.unexpired(key, now).into_iter();
        found.map(|(mapping, _)| mapping).collect()
    }

    /// A name's pairs as mappings, and for how many seconds from `seen_at` each counts.
    pub fn unexpired(&self, key: &Key, now: BootTime) -> Vec<(Mapping, u32)> {
        self.mappings(key, |pair| pair.until() > now)
    }

    /// Some of a name's pairs as mappings, and for how many seconds from `seen_at` each counts.
    pub fn of(&self, key: &Key, which: impl Fn(&IpAddr) -> bool) -> Vec<(Mapping, u32)> {
        self.mappings(key, |pair| which(&pair.address))
    }

    /// Those of a mapping's pairs that no agent has made durable.
    pub fn undurable(&self, mapping: &Mapping) -> Vec<IpAddr> {
        let asked = self.names.get(&mapping.name);
        let pairs = asked.and_then(|asked| asked.get(&mapping.endpoint));
        let pairs = pairs.into_iter().flat_map(|name| &name.pairs);
        pairs
            .filter(|pair| !pair.is_settled() && mapping.addresses.contains(&pair.address))
            .map(|pair| pair.address)
            .collect()
    }

    /// What an endpoint has learned of a name since an agent last made it durable.
    pub fn unsettled(&self, key: &Key) -> Vec<Mapping> {
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
        let mut found: Vec<(Mapping, u32)> = Vec::new();
        for pair in name.pairs.iter().filter(|pair| which(pair)) {
            let lasts = pair.lasts();
            match found
                .iter_mut()
                .find(|(m, l)| m.seen_at == pair.seen_at && m.ttl == pair.ttl && *l == lasts)
            {
                Some((mapping, _)) => mapping.addresses.push(pair.address),
                None => {
                    let mapping = Mapping {
                        endpoint: key.0,
                        name: key.1.clone(),
                        addresses: vec![pair.address],
                        ttl: pair.ttl,
                        seen_at: pair.seen_at,
                        rcode: 0,
                        server: name.server,
                        transport: name.transport,
                        replayed: true,
                    };
                    found.push((mapping, lasts));
                }
            }
        }
        found
    }

    /// Number of pairs kept.
    pub fn len(&self) -> usize {
        self.pairs
    }

    /// Whether nothing is kept.
    pub fn is_empty(&self) -> bool {
        self.pairs == 0
    }

    /// Pairs dropped because there were too many.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }
}

#[cfg(test)]
pub(crate) mod tests;
