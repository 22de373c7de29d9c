//! The toolchain that builds the eBPF programs.
//!
//! Building `core` for `bpfel-unknown-none` needs the standard library's
//! sources. A rustup nightly with `rust-src` has them; where none is
//! installed, Debian's `rustc-web` with `rust-web-src` does as well.

use std::{path::PathBuf, process::Command};

use anyhow::{Context as _, Result};

use crate::process;

/// Debian's compiler; rustup's stays first on PATH and is untouched.
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";
const DEBIAN_CARGO: &str = "/usr/bin/cargo";

/// A compiler with the sources of its standard library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Toolchain {
    /// rustup's `nightly` with `rust-src`.
    Nightly,
    /// Debian's rustc-web, cargo-web and rust-web-src.
    Debian,
}

impl Toolchain {
    /// The one that is installed; a nightly is preferred.
    pub(crate) fn find() -> Option<Self> {
        [Self::Nightly, Self::Debian]
            .into_iter()
            .find(|toolchain| toolchain.has_sources())
    }

    /// In words.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Nightly => "rustup's nightly with rust-src",
            Self::Debian => "Debian's rustc-web with rust-web-src",
        }
    }

    /// Its `cargo`, ready for arguments; the environment chooses the compiler.
    pub(crate) fn cargo(self) -> Command {
        match self {
            Self::Nightly => {
                let mut cargo = process::command("rustup", &["run", "nightly", "cargo"]);
                cargo.env_remove("RUSTUP_TOOLCHAIN").env_remove("RUSTC");
                cargo
            }
            Self::Debian => {
                let mut cargo = process::command(DEBIAN_CARGO, &[]);
                cargo
                    .env_remove("RUSTUP_TOOLCHAIN")
                    .env("RUSTC", DEBIAN_RUSTC)
                    .env("RUSTC_BOOTSTRAP", "1");
                cargo
            }
        }
    }

    /// Major version of its LLVM, which `bpf-linker` must be built against.
    pub(crate) fn llvm_major(self) -> Result<u32> {
        let version = self.version()?;
        llvm_major(&version).with_context(|| {
            format!(
                "{}: `rustc -vV` names no LLVM version: {version}",
                self.name()
            )
        })
    }

    /// What `rustc -vV` says.
    pub(crate) fn version(self) -> Result<String> {
        process::output(self.rustc(&["-vV"]))
    }

    /// Where its libraries lie.
    pub(crate) fn sysroot(self) -> Result<PathBuf> {
        let sysroot = process::output(self.rustc(&["--print", "sysroot"]))?;
        Ok(PathBuf::from(sysroot.trim()))
    }

    fn has_sources(self) -> bool {
        self.sysroot().is_ok_and(|sysroot| {
            sysroot
                .join("lib/rustlib/src/rust/library/core/src/lib.rs")
                .exists()
        })
    }

    fn rustc(self, args: &[&str]) -> Command {
        let mut rustc = match self {
            Self::Nightly => process::command("rustup", &["run", "nightly", "rustc"]),
            Self::Debian => process::command(DEBIAN_RUSTC, &[]),
        };
        rustc.env_remove("RUSTUP_TOOLCHAIN").args(args);
        rustc
    }
}

/// Reads `LLVM version: 22.1.8` out of `rustc -vV`.
fn llvm_major(version: &str) -> Option<u32> {
    version
        .lines()
        .find_map(|line| line.strip_prefix("LLVM version: "))?
        .split('.')
        .next()?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llvm_major_is_read_from_rustc() {
        let text = "rustc 1.96.0\nhost: x86_64-unknown-linux-gnu\nLLVM version: 22.1.8\n";
        assert_eq!(llvm_major(text), Some(22));
        assert_eq!(llvm_major("rustc 1.96.0\n"), None);
    }
}
