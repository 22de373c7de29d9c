//! The next batch for the agent: live answers first, then what no client waits for.

use dns_policy::{boot_time::BootTime, mapping::Realised};

use super::{
    AwaitedResult, BATCH, Calls, Coverage, MAX_NAMES_CHECKED, OTHERS, REPLAYS_BESIDE_LIVE,
    ReleasedAnswer, State, Wait, work,
};
use crate::sink::{Batch, Room, SinkStats};

impl State {
    /// The next mappings to send, and whether more could have been. Those for which no client
    /// waits go as far as `room` and what else there is allow.
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
            _ => room.others.min(REPLAYS_BESIDE_LIVE),
        };
        let most = most.min(OTHERS.saturating_sub(self.others_on_wire));
        let end = live + most;
        self.take_beside(&mut batch, end, now);
        let at = if self.flushing {
            BootTime(u64::MAX)
        } else {
            now
        };
        let looked_at = self.take_refreshes(&mut batch, end, now, at);
        let replayed = self.take_replays(&mut batch, end, now, MAX_NAMES_CHECKED - looked_at);
        stats
            .replayed
            .add(u64::try_from(replayed).unwrap_or(u64::MAX));
        let others = !self.replays.is_empty()
            || !self.beside.is_empty()
            || self.refreshes.is_due(at)
            || self.renewals.is_due(at);
        let may = room.others > 0 && self.others_on_wire < OTHERS;
        let more = (live == BATCH && !self.live.is_empty()) || (may && others);
        (batch, more)
    }

    /// Answers that clients wait for.
    fn take_live(
        &mut self,
        batch: &mut Batch,
        now: BootTime,
        room: usize,
        stats: &SinkStats,
        calls: &mut Calls,
    ) {
        while batch.mappings.len() < BATCH.min(room)
            && let Some((holder, waiting)) = self.live.pop(|of| self.on_wire.allows(of, 1))
        {
            self.queued.give_back(holder, 1);
            let coverage = self.coverage(&waiting.mapping, now);
            if matches!(coverage, Coverage::Leased | Coverage::Acknowledged) {
                // The same pair was realised while this answer waited.
                stats.leased.add(1);
                self.send_later(coverage, waiting.mapping, waiting.report, now);
                calls.push((waiting.on_realised, Realised::Yes));
                continue;
            }
            // A mapping that is larger than the share is sent when nothing of its endpoint is on
            // the wire.
            self.on_wire.add(holder, work(&waiting.mapping.addresses));
            let mut out = self.send(waiting.mapping, Wait::Held, now);
            out.report = waiting.report;
            let held = AwaitedResult {
                since: waiting.since,
                sent: now,
                on_realised: waiting.on_realised,
            };
            self.held.insert(out.sequence, held);
            batch.mappings.push(out);
        }
    }

    /// Leased answers that are reported beside, until the batch has `end` mappings.
    fn take_beside(&mut self, batch: &mut Batch, end: usize, now: BootTime) {
        while batch.mappings.len() < end
            && let Some((holder, ReleasedAnswer { mapping, report })) = self.beside.pop(|_| true)
        {
            self.besides.give_back(holder, 1);
            let mut out = self.send(mapping, Wait::Nobody, now);
            out.report = Some(report);
            batch.mappings.push(out);
        }
    }

    /// Refreshes and renewals that are due at `at`, until the batch has `end` mappings; returns
    /// how many names were looked at.
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
            && let Some(key) = self.refreshes.pop(at).or_else(|| self.renewals.pop(at))
        {
            looked_at += 1;
            for mapping in self.pairs.unsettled(&key) {
                batch.mappings.push(self.send(mapping, Wait::Nobody, now));
            }
        }
        looked_at
    }

    /// Replays of at most `names` names, until the batch has `end` mappings; returns how many
    /// mappings were added.
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
            && let Some(key) = self.replays.pop()
        {
            looked_at += 1;
            for mapping in self.pairs.replay(&key, now) {
                batch.mappings.push(self.send(mapping, Wait::Nobody, now));
            }
        }
        batch.mappings.len() - before
    }
}
