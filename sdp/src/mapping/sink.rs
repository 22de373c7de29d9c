//! The mapping sink of a standalone proxy: decides at once whether an answer
//! may go, and keeps what has to reach the agent.
//!
//! ```text
//!  proxy ─ learn ─► kept (until durable) + leases ──► Leased │ AgentAway │ Held
//!                     │ queued: held answers, then refreshes, then replays
//!                     ▼
//!               next_batch ─► link::mapping_stream ─► agent
//!                     ▲ results, revocations ◄──────────┘
//! ```

mod exchange;

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    net::IpAddr,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::sync::Notify;

pub use exchange::{Batch, Epoch, Outcome, Outgoing, SinkStats, SinkStatus};

use super::{
    BootTime, Mapping, MappingSink, OnRealised, Realised, Refusal, Release,
    kept::{Kept, Key},
    lease::LeaseTable,
};
use crate::{name::Fqdn, proxy::stats::Count};

/// Pairs kept at most.
const KEPT: usize = 200_000;
/// Held answers queued or in flight at most; above, answers are released as if the agent were away.
const HELD: usize = 16_384;
/// Names with a leased answer that wait to be sent.
const REFRESHES: usize = 32_768;
/// Sequences without a result; the oldest are forgotten.
const IN_FLIGHT: usize = 65_536;
/// Refreshes of one name are sent together this long.
const REFRESH_AFTER: Duration = Duration::from_millis(500);
/// How long after the response max delay a held answer counts as late.
const GIVE_UP_AFTER: Duration = Duration::from_millis(20);
/// Held answers in a row without a result in time that make the agent count as hung.
const HUNG_AFTER: u32 = 3;
/// How often what has ended is dropped; until then it only takes room.
const EXPIRE_EVERY: Duration = Duration::from_secs(10);
/// Mappings per batch, and replays among them while live ones wait.
const BATCH: usize = 512;
const REPLAYS_BESIDE_LIVE: usize = 64;

/// See the module.
pub struct LinkSink {
    state: Mutex<State>,
    work: Notify,
    stats: SinkStats,
    max_delay: Duration,
}

struct State {
    kept: Kept,
    leases: LeaseTable,
    min_ttl: u32,
    agent: Option<Epoch>,
    last_agent: Option<Epoch>,
    rules: Option<(Epoch, u64)>,
    next_sequence: u64,
    live: VecDeque<Waiting>,
    refreshes: HashMap<Key, Mapping>,
    refresh_since: Option<BootTime>,
    replays: VecDeque<Key>,
    retries: Vec<Key>,
    in_flight: BTreeMap<u64, InFlight>,
    held: BTreeMap<u64, (BootTime, OnRealised)>,
    revoked: Vec<u64>,
    late_in_a_row: u32,
    flushing: bool,
    expired_at: BootTime,
}

struct Waiting {
    mapping: Mapping,
    since: BootTime,
    on_realised: OnRealised,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Wait {
    Held,
    Nobody,
}

struct InFlight {
    key: Key,
    addresses: Vec<IpAddr>,
    seen_at: BootTime,
}

type Calls = Vec<(OnRealised, Realised)>;

impl LinkSink {
    /// `min_ttl`: floor of TTLs in seconds until an agent says its own;
    /// `max_delay`: how long an answer is held at most.
    pub fn new(min_ttl: u32, max_delay: Duration) -> Self {
        Self {
            state: Mutex::new(State {
                kept: Kept::new(KEPT),
                leases: LeaseTable::default(),
                min_ttl,
                agent: None,
                last_agent: None,
                rules: None,
                next_sequence: 1,
                live: VecDeque::new(),
                refreshes: HashMap::new(),
                refresh_since: None,
                replays: VecDeque::new(),
                retries: Vec::new(),
                in_flight: BTreeMap::new(),
                held: BTreeMap::new(),
                revoked: Vec::new(),
                late_in_a_row: 0,
                flushing: false,
                expired_at: BootTime::default(),
            }),
            work: Notify::new(),
            stats: SinkStats::default(),
            max_delay,
        }
    }

