//! `cargo xtask bpf`: builds the eBPF programs.

use anyhow::{Result, bail};

use crate::{process, toolchain::Toolchain, workspace};

/// Builds the object; with `check`, compares it with the committed one instead.
pub(crate) fn build(check: bool) -> Result<()> {
    let Some(toolchain) = Toolchain::find() else {
        bail!("no eBPF toolchain: run `cargo xtask setup --only bpf`");
    };
    let mut cargo = toolchain.cargo();
    cargo.args([
        "build",
        "--release",
        "--target=bpfel-unknown-none",
        "-Zbuild-std=core",
    ]);
    cargo.args(["--package", workspace::BPF, "--target-dir", "target/bpf"]);
    process::run(cargo)?;
    if check {
        bail!("no object is committed yet to compare with");
    }
    Ok(())
}
