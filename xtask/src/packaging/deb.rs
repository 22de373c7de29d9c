//! A Debian package of a tree, by dpkg-deb.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

use super::{ARCHITECTURE, Compression, Package};
use crate::{archive, process, repository};

/// Directory with the control files while the package is made.
const CONTROL: &str = "DEBIAN";
/// Scripts in `packaging/debian`: of one package, or of all.
const SCRIPTS: [&str; 4] = ["preinst", "postinst", "prerm", "postrm"];
/// Placeholders in scripts, each with the functions that replace it in the scripts of several
/// packages.
const SHARED: [(&str, &str); 4] = [
    (
        "#SETTINGS#\n",
        include_str!("../../../packaging/debian/settings.sh"),
    ),
    (
        "#UNMOUNTED#\n",
        include_str!("../../../packaging/debian/unmounted.sh"),
    ),
    (
        "#DELETE#\n",
        include_str!("../../../packaging/debian/delete.sh"),
    ),
    (
        "#REMOVED#\n",
        include_str!("../../../packaging/debian/removed.sh"),
    ),
];

/// Makes the package with this version in `home`. The tree stays as it was.
pub(super) fn make(
    home: &Path,
    tree: &Path,
    package: &Package,
    version: &str,
    compression: Compression,
) -> Result<PathBuf> {
    let control = tree.join(CONTROL);
    fs::create_dir_all(&control)?;
    fs::write(
        control.join("control"),
        fields(home, tree, package, version)?,
    )?;
    fs::write(control.join("md5sums"), sums(tree)?)?;
    for script in SCRIPTS {
        let to = control.join(script);
        fs::write(&to, script_of(package, script)?)?;
        fs::set_permissions(to, fs::Permissions::from_mode(0o755))?;
    }
    let made = home.join(format!("{}_{version}_{ARCHITECTURE}.deb", package.name));
    let mut build = process::command("dpkg-deb", &["--root-owner-group"]);
    build
        .args(match compression {
            Compression::Small => ["-Zxz", "-z6"],
            Compression::Fast => ["-Zgzip", "-z1"],
        })
        .arg("--build")
        .arg(tree)
        .arg(&made)
        .env("SOURCE_DATE_EPOCH", archive::seconds()?);
    process::output(build)?;
    fs::remove_dir_all(control)?;
    Ok(made)
}

fn script_of(package: &Package, script: &str) -> Result<String> {
    let scripts = repository::root().join("packaging/debian");
    let own = scripts.join(format!("{}.{script}", package.name));
    let path = if own.exists() {
        own
    } else {
        scripts.join(script)
    };
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let shared = SHARED.iter();
    Ok(shared.fold(text, |text, (mark, functions)| {
        text.replace(mark, functions)
    }))
}

fn fields(home: &Path, tree: &Path, package: &Package, version: &str) -> Result<String> {
    let size = process::output({
        let mut du = process::command("du", &["-sk", "--apparent-size", "--exclude=DEBIAN"]);
        du.arg(tree);
        du
    })?;
    let size = size.split_whitespace().next().unwrap_or_default();
    let description = package.description.replace('\n', "\n ");
    Ok(format!(
        "Package: {name}\n\
         Version: {version}\n\
         Architecture: {ARCHITECTURE}\n\
         Maintainer: The Holdfast authors <holdfast@localhost>\n\
         Installed-Size: {size}\n\
         Depends: {libraries}, init-system-helpers, passwd, systemd (>= 249)\n\
         Section: net\n\
         Priority: optional\n\
         Description: {summary}\n {description}\n",
        name = package.name,
        libraries = libraries(home, &tree.join("usr/bin").join(package.name))?,
        summary = package.summary,
    ))
}

/// Debian packages, with versions, that contain the libraries of the program on this machine.
fn libraries(home: &Path, program: &Path) -> Result<String> {
    // dpkg-shlibdeps runs in the source of a package only.
    let source = home.join("source");
    fs::create_dir_all(source.join("debian"))?;
    fs::write(
        source.join("debian/control"),
        "Source: holdfast\n\nPackage: holdfast\nArchitecture: any\n",
    )?;
    let mut command = process::command("dpkg-shlibdeps", &["-O"]);
    command.arg(program).current_dir(&source);
    let found = process::output(command)?;
    fs::remove_dir_all(source)?;
    let found = found.trim().strip_prefix("shlibs:Depends=");
    Ok(found.context("dpkg-shlibdeps found no library")?.to_owned())
}

/// Sums of the files, as `dpkg -V` reads them.
fn sums(tree: &Path) -> Result<String> {
    let script = "find usr -type f -print0 | sort -z | xargs -0 md5sum";
    let mut command = process::command("sh", &["-c", script]);
    command.current_dir(tree);
    process::output(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNMOUNTED: &str = include_str!("../../../packaging/debian/unmounted.sh");

    /// Whether the shell function `unmounted` succeeds, and its output, if `mountpoint` exits with
    /// this code.
    fn unmounted(mounted: u8) -> (bool, String) {
        let script = format!(
            "mountpoint() {{ [ \"$*\" = '-q /sys/fs/bpf' ] && return {mounted}; }}\n{UNMOUNTED}\
             DPKG_MAINTSCRIPT_PACKAGE=holdfast-agent\nunmounted holdfast-agent.service"
        );
        let out = process::command("sh", &["-c", &script]).output().unwrap();
        let text = String::from_utf8(out.stderr).unwrap();
        (out.status.success(), text)
    }

    #[test]
    fn a_refusal_of_systemd_names_what_is_missing_and_the_remedy() {
        let (is_refused, text) = unmounted(32);
        assert!(is_refused, "{text}");
        for part in [
            "systemd does not start holdfast-agent.service: no file system is mounted at /sys/fs/bpf",
            "mount -t bpf bpf /sys/fs/bpf",
            "systemctl start holdfast-agent.service",
        ] {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(unmounted(0), (false, String::new()));
    }

    #[test]
    fn the_scripts_know_every_assertion_of_the_units() {
        let packaging = repository::root().join("packaging");
        for unit in [
            "holdfast-agent.service",
            "holdfast-agent@.service",
            "holdfast-sdp@.service",
            "holdfast-netpol.service",
        ] {
            let text = fs::read_to_string(packaging.join(unit)).unwrap();
            let mut asserts = text.lines().filter(|line| line.starts_with("Assert"));
            assert!(
                asserts.all(|line| line == "AssertPathIsMountPoint=/sys/fs/bpf"),
                "{unit}"
            );
        }
        for package in ["holdfast-agent", "holdfast-sdp"] {
            let path = packaging.join(format!("debian/{package}.postinst"));
            let text = fs::read_to_string(path).unwrap();
            assert!(
                text.contains("#UNMOUNTED#\n") && text.contains("unmounted \"$"),
                "{package}"
            );
        }
    }
}
