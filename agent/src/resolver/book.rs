//! The objects as the resolver sees them: the store's objects, with answers that are not written
//! yet.

mod held;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
};

use agent_core::source_event::SourceEvent;
use dns_policy::name::Fqdn;

use self::held::{Held, fold};
pub use self::held::{Learned, Said};
use super::{
    Observation, ResolvedName, WantedNames, dns_name,
    names::{self, Plan},
    object::{AddressFilter, ObjectKey, Resolver, Settings, Status, UnixTime, Version},
    observe::Outcome,
    schedule::{self, Ended, Schedule},
    store::Changes,
};

/// Seconds until an object is written again: a pod that looks up a new name each time must not cause writes
/// without a pause.
pub const PAUSE: u32 = 1;
/// Seconds until a write is tried again because the object was not in the store.
const AGAIN: u32 = 5;
/// Longest wait for a write, in seconds. If the time of a write is further away than this, the clock was set back after
/// that time was chosen, so the time does not count.
const LONGEST_PAUSE: u32 = 120;

/// What an answer to a pod changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// An object has the answer now.
    Added,
    /// The objects of the name have its addresses already.
    Known,
    /// The objects of the name have no room for the answer, or got too many answers in this second.
    LeftOut,
    /// No object is about the name.
    Unmatched,
}

/// The new status of an object, to be written.
#[derive(Clone, Debug)]
pub struct Write {
    pub key: ObjectKey,
    /// The object as it was read or written last.
    pub base: Resolver,
    /// Answers that came after `base`, in their order.
    pub learned: Vec<Learned>,
    /// When the names of the object were last looked up: addresses after their grace period are
    /// removed. `None` if this agent removes none.
    pub looked_up: Option<HashMap<Fqdn, UnixTime>>,
}

