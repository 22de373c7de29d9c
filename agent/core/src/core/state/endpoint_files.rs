//! The files of endpoints: their content on disk, the writes that are due, and the results that wait for these writes.
//!
//! Owns, for each endpoint, the state of its file and the mapping results that are not durable yet;
//! for removed endpoints, whether a file is left. It keeps one invariant: a result is durable only
//! after a write of the file that includes its names, and a write that fails leaves its results
//! waiting for the next one.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use dns_policy::{boot_time::BootTime, rule::EndpointRules};
use shared_maps::EndpointId;

use crate::core::event::{MappingResult, StreamId};

/// Minimum time between two writes of an endpoint's file for names alone, in seconds.
const MIN_INTERVAL: u64 = 5;
/// Number of pairs that add one second to [`MIN_INTERVAL`], because each write has all pairs.
const PAIRS_PER_SECOND: u64 = 1000;
/// How long the first name since the last write waits for others, nanoseconds.
const GATHER_TIME: u64 = 200_000_000;
/// Maximum number of results that wait for one endpoint's file.
const MAX_UNDURABLE: usize = 65_536;

/// Whether an endpoint has a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Presence {
    #[default]
    Absent,
    Present,
}

/// A write that the core does not wait for.
#[derive(Debug)]
struct Background {
    number: u64,
    results: Vec<MappingResult>,
}

#[derive(Debug, Default)]
struct File {
    presence: Presence,
    /// Whether this run has not planned a write of the file yet.
    is_of_earlier_run: bool,
    /// DNS rules in the file; `None` if unknown.
    rules: Option<Arc<EndpointRules>>,
    written_at: BootTime,
    due: Option<BootTime>,
    undurable: Vec<MappingResult>,
    background: Option<Background>,
    /// Why the last background write failed, until a write succeeds.
    failure: Option<String>,
}

impl File {
    fn exists(&self) -> bool {
        self.presence == Presence::Present
    }
}

/// The file of each endpoint, with the results that wait for it.
#[derive(Debug, Default)]
pub(crate) struct EndpointFiles {
    files: BTreeMap<EndpointId, File>,
    /// Files of endpoints that were removed.
    left: BTreeSet<EndpointId>,
    due: BTreeSet<(BootTime, EndpointId)>,
    /// Number of the last background write.
    last_write: u64,
}

impl EndpointFiles {
    /// Adds an endpoint without a file.
    pub(crate) fn add(&mut self, id: EndpointId) {
        self.files.insert(id, File::default());
    }

    /// Adds an endpoint with a file of an earlier run that has these rules.
    pub(crate) fn find(&mut self, id: EndpointId, rules: Option<Arc<EndpointRules>>) {
        let file = self.files.entry(id).or_default();
        file.presence = Presence::Present;
        file.is_of_earlier_run = true;
        file.rules = rules;
    }

    /// Removes an endpoint: nothing waits for its file any more. The file is left until it is
    /// removed.
    pub(crate) fn leave(&mut self, id: EndpointId) {
        if self.files.remove(&id).is_some_and(|file| file.exists()) {
            self.left.insert(id);
        }
    }

    /// Whether the file of a removed endpoint is left.
    pub(crate) fn is_left(&self, id: EndpointId) -> bool {
        self.left.contains(&id)
    }

    /// Notes that the file of a removed endpoint is removed. Returns whether there was one.
    pub(crate) fn remove_left(&mut self, id: EndpointId) -> bool {
        self.left.remove(&id)
    }

    /// Notes that the file of a removed endpoint could not be removed.
    pub(crate) fn restore_left(&mut self, id: EndpointId) {
        self.left.insert(id);
    }

    /// Whether an endpoint has a file once all plans are carried out.
    pub(crate) fn exists(&self, id: EndpointId) -> bool {
        self.files.get(&id).is_some_and(File::exists)
    }

    /// Whether an endpoint has a file, with other rules than these or written by an earlier run.
    pub(crate) fn is_outdated(&self, id: EndpointId, rules: Option<&Arc<EndpointRules>>) -> bool {
        let file = self.files.get(&id);
        file.is_some_and(|file| {
            file.exists() && (file.is_of_earlier_run || file.rules.as_ref() != rules)
        })
    }

    /// Whether an endpoint has a file, with these rules.
    pub(crate) fn has_rules(&self, id: EndpointId, rules: &Arc<EndpointRules>) -> bool {
        let file = self.files.get(&id);
        file.is_some_and(|file| file.exists() && file.rules.as_ref() == Some(rules))
    }

    /// Notes that an endpoint's file is due at this time.
    pub(crate) fn mark_due(&mut self, id: EndpointId, at: BootTime) {
        if let Some(file) = self.files.get_mut(&id) {
            file.due = Some(at);
            self.due.insert((at, id));
        }
    }

    /// Notes that an endpoint with this many pairs learned something: its file is due soon.
    pub(crate) fn mark_due_soon(&mut self, id: EndpointId, pairs: usize, now: BootTime) {
        if let Some(file) = self.files.get(&id)
            && file.due.is_none()
        {
            let interval = MIN_INTERVAL + pairs as u64 / PAIRS_PER_SECOND;
            let due = gathered(now).max(file.written_at.plus_secs(interval));
            self.mark_due(id, due);
        }
    }

