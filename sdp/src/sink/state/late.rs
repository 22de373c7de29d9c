//! Answers whose results come late, and whether the agent is the cause.

use std::{collections::BTreeMap, time::Duration};

use dns_policy::{boot_time::BootTime, mapping::Realised};

use super::{AwaitedResult, Calls, State, Waiting, nanos};

/// Time after the response max delay at which a held answer counts as late.
const GIVE_UP_AFTER: Duration = Duration::from_millis(20);
/// A listener may have begun to count up to this much earlier. Once the last late answer is counted,
/// the next answer must not be held.
const LISTENER_AHEAD: Duration = Duration::from_millis(5);
/// The agent is the cause of a late answer if the link read from it within this time before the
/// answer was late.
const RESULT_WITHIN: Duration = Duration::from_millis(20);

/// Number of late answers in a row after which the agent counts as hung.
const HUNG_AFTER: u32 = 3;

/// How late the agent is with its results.
#[derive(Default)]
pub(in crate::sink) struct Lateness {
    /// Time at which the link last had read everything that the agent had sent.
    pub(in crate::sink) read_at: BootTime,
    in_a_row: u32,
    /// The last sequence number that counted as late.
    until: u64,
}

impl Lateness {
    /// Whether the agent counts as hung.
    pub(in crate::sink) fn agent_hangs(&self) -> bool {
        self.in_a_row >= HUNG_AFTER
    }

    /// Resets the count: the agent has connected, or has sent a result.
    pub(super) fn reset(&mut self) {
        self.in_a_row = 0;
    }

    /// Counts the held answers whose results the agent has not sent in time.
    fn count(
        &mut self,
        held: &BTreeMap<u64, AwaitedResult>,
        now: BootTime,
        max_delay: Duration,
    ) -> u64 {
        let is_late = nanos(max_delay).saturating_sub(nanos(LISTENER_AHEAD));
        let read_until = self.read_at.plus(RESULT_WITHIN);
        let mut late = 0;
        for (sequence, held) in held.range(self.until + 1..) {
            let due = BootTime::from_nanos(held.sent.nanos().saturating_add(is_late));
            if now < due || read_until < due {
                break;
            }
            self.until = *sequence;
            late += 1;
        }
        let more = u32::try_from(late).unwrap_or(u32::MAX);
        self.in_a_row = self.in_a_row.saturating_add(more);
        late
    }
}

impl State {
    /// Judges whether the agent is late with results for sent mappings, and gives up on held
    /// answers whose time is over. Returns the number of late answers.
    ///
    /// The agent is late only if the link could read its results: a process that gets no CPU does
    /// not blame the agent for that.
    pub(in crate::sink) fn expire_held(
        &mut self,
        now: BootTime,
        max_delay: Duration,
        calls: &mut Calls,
    ) -> u64 {
        let mut late = self.lateness.count(&self.sent.held, now, max_delay);
        while let Some(first) = self.sent.held.first_entry() {
            if !is_over(first.get().since, now, max_delay) {
                break;
            }
            late += u64::from(*first.key() > self.lateness.until);
            calls.push((first.remove().on_realised, Realised::AgentAway));
        }
        late
    }

    /// Like [`Self::expire_held`], including answers whose mappings were not sent yet.
    pub(in crate::sink) fn expire_queued(
        &mut self,
        now: BootTime,
        max_delay: Duration,
        calls: &mut Calls,
    ) -> u64 {
        let over = |waiting: &Waiting| is_over(waiting.since, now, max_delay);
        let mut late = 0;
        for waiting in self.queues.live.take_while(over) {
            calls.push((waiting.on_realised, Realised::AgentAway));
            self.refresh(&waiting.mapping, now);
            late += 1;
        }
        late
    }
}

/// Whether a held answer's time is over. The listener has an exact timer, and this serves only the
/// count.
fn is_over(since: BootTime, now: BootTime, max_delay: Duration) -> bool {
    let bound = nanos(max_delay).saturating_add(nanos(GIVE_UP_AFTER));
    now.nanos().saturating_sub(since.nanos()) > bound
}
