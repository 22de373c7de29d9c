//! The toolchain that builds the eBPF programs.
//!
//! Building `core` for `bpfel-unknown-none` needs the standard library's sources. A rustup
//! toolchain with `rust-src` has them; where none is installed, Debian's `rustc-web` with
//! `rust-web-src` can be used. The linker must be built against the LLVM of the compiler.

use std::{path::PathBuf, process::Command};

use anyhow::{Context as _, Result};

use crate::{linker, process};

/// Debian's compiler. The compiler of rustup stays first on PATH.
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";
const DEBIAN_CARGO: &str = "/usr/bin/cargo";

/// A compiler with the sources of its standard library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Toolchain {
    /// Toolchain `nightly` of rustup, with `rust-src`.
    Nightly,
    /// The toolchain that builds everything else (`rust-toolchain.toml`), with `rust-src`.
    Active,
    /// Debian's rustc-web, cargo-web and rust-web-src.
    Debian,
}

/// Order in which toolchains are tried.
const ORDER: [Toolchain; 3] = [Toolchain::Nightly, Toolchain::Active, Toolchain::Debian];

/// Properties of the machine on which the choice depends.
trait Probe {
    /// Major version of a toolchain's LLVM; `None` if the toolchain is not installed or lacks the
    /// sources.
    fn llvm(&self, toolchain: Toolchain) -> Option<u32>;
    /// Whether bpf-linker is installed, or can be built, for this LLVM.
    fn can_link(&self, llvm: u32) -> bool;
}

struct Machine;

impl Probe for Machine {
    fn llvm(&self, toolchain: Toolchain) -> Option<u32> {
        if !toolchain.has_sources() {
            return None;
        }
        toolchain.llvm_major().ok()
    }

    fn can_link(&self, llvm: u32) -> bool {
        linker::is_there(llvm) || linker::can_be_built(llvm)
    }
}

fn usable(probe: &impl Probe) -> impl Iterator<Item = Toolchain> {
    ORDER.into_iter().filter(|toolchain| {
        probe
            .llvm(*toolchain)
            .is_some_and(|llvm| probe.can_link(llvm))
    })
}

impl Toolchain {
    /// The first toolchain that is installed with sources and has, or can get, a linker.
    pub(crate) fn find() -> Option<Self> {
        Self::usable().next()
    }

    /// All toolchains that [`Self::find`] could return, in the order of preference.
    pub(crate) fn usable() -> impl Iterator<Item = Self> {
        usable(&Machine)
    }

    /// Description of the toolchain, for messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Nightly => "rustup's nightly with rust-src",
            Self::Active => "the workspace's own toolchain with rust-src",
            Self::Debian => "Debian's rustc-web with rust-web-src",
        }
    }

    /// The toolchain's `cargo`, ready for arguments. The environment selects the compiler.
    pub(crate) fn cargo(self) -> Command {
        match self {
            Self::Nightly => {
                let mut cargo = process::command("rustup", &["run", "nightly", "cargo"]);
                cargo.env_remove("RUSTUP_TOOLCHAIN").env_remove("RUSTC");
                cargo
            }
            Self::Active => {
                let mut cargo = process::command("cargo", &[]);
                cargo.env_remove("RUSTC").env("RUSTC_BOOTSTRAP", "1");
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

    /// Output of `rustc -vV` of this toolchain.
    pub(crate) fn version(self) -> Result<String> {
        process::output(self.rustc(&["-vV"]))
    }

    /// Directory that contains its standard library.
    pub(crate) fn sysroot(self) -> Result<PathBuf> {
        let sysroot = process::output(self.rustc(&["--print", "sysroot"]))?;
        Ok(PathBuf::from(sysroot.trim()))
    }

    /// Whether it is installed with the sources of its standard library.
    pub(crate) fn has_sources(self) -> bool {
        self.sysroot().is_ok_and(|sysroot| {
            sysroot
                .join("lib/rustlib/src/rust/library/core/src/lib.rs")
                .exists()
        })
    }

    fn rustc(self, args: &[&str]) -> Command {
        let mut rustc = match self {
            Self::Nightly => process::command("rustup", &["run", "nightly", "rustc"]),
            // The toolchain that cargo selected for this process: rustup's proxy of rustc reads
            // RUSTUP_TOOLCHAIN.
            Self::Active => process::command("rustc", &[]),
            Self::Debian => process::command(DEBIAN_RUSTC, &[]),
        };
        if self != Self::Active {
            rustc.env_remove("RUSTUP_TOOLCHAIN");
        }
        rustc.args(args);
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

    /// LLVM of each toolchain in [`ORDER`], and the LLVMs for which there is a linker.
    struct Has([Option<u32>; 3], &'static [u32]);

    impl Probe for Has {
        fn llvm(&self, toolchain: Toolchain) -> Option<u32> {
            ORDER
                .into_iter()
                .zip(self.0)
                .find(|(of, _)| *of == toolchain)?
                .1
        }

        fn can_link(&self, llvm: u32) -> bool {
            self.1.contains(&llvm)
        }
    }

    #[test]
    fn the_first_that_has_sources_and_a_linker_is_chosen() {
        let all = [Some(23), Some(22), Some(21)];
        for (has, wanted) in [
            (Has(all, &[21, 22, 23]), Some(Toolchain::Nightly)),
            // Debian has no LLVM as new as the LLVM of the nightly toolchain.
            (Has(all, &[21, 22]), Some(Toolchain::Active)),
            (Has(all, &[21]), Some(Toolchain::Debian)),
            (Has(all, &[]), None),
            // Nightly has no rust-src.
            (
                Has([None, Some(22), Some(21)], &[21, 22]),
                Some(Toolchain::Active),
            ),
            (
                Has([None, None, Some(21)], &[21, 22]),
                Some(Toolchain::Debian),
            ),
            (Has([None, None, None], &[21, 22]), None),
        ] {
            assert_eq!(usable(&has).next(), wanted, "{:?} {:?}", has.0, has.1);
        }
    }

    #[test]
    fn llvm_major_is_read_from_rustc() {
        let text = "rustc 1.96.0\nhost: x86_64-unknown-linux-gnu\nLLVM version: 22.1.8\n";
        assert_eq!(llvm_major(text), Some(22));
        assert_eq!(llvm_major("rustc 1.96.0\n"), None);
    }
}