    /// Postpones the next write of a file that is being written in the background right now.
    pub(crate) fn postpone(&mut self, id: EndpointId, now: BootTime) {
        self.mark_due(id, gathered(now));
    }

    /// Takes the endpoints whose files are due.
    pub(crate) fn take_due(&mut self, now: BootTime) -> BTreeSet<EndpointId> {
        let mut found = BTreeSet::new();
        while let Some((at, id)) = self.due.first().copied()
            && at <= now
        {
            self.due.pop_first();
            if self.files.get(&id).is_some_and(|file| file.due.is_some()) {
                found.insert(id);
            }
        }
        found
    }

    /// When the next file is due.
    pub(crate) fn next_due(&self) -> Option<BootTime> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Keeps a result that was sent until the file of this endpoint is written. Then it is sent again as
    /// durable.
    pub(crate) fn await_write(&mut self, id: EndpointId, result: &MappingResult) {
        if let Some(file) = self.files.get_mut(&id)
            && file.undurable.len() < MAX_UNDURABLE
        {
            file.undurable.push(MappingResult {
                durable: true,
                ..result.clone()
            });
        }
    }

    /// Drops the results of a stream that closed: they have no receiver.
    pub(crate) fn forget_stream(&mut self, stream: StreamId) {
        for file in self.files.values_mut() {
            let background = file.background.as_mut().map(|write| &mut write.results);
            for results in background.into_iter().chain([&mut file.undurable]) {
                results.retain(|result| result.stream != stream);
            }
        }
    }

    /// Notes a planned write. Returns whether there was a file before, and the results that the
    /// write makes durable.
    pub(crate) fn write(
        &mut self,
        id: EndpointId,
        rules: Arc<EndpointRules>,
        now: BootTime,
    ) -> (Presence, Vec<MappingResult>) {
        let Some(file) = self.files.get_mut(&id) else {
            return (Presence::Absent, Vec::new());
        };
        let before = std::mem::replace(&mut file.presence, Presence::Present);
        file.failure = None;
        file.is_of_earlier_run = false;
        file.rules = Some(rules);
        file.written_at = now;
        file.due = None;
        let background = file.background.take().map(|write| write.results);
        let mut results = background.unwrap_or_default();
        results.append(&mut file.undurable);
        (before, results)
    }

    /// Notes that a planned write failed: the content on disk is unknown, except whether there is a file. The write is
    /// due again at `retry_at`.
    pub(crate) fn undo_write(
        &mut self,
        id: EndpointId,
        before: Presence,
        results: Vec<MappingResult>,
        retry_at: BootTime,
    ) {
        if let Some(file) = self.files.get_mut(&id) {
            file.undurable.extend(results);
            file.presence = before;
            file.rules = None;
            self.mark_due(id, retry_at);
        }
    }

    /// Whether the file is being written in the background.
    pub(crate) fn is_being_written(&self, id: EndpointId) -> bool {
        self.files
            .get(&id)
            .is_some_and(|file| file.background.is_some())
    }

    /// Notes a planned write in the background. Returns its number.
    pub(crate) fn begin_background(&mut self, id: EndpointId, now: BootTime) -> u64 {
        self.last_write += 1;
        if let Some(file) = self.files.get_mut(&id) {
            file.written_at = now;
            file.is_of_earlier_run = false;
            file.due = None;
            file.background = Some(Background {
                number: self.last_write,
                results: std::mem::take(&mut file.undurable),
            });
        }
        self.last_write
    }

    /// Notes that a write in the background is done. Returns the results that it made durable; no results
    /// if another write of the file has replaced this one.
    pub(crate) fn end_background(&mut self, id: EndpointId, number: u64) -> Vec<MappingResult> {
        let Some(file) = self.files.get_mut(&id) else {
            return Vec::new();
        };
        let write = file.background.take_if(|write| write.number == number);
        let Some(write) = write else {
            return Vec::new();
        };
        file.failure = None;
        write.results
    }

    /// Notes that a write in the background failed. True if the file is therefore due again.
    pub(crate) fn fail_background(
        &mut self,
        id: EndpointId,
        number: u64,
        failure: String,
        retry_at: BootTime,
    ) -> bool {
        let Some(file) = self.files.get_mut(&id) else {
            return false;
        };
        let write = file.background.take_if(|write| write.number == number);
        let Some(mut write) = write else {
            return false;
        };
        write.results.append(&mut file.undurable);
        file.undurable = write.results;
        file.failure = Some(failure);
        self.mark_due(id, retry_at);
        true
    }

    /// Why the last background write failed, for each file that was not written since.
    pub(crate) fn failures(&self) -> impl Iterator<Item = &String> {
        self.files.values().filter_map(|file| file.failure.as_ref())
    }
}

/// The time at which a name that is learned now has waited long enough for others.
fn gathered(now: BootTime) -> BootTime {
    BootTime::from_nanos(now.nanos().saturating_add(GATHER_TIME))
}
