//! The toolchain that builds the eBPF programs. Only `cargo xtask bpf` and
//! the lint step need it: the built object is committed.

use anyhow::{Context as _, Result, bail};

use super::{
    packages::{self, Package},
    step,
};
use crate::{process, toolchain::Toolchain};

const BPF_LINKER: &str = "0.13.0";

const DEBIAN: &[Package] = &[
    Package {
        name: "rustc-web",
        why: "a compiler that matches the sources below; rustup's is untouched",
    },
    Package {
        name: "cargo-web",
        why: "its cargo",
    },
    Package {
        name: "rust-web-src",
        why: "sources of `core`, built for the eBPF target",
    },
    Package {
        name: "g++",
        why: "links bpf-linker with LLVM",
    },
];

/// Finds or installs compiler and linker.
pub(super) fn install() -> Result<()> {
    if Toolchain::find().is_none() {
        packages::install(DEBIAN).context(
            "no rustup nightly with rust-src is installed, and Debian's rustc-web cannot be: \
             either `rustup toolchain install nightly --component rust-src`, or mend the above \
             (rustc-web conflicts with Debian's own rustc and rustup packages: remove these)",
        )?;
    }
    let Some(toolchain) = Toolchain::find() else {
        bail!(
            "the packages are installed, but `/usr/bin/rustc --print sysroot` has no library sources: reinstall rust-web-src"
        );
    };
    step(
        &format!("eBPF compiler: {}", toolchain.name()),
        "`core` is built from source for bpfel-unknown-none",
    );
    linker(toolchain)
}

fn linker(toolchain: Toolchain) -> Result<()> {
    let found = process::output(process::command("bpf-linker", &["--version"])).unwrap_or_default();
    if found.split_whitespace().nth(1) == Some(BPF_LINKER) {
        step(
            &format!("bpf-linker {BPF_LINKER} is there"),
            "links eBPF programs",
        );
        return Ok(());
    }
    let major = toolchain.llvm_major()?;
    let dev = format!("llvm-{major}-dev");
    let prefix = format!("/usr/lib/llvm-{major}");
    if !packages::is_installed(&dev) {
        let package = [Package {
            name: dev.clone().leak(),
            why: "LLVM of the compiler's own version, for bpf-linker",
        }];
        packages::install(&package).with_context(|| {
            format!(
                "the eBPF compiler ({}) needs bpf-linker {BPF_LINKER} built against LLVM {major}: \
                 provide {dev}, or put a released bpf-linker {BPF_LINKER} on PATH",
                toolchain.name()
            )
        })?;
    }
    step(
        &format!("build bpf-linker {BPF_LINKER} against LLVM {major}"),
        "links eBPF programs; about a minute",
    );
    // The build script of bpf-linker looks for llvm-config on PATH.
    let script = format!(
        "PATH={prefix}/bin:$PATH exec cargo install bpf-linker --version {BPF_LINKER} --locked --force \
         --no-default-features --features llvm-{major}"
    );
    let mut install = process::command("sh", &["-c", &script]);
    install
        .env(format!("LLVM_SYS_{major}1_PREFIX"), &prefix)
        .env("RUSTFLAGS", format!("-L native={prefix}/lib"));
    process::run(install).with_context(|| format!("building bpf-linker against {prefix}"))
}
