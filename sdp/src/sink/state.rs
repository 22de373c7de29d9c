//! State and decisions of the sink. It does no I/O and runs under the sink's lock.

mod batch;
mod coverage;
mod late;

use std::{collections::BTreeMap, net::IpAddr, sync::Arc, time::Duration};

use dns_policy::{
    boot_time::BootTime,
    epoch::Epoch,
    mapping::{EndpointInstance, LONGEST_LEASE, Mapping, Realised, Refusal},
    name::Fqdn,
};
use limits::quota::Quota;

use self::coverage::{Coverage, ReleasedAnswer};
use super::{
    Acknowledgements, Grant, HUNG_AFTER, MappingResult, Outgoing, Promise, SinkStats,
    delayed_names::DelayedNames,
    turns::{Names, Turns},
};
use crate::{
    journal::{Journal, Note},
    mapping::{
        OnRealised, Release,
        lease::LeaseTable,
        pairs::{AgentAck, Key, PairTable, Session, Unwritten},
    },
    query_report::QueryReport,
    stats::Count,
};

/// Most pairs that the sink stores. Above it, pairs are dropped and counted.
pub(crate) const KEPT: usize = 200_000;
/// Held answers queued at most, of which each endpoint has a share. Above it, answers are
/// released as if the agent were away.
const HELD: usize = 16_384;
/// Work in the agent for held answers at most, in units of one address and in shares too. The
/// agent works in the order of arrival, so what it has of one endpoint delays the others; the rest
/// waits here, where endpoints take turns. One endpoint alone has some 50 names on their way,
/// which the agent takes in about a millisecond.
const WINDOW: usize = 1024;
/// Cost of a name for the agent in addition to its addresses.
const NAME: usize = 8;
/// Mappings sent and not answered for which no client waits, approximately: an answer that comes
/// while thousands of names are sent again does not wait long behind them in the agent.
const OTHERS: usize = 256;
/// Answers that were released at once and wait to be sent with their other data for the agent,
/// in shares too.
const BESIDE: usize = 4096;
/// Sequences without a result, and as many that are not durable yet; the oldest are forgotten.
const IN_FLIGHT: usize = 65_536;
/// Refreshes of one name are sent together this long.
const REFRESH_AFTER: Duration = Duration::from_millis(500);
/// The same for a name whose pairs the agent has acknowledged.
const RENEW_AFTER: Duration = Duration::from_secs(3);
/// How often what has ended is dropped; until then it only takes room.
const EXPIRE_EVERY: Duration = Duration::from_secs(10);
/// Mappings per batch, and replays among them while live ones wait.
const BATCH: usize = 512;
pub(super) const REPLAYS_BESIDE_LIVE: usize = 64;
/// Names checked for one batch: most of those that are sent again may have ended.
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
    pub(super) agent: Option<Epoch>,
    pub(super) acknowledgements: Acknowledgements,
    /// Acknowledgements of other sessions no longer count.
    session: Session,
    pub(super) last_agent: Option<Epoch>,
    pub(super) rules: Option<(Epoch, u64)>,
    pub(super) next_sequence: u64,
    pub(super) live: Turns<Waiting>,
    pub(super) queued: Quota,
    pub(super) on_wire: Quota,
    pub(super) others_on_wire: usize,
    /// Answers that were released at once, each with its other data for the agent.
    pub(super) beside: Turns<ReleasedAnswer>,
    pub(super) besides: Quota,
    pub(super) refreshes: DelayedNames,
    /// Names whose answers were released because the agent had acknowledged their pairs.
    pub(super) renewals: DelayedNames,
    pub(super) replays: Names,
    pub(super) retries: Vec<Key>,
    pub(super) in_flight: BTreeMap<u64, InFlight>,
    /// Realised, and not on the agent's disk yet: no answer waits for these.
    pub(super) undurable: BTreeMap<u64, InFlight>,
    pub(super) held: BTreeMap<u64, AwaitedResult>,
    pub(super) revoked: Vec<u64>,
    /// When the link last had nothing more to read from the agent.
    pub(super) read_at: BootTime,
    pub(super) late_in_a_row: u32,
    /// The last sequence that counted as late.
    pub(super) late_until: u64,
    pub(super) flushing: bool,
    pub(super) expired_at: BootTime,
}

/// An answer that waits for the result of a mapping that was sent.
pub(super) struct AwaitedResult {
    /// Time at which the answer began to wait.
    since: BootTime,
    /// When the mapping was sent.
    sent: BootTime,
    pub(super) on_realised: OnRealised,
}

