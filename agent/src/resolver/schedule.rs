//! When names are looked up again, and when their addresses leave the status.

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    net::SocketAddr,
    time::Duration,
};

use dns_policy::name::Fqdn;
use rand::{Rng, seq::IteratorRandom as _};

use super::object::{AddressStatus, GRACE, ObjectKey, Resolver, Settings, Status, UnixTime};

/// Longest wait for the next look-up, and the time after which a name without addresses is looked
/// up again.
pub(crate) const LONGEST: Duration = Duration::from_secs(30 * 60);
/// How many seconds the clocks of nodes may differ.
const SKEW: u32 = 60;
/// Maximum number of DNS servers that one look-up asks, if the name has several addresses.
const FAN_OUT: usize = 5;
/// Maximum number of names that are looked up again. It limits only names that pods looked up under a wildcard: the
/// `spec.name` of each object is always planned.
pub(crate) const MAX_PLANNED: usize = 50_000;

/// The status without the addresses whose grace period is over; `None` if nothing changes. `looked_up` gives the time
/// at which the last look-up of a name ended.
///
/// An address stays until a look-up has ended after the end of the address's TTL. So if the server is silent, the
/// failure is counted before any address is removed. If a node with a wrong clock recorded a look-up in the future, it
/// counts as a look-up of now: otherwise its address would stay until that time.
pub(crate) fn expire(
    status: &Status,
    now: UnixTime,
    looked_up: impl Fn(&Fqdn) -> Option<UnixTime>,
) -> Option<Status> {
    let mut left = status.clone();
    for entry in &mut left.names {
        for address in &mut entry.addresses {
            if address.last > now.plus(SKEW) {
                address.last = now;
            }
        }
        let Some(looked_up) = looked_up(&entry.name) else {
            continue;
        };
        entry.addresses.retain(|address| {
            let next = address.next();
            now.since(next) < GRACE.as_secs() || looked_up < next
        });
    }
    (&left != status).then_some(left)
}

/// When an address leaves the status, if it is not found again.
pub(crate) fn leaves_at(address: &AddressStatus) -> UnixTime {
    UnixTime(address.next().0.saturating_add(GRACE.as_secs()))
}

/// How long to wait for the next look-up. `remaining` is the time until it is due: `None` if no name is planned, zero
/// if the look-up is overdue.
pub(crate) fn wait(remaining: Option<Duration>, settings: &Settings) -> Duration {
    match remaining {
        None => LONGEST,
        Some(Duration::ZERO) => Duration::from_secs(2 * u64::from(settings.min_ttl)),
        Some(remaining) => remaining.min(LONGEST),
    }
}

/// The error for a look-up without a DNS server to ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no servers: no DNS server is trusted or ready; give --dns-server, or see --dns-service")]
pub struct NoServers;

/// The servers that a look-up asks, chosen at random: one server for a name with at most one known address, and up to
/// [`FAN_OUT`] servers for any other name.
pub(crate) fn servers_to_ask(
    known: usize,
    servers: &BTreeSet<SocketAddr>,
    random: &mut impl Rng,
) -> Result<Vec<SocketAddr>, NoServers> {
    let count = if known > 1 { FAN_OUT } else { 1 };
    let chosen = servers.iter().copied().choose_multiple(random, count);
    match chosen.is_empty() {
        true => Err(NoServers),
        false => Ok(chosen),
    }
}

/// How the last look-up of a name ended, as far as the next one depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// A server answered: with addresses, with NXDOMAIN or without addresses.
    Answered,
    /// All servers were silent or failed: the name is looked up again soon.
    Failed,
}

/// Names with the times of their next look-ups.
///
/// Objects take turns: a pod can fill the object of a wildcard with names whose servers are slow, and
/// the names of other objects must not wait for all of these.
#[derive(Debug)]
pub(crate) struct Schedule {
    settings: Settings,
    planned: HashMap<Fqdn, Planned>,
    queue: BTreeSet<(UnixTime, Fqdn)>,
    /// Names of the queue that became due, by object. The keys are those in `turns`.
    due: BTreeMap<ObjectKey, BTreeSet<(UnixTime, Fqdn)>>,
    /// Objects with due names, in the order of their turns.
    turns: VecDeque<ObjectKey>,
    /// The latest time at which due names were taken.
    clock: UnixTime,
    objects: BTreeMap<ObjectKey, BTreeSet<Fqdn>>,
    /// Number of names of each object that are not planned, because there are [`MAX_PLANNED`] already.
    left_out: BTreeMap<ObjectKey, usize>,
}

