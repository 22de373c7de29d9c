//! Errors of operations on pinned maps.

use std::{io, path::PathBuf};

use super::map::MapSpec;

/// Failure of an operation on a pinned map.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// There is no such pin.
    #[error("map {path} is not pinned (is the agent running, and is the BPF file system mounted there?)", path = .0.display())]
    NotPinned(PathBuf),
    /// The pin exists, but the map's layout is not the one that this program uses.
    #[error("map {path} has another layout: expected {expected}, found {found}", path = .path.display())]
    Layout {
        /// Path of the map's pin.
        path: PathBuf,
        /// The layout that this program uses.
        expected: MapSpec,
        /// The layout in the kernel.
        found: MapSpec,
    },
    /// The system call is forbidden to this process.
    #[error("map {path}: bpf() is forbidden to this process (EPERM), mostly by a seccomp profile such as a container's RuntimeDefault; allow the system call bpf there, or run with seccomp unconfined; before Linux 5.19 it also needs CAP_BPF", path = .0.display())]
    Forbidden(PathBuf),
    /// The map is full. Its entries are unchanged.
    #[error("map {map} is full")]
    Full {
        /// Path of the map's pin, or the map's name if it has no pin.
        map: String,
    },
    /// A system call failed for another reason.
    #[error("{call} on map {map}: {source}")]
    Syscall {
        /// Command of `bpf(2)`, such as `BPF_MAP_UPDATE_ELEM`.
        call: &'static str,
        /// Path of the map's pin, or the map's name if it has no pin.
        map: String,
        /// Error of the call, or why it was not made.
        source: io::Error,
    },
}
