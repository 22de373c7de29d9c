//! `cargo xtask kernels`: boots kernels of Debian in qemu and runs a script on each.
//!
//! ```text
//!  package ──► target/kernels/<release>/   kernel and modules, from the machine's own mirror
//!  initramfs ─► modules of 9p and overlay, the script, and the guest's start
//!  machine ───► qemu: the machine's own root, read-only, under a file system in memory
//! ```
//!
//! The guest is emulated and not virtualised, so it runs on every machine, but many times slower.

mod initramfs;
mod machine;
mod package;

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;

pub(crate) use machine::Ended;

use crate::{packages, process, workspace};

/// What a guest does if no script is given.
pub(crate) const SMOKE: &str = include_str!("kernels/smoke.sh");

/// Profile of the programs in a guest, the same as for `cargo xtask bench`.
const PROFILE: &str = "measured";

/// Which programs a guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Programs {
    /// Optimised programs, made by [`build`].
    Measured,
    /// The programs that the tests of this machine have built.
    Debug,
}

impl Programs {
    /// The programs' directory in cargo's target directory.
    fn directory(self) -> &'static str {
        match self {
            Self::Measured => PROFILE,
            Self::Debug => "debug",
        }
    }
}

/// Every wait of a test is this many times longer in a guest. Nothing else is looser there.
pub(crate) const TIME_FACTOR: u32 = 6;

/// A kernel that Debian has, by its release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kernel {
    /// Debian 11
    #[value(name = "5.10")]
    V5_10,
    /// Debian 12
    #[value(name = "6.1")]
    V6_1,
    /// The backports of Debian 12
    #[value(name = "6.12")]
    V6_12,
}

impl Kernel {
    /// The first two numbers of the kernel's version.
    pub(crate) fn release(self) -> &'static str {
        match self {
            Self::V5_10 => "5.10",
            Self::V6_1 => "6.1",
            Self::V6_12 => "6.12",
        }
    }

    /// Whether programs are attached by TCX links on this kernel.
    pub(crate) fn has_tcx(self) -> bool {
        self == Self::V6_12
    }

    /// The suite of Debian that has the kernel.
    fn suite(self) -> &'static str {
        match self {
            Self::V5_10 => "bullseye",
            Self::V6_1 => "bookworm",
            Self::V6_12 => "bookworm-backports",
        }
    }
}

/// How to boot, and for how long.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only this kernel
    #[arg(long, value_enum)]
    pub(crate) kernel: Option<Kernel>,
    /// A bash script for the guest, instead of the check that both programs start
    #[arg(long)]
    pub(crate) script: Option<PathBuf>,
    /// A directory that keeps what the guest writes to /disk, for the next guest [default: a new one]
    #[arg(long)]
    pub(crate) disk: Option<PathBuf>,
    /// Do not build the programs first
    #[arg(long)]
    pub(crate) no_build: bool,
    /// The guest is ended after so many seconds
    #[arg(long, default_value_t = 600)]
    pub(crate) limit: u64,
    /// Arguments of the script
    #[arg(last = true)]
    pub(crate) args: Vec<String>,
}

/// Builds the programs, then runs the script on the kernels.
pub(crate) fn run(args: &Args) -> Result<()> {
    let script = match &args.script {
        Some(path) => {
            fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?
        }
        None => SMOKE.to_owned(),
    };
    install()?;
    if !args.no_build {
        build()?;
    }
    let kernels = args
        .kernel
        .map_or_else(|| Kernel::value_variants().to_vec(), |kernel| vec![kernel]);
    let mut failed = Vec::new();
    for kernel in kernels {
        println!("\n== kernel {} ==", kernel.release());
        let limit = Duration::from_secs(args.limit);
        let work = Work {
            script: &script,
            args: &args.args,
            disk: args.disk.as_deref(),
            programs: Programs::Measured,
            limit,
        };
        match guest(kernel, &work, |line| println!("{line}"))? {
            Ended::Status(0) => {}
            Ended::Status(status) => failed.push(format!("{}: status {status}", kernel.release())),
            Ended::WithoutStatus { console } => failed.push(format!(
                "{}: the guest ended without a status; its console is {}",
                kernel.release(),
                console.display()
            )),
            Ended::Late { console } => failed.push(format!(
                "{}: no end after {} s (--limit); its console is {}",
                kernel.release(),
                args.limit,
                console.display()
            )),
        }
    }
    if !failed.is_empty() {
        bail!("kernels failed: {}", failed.join("; "));
    }
    Ok(())
}

