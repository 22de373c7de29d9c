//! State and decisions of the sink. It does no I/O and runs under the sink's lock.

mod agent;
mod batch;
mod coverage;
mod late;
mod queues;
mod sent;

use std::{net::IpAddr, sync::Arc, time::Duration};

use dns_policy::{
    boot_time::BootTime,
    epoch::Epoch,
    mapping::{EndpointInstance, Mapping, Realised, Refusal},
    name::Fqdn,
};

use self::{
    agent::Agent,
    coverage::Coverage,
    late::Lateness,
    queues::{Queues, Waiting},
    sent::{AwaitedResult, InFlight, Sent},
};
use super::{Grant, MappingResult, Outgoing, Promise, SinkStats};
use crate::{
    journal::{Journal, Note},
    mapping::{
        OnRealised, Release,
        lease::LeaseTable,
        pairs::{Key, PairTable, Unwritten},
    },
    query_report::QueryReport,
    stats::Count,
};

/// Maximum number of pairs that the sink stores. Above it, pairs are dropped and counted.
pub(crate) const KEPT: usize = 200_000;
/// How often expired entries are dropped. Until then they only take up room.
const EXPIRE_EVERY: Duration = Duration::from_secs(10);
/// Maximum number of mappings per batch, and of replays in a batch while live mappings wait.
const BATCH: usize = 512;
pub(super) const REPLAYS_WITH_LIVE: usize = 64;
/// Maximum number of names that are checked for one batch. Many of the names to send again may have
/// no unexpired pairs.
const MAX_NAMES_CHECKED: usize = 4 * BATCH;

/// The current time, and how long an answer may be held from now on.
#[derive(Clone, Copy)]
pub(super) struct HoldWindow {
    pub(super) now: BootTime,
    pub(super) max_delay: Duration,
}

pub(super) struct State {
    pub(super) journal: Arc<Journal>,
    pub(super) pairs: PairTable,
    pub(super) leases: LeaseTable,
    pub(super) min_ttl: u32,
    pub(super) agent: Agent,
    pub(super) lateness: Lateness,
    pub(super) queues: Queues,
    pub(super) sent: Sent,
    /// Revocations to acknowledge.
    pub(super) revoked: Vec<u64>,
    pub(super) flushing: bool,
    expired_at: BootTime,
}

pub(super) type Calls = Vec<(OnRealised, Realised)>;

impl State {
    pub(super) fn new(min_ttl: u32, journal: Arc<Journal>) -> Self {
        Self {
            journal,
            pairs: PairTable::new(KEPT),
            leases: LeaseTable::default(),
            min_ttl,
            agent: Agent::default(),
            lateness: Lateness::default(),
            queues: Queues::default(),
            sent: Sent::default(),
            revoked: Vec::new(),
            flushing: false,
            expired_at: BootTime::default(),
        }
    }

    /// Drops expired entries. This walks both tables, so it does not run on every tick.
    pub(super) fn expire(&mut self, now: BootTime) {
        if now.nanos().saturating_sub(self.expired_at.nanos()) < nanos(EXPIRE_EVERY) {
            return;
        }
        self.expired_at = now;
        self.pairs.expire(now);
        self.leases.expire(now);
    }

