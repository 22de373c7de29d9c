//! Addresses of names that EgressFirewalls use: how long each is kept.
//!
//! A pair (name, address) is kept while an object of the store lists it, until its answers end and
//! a few seconds more ([`after_lease`]), and then while connections use the address: until a complete conntrack
//! scan that began later found none.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, BinaryHeap, hash_map::Entry},
    net::IpAddr,
};

use dns_policy::{boot_time::BootTime, name::Fqdn};
use foldhash::HashMap;

use super::{
    cache::{Limits, NamePair, after_lease},
    firewall_names::Openness,
};

/// Maximum number of pairs whose address no answer may open.
const MAX_CLOSED: usize = 1024;
/// Maximum number of pairs that only connections keep. Beyond it, pairs for which the last scan saw
/// no connection are removed: a pod that asks for many names must not make others wait for the next
/// scan.
const MAX_PENDING: usize = 65_536;

/// One address of a name.
#[derive(Clone, Copy, Debug, Default)]
struct Resolved {
    /// When the answers that gave it end, if any did.
    until: Option<BootTime>,
    /// Until when a lease promises that it stays.
    lease_end: Option<BootTime>,
    /// Objects of the store that list it.
    objects: u32,
    is_closed: bool,
    /// Whether it is in the heap.
    is_queued: bool,
    /// Since when only connections keep it, if nothing else does.
    pending: Option<BootTime>,
}

/// An address of any number of names.
#[derive(Clone, Copy, Debug, Default)]
struct Address {
    names: u32,
    /// Until when conntrack vouches for it, if it ever did.
    alive: Option<BootTime>,
}

/// How much room there is for a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// The pair may be taken, with a lease or without.
    Free,
    /// It may be taken without a lease.
    Scarce,
    /// The pair must not be taken.
    Full,
}

/// Pairs (name, address) of EgressFirewalls, each until nothing keeps it any more.
#[derive(Debug)]
pub(crate) struct ResolvedPairs {
    limits: Limits,
    /// Maximum number of pairs that objects of the store may keep.
    most: usize,
    /// When the last complete conntrack scan began.
    last_scan: BootTime,
    names: HashMap<Fqdn, HashMap<IpAddr, Resolved>>,
    addresses: HashMap<IpAddr, Address>,
    due: BinaryHeap<Reverse<(BootTime, Fqdn, IpAddr)>>,
    pending: BTreeSet<(Fqdn, IpAddr)>,
    len: usize,
    /// Pairs that objects of the store keep.
    held: usize,
    closed: usize,
}

impl ResolvedPairs {
    /// An empty set. Objects of the store may keep `most` pairs. Pairs of answers are bounded by
    /// what endpoints may learn, and take no room from the pairs of objects.
    pub(crate) fn new(limits: Limits, most: usize) -> Self {
        Self {
            limits,
            most,
            last_scan: BootTime::START,
            names: HashMap::default(),
            addresses: HashMap::default(),
            due: BinaryHeap::new(),
            pending: BTreeSet::new(),
            len: 0,
            held: 0,
            closed: 0,
        }
    }

    /// How many pairs there are.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Names that have at least one pair.
    pub(crate) fn names(&self) -> impl Iterator<Item = &Fqdn> {
        self.names.keys()
    }

    pub(crate) fn addresses(&self, name: &Fqdn) -> impl Iterator<Item = IpAddr> {
        self.names
            .get(name)
            .into_iter()
            .flat_map(HashMap::keys)
            .copied()
    }

    /// How much room there is for a pair.
    pub(crate) fn room(&self, name: &Fqdn, address: IpAddr, openness: Openness) -> Room {
        let addresses = self.names.get(name);
        let known = addresses.is_some_and(|all| all.contains_key(&address));
        let of_name = addresses.map_or(0, HashMap::len);
        let is_closed = openness == Openness::Closed;
        let full = of_name >= 2 * self.limits.per_name || is_closed && self.closed >= MAX_CLOSED;
        match known {
            false if full => Room::Full,
            _ if of_name >= self.limits.per_name => Room::Scarce,
            _ => Room::Free,
        }
    }

    /// Whether an object of the store may keep a pair.
    pub(crate) fn may_hold(&self, name: &Fqdn, address: IpAddr, openness: Openness) -> bool {
        let pair = self.names.get(name).and_then(|all| all.get(&address));
        pair.is_some_and(|pair| pair.objects > 0)
            || self.held < self.most && self.room(name, address, openness) != Room::Full
    }

    /// Whether the pair is kept.
    pub(crate) fn has(&self, name: &Fqdn, address: IpAddr) -> bool {
        let addresses = self.names.get(name);
        addresses.is_some_and(|all| all.contains_key(&address))
    }