/// Installs the emulator and the tools that make a guest.
pub(crate) fn install() -> Result<()> {
    process::require_root("`cargo xtask kernels`")?;
    packages::install(packages::KERNELS)
}

/// Builds the programs for guests, optimised, because a guest is slow.
pub(crate) fn build() -> Result<()> {
    process::run(process::command(
        "cargo",
        &[
            "build",
            "--locked",
            "--profile",
            PROFILE,
            "--package=holdfast-agent",
            "--package=holdfast-sdp",
            "--package=holdfast-cni",
            "--package=holdfast-e2e",
            "--package=holdfast-bench",
            "--bins",
        ],
    ))
}

/// A script that a guest runs, with its surroundings.
pub(crate) struct Work<'w> {
    /// Text of the script, for bash.
    pub(crate) script: &'w str,
    pub(crate) args: &'w [String],
    /// The host's directory that is /disk in the guest. `None`: a new directory, which is removed
    /// when the guest has ended.
    pub(crate) disk: Option<&'w Path>,
    /// Programs whose directory comes first in the guest's `PATH`.
    pub(crate) programs: Programs,
    /// Longest time until the end of the guest.
    pub(crate) limit: Duration,
}

/// Boots `kernel` for `work`, and passes each line of its output to `line`.
pub(crate) fn guest(kernel: Kernel, work: &Work<'_>, line: impl FnMut(&str)) -> Result<Ended> {
    let target = workspace::target_dir()?;
    let dir = target.join("kernels").join(kernel.release());
    let unpacked = package::unpacked(kernel, &dir)?;
    let run = tempfile_in(&dir)?;
    let own = run.join("disk");
    let disk = work.disk.unwrap_or(&own);
    fs::create_dir_all(disk).with_context(|| format!("making {}", disk.display()))?;
    let programs = target.join(work.programs.directory());
    let start = start(&unpacked, &programs, work.args);
    let initramfs = initramfs::write(&unpacked, &start, work.script, &run)?;
    let ended = machine::boot(&unpacked, &initramfs, (&run, disk), work.limit, line)?;
    if let Ended::Status(_) = ended {
        fs::remove_dir_all(&run).with_context(|| format!("removing {}", run.display()))?;
    }
    Ok(ended)
}

/// A directory of this run in `dir`.
fn tempfile_in(dir: &Path) -> Result<PathBuf> {
    let run = dir.join(format!("run-{}", std::process::id()));
    fs::create_dir_all(&run).with_context(|| format!("making {}", run.display()))?;
    Ok(run)
}

/// The script that starts a guest once its root is mounted: it mounts the rest and runs the script
/// of the work.
fn start(unpacked: &package::Unpacked, programs: &Path, args: &[String]) -> String {
    let quoted: Vec<String> = args.iter().map(|arg| quote(arg)).collect();
    format!(
        include_str!("kernels/start.sh"),
        modules = quote(&unpacked.modules.to_string_lossy()),
        version = unpacked.version,
        factor = TIME_FACTOR,
        programs = quote(&programs.to_string_lossy()),
        args = quoted.join(" "),
    )
}

/// `word` as one word of a shell.
fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_stays_one_word() {
        assert_eq!(quote("it's $HOME"), r"'it'\''s $HOME'");
    }
}
