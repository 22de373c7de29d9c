//! The next batch for the agent: live answers first, then mappings that no client waits for.

use dns_policy::{boot_time::BootTime, mapping::Realised};

use super::{
    BATCH, Calls, Coverage, MAX_NAMES_CHECKED, REPLAYS_WITH_LIVE, State, queues::ReleasedAnswer,
};
use crate::sink::{Batch, Room, SinkStats};

impl State {
    /// The next mappings to send, and whether there were more. Mappings that no client waits for
    /// are included as far as `room` and the other mappings allow.
    pub(in crate::sink) fn next_batch(
        &mut self,
        now: BootTime,
        room: Room,
        stats: &SinkStats,
        calls: &mut Calls,
    ) -> (Batch, bool) {
        let mut batch = Batch {
            revoked: std::mem::take(&mut self.revoked),
            ..Batch::default()
        };
        self.take_live(&mut batch, now, room.live, stats, calls);
        let live = batch.mappings.len();
        let most = match live {
            0 => room.others.min(BATCH),
            _ => room.others.min(REPLAYS_WITH_LIVE),
        };
        let most = most.min(self.sent.room_for_others());
        let end = live + most;
        self.take_released(&mut batch, end, now);
        let at = if self.flushing {
            BootTime::from_nanos(u64::MAX)
        } else {
            now
        };
        let looked_at = self.take_refreshes(&mut batch, end, now, at);
        let replayed = self.take_replays(&mut batch, end, now, MAX_NAMES_CHECKED - looked_at);
        stats
            .replayed
            .add(u64::try_from(replayed).unwrap_or(u64::MAX));
        let may = room.others > 0 && self.sent.room_for_others() > 0;
        let more =
            (live == BATCH && !self.queues.live.is_empty()) || (may && self.queues.has_others(at));
        (batch, more)
    }

    /// Takes answers that clients wait for.
    fn take_live(
        &mut self,
        batch: &mut Batch,
        now: BootTime,
        room: usize,
        stats: &SinkStats,
        calls: &mut Calls,
    ) {
        while batch.mappings.len() < BATCH.min(room)
            && let Some(waiting) = self.queues.live.pop(|of| self.sent.has_room(of))
        {
            let coverage = self.coverage(&waiting.mapping, now);
            if matches!(coverage, Coverage::Leased | Coverage::Acknowledged) {
                // The same pair was realised while this answer waited.
                stats.leased.add(1);
                self.send_later(coverage, waiting.mapping, waiting.report, now);
                calls.push((waiting.on_realised, Realised::Yes));
                continue;
            }
            let client = (waiting.since, waiting.on_realised);
            let mut out = self.send(waiting.mapping, Some(client), now);
            out.report = waiting.report;
            batch.mappings.push(out);
        }
    }

    /// Takes leased answers that are reported, until the batch has `end` mappings.
    fn take_released(&mut self, batch: &mut Batch, end: usize, now: BootTime) {
        while batch.mappings.len() < end
            && let Some(ReleasedAnswer { mapping, report }) = self.queues.released.pop(|_| true)
        {
            let mut out = self.send(mapping, None, now);
            out.report = Some(report);
            batch.mappings.push(out);
        }
    }

    /// Takes refreshes and renewals that are due at `at`, until the batch has `end` mappings.
    /// Returns the number of names that it looked at.
    fn take_refreshes(
        &mut self,
        batch: &mut Batch,
        end: usize,
        now: BootTime,
        at: BootTime,
    ) -> usize {
        let mut looked_at = 0;
        while batch.mappings.len() < end
            && looked_at < MAX_NAMES_CHECKED
            && let Some(key) = self.queues.pop_due(at)
        {
            looked_at += 1;
            for mapping in self.pairs.unsettled(&key) {
                batch.mappings.push(self.send(mapping, None, now));
            }
        }
        looked_at
    }

    /// Takes replays of at most `names` names, until the batch has `end` mappings. Returns the
    /// number of mappings that it added.
    fn take_replays(
        &mut self,
        batch: &mut Batch,
        end: usize,
        now: BootTime,
        names: usize,
    ) -> usize {
        let before = batch.mappings.len();
        let mut looked_at = 0;
        while batch.mappings.len() < end
            && looked_at < names
            && let Some(key) = self.queues.replays.pop()
        {
            looked_at += 1;
            for mapping in self.pairs.replay(&key, now) {
                batch.mappings.push(self.send(mapping, None, now));
            }
        }
        batch.mappings.len() - before
    }
}
