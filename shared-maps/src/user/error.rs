//! What can go wrong with a pinned map.

use std::{io, path::PathBuf};

use super::map::MapSpec;

/// Failure of an operation on a pinned map.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// There is no such pin.
    #[error("map {path} is not pinned (is the agent running, and is the BPF file system mounted there?)", path = .0.display())]
    NotPinned(PathBuf),
    /// The pin exists but is of another shape than this program knows.
    #[error("map {path} has another layout: expected {expected}, found {found}", path = .path.display())]
    Layout {
        /// The pin.
        path: PathBuf,
        /// What this program expects.
        expected: MapSpec,
        /// What the kernel says.
        found: MapSpec,
    },
    /// The system call is forbidden to this process.
    #[error("map {path}: bpf() is forbidden to this process (EPERM), mostly by a seccomp profile such as a container's RuntimeDefault; allow the system call bpf there, or run with seccomp unconfined", path = .0.display())]
    Forbidden(PathBuf),
    /// The map is full; what was in it stays.
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
        /// Why.
        source: io::Error,
    },
}
