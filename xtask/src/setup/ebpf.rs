//! The toolchain that builds the eBPF programs. Only `cargo xtask bpf` and
//! the lint step need it: the built object is committed.

use anyhow::{Context as _, Result, bail};

use crate::{
    linker,
    packages::{self, Package},
    process,
    progress::step,
    toolchain::Toolchain,
};

const BPF_LINKER: &str = linker::VERSION;

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
];

/// Finds or installs compiler and linker.
pub(super) fn install() -> Result<()> {
    let toolchain = match Toolchain::find() {
        Some(toolchain) => toolchain,
        None => debian()?,
    };
    step(
        &format!("eBPF compiler: {}", toolchain.name()),
        "`core` is built from source for bpfel-unknown-none",
    );
    linker(toolchain)
}

fn debian() -> Result<Toolchain> {
    packages::install(DEBIAN).context(
        "no rustup toolchain has both rust-src and an LLVM that Debian packages, and Debian's \
         rustc-web cannot be installed: either `rustup component add rust-src`, or mend the above \
         (rustc-web conflicts with Debian's own rustc and rustup packages: remove these)",
    )?;
    if !Toolchain::Debian.has_sources() {
        bail!(
            "the packages are installed, but `/usr/bin/rustc --print sysroot` has no library sources: reinstall rust-web-src"
        );
    }
    // The first rustc-web of Debian 12 is too old, but its security updates are new enough.
    if !linker::LLVMS.contains(&Toolchain::Debian.llvm_major()?) {
        packages::newest(&DEBIAN.iter().collect::<Vec<_>>())?;
    }
    Ok(Toolchain::Debian)
}

fn linker(toolchain: Toolchain) -> Result<()> {
    let major = toolchain.llvm_major()?;
    if linker::is_there(major) {
        step(
            &format!("bpf-linker {BPF_LINKER} is there"),
            "links eBPF programs",
        );
        return Ok(());
    }
    if !linker::LLVMS.contains(&major) {
        bail!(
            "{} is built with LLVM {major}, and bpf-linker {BPF_LINKER} takes LLVM {} to {}. \
             Debian's security updates have a newer compiler: put `bookworm-security` among the \
             package sources, then say `cargo xtask setup` again",
            toolchain.name(),
            linker::LLVMS.start(),
            linker::LLVMS.end(),
        );
    }
    let dev = linker::dev_package(major);
    let prefix = format!("/usr/lib/llvm-{major}");
    let needed = [
        Package {
            name: dev.clone().leak(),
            why: "LLVM of the compiler's own version, for bpf-linker",
        },
        Package {
            name: "g++",
            why: "links bpf-linker with LLVM",
        },
    ];
    packages::install(&needed).with_context(|| {
        format!(
            "the eBPF compiler ({}) needs bpf-linker {BPF_LINKER} built against LLVM {major}: \
             provide {dev} and g++, or put a released bpf-linker {BPF_LINKER} on PATH",
            toolchain.name()
        )
    })?;
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
