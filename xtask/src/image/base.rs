//! The root file system below the programs: the C library and the CA certificates of Debian,
//! and the records of its packages.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

use super::{
    Profile,
    debian::{self, STATUS, SUMS},
    text,
};
use crate::{packages, process};

/// Directory of a package's control data when it is unpacked.
const CONTROL: &str = "DEBIAN";
/// Packages, and the files in them that programs need. Scanners need the version of Debian.
const WANTED: [(&str, &[&str]); 5] = [
    (
        "base-files",
        &[
            "etc/debian_version",
            "etc/os-release",
            "usr/lib/os-release",
            "usr/share/common-licenses",
            "usr/share/doc/base-files/copyright",
        ],
    ),
    (
        "ca-certificates",
        &["usr/share/doc/ca-certificates/copyright"],
    ),
    // The licence of libgcc-s1 is a link to this file.
    ("gcc-12-base", &["usr/share/doc/gcc-12-base/copyright"]),
    (
        "libc6",
        &[
            "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
            "lib/x86_64-linux-gnu/libc.so.6",
            "lib/x86_64-linux-gnu/libdl.so.2",
            "lib/x86_64-linux-gnu/libm.so.6",
            "lib/x86_64-linux-gnu/libnss_dns.so.2",
            "lib/x86_64-linux-gnu/libnss_files.so.2",
            "lib/x86_64-linux-gnu/libpthread.so.0",
            "lib/x86_64-linux-gnu/libresolv.so.2",
            "lib/x86_64-linux-gnu/librt.so.1",
            "lib64/ld-linux-x86-64.so.2",
            "usr/share/doc/libc6/copyright",
        ],
    ),
    (
        "libgcc-s1",
        &[
            "lib/x86_64-linux-gnu/libgcc_s.so.1",
            "usr/share/doc/libgcc-s1",
        ],
    ),
];

/// Makes the root file system in `home`. Tests reuse the file system of an earlier run with the
/// same packages.
pub(super) fn root(home: &Path, profile: Profile) -> Result<PathBuf> {
    let base = home.join("base");
    if base.exists() {
        let complete = |(name, _): &(&str, _)| base.join(STATUS).join(name).exists();
        if profile == Profile::Debug && WANTED.iter().all(complete) {
            return Ok(base);
        }
        fs::remove_dir_all(&base)?;
    }
    let debian = unpacked(home)?;
    let part = home.join("base.part");
    fresh(&part)?;
    for dir in [
        "etc/ssl/certs",
        "usr/local/bin",
        "run",
        "var",
        "tmp",
        STATUS,
    ] {
        fs::create_dir_all(part.join(dir))?;
    }
    // /var/run is a link, as on a node, because CNI plugins get paths below it.
    symlink("../run", part.join("var/run"))?;
    fs::write(part.join("etc/nsswitch.conf"), "hosts: files dns\n")?;
    for (package, files) in WANTED {
        let of = debian.join(package);
        let mut copy = process::command("cp", &["-a", "--parents"]);
        copy.args(files).arg(&part).current_dir(&of);
        process::output(copy)?;
        status(&part, &of, package).with_context(|| package.to_owned())?;
    }
    let certificates = part.join("etc/ssl/certs/ca-certificates.crt");
    bundle(&debian.join("ca-certificates"), &certificates)?;
    fs::rename(part, &base)?;
    Ok(base)
}

/// Records the package for scanners, with the sums of the package's files in the image.
fn status(part: &Path, of: &Path, package: &str) -> Result<()> {
    let status = part.join(STATUS).join(package);
    fs::copy(of.join(CONTROL).join("control"), &status)?;
    let mut files = debian::files(of)?;
    files.retain(|file| part.join(file).is_file() && !part.join(file).is_symlink());
    let mut sums = process::command("md5sum", &["--"]);
    sums.args(files).current_dir(part);
    Ok(fs::write(
        format!("{}{SUMS}", text(&status)?),
        process::output(sums)?,
    )?)
}

/// The packages, unpacked without their scripts, each in a directory of its name.
fn unpacked(home: &Path) -> Result<PathBuf> {
    let debian = home.join("debian");
    fresh(&debian)?;
    let download = || {
        let mut command = process::command("apt-get", &["download", "-qq"]);
        command
            .args(WANTED.iter().map(|(name, _)| name))
            .current_dir(&debian);
        command
    };
    if process::output(download()).is_err() {
        packages::update()?;
        process::output(download())?;
    }
    let files: Vec<_> = fs::read_dir(&debian)?.collect::<Result<_, _>>()?;
    for file in files {
        let name = file.file_name().to_string_lossy().into_owned();
        let package = name.split('_').next().unwrap_or_default();
        let to = text(&debian.join(package))?;
        let args = ["--raw-extract", &text(&file.path())?, &to];
        process::output(process::command("dpkg-deb", &args))?;
    }
    Ok(debian)
}

/// One file of all certificates, as the script of ca-certificates makes it.
fn bundle(package: &Path, to: &Path) -> Result<()> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(package.join("usr/share/ca-certificates/mozilla"))? {
        paths.push(entry?.path());
    }
    paths.sort();
    let mut all = Vec::new();
    for path in paths {
        all.extend(fs::read(path)?);
    }
    Ok(fs::write(to, all)?)
}

fn fresh(dir: &Path) -> Result<()> {
    if dir.exists() {
        fs::remove_dir_all(dir)?;
    }
    Ok(fs::create_dir_all(dir)?)
}