    pub(super) fn learn<'s>(
        &mut self,
        (mapping, report): (Mapping, Option<Box<QueryReport>>),
        on_realised: OnRealised,
        at: HoldWindow,
        stats: &'s SinkStats,
    ) -> (Release, &'s Count) {
        let now = at.now;
        let endpoint = mapping.endpoint;
        let away = !self.agent_works();
        let coverage = self.coverage(&mapping, now);
        let leased = coverage != Coverage::None;
        self.keep(&mapping, coverage);
        let unwritten = self.pairs.take_unwritten(&mapping, away);
        let note = (unwritten != Unwritten::Nothing).then(|| self.learned(&mapping));
        if !away {
            // The link wakes the journal's writer later, so that the wake-up delays no answer.
            note.into_iter()
                .for_each(|note| self.journal.note_later(note));
            if leased {
                self.send_later(coverage, mapping, report, now);
                return (Release::Leased, &stats.leased);
            }
            let waiting = Waiting {
                mapping,
                report,
                since: now,
                on_realised,
            };
            if let Err(waiting) = self.queues.live.push(endpoint.into(), waiting) {
                self.refresh(&waiting.mapping, now);
                return (Release::AgentAway, &stats.queue_full);
            }
            return (Release::Held, &stats.held);
        }
        let counter = if !self.agent.is_connected() {
            &stats.agent_away
        } else if leased {
            note.into_iter().for_each(|note| self.journal.note(note));
            self.send_later(coverage, mapping, None, now);
            return (Release::Leased, &stats.leased);
        } else {
            self.refresh(&mapping, now);
            &stats.agent_hung
        };
        let unwritten = note.map(|note| (note, unwritten));
        let release = self.await_journal(endpoint, unwritten, on_realised, at);
        (release, counter)
    }

    fn keep(&mut self, mapping: &Mapping, coverage: Coverage) {
        if coverage == Coverage::Leased {
            self.pairs.keep_leased(mapping, self.min_ttl);
        } else {
            // An answer whose lease must be renewed is sent although the agent has it. An
            // acknowledged answer is also sent, because no later TTL is promised.
            self.pairs.keep(mapping, self.min_ttl);
        }
    }

    /// Writes what is not on a disk while the agent is away: a mapping that only this process has
    /// is written before the client gets the answer.
    fn await_journal(
        &self,
        endpoint: EndpointInstance,
        unwritten: Option<(Note, Unwritten)>,
        on_written: OnRealised,
        at: HoldWindow,
    ) -> Release {
        let may_wait = self.journal.may_wait(at.now, at.max_delay);
        let waits = match unwritten {
            Some((note, Unwritten::Pair)) if may_wait => {
                self.journal.note_first(endpoint, note, on_written).is_ok()
            }
            unwritten => {
                if let Some((note, _)) = unwritten {
                    self.journal.note(note);
                }
                may_wait && self.journal.wait_behind(endpoint, on_written).is_ok()
            }
        };
        if waits {
            Release::Held
        } else {
            Release::AgentAway
        }
    }

    fn learned(&self, mapping: &Mapping) -> Note {
        let lasts = mapping.ttl.max(self.min_ttl);
        let addresses = self.pairs.undurable(mapping);
        let mapping = Mapping {
            addresses,
            ..mapping.clone()
        };
        Note::Learned(mapping, lasts)
    }

    /// Notes that an agent connected. If its epoch is new, all stored pairs are sent again.
    /// Otherwise only the pairs that the agent has not made durable are sent again.
    pub(super) fn agent_up(&mut self, epoch: Epoch, min_ttl: Option<u32>) {
        self.leases.clear();
        let all = self.agent.connected(epoch);
        self.queues.replay(self.pairs.keys(all));
        self.lateness.reset();
        self.min_ttl = min_ttl.unwrap_or(self.min_ttl);
    }

    /// Notes that the connection to the agent ended. Writes to the journal the pairs that it lacks
    /// or has with an earlier expiry. Leases are void, because no revocation can reach this proxy.
    /// Held answers are added to `calls`.
    pub(super) fn agent_down(&mut self, calls: &mut Calls) {
        if self.agent.disconnected() {
            for (mapping, lasts) in self.pairs.all_to_write() {
                self.journal.note(Note::Learned(mapping, lasts));
            }
        }
        self.leases.clear();
        self.revoked.clear();
        self.queues.clear(calls);
        self.sent.clear(calls);
    }

    /// Whether an agent is connected and answers in time.
    pub(super) fn agent_works(&self) -> bool {
        self.agent.is_connected() && !self.lateness.agent_hangs()
    }

    /// Number of mappings that the agent has not answered yet; 0 if the agent is away or hangs.
    pub(super) fn unanswered(&self) -> usize {
        if self.agent_works() {
            self.queues.len() + self.sent.len()
        } else {
            0
        }
    }

    /// Keeps a mapping from another proxy's journal, and sends it to the agent.
    pub(super) fn adopt(&mut self, mapping: &Mapping, lasts: u32) {
        self.pairs.take_over(mapping, lasts);
        if self.agent.is_connected() {
            self.queues.replays.push(Key::of(mapping));
        }
    }

    /// Queues the stored pairs of the name. For each address, the answer with the later expiry
    /// counts, even if it came first.
    fn refresh(&mut self, mapping: &Mapping, now: BootTime) {
        self.queues.refreshes.push(Key::of(mapping), now);
    }

    /// Sends a mapping. `client` has the callback of a waiting answer, and the time at which it
    /// began to wait.
    fn send(
        &mut self,
        mapping: Mapping,
        client: Option<(BootTime, OnRealised)>,
        now: BootTime,
    ) -> Outgoing {
        self.sent.add(mapping, client, now, self.min_ttl)
    }

    /// Takes the second result of a sequence, and returns whether it was one. It settles the pairs
    /// and grants nothing: its lease is the lease of the first result, which may have been revoked
    /// since.
    pub(super) fn settle(&mut self, result: &MappingResult) -> bool {
        let Some(sent) = self.sent.undurable.remove(&result.sequence) else {
            return false;
        };
        if result.result.is_ok_and(|grant| grant.durable) {
            self.settled(sent);
        }
        true
    }

    /// Takes the first result of a sequence. Returns `false` if nothing waited for it.
    pub(super) fn result(
        &mut self,
        result: &MappingResult,
        at: HoldWindow,
        calls: &mut Calls,
    ) -> bool {
        self.lateness.reset();
        let held = self.sent.held.remove(&result.sequence);
        let was_held = held.is_some();
        if let Some(AwaitedResult { on_realised, .. }) = held {
            let realised = match result.result {
                Ok(_) => Realised::Yes,
                Err(refusal) => Realised::No(refusal),
            };
            calls.push((on_realised, realised));
        }
        let Some(sent) = self.sent.answered(result.sequence) else {
            return was_held;
        };
        match result.result {
            Ok(grant) => self.granted(result.sequence, sent, grant, at),
            Err(refusal) => self.refused(sent, refusal),
        }
        true
    }

    fn granted(&mut self, sequence: u64, sent: InFlight, grant: Grant, at: HoldWindow) {
        match grant.promise {
            Promise::None => {}
            Promise::Until(end) => {
                let holder = sent.key.asked.endpoint.into();
                self.leases
                    .grant(holder, &sent.key.name, &sent.addresses, end, grant.revision);
            }
            Promise::ForItsTtl => self.acknowledged(&sent, at),
        }
        if grant.durable {
            self.settled(sent);
            return;
        }
        self.sent.await_durable(sequence, sent);
    }

    fn refused(&mut self, sent: InFlight, refusal: Refusal) {
        self.pairs.unacknowledge(&sent.key);
        match refusal {
            Refusal::NotAllowed | Refusal::Invalid | Refusal::Rejected => {
                self.pairs.forget(&sent.key, &sent.addresses, sent.ack);
                self.journal
                    .note_later(Note::Forgotten(sent.key, sent.addresses, sent.ack));
            }
            Refusal::EndpointUnknown | Refusal::RateLimited => {
                if self.pairs.retry(&sent.key, &sent.addresses) {
                    self.queues.retries.push(sent.key);
                }
            }
            Refusal::NotRealised => {}
        }
    }

    /// Notes that no result will come for a sequence. Its mapping is sent again while it is kept,
    /// because the agent did not refuse it. Returns `false` if nothing waited for a result.
    pub(super) fn no_result(&mut self, sequence: u64) -> bool {
        let Some(sent) = self.sent.answered(sequence) else {
            return false;
        };
        self.pairs.unacknowledge(&sent.key);
        self.queues.retries.push(sent.key);
        true
    }

    fn settled(&mut self, sent: InFlight) {
        self.pairs.settle(&sent.key, &sent.addresses, sent.ack);
        self.journal
            .note_later(Note::Settled(sent.key, sent.addresses, sent.ack));
    }

    /// Forgets the pairs of `name` (`None`: of every name) with these `addresses` (empty: with any
    /// address). Queued keys of forgotten pairs are skipped later.
    pub(super) fn revoke(&mut self, name: Option<&Fqdn>, addresses: &[IpAddr]) {
        let named = |of: &Fqdn| name.is_none_or(|name| name == of);
        // Answers wait for the results of these mappings. An agent that stops now may not have
        // accepted them.
        let sent = self.sent.awaited();
        let sent = sent.filter(|sent| named(&sent.key.name));
        let own = |sent: &InFlight| self.pairs.of(&sent.key, &sent.addresses);
        let mut again: Vec<_> = sent.flat_map(own).collect();
        self.leases.revoke(name, addresses);
        self.pairs.revoke(name, addresses);
        self.journal
            .note(Note::Revoked(name.cloned(), addresses.to_vec()));
        let queued = self.queues.live.iter().filter(|w| named(&w.mapping.name));
        again.extend(queued.map(|w| (w.mapping.clone(), w.mapping.ttl.max(self.min_ttl))));
        for (mapping, lasts) in again {
            self.pairs.keep(&mapping, lasts);
            if self.pairs.take_unwritten(&mapping, false) != Unwritten::Nothing {
                self.journal.note(Note::Learned(mapping, lasts));
            }
        }
    }
}

pub(super) fn call(calls: Calls) {
    for (on_realised, realised) in calls {
        on_realised(realised);
    }
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}
