//! Debian packages of debug builds. The tier `packages` installs them in a clean root of Debian without and with a
//! running systemd, and the tier `kernels` in a guest that this root's systemd boots.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result};

use super::{Output, observe, tally::Tally};
use crate::{
    image::Profile, kernels::TIME_FACTOR, packages, packaging, process, progress::step, workspace,
};

/// The longest time of each part.
const LIMIT: Duration = Duration::from_secs(5 * 60);
/// Debian's packages that the tests call, and dependencies of our packages.
const INCLUDED: [&str; 13] = [
    "bash-completion",
    "dbus",
    "init-system-helpers",
    "iproute2",
    "kmod",
    "libgcc-s1",
    "man-db",
    "nftables",
    "passwd",
    "procps",
    "python3-minimal",
    "systemd",
    "systemd-sysv",
];
const SCRIPTS: [(&str, &str); 5] = [
    ("checks.sh", include_str!("../packaging/tests/checks.sh")),
    (
        "clean_root.sh",
        include_str!("../packaging/tests/clean_root.sh"),
    ),
    (
        "guest_host.sh",
        include_str!("../packaging/tests/guest_host.sh"),
    ),
    ("host.sh", include_str!("../packaging/tests/host.sh")),
    ("traffic.py", include_str!("../packaging/tests/traffic.py")),
];
/// Directory of packages and scripts in the root.
const INSIDE: &str = "packages";
/// Enters the root from a process with its own namespaces, so that a clean-up there cannot affect
/// this machine.
const CHROOT: &str = "mount --make-rprivate / && mount -t proc proc \"$0/proc\" && mount -t tmpfs tmp \"$0/tmp\" && \
                      exec chroot \"$0\" bash /packages/clean_root.sh /packages/0 /packages/1";
const INSTALL: &str = "mount --make-rprivate / && mount -t proc proc \"$0/proc\" && \
                       chroot \"$0\" apt-get install -qq -y --no-install-recommends \"$@\" && chroot \"$0\" apt-get clean";
/// Unit that runs the script once the host is up, and ends the host with the script's status.
const UNIT: &str = "[Unit]\nAfter=multi-user.target\nSuccessAction=exit\nFailureAction=exit\n\
                    [Service]\nType=oneshot\nStandardOutput=file:/packages/log\nStandardError=inherit\n\
                    ExecStart=/bin/bash /packages/host.sh /packages/0 /packages/1 /packages/traffic.py\n";
/// Like [`UNIT`], for a guest that is `{}` times slower.
const GUEST_UNIT: &str = "[Unit]\nAfter=multi-user.target\n\
                          [Service]\nType=oneshot\nTimeoutStartSec=infinity\nEnvironment=TIME_FACTOR={}\n\
                          ExecStart=/bin/bash /packages/guest_host.sh\n";
/// A script of [`crate::kernels::Work`]. Argument: the archive of a root.
pub(super) const GUEST: &str = include_str!("../packaging/tests/guest.sh");

/// Makes the packages with two versions, and runs both parts.
pub(super) fn run() -> Result<Tally> {
    packages::install(packages::PACKAGES)?;
    let versions = packaging::of_two_versions(Profile::Debug)?;
    let home = workspace::target_dir()?.join("packages-test");
    let mut total = Tally::default();
    let root = root(&home, &Base::Minimal.archive(&home)?, &versions)?;
    total.add(&observe(
        "packages in a clean root",
        in_namespaces(&root, CHROOT),
        Output::AtItsEnd,
        Some(LIMIT),
    )?);
    let root = self::root(&home, &Base::Bootable.archive(&home)?, &versions)?;
    at_boot(&root, UNIT)?;
    total.add(&observe(
        "packages on a host with systemd",
        host(&root),
        Output::AtItsEnd,
        Some(LIMIT),
    )?);
    fs::remove_dir_all(root)?;
    Ok(total)
}

/// The archive of a root whose systemd runs the same checks in a guest, for [`GUEST`].
pub(super) fn guest_archive() -> Result<PathBuf> {
    packages::install(packages::PACKAGES)?;
    let versions = packaging::of_two_versions(Profile::Debug)?;
    let home = workspace::target_dir()?.join("packages-test");
    let root = root(&home, &Base::Bootable.archive(&home)?, &versions)?;
    at_boot(&root, &GUEST_UNIT.replace("{}", &TIME_FACTOR.to_string()))?;
    let archive = home.join("guest.tar");
    pack(&root, &archive)?;
    fs::remove_dir_all(root)?;
    Ok(archive)
}

/// A root of Debian, before Holdfast is installed.
#[derive(Clone, Copy)]
enum Base {
    /// The smallest root, with the lists and packages that apt needs to install all others.
    Minimal,
    /// A root with all other packages installed, and systemd as its first process.
    Bootable,
}

