//! Results of look-ups become the status of an object.

use std::net::IpAddr;

use dns_policy::name::Fqdn;

use super::{
    dns_name,
    object::{
        AddressStatus, Degraded, MAX_ADDRESSES, MAX_ADDRESSES_OF_OBJECT, MAX_NAMES, NameStatus,
        Settings, Status, UnixTime,
    },
};

/// Result of looking a name up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Its addresses, each with its TTL in seconds.
    Found(Vec<(IpAddr, u32)>),
    /// The name exists and has no address of the type that was asked for.
    NoData,
    /// There is no usable answer.
    Failed(Failure),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The answer has this code, which is not 0.
    Code(u8),
    /// No server answered in time, or no server can be reached.
    Silent,
}

impl Failure {
    /// The code; a silent server counts as SERVFAIL.
    fn code(self) -> u8 {
        match self {
            Self::Code(code) => code,
            Self::Silent => 2,
        }
    }

    /// Whether the name does not exist: looking it up again soon is useless.
    pub fn is_final(self) -> bool {
        self.code() == 3
    }

    /// Reason and message of the condition `Degraded`.
    pub fn words(self) -> (String, String) {
        let (reason, message) = match self.code() {
            1 => ("FORMERR", "Format Error"),
            2 => ("SERVFAIL", "Server Failure"),
            3 => ("NXDOMAIN", "Non-Existent Domain"),
            4 => ("NOTIMP", "Not Implemented"),
            5 => ("REFUSED", "Query Refused"),
            6 => ("YXDOMAIN", "Name Exists when it should not"),
            7 => ("YXRRSET", "RR Set Exists when it should not"),
            8 => ("NXRRSET", "RR Set that should exist does not"),
            9 => ("NOTAUTH", "Server Not Authoritative for zone"),
            10 => ("NOTZONE", "Name not contained in zone"),
            code => return (format!("RCODE{code}"), "Unknown".to_owned()),
        };
        (reason.to_owned(), message.to_owned())
    }
}

/// What a look-up changes in an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// The new status; `None` if it stays as it is.
    pub status: Option<Status>,
    /// Addresses that the object has no room for.
    pub left_out: usize,
}

/// The status of the object of `spec` after `name` was looked up. Nothing changes if the object is
/// not about that name. A TTL of 0, or above 31 bits (RFC 2181, 8), counts as [`Settings::min_ttl`].
pub fn observe(
    status: &Status,
    spec: &Fqdn,
    name: &Fqdn,
    outcome: &Outcome,
    now: UnixTime,
    settings: &Settings,
) -> Change {
    let mut next = status.clone();
    let left_out = apply(&mut next, spec, name, outcome, now, settings);
    Change {
        left_out,
        status: (&next != status).then_some(next),
    }
}

/// Like [`observe`], in place: a status may have thousands of addresses. Returns how many addresses the
/// object has no room for.
pub fn apply(
    status: &mut Status,
    spec: &Fqdn,
    name: &Fqdn,
    outcome: &Outcome,
    now: UnixTime,
    settings: &Settings,
) -> usize {
    // Because of the schema in the CRD, one name such as _a.example.com would make the whole status invalid.
    let is_wanted = dns_name::matches(spec, name) && dns_name::parse(name.as_str()).is_ok();
    let mut next = Next {
        status,
        spec,
        now,
        settings,
        left_out: 0,
    };
    match outcome {
        _ if !is_wanted => {}
        Outcome::NoData => {}
        Outcome::Found(records) if records.is_empty() => {}
        Outcome::Found(records) => next.found(name, records),
        Outcome::Failed(failure) => next.failed(name, *failure),
    }
    next.left_out
}

/// Whether an address that gets this TTL now would be looked up next at the same time as `existing`, within the
/// tolerance.
pub(crate) fn is_same_next(
    existing: &AddressStatus,
    ttl: u32,
    now: UnixTime,
    tolerance: u32,
) -> bool {
    let found = AddressStatus {
        ttl,
        last: now,
        ..*existing
    };
    existing.next().0.abs_diff(found.next().0) <= tolerance.into()
}

struct Next<'a> {
    status: &'a mut Status,
    spec: &'a Fqdn,
    now: UnixTime,
    settings: &'a Settings,
    left_out: usize,
}

