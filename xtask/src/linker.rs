//! `bpf-linker`: whether the installed one can be used, and what is needed to build it.

use std::ops::RangeInclusive;

use crate::{packages, process};

/// The version that builds the committed object.
pub(crate) const VERSION: &str = "0.13.0";

/// Major versions of LLVM that this version can be built against.
pub(crate) const LLVMS: RangeInclusive<u32> = 21..=23;

/// Debian's package of an LLVM to build against.
pub(crate) fn dev_package(llvm: u32) -> String {
    format!("llvm-{llvm}-dev")
}

/// Whether the right version is on PATH and reads the output of this LLVM. A linker with LLVM
/// inside does not show its version; released linkers contain a new one.
pub(crate) fn is_there(llvm: u32) -> bool {
    let version = process::command("bpf-linker", &["--version"]);
    let version = process::output(version).unwrap_or_default();
    if version.split_whitespace().nth(1) != Some(VERSION) {
        return false;
    }
    let libraries = process::command("sh", &["-c", "ldd \"$(command -v bpf-linker)\""]);
    let libraries = process::output(libraries).unwrap_or_default();
    serves(&libraries, llvm)
}

/// Whether the linker can be built against this LLVM, and the LLVM's headers are available.
pub(crate) fn can_be_built(llvm: u32) -> bool {
    let package = dev_package(llvm);
    LLVMS.contains(&llvm) && (packages::is_installed(&package) || packages::is_available(&package))
}

/// Whether the linker can be used: LLVM reads the output of older versions, but not of newer
/// versions.
fn serves(libraries: &str, llvm: u32) -> bool {
    linked_llvm(libraries).is_none_or(|linked| linked >= llvm)
}

/// Reads `libLLVM.so.22.1` or `libLLVM-17.so.1` out of what `ldd` says.
fn linked_llvm(libraries: &str) -> Option<u32> {
    let (_, rest) = libraries.split_once("libLLVM")?;
    let rest = rest.strip_prefix(".so.").or(rest.strip_prefix('-'))?;
    rest.split(|c: char| !c.is_ascii_digit())
        .next()?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_llvm_does_not_serve() {
        let new = "\tlibLLVM.so.22.1 => /usr/lib/llvm-22/lib/libLLVM.so.22.1 (0x0)\n";
        let old = "\tlibc.so.6 => /lib/libc.so.6\n\tlibLLVM-17.so.1 => /usr/lib/libLLVM-17.so.1\n";
        assert_eq!(linked_llvm(new), Some(22));
        assert_eq!(linked_llvm(old), Some(17));
        assert!(serves(new, 22) && serves(new, 21) && !serves(new, 23));
        assert!(!serves(old, 22));
        assert!(serves("\tstatically linked\n", 23));
    }
}
