//! Debian packages, installed only where missing.

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path};

use anyhow::{Context as _, Result, bail};
use parking_lot::Mutex;

use crate::{process, progress::step};

/// A package and what it is for.
pub(crate) struct Package {
    pub(crate) name: &'static str,
    pub(crate) why: &'static str,
}

/// Tools of demo, benchmarks and the tests of `e2e`.
pub(super) const LAB: &[Package] = &[
    Package {
        name: "iproute2",
        why: "ip: namespaces, veths and routes of the lab",
    },
    Package {
        name: "util-linux",
        why: "nsenter: runs programs in the lab's namespaces",
    },
    Package {
        name: "procps",
        why: "sysctl: forwarding in the lab's node",
    },
    Package {
        name: "nftables",
        why: "nft: TPROXY beside our own redirect, in tests",
    },
    Package {
        name: "iptables",
        why: "iptables-nft, iptables-legacy: rules of kube-proxy and portmap, in tests",
    },
    Package {
        name: "bpftool",
        why: "looks at pinned maps and links",
    },
    Package {
        name: "bind9-dnsutils",
        why: "dig: queries of demo and tests",
    },
    Package {
        name: "knot-dnsutils",
        why: "kdig: queries over kept TCP connections",
    },
    Package {
        name: "gcc",
        why: "musl-gcc calls it, and Rust to link",
    },
    Package {
        name: "musl-tools",
        why: "musl-gcc: a stub resolver of containers, in tests",
    },
    Package {
        name: "python3-dnspython",
        why: "a resolver of Python programs, in tests",
    },
    Package {
        name: "python3-pycares",
        why: "c-ares: the resolver of curl and Envoy, in tests",
    },
    Package {
        name: "dnsperf",
        why: "load for benchmarks",
    },
    Package {
        name: "nsd",
        why: "name server of benchmarks",
    },
    Package {
        name: "tcpdump",
        why: "to look into a lab that was kept",
    },
];

/// Resolvers of languages, for the nightly tests only.
pub(super) const NIGHTLY: &[Package] = &[
    Package {
        name: "golang-go",
        why: "the resolver of Go programs, in nightly tests",
    },
    Package {
        name: "default-jdk-headless",
        why: "the resolver of Java programs, in nightly tests",
    },
    Package {
        name: "nodejs",
        why: "the resolver of Node programs, in nightly tests",
    },
    Package {
        name: "faketime",
        why: "libfaketime: hours of an agent in minutes, in nightly tests",
    },
];

/// Tools of `cargo xtask image`.
pub(super) const IMAGE: &[Package] = &[
    Package {
        name: "binutils",
        why: "strip and readelf: programs without their symbols",
    },
    Package {
        name: "umoci",
        why: "makes an image of a directory, without a container engine",
    },
    Package {
        name: "skopeo",
        why: "makes an archive of an image",
    },
    Package {
        name: "containerd",
        why: "runs the images once",
    },
    Package {
        name: "runc",
        why: "containerd starts containers with it",
    },
];

/// Tools of `cargo xtask package`.
pub(super) const PACKAGE: &[Package] = &[
    Package {
        name: "binutils",
        why: "strip: programs without their symbols",
    },
    Package {
        name: "dpkg-dev",
        why: "dpkg-shlibdeps: packages that a program needs",
    },
];

/// Additional packages for the tier `packages`.
pub(super) const PACKAGES: &[Package] = &[
    Package {
        name: "mmdebstrap",
        why: "makes a clean root of Debian, in which the packages are installed",
    },
    Package {
        name: "systemd-container",
        why: "systemd-nspawn: boots that root, with systemd as process 1",
    },
];

/// Tools of `cargo xtask kernels`.
pub(super) const KERNELS: &[Package] = &[
    Package {
        name: "qemu-system-x86",
        why: "emulates a machine with another kernel",
    },
    Package {
        name: "busybox-static",
        why: "the start of a guest",
    },
    Package {
        name: "cpio",
        why: "makes the file system that a guest starts from",
    },
    Package {
        name: "kmod",
        why: "modprobe and depmod: modules of a guest's kernel",
    },
    Package {
        name: "xz-utils",
        why: "reads compressed modules",
    },
    Package {
        name: "debian-archive-keyring",
        why: "keys of the archives with older kernels",
    },
];

