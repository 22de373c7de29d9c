//! Polling with a deadline, for the tests of all crates: a failure says which state was awaited and
//! which state was seen last.
#![warn(missing_docs)]

use std::{
    fmt::{Debug, Display},
    panic::Location,
    sync::LazyLock,
    time::{Duration, Instant},
};

/// Time limit of the functions that panic: far longer than any state takes on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(20);

/// Environment variable that says how many times slower than usual this machine is.
pub const TIME_FACTOR: &str = "HOLDFAST_TIME_FACTOR";

/// The first pause between two probes, and the longest one. Each pause is twice as long as the
/// previous one.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// `time`, stretched for this machine: an emulated machine is many times slower, and
/// [`TIME_FACTOR`] says how many times. All waits of this crate are stretched.
pub fn stretched(time: Duration) -> Duration {
    static FACTOR: LazyLock<u32> = LazyLock::new(|| {
        #[expect(
            clippy::disallowed_methods,
            reason = "tests have no configuration that they could get it from"
        )]
        let given = std::env::var(TIME_FACTOR).ok();
        let factor = given.and_then(|given| given.parse().ok());
        factor.unwrap_or(1).max(1)
    });
    time * *FACTOR
}

/// A state that did not come within the limit.
#[derive(Debug, thiserror::Error)]
#[error("not within {limit:?}: {what}; seen last: {seen}")]
pub struct NotInTime {
    what: String,
    limit: Duration,
    seen: String,
}

/// Repeats `probe` until it succeeds. Errors of `probe` say what it sees.
///
/// # Errors
/// After `limit`, with the last error of `probe`.
pub fn eventually<T, E: Display>(
    what: &str,
    limit: Duration,
    mut probe: impl FnMut() -> Result<T, E>,
) -> Result<T, NotInTime> {
    let mut wait = Wait::new(what, limit);
    loop {
        match probe() {
            Ok(value) => return Ok(value),
            Err(seen) => std::thread::sleep(wait.pause(|| format!("{seen:#}"))?),
        }
    }
}

/// Repeats `see` until its value is `wanted`, and returns that value. Panics after [`LIMIT`].
#[track_caller]
pub fn until<T: Debug>(what: &str, mut see: impl FnMut() -> T, wanted: impl Fn(&T) -> bool) -> T {
    let mut wait = Wait::new(what, LIMIT);
    loop {
        let seen = see();
        if wanted(&seen) {
            return seen;
        }
        match wait.pause(|| format!("{seen:?}")) {
            Ok(pause) => std::thread::sleep(pause),
            Err(late) => panic!("{late}"),
        }
    }
}

/// Like [`until`], but other tasks run between the probes.
#[track_caller]
pub fn until_async<T: Debug>(
    what: &str,
    mut see: impl FnMut() -> T,
    wanted: impl Fn(&T) -> bool,
) -> impl Future<Output = T> {
    until_awaited(what, async move || see(), wanted)
}

/// Like [`until_async`], for probes that are async, such as requests.
#[track_caller]
pub fn until_awaited<T: Debug>(
    what: &str,
    mut see: impl AsyncFnMut() -> T,
    wanted: impl Fn(&T) -> bool,
) -> impl Future<Output = T> {
    let caller = Location::caller();
    let mut wait = Wait::new(what, LIMIT);
    async move {
        loop {
            let seen = see().await;
            if wanted(&seen) {
                return seen;
            }
            match wait.pause(|| format!("{seen:?}")) {
                Ok(pause) => tokio::time::sleep(pause).await,
                Err(late) => panic!("{caller}: {late}"),
            }
        }
    }
}

struct Wait {
    what: String,
    limit: Duration,
    begun: Instant,
    pause: Duration,
}

impl Wait {
    fn new(what: &str, limit: Duration) -> Self {
        Self {
            what: what.to_owned(),
            limit: stretched(limit),
            begun: Instant::now(),
            pause: FIRST_PAUSE,
        }
    }

    /// How long to pause before the next probe.
    fn pause(&mut self, seen: impl FnOnce() -> String) -> Result<Duration, NotInTime> {
        if self.begun.elapsed() >= self.limit {
            return Err(NotInTime {
                what: self.what.clone(),
                limit: self.limit,
                seen: seen(),
            });
        }
        let pause = self.pause;
        self.pause = (pause * 2).min(LONGEST_PAUSE);
        Ok(pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_that_comes_is_returned() {
        let mut probes = 0;
        let seen = until(
            "three probes",
            || {
                probes += 1;
                probes
            },
            |probes| *probes == 3,
        );
        assert_eq!(seen, 3);
    }

    #[tokio::test]
    async fn other_tasks_run_between_the_probes() {
        let (sender, mut receiver) = tokio::sync::mpsc::channel(1);
        let send = async move { sender.send(5).await.unwrap() };
        let receive = until_async("a message", || receiver.try_recv().ok(), Option::is_some);
        assert_eq!(tokio::join!(receive, send).0, Some(5));
    }

    #[test]
    fn a_failure_says_what_was_awaited_and_what_was_seen_last() {
        let mut probes = 0;
        let late = eventually("the flag", Duration::ZERO, || -> Result<(), String> {
            probes += 1;
            Err(format!("probe {probes}"))
        });
        assert_eq!(
            late.unwrap_err().to_string(),
            "not within 0ns: the flag; seen last: probe 1"
        );
    }
}
