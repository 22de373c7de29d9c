//! The tiers.

use clap::ValueEnum;

/// What a test needs, and how long it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Tier {
    /// No privilege, seconds
    Unit,
    /// Root: packets through the loaded eBPF programs, seconds
    Kernel,
    /// Root: whole nodes in network namespaces, minutes
    Netns,
    /// Root: the container images of debug builds, made and run, seconds
    Image,
    /// Root: the Debian packages of debug builds, in a clean Debian and on a host with systemd, a minute or two
    Packages,
    /// Root: pods that Debian's containerd starts through the CNI plugin, minutes
    Cri,
    /// Root: both programs on Debian 12's kernel, in qemu, a minute or two
    Guest,
    /// Root: every attack of one pod on another at full strength, minutes
    Hostile,
    /// Root: parts of the kernel and netns tiers on older and newer kernels in qemu, an hour for each
    Kernels,
    /// Root: every fuzzer for a minute, and what is marked `#[ignore]`, hours
    Nightly,
}