    /// Counters.
    pub fn stats(&self) -> &SinkStats {
        &self.stats
    }

    /// How it stands.
    pub fn status(&self) -> SinkStatus {
        let state = self.state.lock();
        SinkStatus {
            kept: state.kept.len(),
            dropped: state.kept.dropped(),
            leases: state.leases.len(),
            queued: state.live.len() + state.refreshes.len() + state.replays.len(),
            in_flight: state.in_flight.len(),
            agent_hung: state.agent.is_some() && state.late_in_a_row >= HUNG_AFTER,
        }
    }

    /// A stream to an agent is up. Of a new epoch: everything kept is sent
    /// again; of the same: what it has not made durable.
    pub fn agent_up(&self, epoch: Epoch, min_ttl: Option<u32>) {
        let mut state = self.state.lock();
        let all = state.last_agent.as_ref() != Some(&epoch);
        state.leases.clear();
        state.replays = state.kept.keys(all).into();
        state.retries.clear();
        state.last_agent = Some(epoch.clone());
        state.agent = Some(epoch);
        state.late_in_a_row = 0;
        if let Some(min_ttl) = min_ttl {
            state.min_ttl = min_ttl;
        }
        drop(state);
        self.work.notify_one();
    }

    /// The stream is gone: held answers are released, leases are void (no
    /// revocation could reach us).
    pub fn agent_down(&self) {
        let mut state = self.state.lock();
        state.agent = None;
        state.leases.clear();
        state.refreshes.clear();
        state.refresh_since = None;
        state.replays.clear();
        state.retries.clear();
        state.revoked.clear();
        let queued = std::mem::take(&mut state.live);
        state.in_flight.clear();
        let held = std::mem::take(&mut state.held);
        drop(state);
        for waiting in queued {
            (waiting.on_realised)(Realised::AgentAway);
        }
        for (_, on_realised) in held.into_values() {
            on_realised(Realised::AgentAway);
        }
    }

    /// Rules of this revision are in force: older leases do not count any more.
    pub fn rules_applied(&self, epoch: Epoch, revision: u64) {
        self.state.lock().rules = Some((epoch, revision));
    }

    /// Waits until [`Self::next_batch`] may have something.
    pub async fn has_work(&self) {
        self.work.notified().await;
    }

    /// What to send now.
    pub fn next_batch(&self, now: BootTime) -> Batch {
        let mut state = self.state.lock();
        if state.agent.is_none() {
            return Batch::default();
        }
        let batch = state.next_batch(now, &self.stats);
        let more = !state.live.is_empty() || !state.replays.is_empty();
        drop(state);
        if more {
            self.work.notify_one();
        }
        batch
    }

    /// The agent's results.
    pub fn results(&self, outcomes: Vec<Outcome>) {
        let mut calls = Calls::new();
        let mut state = self.state.lock();
        for outcome in outcomes {
            let counter = if outcome.realised {
                &self.stats.realised
            } else {
                &self.stats.refused
            };
            counter.add(1);
            state.result(&outcome, &mut calls);
        }
        drop(state);
        call(calls);
    }

    /// Takes leases back and queues the acknowledgement.
    pub fn revoke(&self, id: u64, name: Option<&Fqdn>, addresses: &[IpAddr]) {
        let mut state = self.state.lock();
        state.leases.revoke(name, addresses);
        state.revoked.push(id);
        drop(state);
        self.stats.revocations.add(1);
        self.work.notify_one();
    }

    /// Housekeeping; call about once a second.
    pub fn tick(&self, now: BootTime) {
        let mut calls = Calls::new();
        let mut state = self.state.lock();
        state.expire(now);
        let retries = std::mem::take(&mut state.retries);
        state.replays.extend(retries);
        let late = state.expire_held(now, self.max_delay, &mut calls);
        drop(state);
        self.stats.late.add(late);
        call(calls);
        self.work.notify_one();
    }

