//! How long to wait between attempts to reach the agent.

use std::time::Duration;

use backon::{BackoffBuilder, ConstantBuilder};

/// Upper limit of a wait, jitter included.
pub(super) const MAX_DELAY: Duration = Duration::from_secs(1);

const EAGER: Duration = Duration::from_millis(125);
/// Number of short waits, which last 10 s or more in total.
const EAGER_TIMES: usize = 80;
const CALM: Duration = Duration::from_millis(500);

/// Waits of 125 to 250 ms for the first ten seconds, of 0.5 to 1 s after them, without end.
pub(super) fn delays() -> impl Iterator<Item = Duration> + Send {
    let eager = ConstantBuilder::new()
        .with_delay(EAGER)
        .with_max_times(EAGER_TIMES)
        .with_jitter()
        .build();
    let calm = ConstantBuilder::new()
        .with_delay(CALM)
        .without_max_times()
        .with_jitter()
        .build();
    eager.chain(calm).map(|delay| delay.min(MAX_DELAY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eager_for_ten_seconds_then_calm() {
        let mut passed = Duration::ZERO;
        for delay in delays().take(500) {
            let bound = if passed < Duration::from_secs(10) {
                250
            } else {
                1000
            };
            assert!(
                delay <= Duration::from_millis(bound),
                "{delay:?} after {passed:?}"
            );
            assert!(delay >= EAGER);
            passed += delay;
        }
        assert!(passed > Duration::from_secs(60));
    }
}