#[derive(Debug, Default)]
struct Planned {
    /// Objects that have the name, each with the number of its addresses of the name and the time of the next look-up.
    objects: BTreeMap<ObjectKey, (usize, Option<UnixTime>)>,
    /// When the name is looked up next; `None` while it is being looked up.
    due: Option<UnixTime>,
    /// Once the name is due: the object in whose turn the name is looked up.
    turn: Option<ObjectKey>,
    is_asked: bool,
    /// When the last look-up ended.
    last: Option<UnixTime>,
    /// Look-ups in a row at which all servers failed.
    silent: u32,
}

impl Schedule {
    pub(crate) fn new(settings: Settings) -> Self {
        Self {
            settings,
            planned: HashMap::new(),
            queue: BTreeSet::new(),
            due: BTreeMap::new(),
            turns: VecDeque::new(),
            clock: UnixTime::default(),
            objects: BTreeMap::new(),
            left_out: BTreeMap::new(),
        }
    }

    /// Takes a new or changed object.
    pub(crate) fn apply(&mut self, object: &Resolver, now: UnixTime) {
        let mut names = BTreeMap::from([(object.name.clone(), (0, None))]);
        for entry in &object.status.names {
            let next = entry.addresses.iter().map(|address| {
                // A time in the future, from a node with another clock, counts as now.
                let last = address.last.min(now);
                AddressStatus { last, ..*address }.next()
            });
            names.insert(entry.name.clone(), (entry.addresses.len(), next.min()));
        }
        let room = MAX_PLANNED.saturating_sub(self.planned.len());
        let is_new = |name: &Fqdn| !self.planned.contains_key(name) && name != &object.name;
        let new: Vec<Fqdn> = names.keys().filter(|name| is_new(name)).cloned().collect();
        match new.len().saturating_sub(room) {
            0 => self.left_out.remove(&object.key),
            left_out => self.left_out.insert(object.key.clone(), left_out),
        };
        for name in new.into_iter().skip(room) {
            names.remove(&name);
        }
        let now_of = names.keys().cloned().collect();
        let before = self.objects.insert(object.key.clone(), now_of);
        for gone in before.unwrap_or_default() {
            if !names.contains_key(&gone) {
                self.forget(&gone, &object.key);
            }
        }
        for (name, known) in names {
            let planned = self.planned.entry(name.clone()).or_default();
            planned.objects.insert(object.key.clone(), known);
            self.plan(&name, now);
        }
    }

    /// Removes an object. Its names are forgotten unless another object has them.
    pub(crate) fn remove(&mut self, key: &ObjectKey) {
        self.left_out.remove(key);
        for name in self.objects.remove(key).unwrap_or_default() {
            self.forget(&name, key);
        }
    }

    fn forget(&mut self, name: &Fqdn, key: &ObjectKey) {
        let Some(planned) = self.planned.get_mut(name) else {
            return;
        };
        planned.objects.remove(key);
        if planned.objects.is_empty()
            && let Some(planned) = self.planned.remove(name)
            && let Some(due) = planned.due
        {
            self.dequeue(name, due, planned.turn.as_ref());
        }
    }

    fn dequeue(&mut self, name: &Fqdn, due: UnixTime, turn: Option<&ObjectKey>) {
        let of_object = turn.and_then(|key| self.due.get_mut(key));
        let queue = of_object.unwrap_or(&mut self.queue);
        queue.remove(&(due, name.clone()));
    }

    fn plan(&mut self, name: &Fqdn, now: UnixTime) {
        let Some(planned) = self.planned.get_mut(name) else {
            return;
        };
        if planned.is_asked {
            return;
        }
        let due = planned.due(&self.settings, now);
        let turn = planned.turn.take();
        if let Some(before) = planned.due.replace(due) {
            self.dequeue(name, before, turn.as_ref());
        }
        self.queue.insert((due, name.clone()));
    }

    /// Takes the names that are due, `most` at most: they are not due again until
    /// [`Self::ended`].
    pub(crate) fn take_due(&mut self, now: UnixTime, most: usize) -> Vec<(Fqdn, usize)> {
        self.follow_clock(now);
        self.give_turns(now);
        let mut taken = Vec::new();
        while taken.len() < most
            && let Some(key) = self.turns.pop_front()
        {
            let Some(mut names) = self.due.remove(&key) else {
                continue;
            };
            let Some((_, name)) = names.pop_first() else {
                continue;
            };
            if !names.is_empty() {
                self.due.insert(key.clone(), names);
                self.turns.push_back(key);
            }
            let planned = self.planned.get_mut(&name);
            taken.push((name, planned.map_or(0, Planned::ask)));
        }
        taken
    }

