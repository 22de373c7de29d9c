//! Prefixes and steps that failed, and when they are tried again.
//!
//! Owns the prefixes without an identity or without room in the ipcache, and what the last plan
//! that failed reports. It keeps one invariant: as long as something is left to be tried again,
//! there is a time for it.

use std::collections::BTreeSet;

use dns_policy::boot_time::BootTime;
use ipnet::IpNet;

use crate::datapath::plan::StepError;

/// How long to wait before failed steps are tried again, seconds.
pub(crate) const RETRY: u64 = 1;

/// What failed, and the time to try it again.
#[derive(Debug, Default)]
pub(crate) struct Retry {
    at: Option<BootTime>,
    unresolved: BTreeSet<IpNet>,
    failed_steps: usize,
    /// Why a step failed, and until when that is reported.
    reason: Option<(BootTime, String)>,
}

impl Retry {
    /// Notes a prefix that did not get its intended identity.
    pub(crate) fn add(&mut self, prefix: IpNet) {
        self.unresolved.insert(prefix);
    }

    /// Notes that a prefix has an identity again.
    pub(crate) fn remove(&mut self, prefix: IpNet) {
        self.unresolved.remove(&prefix);
    }

    /// Whether prefixes wait to be tried again.
    pub(crate) fn has_prefixes(&self) -> bool {
        !self.unresolved.is_empty()
    }

    /// Schedules another try of everything that waits, soon.
    pub(crate) fn schedule(&mut self, now: BootTime) {
        self.at.get_or_insert(now.plus_secs(RETRY));
    }

    /// Takes the prefixes to be tried again; `None` before their time.
    pub(crate) fn take_due(&mut self, now: BootTime) -> Option<BTreeSet<IpNet>> {
        self.at.take_if(|at| *at <= now)?;
        Some(std::mem::take(&mut self.unresolved))
    }

    /// When the next retry is due.
    pub(crate) fn next(&self) -> Option<BootTime> {
        self.at
    }

    /// Notes the outcome of a plan. A failure is reported until its steps were tried again.
    pub(crate) fn note(&mut self, failures: &[(usize, StepError)], now: BootTime) {
        let cause = failures
            .iter()
            .find(|(_, error)| !matches!(error, StepError::Skipped));
        if let Some((_, error)) = cause.or(failures.first()) {
            self.failed_steps = failures.len();
            self.reason = Some((now.plus_secs(RETRY), error.to_string()));
        } else if self.reason.as_ref().is_none_or(|(until, _)| *until <= now) {
            self.failed_steps = 0;
            self.reason = None;
        }
    }

    /// Steps that failed and were not tried again yet.
    pub(crate) fn failed_steps(&self) -> usize {
        self.failed_steps
    }

    /// Why a step of the last plan failed; `None` if it is no longer reported.
    pub(crate) fn reason(&self) -> Option<&String> {
        self.reason.as_ref().map(|(_, text)| text)
    }
}
