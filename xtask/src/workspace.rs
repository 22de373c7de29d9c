//! Paths in this repository.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::{process, repository};

/// The crate with the tests that need root.
pub(crate) const E2E: &str = "holdfast-e2e";
/// The crate of the eBPF programs, which has another target and toolchain.
pub(crate) const BPF: &str = "holdfast-bpf";

/// `cargo metadata` of the workspace members, and of all dependencies if `deps`.
pub(crate) fn metadata(deps: bool) -> Result<Value> {
    let mut args = vec!["metadata", "--format-version=1", "--locked"];
    if !deps {
        args.push("--no-deps");
    }
    let text = process::output(process::command("cargo", &args))?;
    serde_json::from_str(&text).context("`cargo metadata` printed something else than JSON")
}

/// Directories of the members, relative to the root.
pub(crate) fn member_dirs(metadata: &Value) -> Vec<PathBuf> {
    packages(metadata)
        .filter_map(|package| package["manifest_path"].as_str())
        .filter_map(|path| {
            Path::new(path)
                .parent()?
                .strip_prefix(repository::root())
                .ok()
        })
        .map(Path::to_path_buf)
        .collect()
}

/// The packages that `cargo metadata` lists.
pub(crate) fn packages(metadata: &Value) -> impl Iterator<Item = &Value> {
    metadata["packages"].as_array().into_iter().flatten()
}

/// The directory of the crate that contains a file, relative to the root, and the file's path
/// within it.
pub(crate) fn crate_of(file: &Path) -> Option<(&Path, &Path)> {
    let mut dirs = file.ancestors().skip(1);
    let dir = dirs.find(|dir| repository::root().join(dir).join("Cargo.toml").is_file())?;
    let inner = file.strip_prefix(dir).ok()?;
    (!dir.as_os_str().is_empty()).then_some((dir, inner))
}

/// Whether a file has only tests or their helpers, by its path.
pub(crate) fn is_test_file(file: &Path) -> bool {
    file.iter().any(|part| {
        let part = part.to_string_lossy();
        ["tests", "tests.rs", "testing", "testing.rs"].contains(&&*part)
            || part.ends_with("_tests.rs")
    })
}

/// The command that builds every program and test in the dev profile. It builds all at once and
/// with the features of `cargo test`: for a smaller selection, which has other features, cargo
/// would build the crates again.
pub(crate) fn build() -> Command {
    let build = ["build", "--locked", "--workspace", "--exclude", BPF];
    let mut command = process::command("cargo", &build);
    command.args(["--lib", "--bins", "--tests"]);
    command
}

/// The command that runs these test programs, as [`build`] builds them.
pub(crate) fn test(programs: &[&str]) -> Command {
    let test = ["test", "--locked", "--workspace", "--exclude", BPF];
    let mut command = process::command("cargo", &test);
    command.args(programs.iter().flat_map(|program| ["--test", program]));
    command
}

/// Files that git knows or would add, relative to the root.
pub(crate) fn files() -> Result<Vec<PathBuf>> {
    let list = process::output(process::command(
        "git",
        &["ls-files", "--cached", "--others", "--exclude-standard"],
    ))?;
    Ok(list
        .lines()
        .map(PathBuf::from)
        .filter(|path| repository::root().join(path).is_file())
        .collect())
}

/// Names of a package's targets of one kind (`bin`, `test`).
pub(crate) fn targets<'m>(
    metadata: &'m Value,
    package: &'m str,
    kind: &'m str,
) -> impl Iterator<Item = &'m str> {
    packages(metadata)
        .filter(move |candidate| candidate["name"] == package)
        .flat_map(|package| package["targets"].as_array().into_iter().flatten())
        .filter(move |target| {
            target["kind"]
                .as_array()
                .is_some_and(|kinds| kinds.iter().any(|k| k == kind))
        })
        .filter_map(|target| target["name"].as_str())
}

/// Build directory of cargo, as `cargo metadata` reports it.
pub(crate) fn target_dir() -> Result<PathBuf> {
    let metadata = metadata(false)?;
    metadata["target_directory"]
        .as_str()
        .map(PathBuf::from)
        .context("`cargo metadata` names no target_directory")
}
