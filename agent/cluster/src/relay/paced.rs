//! Log lines that another side can cause: a bounded number in each period.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Maximum number of lines in one [`PERIOD`].
const LINES: u64 = 50;
/// The time after which a new count begins.
const PERIOD: Duration = Duration::from_secs(10);

/// Lines of one kind.
#[derive(Debug, Default)]
pub(super) struct Paced(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    begin: Option<Instant>,
    /// Lines in this period, including lines that were left out.
    lines: u64,
}

impl Paced {
    /// Whether a line may be written now; if so, how many were left out in the period before.
    pub(super) fn line(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock();
        let is_over = |begin| now.saturating_duration_since(begin) >= PERIOD;
        let mut left_out = 0;
        if state.begin.is_none_or(is_over) {
            left_out = state.lines.saturating_sub(LINES);
            *state = State {
                begin: Some(now),
                lines: 0,
            };
        }
        state.lines += 1;
        (state.lines <= LINES).then_some(left_out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_writes_a_bounded_number_of_lines_and_then_how_many_were_left_out() {
        let paced = Paced::default();
        let begin = Instant::now();
        let written = (0..1000).filter(|_| paced.line(begin).is_some()).count();
        assert_eq!(u64::try_from(written).unwrap(), LINES);
        assert_eq!(paced.line(begin + PERIOD), Some(1000 - LINES));
        assert_eq!(paced.line(begin + PERIOD), Some(0));
        assert_eq!(paced.line(begin + 3 * PERIOD), Some(0));
    }
}