    /// From now on nothing waits to be sent together: the process is leaving.
    pub fn flush(&self) {
        self.state.lock().flushing = true;
        self.work.notify_one();
    }

    /// Mappings that the agent has not answered yet; 0 if it is away or hangs.
    pub fn unanswered(&self) -> usize {
        let state = self.state.lock();
        if state.agent.is_none() || state.late_in_a_row >= HUNG_AFTER {
            return 0;
        }
        state.live.len() + state.refreshes.len() + state.replays.len() + state.in_flight.len()
    }
}

impl MappingSink for LinkSink {
    fn learn(&self, mapping: Mapping, on_realised: OnRealised) -> Release {
        let now = BootTime::now();
        let mut calls = Calls::new();
        let mut state = self.state.lock();
        let late = state.expire_held(now, self.max_delay, &mut calls);
        let (release, counter) = state.learn(mapping, on_realised, now, &self.stats);
        drop(state);
        counter.add(1);
        self.stats.late.add(late);
        call(calls);
        if release != Release::AgentAway {
            self.work.notify_one();
        }
        release
    }
}

impl State {
    /// Walks both tables, so not on every tick.
    fn expire(&mut self, now: BootTime) {
        if now.0.saturating_sub(self.expired_at.0) < nanos(EXPIRE_EVERY) {
            return;
        }
        self.expired_at = now;
        self.kept.expire(now);
        self.leases.expire(now);
    }

    fn learn<'s>(
        &mut self,
        mapping: Mapping,
        on_realised: OnRealised,
        now: BootTime,
        stats: &'s SinkStats,
    ) -> (Release, &'s Count) {
        self.kept.keep(&mapping, self.min_ttl);
        if self.agent.is_none() {
            return (Release::AgentAway, &stats.agent_away);
        }
        if self.is_leased(&mapping, now) {
            self.refresh(mapping, now);
            return (Release::Leased, &stats.leased);
        }
        if self.late_in_a_row >= HUNG_AFTER {
            self.refresh(mapping, now);
            return (Release::AgentAway, &stats.agent_hung);
        }
        if self.live.len() >= HELD {
            self.refresh(mapping, now);
            return (Release::AgentAway, &stats.queue_full);
        }
        self.live.push_back(Waiting {
            mapping,
            since: now,
            on_realised,
        });
        (Release::Held, &stats.held)
    }

    /// The rule of release: every pair is leased in this epoch, under the rules
    /// that this proxy applies or later ones, until the client may forget it.
    fn is_leased(&self, mapping: &Mapping, now: BootTime) -> bool {
        let Some((epoch, revision)) = &self.rules else {
            return false;
        };
        if self.agent.as_ref() != Some(epoch) {
            return false;
        }
        let until = now.plus_secs(mapping.ttl.max(self.min_ttl).into());
        self.leases
            .covers(&mapping.name, &mapping.addresses, until, *revision)
    }

    fn refresh(&mut self, mapping: Mapping, now: BootTime) {
        let key = (mapping.endpoint, mapping.name.clone());
        let full = self.refreshes.len() >= REFRESHES;
        match self.refreshes.get_mut(&key) {
            // Another set of addresses must not push the first out of the queue.
            Some(queued) => {
                for address in &mapping.addresses {
                    if !queued.addresses.contains(address) {
                        queued.addresses.push(*address);
                    }
                }
                queued.ttl = queued.ttl.min(mapping.ttl);
                queued.seen_at = mapping.seen_at;
            }
            None if !full => {
                self.refreshes.insert(key, mapping);
                self.refresh_since.get_or_insert(now);
            }
            // It is kept, and goes out with the next replay.
            None => {}
        }
    }

