//! Instants that both programs understand.

use std::{fmt, num::NonZeroU64, time::Duration};

/// An instant of CLOCK_BOOTTIME: both processes share this clock.
///
/// The number in it is one more than the nanoseconds, so that `Option<BootTime>` is as small as a
/// `BootTime`: tables keep several for each address.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BootTime(NonZeroU64);

impl BootTime {
    /// When the machine started.
    pub const START: Self = Self(NonZeroU64::MIN);

    /// Reads CLOCK_BOOTTIME, which also counts the time in suspend.
    pub fn now() -> Self {
        Self::from_nanos(shared_maps::user::boottime_ns())
    }

    /// The instant `nanos` after the start, but at most the last one, 584 years after the start.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self::START.plus_nanos(nanos)
    }

    /// Nanoseconds since the start.
    pub const fn nanos(self) -> u64 {
        self.0.get() - 1
    }

    /// This instant plus whole seconds.
    #[must_use]
    pub const fn plus_secs(self, secs: u64) -> Self {
        self.plus_nanos(secs.saturating_mul(1_000_000_000))
    }

    /// This instant plus a duration.
    #[must_use]
    pub fn plus(self, duration: Duration) -> Self {
        self.plus_nanos(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
    }

    const fn plus_nanos(self, nanos: u64) -> Self {
        Self(self.0.saturating_add(nanos))
    }
}

impl Default for BootTime {
    fn default() -> Self {
        Self::START
    }
}

impl fmt::Debug for BootTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("BootTime").field(&self.nanos()).finish()
    }
}