    /// Takes a pair of an answer, with the ends of the answer and of its lease. The caller has made
    /// sure that there is room.
    pub(crate) fn learn(
        &mut self,
        (name, address): (&Fqdn, IpAddr),
        openness: Openness,
        until: BootTime,
        lease_end: Option<BootTime>,
    ) {
        let pair = self.pair(name, address, openness);
        pair.until = pair.until.max(Some(until));
        pair.lease_end = pair.lease_end.max(lease_end);
        pair.pending = None;
        let queue = !std::mem::replace(&mut pair.is_queued, true);
        let due = pair.due().unwrap_or_default();
        self.pending.remove(&(name.clone(), address));
        if queue {
            self.due.push(Reverse((due, name.clone(), address)));
        }
    }

    /// Notes that an object of the store lists the pair. The caller has made sure that there is
    /// room.
    pub(crate) fn hold(&mut self, name: &Fqdn, address: IpAddr, openness: Openness) {
        let pair = self.pair(name, address, openness);
        pair.objects += 1;
        pair.pending = None;
        let is_first = pair.objects == 1;
        self.held += usize::from(is_first);
        self.pending.remove(&(name.clone(), address));
    }

    /// Ends the answers of a pair: no endpoint holds it, and no lease promises it.
    pub(crate) fn end_answers(&mut self, name: &Fqdn, address: IpAddr, now: BootTime) {
        let pair = self
            .names
            .get_mut(name)
            .and_then(|all| all.get_mut(&address));
        let Some(pair) = pair.filter(|pair| pair.pending.is_none()) else {
            return;
        };
        (pair.until, pair.lease_end) = (None, None);
        pair.is_queued = true;
        self.due.push(Reverse((now, name.clone(), address)));
    }

    /// Notes that an object of the store no longer lists the pair.
    pub(crate) fn release(&mut self, name: &Fqdn, address: IpAddr, now: BootTime) {
        let pair = self
            .names
            .get_mut(name)
            .and_then(|all| all.get_mut(&address));
        let Some(pair) = pair.filter(|pair| pair.objects > 0) else {
            return;
        };
        pair.objects -= 1;
        if pair.objects > 0 {
            return;
        }
        self.held -= 1;
        if !pair.is_queued {
            pair.is_queued = true;
            self.due.push(Reverse((now, name.clone(), address)));
        }
    }

    fn pair(&mut self, name: &Fqdn, address: IpAddr, openness: Openness) -> &mut Resolved {
        let addresses = match self.names.contains_key(name) {
            true => self.names.get_mut(name),
            false => Some(self.names.entry(name.clone()).or_default()),
        };
        let addresses = addresses.expect("the name is there now");
        match addresses.entry(address) {
            Entry::Occupied(pair) => pair.into_mut(),
            Entry::Vacant(vacant) => {
                let is_closed = openness == Openness::Closed;
                self.len += 1;
                self.closed += usize::from(is_closed);
                self.addresses.entry(address).or_default().names += 1;
                vacant.insert(Resolved {
                    is_closed,
                    ..Resolved::default()
                })
            }
        }
    }

    /// The pairs of a name beyond its limit that nothing promises to keep: those that end first.
    pub(crate) fn evict(&mut self, name: &Fqdn, kept: IpAddr, now: BootTime) -> Vec<NamePair> {
        let Some(addresses) = self.names.get(name) else {
            return Vec::new();
        };
        let excess = addresses.len().saturating_sub(self.limits.per_name);
        if excess == 0 {
            return Vec::new();
        }
        let free = addresses.iter().filter(|(address, pair)| {
            **address != kept && pair.objects == 0 && pair.lease_until() <= Some(now)
        });
        let mut free: Vec<_> = free.map(|(address, pair)| (pair.until, *address)).collect();
        free.sort_unstable();
        let gone = free.into_iter().take(excess);
        let gone: Vec<NamePair> = gone.map(|(_, address)| (name.clone(), address)).collect();
        for (name, address) in &gone {
            self.forget(name, *address);
        }
        gone
    }

    /// Has pairs that nothing else keeps wait for the end of their connections. Removes and returns the
    /// pairs that must not wait.
    pub(crate) fn expire(&mut self, now: BootTime) -> Vec<NamePair> {
        let mut gone = Vec::new();
        while let Some(Reverse((at, _, _))) = self.due.peek()
            && *at <= now
        {
            let Some(Reverse((_, name, address))) = self.due.pop() else {
                break;
            };
            let pair = self
                .names
                .get_mut(&name)
                .and_then(|all| all.get_mut(&address));
            let Some(pair) = pair.filter(|pair| pair.is_queued) else {
                continue;
            };
            if let Some(due) = pair.due().filter(|due| *due > now) {
                self.due.push(Reverse((due, name, address)));
                continue;
            }
            pair.is_queued = false;
            if pair.objects > 0 {
                continue;
            }
            pair.pending = Some(now);
            if self.limits.zombies == 0 {
                self.forget(&name, address);
                gone.push((name, address));
            } else {
                self.pending.insert((name, address));
            }
        }
        if self.pending.len() > MAX_PENDING {
            gone.extend(self.forget_unseen());
        }
        gone
    }

