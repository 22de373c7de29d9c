//! Archives whose bytes depend only on their files and the commit.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};

use crate::process;

/// Options that keep order, owners and permissions of this machine out of the archive. All files
/// get the time of the commit.
const SAME: [&str; 6] = [
    "--sort=name",
    "--owner=0",
    "--group=0",
    "--numeric-owner",
    "--format=gnu",
    "--mode=u+rwX,go+rX,go-w",
];

/// Makes a compressed archive of `name`, which is in the directory `of`, without the files that the
/// patterns `without` match.
pub(crate) fn gzipped(to: &Path, of: &Path, name: &str, without: &[String]) -> Result<()> {
    let mut tar = plain(to, of)?;
    tar.args(without.iter().map(|pattern| format!("--exclude={pattern}")));
    tar.arg("--use-compress-program=gzip -9n").arg(name);
    process::output(tar).map(drop)
}

/// Makes an archive of `names`, which are in the directory `of`.
pub(crate) fn uncompressed(to: &Path, of: &Path, names: &[&str]) -> Result<()> {
    let mut tar = plain(to, of)?;
    tar.args(names);
    process::output(tar).map(drop)
}

fn plain(to: &Path, of: &Path) -> Result<Command> {
    let mut tar = process::command("tar", &["--create"]);
    tar.args(SAME).arg(format!("--mtime=@{}", seconds()?));
    tar.arg("--file").arg(to).arg("--directory").arg(of);
    Ok(tar)
}

/// Writes the file SHA256SUMS of `files` into `home`.
pub(crate) fn sums(home: &Path, files: &[PathBuf]) -> Result<PathBuf> {
    let mut names: Vec<_> = files.iter().filter_map(|file| file.file_name()).collect();
    names.sort();
    let mut command = process::command("sha256sum", &["--"]);
    command.args(names).current_dir(home);
    let to = home.join("SHA256SUMS");
    fs::write(&to, process::output(command)?)?;
    Ok(to)
}

/// Time of the commit, or SOURCE_DATE_EPOCH, in seconds since 1970.
pub(crate) fn seconds() -> Result<String> {
    #[expect(
        clippy::disallowed_methods,
        reason = "the convention of reproducible builds"
    )]
    let seconds = match env::var("SOURCE_DATE_EPOCH") {
        Ok(seconds) => seconds,
        Err(_) => process::output(process::command("git", &["show", "-s", "--format=%ct"]))
            .context("the time of the commit; without git, set SOURCE_DATE_EPOCH")?,
    };
    Ok(seconds.trim().to_owned())
}

/// The time of [`seconds`], in the form of documents.
pub(crate) fn date() -> Result<String> {
    let at = format!("--date=@{}", seconds()?);
    let date = process::command("date", &["--utc", &at, "+%Y-%m-%dT%H:%M:%SZ"]);
    Ok(process::output(date)?.trim().to_owned())
}
