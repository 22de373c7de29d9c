//! Counting what the test harness prints.

use std::fmt;

/// Results of any number of test programs.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) passed: u64,
    pub(super) failed: u64,
    pub(super) ignored: u64,
    /// Names of failed tests, and other failures.
    pub(super) failures: Vec<String>,
}

impl Tally {
    /// Takes one line of output.
    ///
    /// `test result: ok. 5 passed; 0 failed; 1 ignored; …` has numbers, `test some::name ...
    /// FAILED` a name.
    pub(super) fn read(&mut self, line: &str) {
        if let Some(counts) = line.strip_prefix("test result: ") {
            self.passed += count(counts, "passed");
            self.failed += count(counts, "failed");
            self.ignored += count(counts, "ignored");
        } else if let Some(name) = line
            .strip_prefix("test ")
            .and_then(|rest| rest.strip_suffix(" ... FAILED"))
        {
            self.failures.push(name.to_owned());
        }
    }

    /// Adds a failure that the harness did not print.
    pub(super) fn fail(&mut self, what: String) {
        self.failed += 1;
        self.failures.push(what);
    }

    /// Adds the results of another tally.
    pub(super) fn add(&mut self, other: &Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
        self.failures.extend(other.failures.iter().cloned());
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} passed, {} failed, {} ignored",
            self.passed, self.failed, self.ignored
        )
    }
}

/// Number before `word` in a line of counts; 0 if it is absent.
fn count(counts: &str, word: &str) -> u64 {
    counts
        .split([';', '.'])
        .filter_map(|part| part.trim().strip_suffix(word))
        .find_map(|number| number.trim().parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_add_up_and_failures_are_named() {
        let mut tally = Tally::default();
        for line in [
            "running 3 tests",
            "test a::b ... ok",
            "test a::c ... FAILED",
            "test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s",
            "test result: ok. 20 passed; 0 failed; 0 ignored; 0 measured; 4 filtered out; finished in 1.50s",
        ] {
            tally.read(line);
        }
        assert_eq!((tally.passed, tally.failed, tally.ignored), (21, 1, 1));
        assert_eq!(tally.failures, ["a::c"]);
    }
}
