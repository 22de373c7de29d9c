//! Instants that both programs understand.

use std::time::Duration;

/// An instant of CLOCK_BOOTTIME, nanoseconds: both processes share this clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BootTime(pub u64);

impl BootTime {
    /// Reads CLOCK_BOOTTIME, which also counts the time in suspend.
    pub fn now() -> Self {
        Self(shared_maps::user::boottime_ns())
    }

    /// This instant plus whole seconds.
    #[must_use]
    pub const fn plus_secs(self, secs: u64) -> Self {
        Self(self.0.saturating_add(secs.saturating_mul(1_000_000_000)))
    }

    /// This instant plus a duration.
    #[must_use]
    pub fn plus(self, duration: Duration) -> Self {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanos))
    }
}