impl Next<'_> {
    fn found(&mut self, name: &Fqdn, records: &[(IpAddr, u32)]) {
        let ttl = |ttl: u32| match i32::try_from(ttl) {
            Ok(1..) => ttl,
            _ => self.settings.min_ttl,
        };
        let records: Vec<_> = records.iter().map(|(ip, t)| (*ip, ttl(*t))).collect();
        let Some(at) = self.entry(name, &records) else {
            return;
        };
        let (now, tolerance) = (self.now, self.settings.tolerance);
        let entry = &mut self.status.names[at];
        for (ip, ttl) in records {
            match entry.addresses.iter_mut().find(|known| known.ip == ip) {
                // An expired address is always renewed: otherwise it would leave the status although it was found
                // again.
                Some(known) if known.next() > now && is_same_next(known, ttl, now, tolerance) => {}
                Some(known) => (known.ttl, known.last) = (ttl, now),
                None => entry.addresses.push(AddressStatus { ip, ttl, last: now }),
            }
        }
        entry.failures = 0;
        let words = ("NOERROR".to_owned(), "No Error".to_owned());
        set_degraded(entry, false, words, now);
        if name == self.spec && dns_name::is_wildcard(name.as_str()) {
            self.drop_covered();
        }
        self.fit();
    }

    /// Index of the entry of a name that was found, made if it is needed and if there is room.
    fn entry(&mut self, name: &Fqdn, records: &[(IpAddr, u32)]) -> Option<usize> {
        let names = &self.status.names;
        if let Some(at) = names.iter().position(|entry| &entry.name == name) {
            return Some(at);
        }
        let wildcard = self.status.of(self.spec).filter(|_| name != self.spec);
        if wildcard.is_some_and(|wildcard| self.covers_records(wildcard, records)) {
            return None;
        }
        if names.len() >= MAX_NAMES {
            let is_over = |entry: &NameStatus| {
                let mut addresses = entry.addresses.iter();
                &entry.name != self.spec && addresses.all(|address| address.next() <= self.now)
            };
            let Some(over) = names.iter().position(is_over) else {
                self.left_out += records.len();
                return None;
            };
            self.status.names.remove(over);
        }
        let entry = NameStatus {
            name: name.clone(),
            addresses: Vec::new(),
            failures: 0,
            degraded: None,
        };
        let at = match name == self.spec {
            true => 0,
            false => self.status.names.len(),
        };
        self.status.names.insert(at, entry);
        Some(at)
    }

    fn covers_records(&self, wildcard: &NameStatus, records: &[(IpAddr, u32)]) -> bool {
        records.iter().all(|(ip, ttl)| {
            let known = wildcard.addresses.iter().find(|known| known.ip == *ip);
            known.is_some_and(|known| is_same_next(known, *ttl, self.now, self.settings.tolerance))
        })
    }

    /// Drops each name whose addresses the wildcard has too, if their next look-ups are at the same times.
    fn drop_covered(&mut self) {
        let tolerance = u64::from(self.settings.tolerance);
        let Some((wildcard, rest)) = self.status.names.split_first() else {
            return;
        };
        let is_covered = |entry: &NameStatus| {
            !entry.addresses.is_empty()
                && entry.addresses.iter().all(|address| {
                    let mut theirs = wildcard.addresses.iter();
                    theirs.any(|known| {
                        known.ip == address.ip
                            && known.next().0.abs_diff(address.next().0) <= tolerance
                    })
                })
        };
        let covered: Vec<Fqdn> = rest
            .iter()
            .filter(|entry| is_covered(entry))
            .map(|entry| entry.name.clone())
            .collect();
        self.status
            .names
            .retain(|entry| !covered.contains(&entry.name));
    }

    fn failed(&mut self, name: &Fqdn, failure: Failure) {
        let (now, settings) = (self.now, self.settings);
        let names = &mut self.status.names;
        let Some(at) = names.iter().position(|entry| &entry.name == name) else {
            return;
        };
        let entry = &mut names[at];
        let is_over = entry.addresses.iter().all(|address| address.next() <= now);
        if entry.failures >= settings.failure_threshold && is_over {
            names.remove(at);
            return;
        }
        for address in &mut entry.addresses {
            if address.next() <= now.plus(settings.tolerance) {
                (address.ttl, address.last) = (settings.min_ttl, now);
            }
        }
        entry.failures = entry.failures.saturating_add(1);
        set_degraded(entry, true, failure.words(), now);
    }

    /// Leaves addresses out until the object keeps its limits. The names with the most addresses lose addresses first.
    /// Of one name, the expired addresses are left out first.
    fn fit(&mut self) {
        let names = &mut self.status.names;
        let most = names.iter().map(|entry| entry.addresses.len()).max();
        let kept = |limit: usize| -> usize {
            let lengths = names.iter().map(|entry| entry.addresses.len());
            lengths.map(|length| length.min(limit)).sum()
        };
        let total = kept(usize::MAX);
        if total <= MAX_ADDRESSES_OF_OBJECT && most.unwrap_or(0) <= MAX_ADDRESSES {
            return;
        }
        let limits: Vec<usize> = (1..=MAX_ADDRESSES).collect();
        let fitting = limits.partition_point(|limit| kept(*limit) <= MAX_ADDRESSES_OF_OBJECT);
        let now = self.now;
        for entry in names.iter_mut() {
            // The sort is stable: the order in which addresses came stays.
            if entry.addresses.len() > fitting {
                entry.addresses.sort_by_key(|address| address.next() <= now);
                entry.addresses.truncate(fitting);
            }
        }
        let left: usize = names.iter().map(|entry| entry.addresses.len()).sum();
        self.left_out += total.saturating_sub(left);
    }
}

fn set_degraded(
    entry: &mut NameStatus,
    is_degraded: bool,
    (reason, message): (String, String),
    now: UnixTime,
) {
    let before = entry.degraded.take();
    let since = before
        .filter(|before| before.is_degraded == is_degraded)
        .map_or(now, |before| before.since);
    entry.degraded = Some(Degraded {
        is_degraded,
        reason,
        message,
        since,
    });
}
