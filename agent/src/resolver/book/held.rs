//! One object, with the answers that came after the object was read.

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
};

use dns_policy::name::Fqdn;

use crate::resolver::{
    dns_name,
    object::{
        AddressStatus, MAX_ADDRESSES, MAX_ADDRESSES_OF_OBJECT, MAX_NAMES, Resolver, Settings,
        Status, UnixTime,
    },
    observe::{Outcome, apply, observe},
};

/// Maximum results of look-ups that wait for the store, for one object. The oldest are dropped.
const MAX_LEARNED: usize = 1000;

/// Maximum answers to pods that change an object in one second. The cost of each grows with the object, and a pod can
/// cause any number of them.
pub(super) const NEWS: u32 = 250;

shared_maps::words! {
    /// Where the addresses of a name come from, as far as this agent knows.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Said {
        /// A look-up by this agent.
        LookUp => "look-up",
        /// An answer that a pod of this node got.
        Pod => "pod",
        /// The store: another agent, or the last run.
        Store => "store",
    }
}

/// The result of looking a name up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Learned {
    pub name: Fqdn,
    pub outcome: Outcome,
    /// Time of the answer or of the failure.
    pub at: UnixTime,
}

/// A DNSNameResolver object, with the answers that the store does not have yet.
#[derive(Debug)]
pub(super) struct Held {
    /// The object as it is in the store.
    pub(super) stored: Resolver,
    /// Whether the object is not in the store yet.
    pub(super) is_local: bool,
    /// Answers that the store does not have yet, in order.
    pub(super) learned: Vec<Learned>,
    /// The object as it will be in the store.
    pub(super) effective: Resolver,
    /// Where the addresses of each name come from.
    pub(super) said: HashMap<Fqdn, Said>,
    /// Addresses that the core has.
    pub(super) sent: Option<BTreeSet<IpAddr>>,
    /// When the first address leaves the object.
    pub(super) expires: Option<UnixTime>,
    pub(super) is_writing: bool,
    pub(super) retry_at: Option<UnixTime>,
    /// The second of the latest answer to a pod, and the number of answers in that second.
    news: (UnixTime, u32),
    /// The current write includes this many of `learned`, from the first on.
    writing: usize,
    /// The object that was written last, and how many of `learned` it includes. Kept until the store sends it.
    written: Option<(Resolver, usize)>,
}

impl Held {
    pub(super) fn new(object: Resolver, is_local: bool) -> Self {
        Self {
            effective: object.clone(),
            stored: object,
            is_local,
            learned: Vec::new(),
            said: HashMap::new(),
            sent: None,
            expires: None,
            is_writing: false,
            retry_at: None,
            news: (UnixTime::default(), 0),
            writing: 0,
            written: None,
        }
    }

    /// Takes the store's object. A new list includes everything that was written before it.
    pub(super) fn applied(&mut self, object: Resolver, is_listed: bool) {
        let is_ours =
            |(written, _): &mut (Resolver, usize)| is_listed || written.version == object.version;
        if let Some((_, count)) = self.written.take_if(is_ours) {
            self.drop_learned(count);
        }
        self.stored = object;
    }

    fn drop_learned(&mut self, count: usize) {
        self.learned.drain(..count.min(self.learned.len()));
        self.writing = self.writing.saturating_sub(count);
    }

    /// The object as it was read or written last, and the answers since.
    pub(super) fn base(&self) -> (&Resolver, &[Learned]) {
        match &self.written {
            Some((written, count)) => (written, self.learned.get(*count..).unwrap_or_default()),
            None => (&self.stored, &self.learned),
        }
    }

    pub(super) fn begin_write(&mut self) -> (Resolver, Vec<Learned>) {
        self.is_writing = true;
        self.writing = self.learned.len();
        let (base, learned) = self.base();
        (base.clone(), learned.to_vec())
    }

    pub(super) fn wrote(&mut self, object: Resolver) {
        if self.stored.version == object.version {
            self.drop_learned(self.writing);
            self.stored = object;
        } else {
            self.written = Some((object, self.writing));
        }
        self.writing = 0;
    }

