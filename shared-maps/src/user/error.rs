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
        /// The pin.
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
        /// The map.
        map: String,
    },
    /// A system call failed.
    #[error("{call} on map {map}: {source}")]
    Syscall {
        /// The call.
        call: &'static str,
        /// The map.
        map: String,
        /// The system's reason.
        source: io::Error,
    },
}
