//! The mapping sink of a standalone proxy. It decides at once whether an answer may be released,
//! and keeps what has to reach the agent.
//!
//! ```text
//!  proxy ─ learn ─► kept (until durable) + leases ──► Leased │ AgentAway │ Held
//!                     │ queued: held answers, then those released already, refreshes, replays
//!                     ▼
//!               next_batch ─► link::mapping_stream ─► agent
//!                     ▲ results, revocations ◄──────────┘
//! ```

mod delayed_names;
mod exchange;
mod state;
mod turns;

use std::{
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwapOption;
use daemon::link_stream::ReadNow;
use dns_policy::{boot_time::BootTime, epoch::Epoch, mapping::Mapping, name::Fqdn};
use parking_lot::Mutex;
use tokio::sync::Notify;

pub use exchange::{
    Acknowledgements, Batch, Grant, MappingResult, Outgoing, Promise, Room, SinkStats, SinkStatus,
};

#[cfg(test)]
pub(crate) use self::state::KEPT as KEPT_PAIRS;
use self::state::{Calls, State, call};
use crate::{
    journal::{Journal, Written},
    mapping::{MappingSink, OnRealised, Release},
    query_report::QueryReport,
    shared_tasks::SharedTasks,
};

/// How often a process that is leaving checks for the agent's results.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The sink that sends mappings to the agent over the link.
pub struct LinkSink {
    state: Mutex<State>,
    journal: Arc<Journal>,
    /// Changes when a lease changes, under the lock of `state` and before the link sends anything.
    leases_version: AtomicU64,
    work: Notify,
    /// The tasks of the link that send and receive mappings, and its socket. `None` if only the
    /// link may poll them.
    link: ArcSwapOption<(SharedTasks, ReadNow)>,
    stats: SinkStats,
    max_delay: Duration,
}

impl LinkSink {
    /// `min_ttl`: minimum of TTLs in seconds until an agent sends its own minimum; `max_delay`:
    /// maximum time for which an answer is held.
    pub fn new(min_ttl: u32, max_delay: Duration) -> Self {
        Self::with_journal(min_ttl, max_delay, Arc::default())
    }

    /// Like [`Self::new`], with a journal for mappings that no agent has made durable.
    pub fn with_journal(min_ttl: u32, max_delay: Duration, journal: Arc<Journal>) -> Self {
        Self {
            state: Mutex::new(State::new(min_ttl, Arc::clone(&journal))),
            journal,
            leases_version: AtomicU64::new(0),
            work: Notify::new(),
            link: ArcSwapOption::empty(),
            stats: SinkStats::default(),
            max_delay,
        }
    }

    /// Sets the effect of acknowledgements by an agent without leases.
    #[must_use]
    pub fn with_acknowledgements(self, count: Acknowledgements) -> Self {
        self.state.lock().agent.acknowledgements = count;
        self
    }

    pub fn stats(&self) -> &SinkStats {
        &self.stats
    }

    pub fn status(&self) -> SinkStatus {
        let state = self.state.lock();
        SinkStatus {
            kept: state.pairs.len(),
            dropped: state.pairs.dropped(),
            leases: state.leases.len(),
            queued: state.queues.len(),
            in_flight: state.sent.len(),
            agent_hung: state.agent.is_connected() && state.lateness.agent_hangs(),
        }
    }

    /// Notes that a stream to an agent is open. If the agent's epoch is new, all stored pairs are
    /// sent again. Otherwise only the pairs that the agent has not made durable are sent again.
    pub fn agent_up(&self, epoch: Epoch, min_ttl: Option<u32>) {
        let mut state = self.state.lock();
        state.agent_up(epoch, min_ttl);
        self.leases_changed();
        drop(state);
        self.work.notify_one();
    }

    /// Notes that the stream ended. Held answers are released. Leases are void, because no
    /// revocation could reach this proxy.
    pub fn agent_down(&self) {
        let mut calls = Calls::new();
        let mut state = self.state.lock();
        state.agent_down(&mut calls);
        self.leases_changed();
        drop(state);
        call(calls);
    }

    /// Notes that rules of this revision are in force, so that older leases do not count any more.
    pub fn rules_applied(&self, epoch: Epoch, revision: u64) {
        let mut state = self.state.lock();
        state.agent.rules = Some((epoch, revision));
        self.leases_changed();
    }

    /// Revision of the rules by which leases are judged.
    pub fn rules_revision(&self) -> Option<u64> {
        let state = self.state.lock();
        state.agent.rules.as_ref().map(|(_, revision)| *revision)
    }

    /// Waits until [`Self::next_batch`] may have something.
    pub async fn has_work(&self) {
        self.work.notified().await;
    }

    /// Sets the tasks that [`Self::has_work`] wakes, and the socket that they read. From then on,
    /// [`MappingSink::push`] and [`MappingSink::exchange`] poll them.
    pub fn share_tasks(&self, link: Option<(SharedTasks, ReadNow)>) {
        self.link.store(link.map(Arc::new));
    }

    /// The next mappings to send.
    pub fn next_batch(&self, now: BootTime) -> Batch {
        self.next_batch_in(now, Room::default())
    }

    /// Like [`Self::next_batch`], limited to the available room.
    pub fn next_batch_in(&self, now: BootTime, room: Room) -> Batch {
        let mut calls = Calls::new();
        let mut state = self.state.lock();
        if !state.agent.is_connected() {
            return Batch::default();
        }
        let late = state.expire_queued(now, self.max_delay, &mut calls);
        let (batch, more) = state.next_batch(now, room, &self.stats, &mut calls);
        drop(state);
        self.journal.nudge();
        self.stats.late.add(late);
        call(calls);
        if more {
            self.work.notify_one();
        }
        batch
    }

    /// Notes that the link has just read all that the agent had sent, and waits for more. If a
    /// result is late by then, the agent is the cause. Call this often while [`Self::is_waiting`].
    pub fn read_all(&self, now: BootTime) {
        self.state.lock().lateness.read_at = now;
    }

    /// Whether an answer waits for a result of the agent.
    pub fn is_waiting(&self) -> bool {
        self.state.lock().sent.has_held()
    }

    /// Takes the agent's results: for each sequence number one when the mapping is realised or
    /// refused, and perhaps another one when it is durable.
    pub fn results(&self, results: Vec<MappingResult>) {
        let mut calls = Calls::new();
        let mut state = self.state.lock();
        let at = state::HoldWindow {
            now: BootTime::now(),
            max_delay: self.max_delay,
        };
        for result in results {
            if state.settle(&result) || !state.result(&result, at, &mut calls) {
                continue;
            }
            let counter = match result.result {
                Ok(_) => &self.stats.realised,
                Err(_) => &self.stats.refused,
            };
            counter.add(1);
        }
        let may_send = state.queues.is_ready();
        drop(state);
        call(calls);
        self.journal.nudge();
        if may_send {
            self.work.notify_one();
        }
    }

    /// Notes that the agent will send no result for a mapping. This does not count as a sign of
    /// life.
    pub fn no_result(&self, sequence: u64) {
        if self.state.lock().no_result(sequence) {
            self.stats.refused.add(1);
        }
    }

    /// Ends leases, forgets the pairs, and queues the acknowledgement.
    ///
    /// Mappings that were learned earlier are no longer sent, because they would reopen what the
    /// agent closes. Mappings of held answers are still sent, because their clients wait.
    pub fn revoke(&self, id: u64, name: Option<&Fqdn>, addresses: &[IpAddr]) {
        let mut state = self.state.lock();
        state.revoke(name, addresses);
        self.leases_changed();
        state.revoked.push(id);
        drop(state);
        self.stats.revocations.add(1);
        self.work.notify_one();
    }

    /// Does housekeeping. Call it about once a second.
    pub fn tick(&self, now: BootTime) {
        let mut calls = Calls::new();
        let mut state = self.state.lock();
        state.expire(now);
        state.queues.retry();
        let late = state.expire_held(now, self.max_delay, &mut calls)
            + state.expire_queued(now, self.max_delay, &mut calls);
        drop(state);
        self.stats.late.add(late);
        call(calls);
        self.work.notify_one();
    }

    /// Adopts the mappings of another proxy's journal, which are already in this proxy's own
    /// journal.
    pub fn adopt(&self, written: &[Written]) {
        let mut state = self.state.lock();
        for (mapping, lasts) in written {
            state.adopt(mapping, *lasts);
        }
        drop(state);
        self.work.notify_one();
    }

    /// For a process that is leaving: from now on no mapping is delayed to be sent together with
    /// others. Returns when the agent has answered everything, is away, hangs, or has answered
    /// nothing for `silent`. Returns the number of mappings without an answer.
    pub async fn finish(&self, silent: Duration) -> usize {
        self.state.lock().flushing = true;
        self.work.notify_one();
        let mut left = self.unanswered();
        let mut since = tokio::time::Instant::now();
        while left > 0 {
            tokio::time::sleep(POLL_INTERVAL.min(silent)).await;
            let now = self.unanswered();
            if now != left {
                left = now;
                since = tokio::time::Instant::now();
            } else if since.elapsed() >= silent {
                break;
            }
        }
        left
    }

    /// Notes that a lease changed, or something that decides whether it counts.
    fn leases_changed(&self) {
        self.leases_version.fetch_add(1, Ordering::Release);
    }

    fn unanswered(&self) -> usize {
        self.state.lock().unanswered()
    }
}

impl LinkSink {
    /// Like [`MappingSink::learn`], at a given instant.
    pub fn learn_at(&self, mapping: Mapping, on_realised: OnRealised, now: BootTime) -> Release {
        self.take((mapping, None), on_realised, now)
    }

    fn take(
        &self,
        learned: (Mapping, Option<Box<QueryReport>>),
        on_realised: OnRealised,
        now: BootTime,
    ) -> Release {
        let mut calls = Calls::new();
        let mut state = self.state.lock();
        let late = state.expire_held(now, self.max_delay, &mut calls);
        let at = state::HoldWindow {
            now,
            max_delay: self.max_delay,
        };
        let (release, counter) = state.learn(learned, on_realised, at, &self.stats);
        // A mapping without a waiting answer is sent when the sender looks next, because waking the
        // sender for each leased answer would cost more than the answer.
        let urgent = release == Release::Held || state.flushing || state.queues.has_released();
        drop(state);
        counter.add(1);
        self.stats.late.add(late);
        call(calls);
        if urgent {
            self.work.notify_one();
        }
        release
    }
}

impl MappingSink for LinkSink {
    fn learn(&self, mapping: Mapping, on_realised: OnRealised) -> Release {
        self.learn_at(mapping, on_realised, BootTime::now())
    }

    fn learn_reported(
        &self,
        mapping: Mapping,
        report: Option<Box<QueryReport>>,
        on_realised: OnRealised,
    ) -> Release {
        self.take((mapping, report), on_realised, BootTime::now())
    }

    fn push(&self) {
        if let Some((tasks, _)) = self.link.load().as_deref() {
            tasks.poll_woken();
        }
    }

    fn exchange(&self) {
        if let Some((tasks, read_now)) = self.link.load().as_deref() {
            read_now.request();
            tasks.poll_woken();
        }
    }

    fn leases_version(&self) -> Option<u64> {
        Some(self.leases_version.load(Ordering::Acquire))
    }
}

impl std::fmt::Debug for LinkSink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LinkSink")
            .field("status", &self.status())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