    fn next_batch(&mut self, now: BootTime, stats: &SinkStats) -> Batch {
        let mut batch = Batch {
            revoked: std::mem::take(&mut self.revoked),
            ..Batch::default()
        };
        while batch.mappings.len() < BATCH
            && let Some(waiting) = self.live.pop_front()
        {
            let out = self.send(waiting.mapping, Wait::Held);
            self.held
                .insert(out.sequence, (waiting.since, waiting.on_realised));
            batch.mappings.push(out);
        }
        let due = self.refresh_since.is_some_and(|since| {
            self.flushing || now.0.saturating_sub(since.0) >= nanos(REFRESH_AFTER)
        });
        if due {
            self.refresh_since = None;
            for mapping in std::mem::take(&mut self.refreshes).into_values() {
                batch.mappings.push(self.send(mapping, Wait::Nobody));
            }
        }
        let room = if batch.mappings.is_empty() {
            BATCH
        } else {
            REPLAYS_BESIDE_LIVE
        };
        let mut sent = 0;
        while sent < room
            && let Some(key) = self.replays.pop_front()
        {
            for mapping in self.kept.replay(&key, now) {
                batch.mappings.push(self.send(mapping, Wait::Nobody));
                sent += 1;
            }
        }
        stats.replayed.add(u64::try_from(sent).unwrap_or(u64::MAX));
        batch
    }

    fn send(&mut self, mapping: Mapping, wait: Wait) -> Outgoing {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        let leased = wait == Wait::Nobody && !mapping.replayed;
        self.in_flight.insert(
            sequence,
            InFlight {
                key: (mapping.endpoint, mapping.name.clone()),
                addresses: mapping.addresses.clone(),
                seen_at: mapping.seen_at,
            },
        );
        if self.in_flight.len() > IN_FLIGHT {
            self.in_flight.pop_first();
        }
        Outgoing {
            sequence,
            mapping,
            leased,
        }
    }

    fn result(&mut self, outcome: &Outcome, calls: &mut Calls) {
        self.late_in_a_row = 0;
        if let Some((_, on_realised)) = self.held.remove(&outcome.sequence) {
            let realised = if outcome.realised {
                Realised::Yes
            } else {
                Realised::No(outcome.refusal)
            };
            calls.push((on_realised, realised));
        }
        let Some(sent) = self.in_flight.remove(&outcome.sequence) else {
            return;
        };
        if outcome.realised {
            if let Some(end) = outcome.lease_end {
                self.leases
                    .grant(&sent.key.1, &sent.addresses, end, outcome.revision);
            }
            if outcome.durable {
                self.kept.settle(&sent.key, &sent.addresses, sent.seen_at);
            }
        } else {
            match outcome.refusal {
                Refusal::NotAllowed | Refusal::Invalid => {
                    self.kept.forget(&sent.key, &sent.addresses);
                }
                Refusal::EndpointUnknown | Refusal::RateLimited => {
                    if self.kept.retry(&sent.key) {
                        self.retries.push(sent.key.clone());
                    }
                }
                Refusal::NotRealised => {}
            }
        }
    }

    /// Gives up on held answers whose time is over, queued or sent; says how many.
    fn expire_held(&mut self, now: BootTime, max_delay: Duration, calls: &mut Calls) -> u64 {
        // The listener has its own, exact timer; this one only keeps the count.
        let bound = nanos(max_delay).saturating_add(nanos(GIVE_UP_AFTER));
        let over = |since: BootTime| now.0.saturating_sub(since.0) > bound;
        let mut late = 0;
        while self.live.front().is_some_and(|waiting| over(waiting.since))
            && let Some(waiting) = self.live.pop_front()
        {
            calls.push((waiting.on_realised, Realised::AgentAway));
            self.refresh(waiting.mapping, now);
            late += 1;
        }
        while let Some(first) = self.held.first_entry() {
            if !over(first.get().0) {
                break;
            }
            calls.push((first.remove().1, Realised::AgentAway));
            late += 1;
        }
        self.late_in_a_row = self
            .late_in_a_row
            .saturating_add(u32::try_from(late).unwrap_or(u32::MAX));
        late
    }
}

fn call(calls: Calls) {
    for (on_realised, realised) in calls {
        on_realised(realised);
    }
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
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