impl Write {
    /// The status that `object` gets, and how many addresses it has no room for.
    pub fn status(&self, object: &Resolver, now: UnixTime, settings: &Settings) -> (Status, usize) {
        let (status, left_out) = fold(object, &self.learned, settings);
        let status = match &self.looked_up {
            Some(at) => {
                schedule::expire(&status, now, |name| at.get(name).copied()).unwrap_or(status)
            }
            None => status,
        };
        (status, left_out)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Written {
    /// The store has this object.
    Done(Resolver),
    /// The object is not in the store.
    Gone,
    /// The write did not succeed; it is tried again after this many seconds.
    Failed(u32),
}

/// All DNSNameResolver objects, with the answers that are not written yet.
#[derive(Debug)]
pub(crate) struct Book {
    settings: Settings,
    filter: AddressFilter,
    namespace: String,
    objects: BTreeMap<ObjectKey, Held>,
    by_name: HashMap<Fqdn, BTreeSet<ObjectKey>>,
    schedule: Schedule,
    /// When objects have addresses to remove.
    expiries: BTreeSet<(UnixTime, ObjectKey)>,
    /// Objects with something to write.
    unwritten: BTreeSet<ObjectKey>,
    /// Objects of the list that is being read.
    listed: Option<BTreeSet<ObjectKey>>,
    resolved: Vec<SourceEvent<ResolvedName>>,
    /// Whether this agent removes addresses and looks names up.
    leads: bool,
}

impl Book {
    pub(crate) fn new(settings: Settings, filter: AddressFilter, namespace: &str) -> Self {
        Self {
            settings,
            filter,
            namespace: namespace.to_owned(),
            objects: BTreeMap::new(),
            by_name: HashMap::new(),
            schedule: Schedule::new(settings),
            expiries: BTreeSet::new(),
            unwritten: BTreeSet::new(),
            listed: None,
            resolved: Vec::new(),
            leads: false,
        }
    }

    /// Whether this agent looks names up and removes addresses.
    pub(crate) fn set_leads(&mut self, leads: bool) {
        self.leads = leads;
    }

    pub(crate) fn schedule(&mut self) -> &mut Schedule {
        &mut self.schedule
    }

    /// The objects with the answers that are not written yet, and where the addresses of each name come from.
    pub(crate) fn objects(
        &self,
    ) -> impl Iterator<Item = (&ObjectKey, &Resolver, &HashMap<Fqdn, Said>)> {
        let objects = self.objects.iter();
        objects.map(|(key, held)| (key, &held.effective, &held.said))
    }

    /// When a name is looked up next.
    pub(crate) fn next_of(&self, name: &Fqdn) -> Option<UnixTime> {
        self.schedule.next_of(name)
    }

    /// The schedule of the names that are looked up.
    pub(crate) fn planned(&self) -> &Schedule {
        &self.schedule
    }

    /// Objects with something to write.
    pub(crate) fn unwritten(&self) -> usize {
        self.unwritten.len()
    }

    /// Takes the addresses that the core does not know yet.
    pub(crate) fn take_resolved(&mut self) -> Vec<SourceEvent<ResolvedName>> {
        std::mem::take(&mut self.resolved)
    }

    /// Whether the changes add, remove or rename objects.
    pub(crate) fn has_others(&self, changes: &Changes) -> bool {
        changes.iter().any(|change| match change {
            SourceEvent::Apply(object) => {
                let held = self.objects.get(&object.key);
                held.is_none_or(|held| held.is_local || held.stored.name != object.name)
            }
            SourceEvent::Init => false,
            SourceEvent::InitDone | SourceEvent::Delete(_) => true,
        })
    }

    /// Applies changes that the store reported.
    pub(crate) fn changed(&mut self, changes: Changes, now: UnixTime) {
        for change in changes {
            match change {
                SourceEvent::Init => {
                    self.listed = Some(BTreeSet::new());
                    self.resolved.push(SourceEvent::Init);
                }
                SourceEvent::Apply(object) => {
                    let key = object.key.clone();
                    if let Some(listed) = &mut self.listed {
                        listed.insert(key.clone());
                        self.applied(object, true);
                        // The core gets every object of a list.
                        self.refresh(&key, now, true);
                    } else {
                        self.applied(object, false);
                        self.refresh(&key, now, false);
                    }
                }
                SourceEvent::InitDone => {
                    let listed = self.listed.take().unwrap_or_default();
                    let known = self.objects.iter();
                    let is_gone = |(key, held): &(&ObjectKey, &Held)| {
                        !held.is_local && !listed.contains(*key)
                    };
                    let gone: Vec<_> = known.filter(is_gone).map(|(key, _)| key.clone()).collect();
                    for key in gone {
                        self.forget(&key);
                    }
                    let local = self.objects.iter().filter(|(_, held)| held.is_local);
                    let local: Vec<_> = local.map(|(key, _)| key.clone()).collect();
                    for key in local {
                        self.refresh(&key, now, true);
                    }
                    self.resolved.push(SourceEvent::InitDone);
                }
                SourceEvent::Delete(key) => {
                    let (namespace, name) = key.split_once('/').unwrap_or_default();
                    let key = ObjectKey {
                        namespace: namespace.to_owned(),
                        name: name.to_owned(),
                    };
                    if self.objects.contains_key(&key) {
                        self.forget(&key);
                        self.resolved.push(SourceEvent::Delete(key.to_string()));
                    }
                }
            }
        }
    }

    fn applied(&mut self, object: Resolver, is_listed: bool) {
        let key = object.key.clone();
        let Some(held) = self.objects.get_mut(&key) else {
            self.insert(object, false);
            return;
        };
        if held.stored.name != object.name {
            // The store has a new object under the same key.
            self.forget(&key);
            self.insert(object, false);
            return;
        }
        held.is_local = false;
        held.applied(object, is_listed);
    }

    fn insert(&mut self, object: Resolver, is_local: bool) {
        let key = object.key.clone();
        let keys = self.by_name.entry(object.name.clone()).or_default();
        keys.insert(key.clone());
        self.objects.insert(key, Held::new(object, is_local));
    }

    fn forget(&mut self, key: &ObjectKey) {
        let Some(held) = self.objects.remove(key) else {
            return;
        };
        if let Some(keys) = self.by_name.get_mut(&held.stored.name) {
            keys.remove(key);
            if keys.is_empty() {
                self.by_name.remove(&held.stored.name);
            }
        }
        if let Some(at) = held.expires {
            self.expiries.remove(&(at, key.clone()));
        }
        self.unwritten.remove(key);
        self.schedule.remove(key);
    }

    /// Computes the status that an object has now. The core gets the object if its addresses changed, or if `always` is
    /// set.
    fn refresh(&mut self, key: &ObjectKey, now: UnixTime, always: bool) {
        if let Some(held) = self.objects.get(key) {
            let (base, learned) = held.base();
            let (status, _) = fold(base, learned, &self.settings);
            self.settle(key, status, now, always);
        }
    }

    /// Checks whether an object loses addresses, because time passed or a look-up ended.
    fn revisit(&mut self, key: &ObjectKey, now: UnixTime) {
        if let Some(held) = self.objects.get(key) {
            let status = held.effective.status.clone();
            self.settle(key, status, now, false);
        }
    }

    /// Records the new status of an object. The caller has computed it: computing it here from all answers would be
    /// too slow for each answer to a pod.
    fn settle(&mut self, key: &ObjectKey, mut status: Status, now: UnixTime, always: bool) {
        let Some(held) = self.objects.get_mut(key) else {
            return;
        };
        let (base, _) = held.base();
        if self.leads {
            let schedule = &self.schedule;
            let looked_up = |name: &Fqdn| schedule.looked_up(name);
            status = schedule::expire(&status, now, looked_up).unwrap_or(status);
        }
        let needs_write = status != base.status && !held.is_local;
        held.effective = Resolver {
            status,
            ..held.stored.clone()
        };
        held.keep_said();
        match needs_write {
            true => self.unwritten.insert(key.clone()),
            false => self.unwritten.remove(key),
        };
        let addresses = held.effective.status.names.iter();
        let addresses = addresses.flat_map(|entry| &entry.addresses);
        let first = addresses.map(schedule::leaves_at).min();
        if let Some(before) = std::mem::replace(&mut held.expires, first) {
            self.expiries.remove(&(before, key.clone()));
        }
        if let Some(first) = first {
            self.expiries.insert((first, key.clone()));
        }
        self.schedule.apply(&held.effective, now);
        let addresses = held.effective.addresses(&self.filter);
        if always || held.sent.as_ref() != Some(&addresses) {
            held.sent = Some(addresses.clone());
            self.resolved.push(SourceEvent::Apply(ResolvedName {
                key: key.to_string(),
                name: held.stored.name.clone(),
                addresses,
            }));
        }
    }

    /// The objects about a name: its own object, and the object of its wildcard.
    fn about(&self, name: &Fqdn) -> Vec<ObjectKey> {
        let wildcard = Fqdn::normalise(&dns_name::wildcard_of(name.as_str()));
        let own = self.by_name.get(name).into_iter();
        let of_wildcard = self.by_name.get(&wildcard).filter(|_| wildcard != *name);
        own.chain(of_wildcard).flatten().cloned().collect()
    }

    /// Takes an answer that a pod got. The answer counts if the object lacks one of the answer's addresses, or if the
    /// TTL of one of them is over. The agent's own look-ups renew the TTLs of the other addresses.
    pub(crate) fn observed(&mut self, observation: &Observation, now: UnixTime) -> Taken {
        let name = &observation.name;
        let about = self.about(name);
        if about.is_empty() {
            return Taken::Unmatched;
        }
        let ttl = u32::try_from(observation.ttl.as_secs()).unwrap_or(u32::MAX);
        let addresses = observation.addresses.iter();
        let records: Vec<(IpAddr, u32)> = addresses.map(|ip| (*ip, ttl)).collect();
        let at = UnixTime::from(observation.at).min(now);
        let mut taken = Taken::Known;
        for key in about {
            let Some(held) = self.objects.get(&key) else {
                continue;
            };
            let is_news = records.iter().any(|(ip, _)| !held.has(name, *ip, now));
            let learned = Learned {
                name: name.clone(),
                outcome: Outcome::Found(records.clone()),
                at,
            };
            if !is_news {
                continue;
            }
            let held = self.objects.get_mut(&key);
            if !held.is_some_and(|held| held.may_take_news(name, now)) {
                if taken == Taken::Known {
                    taken = Taken::LeftOut;
                }
            } else if self.learn(&key, learned, Said::Pod, now) {
                taken = Taken::Added;
            }
        }
        taken
    }

    /// Takes the result of a look-up that was due.
    pub(crate) fn looked_up(&mut self, name: &Fqdn, outcome: &Outcome, now: UnixTime) {
        let ended = match outcome {
            Outcome::Found(_) | Outcome::NoData => Ended::Answered,
            Outcome::Failed(failure) if failure.is_final() => Ended::Answered,
            Outcome::Failed(_) => Ended::Failed,
        };
        self.schedule.ended(name, ended, now);
        self.asked_by_hand(name, outcome, now);
        for key in self.about(name) {
            self.revisit(&key, now);
        }
    }

    /// Notes that a due name could not be looked up. The name is tried again soon.
    pub(crate) fn not_asked(&mut self, name: &Fqdn, now: UnixTime) {
        self.schedule.not_asked(name, now);
    }

    /// Adds the result of a look-up by command to the objects, and changes no due time. For a look-up that was due,
    /// call [`Self::looked_up`].
    pub(crate) fn asked_by_hand(&mut self, name: &Fqdn, outcome: &Outcome, now: UnixTime) {
        for key in self.about(name) {
            let learned = Learned {
                name: name.clone(),
                outcome: outcome.clone(),
                at: now,
            };
            self.learn(&key, learned, Said::LookUp, now);
        }
    }

    /// Adds an answer to an object. Returns whether the object has something new.
    fn learn(&mut self, key: &ObjectKey, learned: Learned, said: Said, now: UnixTime) -> bool {
        let Some(held) = self.objects.get_mut(key) else {
            return false;
        };
        let Some(status) = held.learn(learned, said, &self.settings) else {
            return false;
        };
        self.settle(key, status, now, false);
        true
    }

    /// Compares the objects with the wanted names. An object that has to be made counts as existing from now on, so its
    /// name is looked up even if the store refuses the object. While some documents are unread, the plan removes no
    /// stored object, because an unread document may use its name.
    pub(crate) fn plan(&mut self, wanted: &WantedNames, now: UnixTime) -> Plan {
        let stored = self.objects.iter().filter(|(_, held)| !held.is_local);
        let stored = stored.map(|(key, held)| (key.clone(), held.stored.name.clone()));
        let mut plan = names::plan(&wanted.names, &stored.collect(), &self.namespace);
        if !wanted.is_complete {
            plan.delete.clear();
        }
        let is_made = |key: &ObjectKey| plan.create.iter().any(|(made, _)| made == key);
        let local = self.objects.iter().filter(|(_, held)| held.is_local);
        let local: Vec<_> = local.map(|(key, _)| key.clone()).collect();
        for key in local {
            if !is_made(&key) {
                self.forget(&key);
                self.resolved.push(SourceEvent::Delete(key.to_string()));
            }
        }
        for (key, name) in &plan.create {
            if !self.objects.contains_key(key) {
                let object = Resolver {
                    key: key.clone(),
                    version: Version::default(),
                    name: name.clone(),
                    status: Status::default(),
                };
                self.insert(object, true);
                self.refresh(key, now, false);
            }
        }
        plan
    }

    /// Looks at the objects with addresses whose grace period is over.
    pub(crate) fn expire(&mut self, now: UnixTime) {
        while let Some((at, key)) = self.expiries.first().cloned()
            && at <= now
        {
            self.revisit(&key, now);
            // If the name is being looked up, the address stays until the look-up has ended.
            let again = self.objects.get_mut(&key).map(|held| &mut held.expires);
            if let Some(expires) = again
                && *expires == Some(at)
            {
                self.expiries.remove(&(at, key.clone()));
                let later = now.plus(1);
                *expires = Some(later);
                self.expiries.insert((later, key));
            }
        }
    }

    /// The next time at which [`Self::expire`] has something to do.
    pub(crate) fn expires(&self) -> Option<UnixTime> {
        self.expiries.first().map(|(at, _)| *at)
    }

    /// Takes objects to write, `most` at most.
    pub(crate) fn take_writes(&mut self, now: UnixTime, most: usize) -> Vec<Write> {
        let is_ready = |key: &&ObjectKey| {
            let held = self.objects.get(*key);
            let waits = |at: UnixTime| at > now && at <= now.plus(LONGEST_PAUSE);
            held.is_some_and(|held| !held.is_writing && !held.retry_at.is_some_and(waits))
        };
        let keys: Vec<_> = self
            .unwritten
            .iter()
            .filter(is_ready)
            .take(most)
            .cloned()
            .collect();
        let mut writes = Vec::new();
        for key in keys {
            let Some(held) = self.objects.get_mut(&key) else {
                continue;
            };
            let names = held.effective.status.names.iter();
            let at = |name: &Fqdn| Some((name.clone(), self.schedule.looked_up(name)?));
            let looked_up = names.filter_map(|entry| at(&entry.name)).collect();
            let (base, learned) = held.begin_write();
            writes.push(Write {
                base,
                learned,
                looked_up: self.leads.then_some(looked_up),
                key,
            });
        }
        writes
    }

    /// When a write that failed is tried again.
    pub(crate) fn retries(&self) -> Option<UnixTime> {
        let unwritten = self.unwritten.iter();
        let held = unwritten.filter_map(|key| self.objects.get(key));
        held.filter(|held| !held.is_writing)
            .map(|held| held.retry_at.unwrap_or_default())
            .min()
    }

    /// Applies the result of a write; answers that came meanwhile remain to be written.
    pub(crate) fn wrote(&mut self, key: &ObjectKey, written: Written, now: UnixTime) {
        let Some(held) = self.objects.get_mut(key) else {
            return;
        };
        held.is_writing = false;
        held.retry_at = None;
        match written {
            Written::Done(object) => {
                held.wrote(object);
                held.retry_at = Some(now.plus(PAUSE));
            }
            // The watch will report that the object is gone.
            Written::Gone => held.retry_at = Some(now.plus(AGAIN)),
            Written::Failed(after) => held.retry_at = Some(now.plus(after)),
        }
        self.refresh(key, now, false);
    }
}
