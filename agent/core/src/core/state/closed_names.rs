//! Names that were cleaned, and addresses that no answer may label: neither may open.
//!
//! Owns the cleanings, the mark that their file is out of date, and the latest refused addresses. It
//! keeps two invariants: a cleaning is remembered for longer than any proxy keeps an answer, and
//! the plan that closes something because of a cleaning also writes the cleaning to disk.

use std::{collections::VecDeque, net::IpAddr};

use dns_policy::{boot_time::BootTime, name::Fqdn, pattern::SelectorMatcher, rule::NameRule};
use shared_maps::EndpointId;

use super::refused::RecentlyRefused;
use crate::fqdn::{
    cleaned::{self, CleanedNames, Cleaning},
    longest::MAX_TTL,
};

/// Maximum number of cleanings that are remembered; the oldest are forgotten.
const REMEMBERED: usize = 64;
/// How long a cleaning of one endpoint is remembered beyond the longest TTL, seconds: after that no
/// proxy sends what it saw before the cleaning.
const REMEMBERED_AFTER: u64 = 3600;

/// One cleaning, ready to be compared with names.
#[derive(Debug)]
pub(crate) struct Cleaned {
    what: Cleaning,
    matcher: Option<SelectorMatcher>,
}

impl Cleaned {
    /// `None` if the pattern is not valid, and so matches nothing.
    pub(crate) fn new(what: Cleaning) -> Option<Self> {
        let compile = |text: &String| SelectorMatcher::compile(&NameRule::Pattern(text.clone()));
        let matcher = what.pattern.as_ref().map(compile).transpose().ok()?;
        Some(Self { what, matcher })
    }

    /// The only endpoint whose names are cleaned, if there is one.
    pub(crate) fn endpoint(&self) -> Option<EndpointId> {
        self.what.endpoint
    }

    /// Whether the cleaning is about this name at this endpoint.
    pub(crate) fn is_of(&self, endpoint: EndpointId, name: &Fqdn) -> bool {
        self.endpoint().is_none_or(|only| only == endpoint) && self.is_of_name(name)
    }

    /// Whether the cleaning is about this name at one endpoint or more.
    pub(crate) fn is_of_name(&self, name: &Fqdn) -> bool {
        let matcher = self.matcher.as_ref();
        matcher.is_none_or(|matcher| matcher.matches(name))
    }

    /// Whether this cleaning makes an older one superfluous.
    fn covers(&self, older: &Self) -> bool {
        let (new, old) = (&self.what, &older.what);
        (new.pattern.is_none() || new.pattern == old.pattern)
            && (new.endpoint.is_none() || new.endpoint == old.endpoint)
    }
}

/// The cleaned names, and the latest addresses that answers may not label.
#[derive(Debug, Default)]
pub(crate) struct ClosedNames {
    /// Ordered by time, with the newest last.
    cleanings: VecDeque<Cleaned>,
    is_unsaved: bool,
    refused: RecentlyRefused,
}

impl ClosedNames {
    /// Restores the names that an earlier run wrote to disk.
    pub(crate) fn restore(&mut self, names: CleanedNames, boot_id: &str, now: BootTime) {
        let mut cleanings = names.cleanings;
        if names.boot_id != boot_id {
            // No proxy has an answer from before the boot. The file of --tofqdns-pre-cache may have
            // one.
            cleanings.retain(|cleaning| cleaning.endpoint.is_none() && cleaning.at_unix > 0);
            cleanings
                .iter_mut()
                .for_each(|cleaning| cleaning.at = BootTime::START);
        }
        cleanings.sort_by_key(|cleaning| (cleaning.at, cleaning.at_unix));
        for cleaned in cleanings.into_iter().filter_map(Cleaned::new) {
            self.add(cleaned, now);
        }
        self.is_unsaved = false;
    }

    /// Remembers a cleaning, and drops those that it covers or that are too old to matter. A cleaning
    /// of the whole node matters as long as the file of `--tofqdns-pre-cache` may have the names.
    pub(crate) fn add(&mut self, cleaned: Cleaned, now: BootTime) {
        let lasts = u64::from(MAX_TTL) + REMEMBERED_AFTER;
        self.cleanings.retain(|known| {
            let is_young = known.what.at.plus_secs(lasts) > now;
            (is_young || known.endpoint().is_none()) && !cleaned.covers(known)
        });
        self.cleanings.push_back(cleaned);
        if self.cleanings.len() > REMEMBERED {
            self.cleanings.pop_front();
        }
        self.is_unsaved = true;
    }

    /// Whether an endpoint's name was cleaned since `seen`.
    pub(crate) fn covers(&self, endpoint: EndpointId, name: &Fqdn, seen: BootTime) -> bool {
        let since = self.cleanings.iter().rev();
        since
            .take_while(|cleaned| seen <= cleaned.what.at)
            .any(|cleaned| cleaned.is_of(endpoint, name))
    }

    /// Whether a name was cleaned on the whole node since this Unix time in nanoseconds.
    pub(crate) fn covers_on_node(&self, name: &Fqdn, seen: u64) -> bool {
        let of_all = self.cleanings.iter();
        let mut since =
            of_all.filter(|cleaned| cleaned.endpoint().is_none() && seen <= cleaned.what.at_unix);
        since.any(|cleaned| cleaned.is_of_name(name))
    }

    /// The text of the file, if the file is out of date. It counts as written from now on.
    pub(crate) fn take_unsaved(&mut self, boot_id: &str) -> Option<String> {
        std::mem::take(&mut self.is_unsaved).then(|| {
            let cleanings = self.cleanings.iter().map(|cleaned| &cleaned.what);
            cleaned::render(boot_id, cleanings)
        })
    }

    /// Marks the file as out of date again: it could not be written.
    pub(crate) fn undo_save(&mut self) {
        self.is_unsaved = true;
    }

    /// Remembers an address of an answer that gets no label.
    pub(crate) fn note_refused(&mut self, name: &Fqdn, address: IpAddr) {
        self.refused.note(name, address);
    }

    /// The latest addresses of answers for this name that got no label.
    pub(crate) fn refused_of(&self, name: &Fqdn) -> Vec<IpAddr> {
        self.refused.of(name)
    }
}