pub(super) struct Waiting {
    pub(super) mapping: Mapping,
    pub(super) report: Option<Box<QueryReport>>,
    pub(super) since: BootTime,
    pub(super) on_realised: OnRealised,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Wait {
    Held,
    Nobody,
}

pub(super) struct InFlight {
    pub(super) key: Key,
    pub(super) addresses: Vec<IpAddr>,
    pub(super) ack: AgentAck,
    /// When it was sent, and until when its own TTL runs.
    sent: BootTime,
    runs_until: BootTime,
    /// A client waited for it when it was sent.
    waited: bool,
}

pub(super) type Calls = Vec<(OnRealised, Realised)>;

impl State {
    pub(super) fn new(min_ttl: u32, journal: Arc<Journal>) -> Self {
        Self {
            journal,
            pairs: PairTable::new(KEPT),
            leases: LeaseTable::default(),
            min_ttl,
            agent: None,
            acknowledgements: Acknowledgements::default(),
            session: Session::default(),
            last_agent: None,
            rules: None,
            next_sequence: 1,
            live: Turns::default(),
            queued: Quota::new(HELD),
            on_wire: Quota::new(WINDOW),
            others_on_wire: 0,
            beside: Turns::default(),
            besides: Quota::new(BESIDE),
            refreshes: DelayedNames::new(REFRESH_AFTER),
            renewals: DelayedNames::new(RENEW_AFTER),
            replays: Names::default(),
            retries: Vec::new(),
            in_flight: BTreeMap::new(),
            undurable: BTreeMap::new(),
            held: BTreeMap::new(),
            revoked: Vec::new(),
            read_at: BootTime::default(),
            late_in_a_row: 0,
            late_until: 0,
            flushing: false,
            expired_at: BootTime::default(),
        }
    }

    /// Walks both tables, so not on every tick.
    pub(super) fn expire(&mut self, now: BootTime) {
        if now.0.saturating_sub(self.expired_at.0) < nanos(EXPIRE_EVERY) {
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
        let hangs = self.late_in_a_row >= HUNG_AFTER;
        let away = self.agent.is_none() || hangs;
        let coverage = self.coverage(&mapping, now);
        let leased = coverage != Coverage::None;
        self.keep(&mapping, coverage);
        let unwritten = self.pairs.take_unwritten(&mapping, away);
        let note = (unwritten != Unwritten::Nothing).then(|| self.learned(&mapping));
        if !away {
            // The link wakes the writer: an answer does not pay for that.
            note.into_iter()
                .for_each(|note| self.journal.note_later(note));
            if leased {
                self.send_later(coverage, mapping, report, now);
                return (Release::Leased, &stats.leased);
            }
            let holder = endpoint.into();
            if !self.queued.take(holder, 1) {
                self.refresh(&mapping, now);
                return (Release::AgentAway, &stats.queue_full);
            }
            let waiting = Waiting {
                mapping,
                report,
                since: now,
                on_realised,
            };
            self.live.push(holder, waiting);
            return (Release::Held, &stats.held);
        }
        let counter = if self.agent.is_none() {
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
            // An answer whose lease must be renewed is sent although the agent has it. So is an
            // acknowledged one, because no later TTL is promised.
            self.pairs.keep(mapping, self.min_ttl);
        }
    }

    /// Writes what is not on disk while the agent is away: a mapping that only this process has is
    /// written before the client gets the answer.
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

    /// The agent went: what a disk may have been behind with is written now.
    pub(super) fn write_rest(&mut self) {
        for (mapping, lasts) in self.pairs.all_to_write() {
            self.journal.note(Note::Learned(mapping, lasts));
        }
    }

    /// Keeps what another proxy's journal said, and tells the agent.
    pub(super) fn adopt(&mut self, mapping: &Mapping, lasts: u32) {
        self.pairs.take_over(mapping, lasts);
        if self.agent.is_some() {
            let key = Key::of(mapping);
            self.replays.push(key);
        }
    }

    /// Has what is kept of the name sent soon: of two answers the longer one counts, address
    /// by address, whichever came last.
    fn refresh(&mut self, mapping: &Mapping, now: BootTime) {
        let key = Key::of(mapping);
        self.refreshes.push(key, now);
    }

    /// How much waits to be sent.
    pub(super) fn queued(&self) -> usize {
        self.live.len()
            + self.beside.len()
            + self.refreshes.len()
            + self.renewals.len()
            + self.replays.len()
    }

    fn send(&mut self, mapping: Mapping, wait: Wait, now: BootTime) -> Outgoing {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        let leased = wait == Wait::Nobody && !mapping.replayed;
        self.others_on_wire += usize::from(wait == Wait::Nobody);
        self.in_flight.insert(
            sequence,
            InFlight {
                key: Key::of(&mapping),
                addresses: mapping.addresses.clone(),
                ack: AgentAck {
                    seen: mapping.seen_at,
                    until: mapping
                        .seen_at
                        .plus_secs(mapping.ttl.max(self.min_ttl).into()),
                },
                sent: now,
                runs_until: mapping
                    .seen_at
                    .plus_secs(mapping.ttl.into())
                    .min(now.plus(LONGEST_LEASE)),
                waited: wait == Wait::Held,
            },
        );
        if self.in_flight.len() > IN_FLIGHT
            && let Some((sequence, _)) = self.in_flight.first_key_value()
        {
            let oldest = *sequence;
            self.answered(oldest);
        }
        Outgoing {
            sequence,
            mapping,
            leased,
            report: None,
        }
    }

    /// Whether this was the second result of a sequence. It settles the pairs
    /// and grants nothing: its lease is that of the first one, which may have
    /// been revoked since.
    pub(super) fn settle(&mut self, result: &MappingResult) -> bool {
        let Some(sent) = self.undurable.remove(&result.sequence) else {
            return false;
        };
        if result.result.is_ok_and(|grant| grant.durable) {
            self.settled(sent);
        }
        true
    }

    /// Takes the first result of a sequence; false if nothing waited for one.
    pub(super) fn result(
        &mut self,
        result: &MappingResult,
        at: HoldWindow,
        calls: &mut Calls,
    ) -> bool {
        self.late_in_a_row = 0;
        let held = self.held.remove(&result.sequence);
        let was_held = held.is_some();
        if let Some(AwaitedResult { on_realised, .. }) = held {
            let realised = match result.result {
                Ok(_) => Realised::Yes,
                Err(refusal) => Realised::No(refusal),
            };
            calls.push((on_realised, realised));
        }
        let Some(sent) = self.answered(result.sequence) else {
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
        self.undurable.insert(sequence, sent);
        if self.undurable.len() > IN_FLIGHT {
            self.undurable.pop_first();
        }
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
                    self.retries.push(sent.key);
                }
            }
            Refusal::NotRealised => {}
        }
    }