impl Base {
    /// Path of the root's archive, which is made if it is missing. To get a newer archive, remove
    /// the old one.
    fn archive(self, home: &Path) -> Result<PathBuf> {
        let name = match self {
            Self::Minimal => "minimal",
            Self::Bootable => "bootable",
        };
        let archive = home.with_file_name(format!("packages-test-{name}.tar"));
        if !archive.exists() {
            step(
                &format!("make a {name} root of Debian"),
                "packages are installed there",
            );
            let part = archive.with_extension("part.tar");
            match self {
                Self::Minimal => minimal(&part)?,
                Self::Bootable => bootable(home, &Self::Minimal.archive(home)?, &part)?,
            }
            fs::rename(part, &archive)?;
        }
        Ok(archive)
    }
}

fn minimal(archive: &Path) -> Result<()> {
    let names = INCLUDED.join(" ");
    let download = format!(
        "--customize-hook=chroot \"$1\" apt-get install -qq -y --no-install-recommends --download-only {names}"
    );
    let args = ["--variant=minbase", "--quiet", "--skip=cleanup/apt"];
    let mut make = process::command("mmdebstrap", &args);
    make.args([&download, "bookworm"]).arg(archive);
    process::run(make)
}

/// Installs the packages that the minimal root has downloaded.
fn bootable(home: &Path, minimal: &Path, archive: &Path) -> Result<()> {
    let root = unpacked(home, minimal)?;
    let mut install = in_namespaces(&root, INSTALL);
    install.args(INCLUDED);
    process::output(install)?;
    pack(&root, archive)
}

fn pack(root: &Path, archive: &Path) -> Result<()> {
    let mut pack = process::command("tar", &["--create", "--numeric-owner", "--file"]);
    pack.arg(archive).arg("--directory").arg(root).arg(".");
    process::output(pack).map(drop)
}

/// Unpacks the archive into an empty directory.
fn unpacked(home: &Path, archive: &Path) -> Result<PathBuf> {
    let root = home.join("root");
    if root.exists() {
        fs::remove_dir_all(&root).with_context(|| format!("removing {}", root.display()))?;
    }
    fs::create_dir_all(&root)?;
    let mut unpack = process::command("tar", &["--extract", "--file"]);
    unpack.arg(archive).arg("--directory").arg(&root);
    process::output(unpack)?;
    Ok(root)
}

/// A clean root with the packages of both versions, and the scripts.
fn root(home: &Path, base: &Path, versions: &[Vec<PathBuf>; 2]) -> Result<PathBuf> {
    let root = unpacked(home, base)?;
    // Without syncs: a temporary root need not survive a power cut.
    fs::write(root.join("etc/dpkg/dpkg.cfg.d/fast"), "force-unsafe-io\n")?;
    let inside = root.join(INSIDE);
    for (number, files) in versions.iter().enumerate() {
        let to = inside.join(number.to_string());
        fs::create_dir_all(&to)?;
        for file in files {
            fs::copy(file, to.join(file.file_name().context("a file's name")?))?;
        }
        let mut scan = process::command("dpkg-scanpackages", &["--multiversion", "."]);
        scan.current_dir(&to);
        fs::write(to.join("Packages"), process::output(scan)?)?;
    }
    for (number, name) in ["first.list", "next.list"].iter().enumerate() {
        let list = format!("deb [trusted=yes] file:/{INSIDE}/{number} ./\n");
        fs::write(inside.join(name), list)?;
    }
    for (name, text) in SCRIPTS {
        fs::write(inside.join(name), text)?;
    }
    Ok(root)
}

fn in_namespaces(root: &Path, script: &str) -> Command {
    let args = [
        "--mount",
        "--net",
        "--pid",
        "--fork",
        "--kill-child",
        "sh",
        "-c",
        script,
    ];
    let mut command = process::command("unshare", &args);
    command.arg(root);
    command
}

/// Lets the root's systemd start `unit`.
fn at_boot(root: &Path, unit: &str) -> Result<()> {
    let units = root.join("etc/systemd/system");
    let wanted = units.join("multi-user.target.wants");
    fs::create_dir_all(&wanted)?;
    fs::write(units.join("packages-test.service"), unit)?;
    std::os::unix::fs::symlink(
        "../packages-test.service",
        wanted.join("packages-test.service"),
    )?;
    Ok(())
}

/// Boots the root, then prints what the script printed.
fn host(root: &Path) -> Command {
    let script = "systemd-nspawn --quiet --boot --directory=\"$0\" --private-network --capability=all \
                  --system-call-filter='bpf perf_event_open' --register=no --keep-unit > \"$0.console\" 2>&1\n\
                  status=$?; cat \"$0/packages/log\"; exit $status";
    let mut boot = process::command("sh", &["-c", script]);
    boot.arg(root).env("SYSTEMD_NSPAWN_API_VFS_WRITABLE", "yes");
    boot
}