    /// Forgets the pairs that only connections could keep, of which the last scan saw none.
    fn forget_unseen(&mut self) -> Vec<NamePair> {
        let is_unseen = |(_, address): &&NamePair| {
            let alive = self.addresses.get(address).and_then(|used| used.alive);
            alive.is_none_or(|alive| alive < self.last_scan)
        };
        let gone: Vec<NamePair> = self.pending.iter().filter(is_unseen).cloned().collect();
        for (name, address) in &gone {
            self.forget(name, *address);
        }
        gone
    }

    /// Notes that conntrack vouches for an address.
    pub(crate) fn mark_alive(&mut self, address: IpAddr, gc_start: BootTime) {
        if let Some(address) = self.addresses.get_mut(&address) {
            let until = gc_start.plus(self.limits.idle_grace);
            address.alive = address.alive.max(Some(until));
        }
    }

    /// Ends a complete conntrack scan. Removes and returns the pairs that no connection uses.
    pub(crate) fn scanned(&mut self, gc_start: BootTime) -> Vec<NamePair> {
        self.last_scan = self.last_scan.max(gc_start);
        let is_unused = |(name, address): &&NamePair| {
            let pair = self.names.get(name).and_then(|all| all.get(address));
            let pending = pair.and_then(|pair| pair.pending);
            let alive = self.addresses.get(address).and_then(|used| used.alive);
            pending.is_some_and(|since| gc_start > since.plus(self.limits.idle_grace))
                && alive.is_none_or(|alive| gc_start > alive)
        };
        let gone: Vec<NamePair> = self.pending.iter().filter(is_unused).cloned().collect();
        for (name, address) in &gone {
            self.forget(name, *address);
        }
        gone
    }

    /// Forgets a pair, whatever keeps it. True if it was there.
    pub(crate) fn forget(&mut self, name: &Fqdn, address: IpAddr) -> bool {
        let Some(addresses) = self.names.get_mut(name) else {
            return false;
        };
        let Some(pair) = addresses.remove(&address) else {
            return false;
        };
        if addresses.is_empty() {
            self.names.remove(name);
        }
        self.len -= 1;
        self.held -= usize::from(pair.objects > 0);
        self.closed -= usize::from(pair.is_closed);
        self.pending.remove(&(name.clone(), address));
        if let Some(used) = self.addresses.get_mut(&address) {
            used.names -= 1;
            if used.names == 0 {
                self.addresses.remove(&address);
            }
        }
        self.compact();
        true
    }

    /// Forgets what answers said of a pair; an object of the store may keep it. True if the pair
    /// was removed.
    pub(crate) fn forget_answers(&mut self, name: &Fqdn, address: IpAddr) -> bool {
        let pair = self
            .names
            .get_mut(name)
            .and_then(|all| all.get_mut(&address));
        let Some(pair) = pair else {
            return false;
        };
        if pair.objects == 0 {
            return self.forget(name, address);
        }
        (pair.until, pair.lease_end) = (None, None);
        false
    }

    /// When the next pair has to be checked; `None` if there is none.
    pub(crate) fn next_deadline(&self) -> Option<BootTime> {
        self.due.peek().map(|Reverse((at, _, _))| *at)
    }

    /// Rebuilds the heap once most of it is about pairs long gone.
    fn compact(&mut self) {
        if self.due.len() < 2 * self.len + 1024 {
            return;
        }
        let all = self.names.iter();
        let all = all
            .flat_map(|(name, all)| all.iter().map(move |(address, pair)| (name, address, pair)));
        let queued = all.filter(|(_, _, pair)| pair.is_queued);
        let due = queued.map(|(name, address, pair)| {
            let at = pair.due().unwrap_or_default();
            Reverse((at, name.clone(), *address))
        });
        self.due = due.collect();
    }
}

impl Resolved {
    fn lease_until(&self) -> Option<BootTime> {
        self.lease_end.map(after_lease)
    }

    /// When its answers and its lease have ended.
    fn due(&self) -> Option<BootTime> {
        self.until.map(after_lease).max(self.lease_until())
    }
}

#[cfg(test)]
mod tests;