    /// Names that became due wait for the turn of their object. A name of several objects waits for the turn of the
    /// object with the fewest names.
    fn give_turns(&mut self, now: UnixTime) {
        while let Some((at, name)) = self.queue.pop_first() {
            if at > now {
                self.queue.insert((at, name));
                break;
            }
            let Some(planned) = self.planned.get_mut(&name) else {
                continue;
            };
            let keys = planned.objects.keys();
            let names_of = |key: &&ObjectKey| self.objects.get(*key).map_or(0, BTreeSet::len);
            let Some(key) = keys.min_by_key(names_of).cloned() else {
                continue;
            };
            planned.turn = Some(key.clone());
            if !self.due.contains_key(&key) {
                self.turns.push_back(key.clone());
            }
            self.due.entry(key).or_default().insert((at, name));
        }
    }

    /// Sets the times of look-ups back if the clock was set back. Otherwise names would wait until the clock shows its
    /// former time again.
    fn follow_clock(&mut self, now: UnixTime) {
        let back = self.clock.since(now.plus(SKEW));
        self.clock = if back > 0 { now } else { self.clock.max(now) };
        if back == 0 {
            return;
        }
        let back = back + u64::from(SKEW);
        let earlier = |time: &mut UnixTime| time.0 = time.0.saturating_sub(back);
        for planned in self.planned.values_mut() {
            planned.last.iter_mut().for_each(earlier);
            let next = planned.objects.values_mut();
            next.filter_map(|(_, next)| next.as_mut()).for_each(earlier);
        }
        let names: Vec<Fqdn> = self.planned.keys().cloned().collect();
        for name in names {
            self.plan(&name, now);
        }
    }

    /// Notes that the look-up of a taken name ended.
    pub(crate) fn ended(&mut self, name: &Fqdn, ended: Ended, now: UnixTime) {
        let Some(planned) = self.planned.get_mut(name) else {
            return;
        };
        planned.is_asked = false;
        planned.last = Some(now);
        planned.silent = match ended {
            Ended::Answered => 0,
            Ended::Failed => planned.silent.saturating_add(1),
        };
        self.plan(name, now);
    }

    /// Notes that a taken name could not be looked up: the name is tried again after
    /// [`Settings::min_ttl`].
    pub(crate) fn not_asked(&mut self, name: &Fqdn, now: UnixTime) {
        let Some(planned) = self.planned.get_mut(name) else {
            return;
        };
        planned.is_asked = false;
        let due = now.plus(self.settings.min_ttl);
        planned.due = Some(due);
        self.queue.insert((due, name.clone()));
    }

    /// The name that is looked up next, and when.
    pub(crate) fn next(&self) -> Option<(UnixTime, &Fqdn)> {
        let due = self.turns.iter().filter_map(|key| self.due.get(key));
        let mut due = due.filter_map(BTreeSet::first);
        let next = due.next().or_else(|| self.queue.first());
        next.map(|(at, name)| (*at, name))
    }

    /// When a name is looked up next, if it is planned and is not being looked up now.
    pub(crate) fn next_of(&self, name: &Fqdn) -> Option<UnixTime> {
        self.planned.get(name).and_then(|planned| planned.due)
    }

    /// When the last look-up of a name ended.
    pub(crate) fn looked_up(&self, name: &Fqdn) -> Option<UnixTime> {
        self.planned.get(name).and_then(|planned| planned.last)
    }

    /// Known addresses of a planned name.
    #[cfg(test)]
    pub(super) fn addresses_of(&self, name: &Fqdn) -> Option<usize> {
        self.planned.get(name).map(Planned::addresses)
    }

    /// Whether no name is planned.
    pub(crate) fn is_empty(&self) -> bool {
        self.planned.is_empty()
    }

    /// Number of names that are not planned because there are [`MAX_PLANNED`] already.
    pub(crate) fn left_out(&self) -> usize {
        self.left_out.values().sum()
    }
}

impl Planned {
    fn ask(&mut self) -> usize {
        self.is_asked = true;
        (self.due, self.turn) = (None, None);
        self.addresses()
    }

    fn addresses(&self) -> usize {
        let counts = self.objects.values().map(|(count, _)| *count);
        counts.max().unwrap_or(0)
    }

    fn due(&self, settings: &Settings, now: UnixTime) -> UnixTime {
        let longest = u32::try_from(LONGEST.as_secs()).unwrap_or(u32::MAX);
        let next = self.objects.values().filter_map(|(_, next)| *next).min();
        let Some(last) = self.last else {
            return next.unwrap_or(now);
        };
        match next {
            // A status that could not be written, or small TTLs, must not cause a loop.
            Some(next) => next.max(last.plus(settings.min_ttl)),
            None if self.silent > 0 => {
                let doubled = 1_u32 << (self.silent - 1).min(16);
                last.plus(settings.min_ttl.saturating_mul(doubled).min(longest))
            }
            None => last.plus(longest),
        }
    }
}
