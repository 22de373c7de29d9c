//! How long to wait between attempts to reach the agent.

use std::time::Duration;

use backon::{BackoffBuilder, ConstantBuilder};

/// Upper limit of a wait, jitter included.
pub(super) const MAX_DELAY: Duration = Duration::from_secs(1);
/// A session that was shorter does not begin the waits again: an agent that ends each session at once is asked
/// more and more rarely.
pub(super) const SETTLED: Duration = Duration::from_secs(1);

/// While a standby takes over, which takes a fraction of a second.
const AT_ONCE: Duration = Duration::from_millis(20);
/// Number of the shortest waits, which last 1 s or more in total.
const AT_ONCE_TIMES: usize = 50;
const EAGER: Duration = Duration::from_millis(125);
/// Number of short waits, which last 9 s or more in total.
const EAGER_TIMES: usize = 72;
const CALM: Duration = Duration::from_millis(500);

/// Waits of 20 to 40 ms for the first second, of 125 to 250 ms until ten seconds have passed, and of 0.5 to 1 s after
/// them, without end.
pub(super) fn delays() -> impl Iterator<Item = Duration> + Send {
    let limited = |delay, times| {
        let delays = ConstantBuilder::new().with_delay(delay).with_jitter();
        delays.with_max_times(times).build()
    };
    let calm = ConstantBuilder::new()
        .with_delay(CALM)
        .without_max_times()
        .with_jitter()
        .build();
    limited(AT_ONCE, AT_ONCE_TIMES)
        .chain(limited(EAGER, EAGER_TIMES))
        .chain(calm)
        .map(|delay| delay.min(MAX_DELAY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_once_for_a_second_eager_until_ten_then_calm() {
        let mut passed = Duration::ZERO;
        for delay in delays().take(500) {
            let bounds = match passed.as_secs() {
                0 => 20..=40,
                // The shortest waits last up to two seconds in total.
                1 => 20..=250,
                2..10 => 125..=250,
                _ => 125..=1000,
            };
            let millis = delay.as_millis();
            assert!(bounds.contains(&millis), "{delay:?} after {passed:?}");
            passed += delay;
        }
        assert!(passed > Duration::from_secs(60));
    }
}