/// Additional packages for the tier `cri`.
pub(super) const CRI: &[Package] = &[
    Package {
        name: "containernetworking-plugins",
        why: "ptp and bridge: the networks of containerd's pods, in tests",
    },
    Package {
        name: "systemd-container",
        why: "systemd-nspawn: starts machines on a host, in tests",
    },
    Package {
        name: "busybox-static",
        why: "sets the address of such a machine",
    },
    Package {
        name: "podman",
        why: "starts containers on a host, in tests",
    },
    Package {
        name: "netavark",
        why: "the networks of podman's containers, in tests",
    },
];

/// Programs that only the benchmarks compare with.
pub(super) const BENCH: &[Package] = &[Package {
    name: "dnsdist",
    why: "a forwarder to compare with, in `bench dns`",
}];

/// Tiers install at the same time, but `apt-get update` fails while another process holds the
/// package lists.
static INSTALLING: Mutex<()> = Mutex::new(());

/// Installs the missing packages among `packages`.
pub(super) fn install(packages: &[Package]) -> Result<()> {
    let missing: Vec<&Package> = packages
        .iter()
        .filter(|package| !is_installed(package.name))
        .collect();
    if missing.is_empty() {
        let names: Vec<&str> = packages.iter().map(|package| package.name).collect();
        step(
            &format!("packages are there: {}", names.join(" ")),
            "nothing to install",
        );
        return Ok(());
    }
    newest(&missing)
}

/// Installs the packages, or updates them if they are installed.
pub(crate) fn newest(packages: &[&Package]) -> Result<()> {
    if !process::installed("apt-get") {
        let names: Vec<&str> = packages.iter().map(|package| package.name).collect();
        bail!(
            "this is no Debian system (no apt-get); install what corresponds to these packages \
             of Debian 12 by hand, then say `cargo xtask demo` or `test` again: {}",
            names.join(" ")
        );
    }
    process::require_root("installing packages")?;
    let _one_at_a_time = INSTALLING.lock();
    for package in packages {
        step(&format!("install {}", package.name), package.why);
    }
    update()?;
    let _services = ServicesStayOff::new()?;
    for package in packages {
        // One by one, so that the error names the failing package.
        apt_get(&[
            "install",
            "-qq",
            "-y",
            "--no-install-recommends",
            package.name,
        ])
        .with_context(|| {
            format!(
                "installing {} ({}): its own message is above; `apt-get install {}` repeats it",
                package.name, package.why, package.name
            )
        })?;
    }
    Ok(())
}

/// Updates the package lists.
pub(crate) fn update() -> Result<()> {
    apt_get(&["update", "-qq"])
        .context("`apt-get update`: is the network up and /etc/apt/sources.list right?")
}

/// Whether the package lists of this machine contain the package.
pub(crate) fn is_available(package: &str) -> bool {
    let policy = process::command("apt-cache", &["policy", package]);
    process::output(policy)
        .unwrap_or_default()
        .lines()
        .find_map(|line| line.trim().strip_prefix("Candidate: "))
        .is_some_and(|candidate| candidate != "(none)")
}

pub(crate) fn is_installed(package: &str) -> bool {
    process::output(process::command(
        "dpkg-query",
        &["-W", "-f", "${db:Status-Abbrev}", package],
    ))
    .is_ok_and(|status| status.starts_with("ii"))
}

fn apt_get(args: &[&str]) -> Result<()> {
    // Another apt may be running, for example right after boot.
    let mut command = process::command(
        "apt-get",
        &["-o", "DPkg::Lock::Timeout=300", "-o", "Dpkg::Use-Pty=0"],
    );
    command.args(args).env("DEBIAN_FRONTEND", "noninteractive");
    process::run(command)
}

/// Keeps packages from starting services while it lives: a name server
/// installed for benchmarks must not take this machine's port 53.
struct ServicesStayOff {
    ours: bool,
}

impl ServicesStayOff {
    const POLICY: &str = "/usr/sbin/policy-rc.d";

    fn new() -> Result<Self> {
        let path = Path::new(Self::POLICY);
        let ours = !path.exists();
        if ours {
            fs::write(path, "#!/bin/sh\nexit 101\n")
                .with_context(|| format!("writing {}", Self::POLICY))?;
            fs::set_permissions(path, fs::Permissions::from_mode(0o755))
                .with_context(|| format!("making {} executable", Self::POLICY))?;
        }
        Ok(Self { ours })
    }
}

impl Drop for ServicesStayOff {
    fn drop(&mut self) {
        if self.ours
            && let Err(error) = fs::remove_file(Self::POLICY)
        {
            eprintln!(
                "warning: remove {} by hand, it keeps services from starting: {error}",
                Self::POLICY
            );
        }
    }
}