    /// Whether the object has an address of a name, with a TTL that is not over.
    pub(super) fn has(&self, name: &Fqdn, ip: IpAddr, now: UnixTime) -> bool {
        let status = &self.effective.status;
        // The addresses of the wildcard itself stand for its names.
        let spec = status
            .of(&self.stored.name)
            .filter(|_| status.of(name).is_none());
        let entry = status.of(name).or(spec);
        entry.is_some_and(|entry| {
            let mut addresses = entry.addresses.iter();
            addresses.any(|address| address.ip == ip && address.next() > now)
        })
    }

    /// Counts an answer to a pod that has an address which the object lacks. Returns whether the answer has to be
    /// examined: there is room, and this second had fewer than [`NEWS`] such answers.
    pub(super) fn may_take_news(&mut self, name: &Fqdn, now: UnixTime) -> bool {
        if !self.has_room(name, now) {
            return false;
        }
        if self.news.0 != now {
            self.news = (now, 0);
        }
        self.news.1 += 1;
        self.news.1 <= NEWS
    }

    /// Whether a name may get another address: there is room, or an expired address makes room.
    fn has_room(&self, name: &Fqdn, now: UnixTime) -> bool {
        let status = &self.effective.status;
        let is_over = |address: &AddressStatus| address.next() <= now;
        let Some(entry) = status.of(name) else {
            let mut others = status.names.iter();
            return status.names.len() < MAX_NAMES
                || others.any(|other| {
                    other.name != self.stored.name && other.addresses.iter().all(is_over)
                });
        };
        let count = entry.addresses.len();
        let longest = status.names.iter().map(|other| other.addresses.len()).max();
        let has_more = longest.is_some_and(|longest| count < longest);
        let fits = status.count() < MAX_ADDRESSES_OF_OBJECT || has_more;
        count < MAX_ADDRESSES && fits || entry.addresses.iter().any(is_over)
    }

    /// The status that the object gets by this answer; `None` if nothing changes.
    pub(super) fn learn(
        &mut self,
        learned: Learned,
        said: Said,
        settings: &Settings,
    ) -> Option<Status> {
        let Learned { name, outcome, at } = &learned;
        let spec = &self.stored.name;
        let change = observe(&self.effective.status, spec, name, outcome, *at, settings);
        let status = change.status?;
        self.said.insert(name.clone(), said);
        // Entries that are being written must keep their places.
        let fixed = self
            .writing
            .max(self.written.as_ref().map_or(0, |(_, count)| *count));
        let mut open = self.learned.iter_mut().skip(fixed).rev();
        let before = open.find(|before| before.name == learned.name);
        if before.is_some_and(|before| before.add(&learned)) {
            return Some(status);
        }
        if self.learned.len() >= MAX_LEARNED && fixed == 0 {
            self.learned.remove(0);
        }
        if self.learned.len() < 2 * MAX_LEARNED {
            self.learned.push(learned);
        }
        Some(status)
    }

    /// Forgets the sources of names that the object no longer has.
    pub(super) fn keep_said(&mut self) {
        let names = &self.effective.status;
        self.said.retain(|name, _| names.of(name).is_some());
        for entry in &names.names {
            self.said.entry(entry.name.clone()).or_insert(Said::Store);
        }
    }
}

impl Learned {
    /// Adds later addresses to the earlier ones, if both outcomes have some.
    fn add(&mut self, later: &Self) -> bool {
        let (Outcome::Found(mine), Outcome::Found(theirs)) = (&mut self.outcome, &later.outcome)
        else {
            return false;
        };
        let passed = u32::try_from(later.at.since(self.at)).unwrap_or(u32::MAX);
        for (_, ttl) in mine.iter_mut() {
            *ttl = ttl.saturating_sub(passed).max(1);
        }
        mine.retain(|(ip, _)| !theirs.iter().any(|(other, _)| other == ip));
        mine.extend(theirs.iter().copied());
        mine.truncate(MAX_ADDRESSES);
        self.at = later.at.max(self.at);
        true
    }
}

/// The status of an object after all that was learned, and how many addresses it has no room for.
pub(super) fn fold(object: &Resolver, learned: &[Learned], settings: &Settings) -> (Status, usize) {
    let mut status = object.status.clone();
    let mut left_out = 0;
    for Learned { name, outcome, at } in learned {
        if !dns_name::matches(&object.name, name) {
            continue;
        }
        left_out += apply(&mut status, &object.name, name, outcome, *at, settings);
    }
    (status, left_out)
}
