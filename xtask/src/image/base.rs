//! The root file system below the programs: the C library and the CA certificates of Debian.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

use super::{Profile, text};
use crate::{packages, process};

/// The last one has the licence of libgcc-s1.
const PACKAGES: [&str; 4] = ["libc6", "libgcc-s1", "ca-certificates", "gcc-12-base"];
/// Directory of the libraries below `lib`.
const LIBRARIES: &str = "x86_64-linux-gnu";
/// Libraries of [`PACKAGES`] that programs need; the others are for debugging.
const WANTED: [&str; 10] = [
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libnss_dns.so.2",
    "libnss_files.so.2",
    "libpthread.so.0",
    "libresolv.so.2",
    "librt.so.1",
];

/// Makes it in `home`. For tests, that of an earlier run will do.
pub(super) fn root(home: &Path, profile: Profile) -> Result<PathBuf> {
    let base = home.join("base");
    if base.exists() {
        if profile == Profile::Debug {
            return Ok(base);
        }
        fs::remove_dir_all(&base)?;
    }
    let debian = unpacked(home)?;
    let part = home.join("base.part");
    fresh(&part)?;
    for dir in [
        "lib64",
        "etc/ssl/certs",
        "usr/local/bin",
        "run",
        "var",
        "tmp",
    ] {
        fs::create_dir_all(part.join(dir))?;
    }
    // As on a node: CNI plugins get paths below /var/run.
    symlink("../run", part.join("var/run"))?;
    let libraries = Path::new("lib").join(LIBRARIES);
    fs::create_dir_all(part.join(&libraries))?;
    for library in WANTED {
        let file = libraries.join(library);
        fs::copy(debian.join(&file), part.join(&file)).with_context(|| library.to_owned())?;
    }
    let loader = Path::new("/lib").join(LIBRARIES).join(WANTED[0]);
    symlink(loader, part.join("lib64").join(WANTED[0]))?;
    fs::write(part.join("etc/nsswitch.conf"), "hosts: files dns\n")?;
    certificates(&debian, &part.join("etc/ssl/certs/ca-certificates.crt"))?;
    for package in PACKAGES {
        let doc = part.join("usr/share/doc").join(package);
        fs::create_dir_all(&doc)?;
        let copyright = Path::new("usr/share/doc").join(package).join("copyright");
        // Some are links to another package's.
        let from = fs::canonicalize(debian.join(&copyright))
            .with_context(|| copyright.display().to_string())?;
        fs::copy(from, doc.join("copyright"))?;
    }
    fs::rename(part, &base)?;
    Ok(base)
}

/// The packages, unpacked without their scripts.
fn unpacked(home: &Path) -> Result<PathBuf> {
    let debian = home.join("debian");
    fresh(&debian)?;
    let download = || {
        let mut command = process::command("apt-get", &["download", "-qq"]);
        command.args(PACKAGES).current_dir(&debian);
        command
    };
    if process::output(download()).is_err() {
        packages::update()?;
        process::output(download())?;
    }
    for entry in fs::read_dir(&debian)? {
        let path = entry?.path();
        if path.extension().is_some_and(|ext| ext == "deb") {
            let args = ["-x", &text(&path)?, &text(&debian)?];
            process::output(process::command("dpkg-deb", &args))?;
        }
    }
    Ok(debian)
}

/// One file of all certificates, as the script of ca-certificates makes it.
fn certificates(debian: &Path, to: &Path) -> Result<()> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(debian.join("usr/share/ca-certificates/mozilla"))? {
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
