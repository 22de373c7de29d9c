//! Polling with a deadline, instead of sleeping for luck.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

const PAUSE: Duration = Duration::from_millis(20);

/// Repeats `probe` until it succeeds; after `limit` fails with its last error.
pub fn eventually<T>(
    what: &str,
    limit: Duration,
    mut probe: impl FnMut() -> Result<T>,
) -> Result<T> {
    let deadline = Instant::now() + limit;
    loop {
        match probe() {
            Ok(value) => return Ok(value),
            Err(error) if Instant::now() >= deadline => {
                bail!("{what}: not within {limit:?}; last: {error:#}")
            }
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

/// Repeats `holds` until it is true; after `limit` fails.
pub fn until(what: &str, limit: Duration, mut holds: impl FnMut() -> bool) -> Result<()> {
    eventually(what, limit, || {
        ensure!(holds(), "still false");
        Ok(())
    })
}
