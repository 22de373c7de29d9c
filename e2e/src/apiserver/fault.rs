//! Faults that a test sets: conditions that requests and watches check.

use std::collections::BTreeMap;
use std::time::Instant;

use super::failure::Failure;

/// The answer to requests for a kind, in place of the usual one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// 403, as if no role had the right.
    Forbidden,
    /// 404 in plain text, as if the CRD were not installed.
    NotServed,
    /// 429 for this many requests.
    TooMany(u32),
    /// 500 for this many requests.
    Internal(u32),
    /// 503 for every request, until the test allows them again.
    Unavailable,
}

/// The faults that a test set for one kind of objects.
#[derive(Clone, Debug, Default)]
pub(super) struct OfKind {
    pub(super) refusal: Option<Refusal>,
    /// Whether requests and watches stay open, without answers and events.
    pub(super) held: bool,
    /// Whether lists have `items: null` in place of an array.
    pub(super) null_items: bool,
    /// If this is n > 0, each n-th update or patch gets 409.
    pub(super) conflict_every: u64,
    /// Updates and patches since `conflict_every` was set.
    pub(super) changes: u64,
    /// Counts the times that running watches were broken off.
    pub(super) breaks: u64,
    /// Counts the times that running watches ended with 410.
    pub(super) expiries: u64,
}

/// Every condition of a server.
#[derive(Clone, Debug, Default)]
pub(super) struct Conditions {
    /// Faults by the id of the kind.
    pub(super) kinds: BTreeMap<String, OfKind>,
    /// Whether writes are done but not answered.
    pub(super) holds_answers: bool,
    /// Until this time, lists of custom resources get 429.
    pub(super) starts_until: Option<Instant>,
}

impl Conditions {
    pub(super) fn of(&self, id: &str) -> OfKind {
        self.kinds.get(id).cloned().unwrap_or_default()
    }

    pub(super) fn kind(&mut self, id: &str) -> &mut OfKind {
        self.kinds.entry(id.to_owned()).or_default()
    }

    /// Whether this update or patch gets 409, as if another writer was faster.
    pub(super) fn takes_conflict(&mut self, id: &str) -> bool {
        let Some(of_kind) = self.kinds.get_mut(id) else {
            return false;
        };
        of_kind.changes += 1;
        of_kind.conflict_every > 0 && of_kind.changes.is_multiple_of(of_kind.conflict_every)
    }

    /// The refusal for one request. If the refusal is for a number of requests, decrements that
    /// number.
    pub(super) fn take_refusal(&mut self, id: &str) -> Option<Refusal> {
        let of_kind = self.kinds.get_mut(id)?;
        let refusal = of_kind.refusal?;
        of_kind.refusal = match refusal {
            Refusal::TooMany(0 | 1) | Refusal::Internal(0 | 1) => None,
            Refusal::TooMany(left) => Some(Refusal::TooMany(left - 1)),
            Refusal::Internal(left) => Some(Refusal::Internal(left - 1)),
            Refusal::Forbidden | Refusal::NotServed | Refusal::Unavailable => Some(refusal),
        };
        Some(refusal)
    }
}

impl Refusal {
    /// The answer; `None` for [`Refusal::Forbidden`], whose answer names the user and the verb.
    pub(super) fn failure(self) -> Option<Failure> {
        match self {
            Self::Forbidden => None,
            Self::NotServed => Some(Failure::UnknownPath),
            Self::TooMany(_) => Some(Failure::too_many()),
            Self::Internal(_) => Some(Failure::internal("etcdserver: request timed out")),
            Self::Unavailable => Some(Failure::unavailable()),
        }
    }
}
