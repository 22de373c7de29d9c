//! The last changes, encoded, each with a position.
//!
//! The log is bounded: the oldest changes are removed first. A client that is further behind gets a snapshot.

use std::collections::VecDeque;

use prost::bytes::Bytes;

/// Maximum size of all kept changes together, in bytes.
pub(super) const LOG_MAX: usize = 16 << 20;
/// Maximum size of one answer of [`Log::after`], in bytes. A single change may be larger.
const PORTION: usize = 256 << 10;

/// Why changes after a position cannot be given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TooFarBehind;

/// Changes that follow a position.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Portion {
    /// Encoded parts of a frame.
    pub(super) parts: Vec<Bytes>,
    /// Position after the last of `parts`.
    pub(super) sequence: u64,
}

/// The last changes, up to a number of bytes.
#[derive(Debug)]
pub(super) struct Log {
    changes: VecDeque<Bytes>,
    /// Position before the first of `changes`.
    begin: u64,
    bytes: usize,
    bytes_max: usize,
}

impl Log {
    /// An empty log for at most this many bytes.
    pub(super) fn new(bytes_max: usize) -> Self {
        Self {
            changes: VecDeque::new(),
            begin: 0,
            bytes: 0,
            bytes_max,
        }
    }

    /// Position after the last change.
    pub(super) fn sequence(&self) -> u64 {
        self.begin + count(self.changes.len())
    }

    /// Whether the log has every change after `sequence`.
    pub(super) fn reaches(&self, sequence: u64) -> bool {
        (self.begin..=self.sequence()).contains(&sequence)
    }

    /// Adds a change at the end. Removes the oldest changes while the bytes exceed the limit.
    pub(super) fn push(&mut self, change: Bytes) {
        self.bytes += change.len();
        self.changes.push_back(change);
        while self.bytes > self.bytes_max
            && let Some(oldest) = self.changes.pop_front()
        {
            self.bytes -= oldest.len();
            self.begin += 1;
        }
    }

    /// The next changes after `sequence`; empty if there are none.
    pub(super) fn after(&self, sequence: u64) -> Result<Portion, TooFarBehind> {
        if !self.reaches(sequence) {
            return Err(TooFarBehind);
        }
        let skip = usize::try_from(sequence - self.begin).map_err(|_| TooFarBehind)?;
        let mut portion = Portion {
            parts: Vec::new(),
            sequence,
        };
        let mut bytes = 0;
        for change in self.changes.range(skip..) {
            bytes += change.len();
            if bytes > PORTION && !portion.parts.is_empty() {
                break;
            }
            portion.parts.push(change.clone());
            portion.sequence += 1;
        }
        Ok(portion)
    }
}

fn count(length: usize) -> u64 {
    u64::try_from(length).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(n: u8, bytes: usize) -> Bytes {
        vec![n; bytes].into()
    }

    #[test]
    fn changes_follow_a_position_until_they_are_too_old() {
        let mut log = Log::new(10);
        assert_eq!(log.after(0), Ok(Portion::default()));
        assert_eq!(log.after(1), Err(TooFarBehind));
        for n in 0..5 {
            log.push(change(n, 3));
        }
        // Three changes of three bytes each are kept.
        assert_eq!(log.sequence(), 5);
        assert_eq!(log.after(1), Err(TooFarBehind));
        let portion = log.after(3).unwrap();
        assert_eq!(portion.parts, [change(3, 3), change(4, 3)]);
        assert_eq!(portion.sequence, 5);
        assert_eq!(log.after(5).unwrap().parts, [] as [Bytes; 0]);
        assert_eq!(log.after(6), Err(TooFarBehind));
        // After a change that is larger than the limit, the log is empty.
        log.push(change(9, 11));
        assert_eq!((log.sequence(), log.bytes), (6, 0));
        assert_eq!(log.after(5), Err(TooFarBehind));
        assert_eq!(log.after(6).unwrap().parts, [] as [Bytes; 0]);
    }

    #[test]
    fn a_portion_is_bounded_and_never_empty_where_there_is_a_change() {
        let mut log = Log::new(LOG_MAX);
        log.push(change(1, PORTION + 1));
        log.push(change(2, 1));
        let first = log.after(0).unwrap();
        assert_eq!((first.parts.len(), first.sequence), (1, 1));
        assert_eq!(log.after(1).unwrap().parts, [change(2, 1)]);
    }
}
