//! Polling with a deadline, for tests and tools that return errors.

use std::{fmt::Debug, time::Duration};

use anyhow::{Result, anyhow};

/// Repeats `probe` until it succeeds. After `limit` it fails with the last error.
pub fn eventually<T>(what: &str, limit: Duration, probe: impl FnMut() -> Result<T>) -> Result<T> {
    Ok(polling::eventually(what, limit, probe)?)
}

/// Repeats `see` until its value is `wanted`, and returns that value. After `limit` it fails with
/// the last value or error.
pub fn until<T: Debug>(
    what: &str,
    limit: Duration,
    mut see: impl FnMut() -> Result<T>,
    wanted: impl Fn(&T) -> bool,
) -> Result<T> {
    eventually(what, limit, || match see()? {
        seen if wanted(&seen) => Ok(seen),
        seen => Err(anyhow!("{seen:?}")),
    })
}
