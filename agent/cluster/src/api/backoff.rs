//! How long to wait until the next attempt.

use std::{
    hash::{BuildHasher as _, RandomState},
    time::Duration,
};

/// Base of the first pause between two attempts.
pub(crate) const FIRST: Duration = Duration::from_millis(800);
/// Longest base of a pause between two attempts.
const LONGEST: Duration = Duration::from_secs(30);

/// Pauses between attempts: each is about twice as long as the one before it.
#[derive(Debug)]
pub struct Backoff {
    base: Duration,
    longest: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self::between((FIRST, LONGEST))
    }
}

impl Backoff {
    /// The first pause is at most `first`, and each later one at most `longest`.
    pub fn between((first, longest): (Duration, Duration)) -> Self {
        Self {
            base: first,
            longest,
        }
    }

    /// The pause before the next attempt, between one half of the base and all of it. The base
    /// doubles with each call.
    pub fn pause(&mut self) -> Duration {
        let base = self.base;
        self.base = (base * 2).min(self.longest);
        // The random part keeps agents from sending requests at the same moment.
        base / 2 + random(base / 2)
    }
}

/// A random time below `limit`, so that agents do not send requests at the same moment.
pub fn random(limit: Duration) -> Duration {
    let part = RandomState::new().hash_one(0_u8) % 1000;
    limit * u32::try_from(part).unwrap_or(0) / 1000
}
