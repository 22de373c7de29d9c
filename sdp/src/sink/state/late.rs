//! Answers whose results come late, and whose fault that is.

use std::time::Duration;

use dns_policy::{boot_time::BootTime, mapping::Realised};

use super::{Calls, State, Waiting, nanos};

/// How long after the response max delay a held answer counts as late.
const GIVE_UP_AFTER: Duration = Duration::from_millis(20);
/// How much earlier a listener may have begun to count: the answer after the last late one
/// must not be held any more.
const LISTENER_AHEAD: Duration = Duration::from_millis(5);
/// How much earlier than an answer is late the link may have heard the agent last for the agent
/// to be the one that is late.
const RESULT_WITHIN: Duration = Duration::from_millis(20);

impl State {
    /// Judges whether the agent is late with what was sent, and gives up on held answers whose
    /// time is over; says how many were late.
    ///
    /// The agent is late only if the link could read its results: a process that gets no CPU does
    /// not blame the agent for that.
    pub(in crate::sink) fn expire_held(
        &mut self,
        now: BootTime,
        max_delay: Duration,
        calls: &mut Calls,
    ) -> u64 {
        let is_late = nanos(max_delay).saturating_sub(nanos(LISTENER_AHEAD));
        let read_until = self.read_at.plus(RESULT_WITHIN);
        let mut late = 0;
        for (sequence, held) in self.held.range(self.late_until + 1..) {
            let due = BootTime(held.sent.0.saturating_add(is_late));
            if now < due || read_until < due {
                break;
            }
            self.late_until = *sequence;
            late += 1;
        }
        self.late_in_a_row = self
            .late_in_a_row
            .saturating_add(u32::try_from(late).unwrap_or(u32::MAX));
        while let Some(first) = self.held.first_entry() {
            if !is_over(first.get().since, now, max_delay) {
                break;
            }
            late += u64::from(*first.key() > self.late_until);
            calls.push((first.remove().on_realised, Realised::AgentAway));
        }
        late
    }

    /// The same, including answers whose mappings were not sent yet.
    pub(in crate::sink) fn expire_queued(
        &mut self,
        now: BootTime,
        max_delay: Duration,
        calls: &mut Calls,
    ) -> u64 {
        let over = |waiting: &Waiting| is_over(waiting.since, now, max_delay);
        let mut late = 0;
        for (holder, waiting) in self.live.take_while(over) {
            self.queued.give_back(holder, 1);
            calls.push((waiting.on_realised, Realised::AgentAway));
            self.refresh(&waiting.mapping, now);
            late += 1;
        }
        late
    }
}

/// The listener has its own, exact timer; here only the count is kept.
fn is_over(since: BootTime, now: BootTime, max_delay: Duration) -> bool {
    let bound = nanos(max_delay).saturating_add(nanos(GIVE_UP_AFTER));
    now.0.saturating_sub(since.0) > bound
}