    /// No result will come for a sequence: its mapping is sent again while it is kept, because the
    /// agent did not refuse it. False if nothing waited for a result.
    pub(super) fn no_result(&mut self, sequence: u64) -> bool {
        let Some(sent) = self.answered(sequence) else {
            return false;
        };
        self.pairs.unacknowledge(&sent.key);
        self.retries.push(sent.key);
        true
    }

    /// A mapping is on its way no more.
    fn answered(&mut self, sequence: u64) -> Option<InFlight> {
        let sent = self.in_flight.remove(&sequence)?;
        if sent.waited {
            let units = work(&sent.addresses);
            self.on_wire
                .give_back(sent.key.asked.endpoint.into(), units);
        } else {
            self.others_on_wire -= 1;
        }
        Some(sent)
    }

    fn settled(&mut self, sent: InFlight) {
        self.pairs.settle(&sent.key, &sent.addresses, sent.ack);
        self.journal
            .note_later(Note::Settled(sent.key, sent.addresses, sent.ack));
    }

    /// Forgets pairs: without a name all, without addresses all of the name.
    /// Keys in the queues of what is sent again find nothing then.
    pub(super) fn revoke(&mut self, name: Option<&Fqdn>, addresses: &[IpAddr]) {
        let named = |of: &Fqdn| name.is_none_or(|name| name == of);
        // Answers wait for these; an agent that stops now has not accepted them.
        let sent = self.in_flight.values();
        let sent = sent.filter(|sent| sent.waited && named(&sent.key.name));
        let own = |sent: &InFlight| self.pairs.of(&sent.key, &sent.addresses);
        let mut again: Vec<_> = sent.flat_map(own).collect();
        self.leases.revoke(name, addresses);
        self.pairs.revoke(name, addresses);
        self.journal
            .note(Note::Revoked(name.cloned(), addresses.to_vec()));
        let queued = self.live.iter().filter(|w| named(&w.mapping.name));
        again.extend(queued.map(|w| (w.mapping.clone(), w.mapping.ttl.max(self.min_ttl))));
        for (mapping, lasts) in again {
            self.pairs.keep(&mapping, lasts);
            if self.pairs.take_unwritten(&mapping, false) != Unwritten::Nothing {
                self.journal.note(Note::Learned(mapping, lasts));
            }
        }
    }

    /// Whether there is something to send, once there is room.
    pub(super) fn has_queued(&self) -> bool {
        !self.live.is_empty() || !self.beside.is_empty() || !self.replays.is_empty()
    }

    /// Whether an answer waits for the result of a mapping that was sent.
    pub(super) fn is_waiting(&self) -> bool {
        !self.held.is_empty()
    }
}

pub(super) fn call(calls: Calls) {
    for (on_realised, realised) in calls {
        on_realised(realised);
    }
}

/// Cost of a mapping for the agent, in units of one address. One large mapping leaves room for
/// another endpoint's.
fn work(addresses: &[IpAddr]) -> usize {
    (NAME + addresses.len()).min(WINDOW / 2)
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}
