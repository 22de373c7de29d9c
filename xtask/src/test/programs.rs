//! The test programs of `e2e`. Each has a module for each file of tests.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::tier::Tier;
use crate::{process, repository, workspace};

/// The test program whose tests keep both CPUs busy.
pub(super) const ALONE: &str = "alone";
/// The test program whose tests count lost queries.
const PAIRED: &str = "paired";
/// How many jobs of any other program run at the same time. These jobs mostly wait.
const LANES: usize = 4;
/// The test program whose two tests run in two guests.
pub(super) const BOOTS: &str = "boots";

/// A test program of `e2e` that was built.
#[derive(Debug)]
pub(super) struct TestProgram {
    pub(super) name: String,
    pub(super) path: PathBuf,
}

impl TestProgram {
    /// Whether the tier runs tests of this program.
    pub(super) fn is_of(&self, tier: Tier) -> bool {
        match (tier, self.name.as_str()) {
            (Tier::Nightly, name) => name != BOOTS,
            (Tier::Kernel, name) => name == "kernel",
            (Tier::Cri, name) => name == "cri",
            (Tier::Hostile, name) => name == ALONE,
            (Tier::Kernels, name) => name == BOOTS,
            (_, name) => !["kernel", "cri", BOOTS].contains(&name),
        }
    }

    /// The program's tests, as `file::test`: all tests that run without a flag or, if `ignored`,
    /// the ignored tests.
    pub(super) fn tests(&self, ignored: bool) -> Result<Vec<String>> {
        let mut list = process::command(&self.path.to_string_lossy(), &["--list"]);
        list.args(["--format", "terse", "--ignored"]);
        let only_ignored = self.listed(list)?;
        if ignored {
            return Ok(only_ignored);
        }
        let mut list = process::command(&self.path.to_string_lossy(), &["--list"]);
        list.args(["--format", "terse"]);
        let mut all = self.listed(list)?;
        all.retain(|test| !only_ignored.contains(test));
        Ok(all)
    }

    fn listed(&self, mut list: Command) -> Result<Vec<String>> {
        let output = list.output().context("cannot start a test program")?;
        if !output.status.success() {
            bail!("{} does not list its tests: {}", self.name, output.status);
        }
        let lines = String::from_utf8_lossy(&output.stdout).into_owned();
        let tests = lines.lines().filter_map(|line| line.strip_suffix(": test"));
        Ok(tests.map(str::to_owned).collect())
    }

    /// How many of the program's jobs may run at the same time.
    pub(super) fn lanes(&self) -> usize {
        match self.name.as_str() {
            ALONE => 1,
            PAIRED => 2,
            _ => LANES,
        }
    }

    /// The tests by job: one job for each file or, for the program [`PAIRED`], for each test.
    pub(super) fn jobs(&self, tests: Vec<String>) -> BTreeMap<String, Vec<String>> {
        if self.name == PAIRED {
            let named = tests.into_iter();
            named
                .map(|test| (format!("{PAIRED}::{test}"), vec![test]))
                .collect()
        } else {
            by_file(&self.name, tests)
        }
    }

    /// A run of exactly these tests, one after another.
    pub(super) fn command(&self, tests: &[String]) -> Command {
        let mut command = process::command(&self.path.to_string_lossy(), &["--test-threads=1"]);
        command.arg("--exact").args(tests);
        command.current_dir(repository::root().join("e2e"));
        command
    }
}

/// Tests by the file they are in. Tests in a program's own root are under the program's name.
pub(super) fn by_file(program: &str, tests: Vec<String>) -> BTreeMap<String, Vec<String>> {
    let mut files = BTreeMap::<String, Vec<String>>::new();
    for test in tests {
        let file = match test.split_once("::") {
            Some((file, _)) => format!("{program}::{file}"),
            None => program.to_owned(),
        };
        files.entry(file).or_default().push(test);
    }
    files
}

/// Builds the programs under test and the tests of `e2e`. Returns the paths of the test programs.
pub(super) fn test_programs() -> Result<Vec<TestProgram>> {
    let mut build = workspace::build();
    build.arg("--message-format=json-render-diagnostics");
    println!("  $ {}", process::line(&build));
    let output = build
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start cargo")?;
    if !output.status.success() {
        bail!("the programs, or the tests of e2e, do not build");
    }
    let manifests = ["e2e/Cargo.toml", "e2e/bench/Cargo.toml"]
        .map(|path| repository::root().join(path).to_string_lossy().into_owned());
    let mut programs: Vec<TestProgram> = String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|message| {
            message["reason"] == "compiler-artifact"
                && message["profile"]["test"] == true
                && manifests
                    .iter()
                    .any(|of| message["manifest_path"] == of.as_str())
        })
        .filter_map(|message| {
            Some(TestProgram {
                name: message["target"]["name"].as_str()?.to_owned(),
                path: message["executable"].as_str()?.into(),
            })
        })
        .collect();
    programs.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(programs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_program_is_of_one_tier() {
        let tiers = [Tier::Kernel, Tier::Netns, Tier::Cri, Tier::Kernels];
        for (name, tier) in [
            ("kernel", Tier::Kernel),
            ("cri", Tier::Cri),
            ("boots", Tier::Kernels),
            ("netns", Tier::Netns),
            ("alone", Tier::Netns),
            ("paired", Tier::Netns),
            ("bench", Tier::Netns),
            ("holdfast_e2e", Tier::Netns),
        ] {
            let program = TestProgram {
                name: name.to_owned(),
                path: PathBuf::new(),
            };
            let of: Vec<Tier> = tiers
                .into_iter()
                .filter(|tier| program.is_of(*tier))
                .collect();
            assert_eq!(of, [tier], "{name}");
        }
    }

    #[test]
    fn tests_are_run_by_the_file_they_are_in() {
        let tests = ["why::a", "why::nested::b", "cni::c", "d"].map(str::to_owned);
        let files: Vec<(String, usize)> = by_file("netns", tests.to_vec())
            .into_iter()
            .map(|(file, tests)| (file, tests.len()))
            .collect();
        let expected = [("netns", 1), ("netns::cni", 1), ("netns::why", 2)];
        assert_eq!(files, expected.map(|(file, n)| (file.to_owned(), n)));
    }
}
