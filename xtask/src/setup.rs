//! `cargo xtask setup`: what a fresh Debian 12 lacks. Each step says what it does and why.

mod cargo_tool;
mod ebpf;

use std::fs;

use anyhow::{Context as _, Result, bail};
pub(crate) use cargo_tool::CargoTool;
use clap::ValueEnum;

use crate::{charts, lint, packages, process, progress::step};

/// A part of the setup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// Tools and mounts of demo, benchmarks and tests
    Lab,
    /// The toolchain that builds the eBPF programs
    Bpf,
    /// What lint calls besides the Rust toolchain
    Lint,
    /// helm, promtool and the schemas of Kubernetes, below target/
    Charts,
}

/// Sets up `only`, or everything.
pub(crate) fn run(only: Option<Part>) -> Result<()> {
    let wanted = |part| only.is_none_or(|only| only == part);
    if wanted(Part::Lab) {
        lab()?;
    }
    if wanted(Part::Bpf) {
        ebpf::install()?;
    }
    if wanted(Part::Lint) {
        cargo_tool::CARGO_DENY.install()?;
        lint::install_mdbook()?;
    }
    if wanted(Part::Charts) {
        charts::Tools::install()?;
        step("tools of the charts are there", "helm, promtool, schemas");
    }
    Ok(())
}

/// Tools of demo, benchmarks and the tests of `e2e`. Quick if all are installed.
pub(crate) fn lab() -> Result<()> {
    process::require_root("`cargo xtask setup`")?;
    packages::install(packages::LAB)?;
    kernel()?;
    bpffs()
}

/// Additional tools of the benchmarks.
pub(crate) fn bench() -> Result<()> {
    packages::install(packages::BENCH)
}

/// Tools that make and run the container images.
pub(crate) fn image() -> Result<()> {
    packages::install(packages::IMAGE)
}

/// Tools that start pods in the tier `cri`.
pub(crate) fn cri() -> Result<()> {
    packages::install(packages::IMAGE)?;
    packages::install(packages::CRI)
}

/// Additional tools of the nightly tests.
pub(crate) fn nightly() -> Result<()> {
    packages::install(packages::NIGHTLY)
}

fn kernel() -> Result<()> {
    let release =
        fs::read_to_string("/proc/sys/kernel/osrelease").context("reading the kernel's release")?;
    let release = release.trim();
    if kernel_version(release).is_some_and(|version| version < (6, 1)) {
        bail!(
            "kernel {release} is too old: the tests need 6.1 or newer; Debian 12 has it (docs/src/kernels.md)"
        );
    }
    step(
        &format!("kernel {release}"),
        "tests run on 6.1 or newer; before 6.6 programs are attached by tc filters",
    );
    Ok(())
}

fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn bpffs() -> Result<()> {
    const MOUNT_POINT: &str = "/sys/fs/bpf";
    let mounts = fs::read_to_string("/proc/self/mounts").context("reading /proc/self/mounts")?;
    let mounted = mounts.lines().any(|line| {
        let mut fields = line.split(' ').skip(1);
        fields.next() == Some(MOUNT_POINT) && fields.next() == Some("bpf")
    });
    if mounted {
        step(
            &format!("{MOUNT_POINT} is mounted"),
            "maps and links are pinned there",
        );
        return Ok(());
    }
    step(
        &format!("mount {MOUNT_POINT}"),
        "maps and links are pinned there",
    );
    process::run(process::command(
        "mount",
        &["-t", "bpf", "bpf", MOUNT_POINT],
    ))
    .context(
        "mounting the BPF file system; in a container, mount it outside and pass it in \
         (-v /sys/fs/bpf:/sys/fs/bpf with CAP_BPF, CAP_NET_ADMIN and CAP_SYS_ADMIN)",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_releases_are_read() {
        assert_eq!(kernel_version("6.18.44"), Some((6, 18)));
        assert_eq!(kernel_version("6.1.0-28-amd64"), Some((6, 1)));
        assert_eq!(kernel_version("mystery"), None);
    }
}
