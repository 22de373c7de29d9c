//! The previous version's programs, which tests replace by the programs of this version. They are
//! built from the commit in the file `e2e/previous`.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Stdio,
};

use anyhow::{Context as _, Result, bail};

use crate::{process, repository, workspace};

/// Names the last commit that passed all tests.
const FILE: &str = "e2e/previous";
/// The programs, which have their packages' names.
const PROGRAMS: [&str; 2] = [SDP, AGENT];
const SDP: &str = "holdfast-sdp";
const AGENT: &str = "holdfast-agent";

/// Profile with which the previous version is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Profile {
    Debug,
    Release,
}

impl Profile {
    fn directory(self) -> &'static str {
        match self {
            Self::Debug => "debug",
            Self::Release => "release",
        }
    }
}

/// Paths of the previous version's programs.
#[derive(Debug)]
pub(crate) struct Previous {
    pub(crate) sdp: PathBuf,
    pub(crate) agent: PathBuf,
}

/// Builds the programs if they are missing. Returns their paths.
///
/// `reference`: a commit that replaces the commit in the file.
pub(crate) fn build(reference: Option<&str>, profile: Profile) -> Result<Previous> {
    let commit = commit(reference)?;
    let target = workspace::target_dir()?;
    let home = target.join("previous").join(&commit);
    let kept = home.join(profile.directory());
    let previous = Previous {
        sdp: kept.join(SDP),
        agent: kept.join(AGENT),
    };
    if PROGRAMS.iter().all(|program| kept.join(program).exists()) {
        return Ok(previous);
    }
    let source = home.join("source");
    if !source.exists() {
        unpack(&commit, &source)?;
    }
    println!(
        "{} of {commit}, the previous version:",
        PROGRAMS.join(" and ")
    );
    let mut build = process::command("cargo", &["build", "--locked", "--bins"]);
    build.args(PROGRAMS.iter().flat_map(|program| ["-p", program]));
    if profile == Profile::Release {
        build.arg("--release");
    }
    // The previous version needs its own directory. Cargo distinguishes members of two workspaces
    // only by their paths within the workspace, and would mistake the previous version's members
    // for the present ones.
    let scratch = home.join("target");
    share_dependencies(&target, &scratch, profile)?;
    build.arg("--target-dir").arg(&scratch);
    build.current_dir(&source);
    process::run(build).with_context(|| format!("the previous version, {commit}"))?;
    fs::create_dir_all(&kept)?;
    for program in PROGRAMS {
        let built = scratch.join(profile.directory()).join(program);
        let part = kept.join(program).with_extension("part");
        fs::copy(&built, &part).with_context(|| format!("copy {}", built.display()))?;
        fs::rename(&part, kept.join(program))?;
    }
    fs::remove_dir_all(&scratch)?;
    Ok(previous)
}

/// Links the built dependencies of this version into `to`, so that cargo builds only dependencies
/// that differ. The members of the workspace are left out: they have the same names in both
/// versions.
fn share_dependencies(from: &Path, to: &Path, profile: Profile) -> Result<()> {
    let from = from.join(profile.directory());
    let to = to.join(profile.directory());
    if to.exists() || !from.join("deps").exists() {
        return Ok(());
    }
    let members = members()?;
    let is_of_member = |name: &str| {
        let name = name.strip_prefix("lib").unwrap_or(name);
        // `name-hash`, with the hash last.
        let name = name.rsplit_once('-').map_or(name, |(name, _)| name);
        members.contains(&name.replace('-', "_"))
    };
    for part in [".fingerprint", "build", "deps"] {
        link_tree(&from.join(part), &to.join(part), &is_of_member)?;
    }
    Ok(())
}

/// Crate names of this workspace's members and of their test programs.
fn members() -> Result<BTreeSet<String>> {
    let metadata = workspace::metadata(false)?;
    let targets = workspace::packages(&metadata).flat_map(|package| {
        let targets = package["targets"].as_array().into_iter().flatten();
        targets
            .chain([package])
            .filter_map(|of| of["name"].as_str())
    });
    Ok(targets.map(|name| name.replace('-', "_")).collect())
}

/// Makes hard links to all files below `from`, except entries of `from` that `leaves_out` accepts.
fn link_tree(from: &Path, to: &Path, leaves_out: &dyn Fn(&str) -> bool) -> Result<()> {
    fs::create_dir_all(to)?;
    let entries = fs::read_dir(from).with_context(|| format!("read {}", from.display()))?;
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        if leaves_out(&name.to_string_lossy()) {
            continue;
        }
        let (from, to) = (entry.path(), to.join(&name));
        if entry.file_type()?.is_dir() {
            link_tree(&from, &to, &|_| false)?;
        } else {
            fs::hard_link(&from, &to).with_context(|| format!("link {}", from.display()))?;
        }
    }
    Ok(())
}

fn commit(reference: Option<&str>) -> Result<String> {
    let named = match reference {
        Some(reference) => reference.to_owned(),
        None => fs::read_to_string(repository::root().join(FILE))
            .with_context(|| format!("cannot read {FILE}"))?,
    };
    let named = named.trim();
    let mut git = process::command("git", &["rev-parse", "--verify", "--quiet"]);
    git.arg(format!("{named}^{{commit}}"));
    let Ok(commit) = process::output(git) else {
        bail!(
            "commit {named} of the previous version is not in this clone: fetch it (a shallow \
             clone lacks it: git fetch --unshallow), or name another one in {FILE}"
        );
    };
    Ok(commit.trim().to_owned())
}

fn unpack(commit: &str, to: &Path) -> Result<()> {
    let part = to.with_extension("part");
    if part.exists() {
        fs::remove_dir_all(&part)?;
    }
    fs::create_dir_all(&part)?;
    let mut archive = process::command("git", &["archive", commit])
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start git")?;
    let mut tar = process::command("tar", &["-x", "-C"]);
    tar.arg(&part);
    tar.stdin(archive.stdout.take().context("the output is piped")?);
    process::run(tar)?;
    if !archive.wait()?.success() {
        bail!("git archive {commit} failed");
    }
    Ok(fs::rename(&part, to)?)
}
