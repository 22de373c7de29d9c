//! `cargo xtask package`: a Debian package of each program, and a tarball with the same files.
//!
//! ```text
//!  cargo build ─► programs ───────┐
//!  packaging/ ─► units, settings ─┼─► tree ─ dpkg-deb ─► package
//!  clap ─► man pages, completions ┤     └─── tar ──────► tarball
//!  licences, components ──────────┘
//! ```

mod deb;
mod tree;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

use crate::{
    archive,
    image::{self, Profile},
    packages, process, workspace,
};

/// Version of every artefact: the version of the workspace.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");
/// What the programs are built for, as Debian names it.
const ARCHITECTURE: &str = "amd64";

/// How a package is compressed.
#[derive(Clone, Copy, Debug)]
enum Compression {
    /// For users
    Small,
    /// For tests
    Fast,
}

/// A package of a program.
#[derive(Debug)]
struct Package {
    /// Name of the package and its program.
    name: &'static str,
    /// Static programs that are also in the package.
    also: &'static [&'static str],
    summary: &'static str,
    description: &'static str,
    /// Files of `packaging/`, and where they go.
    files: &'static [(&'static str, &'static str)],
    /// Directories for files of the administrator.
    directories: &'static [&'static str],
}

const PACKAGES: [Package; 2] = [
    Package {
        name: "holdfast-agent",
        also: &["holdfast-cni"],
        summary: "egress policy by DNS name: the agent",
        description: "The agent loads eBPF programs that let containers, pods and network namespaces\n\
                      of this host reach the DNS names and addresses that policies allow. It has a\n\
                      DNS proxy built in; with the package holdfast-sdp a restart of the agent\n\
                      interrupts no query.",
        files: &[
            ("agent.yaml", "usr/share/holdfast/agent.yaml"),
            ("netpol.yaml", "usr/share/holdfast/netpol.yaml"),
            (
                "holdfast-agent.service",
                "usr/lib/systemd/system/holdfast-agent.service",
            ),
            (
                "holdfast-agent@.service",
                "usr/lib/systemd/system/holdfast-agent@.service",
            ),
            (
                "holdfast-netpol.service",
                "usr/lib/systemd/system/holdfast-netpol.service",
            ),
            (
                "oci-hook.json",
                "usr/share/containers/oci/hooks.d/holdfast.json",
            ),
        ],
        directories: &["etc/holdfast/policies", "etc/holdfast/endpoints"],
    },
    Package {
        name: "holdfast-sdp",
        also: &[],
        summary: "egress policy by DNS name: the standalone DNS proxy",
        description: "The proxy decides which DNS names each container may resolve, forwards allowed\n\
                      queries, and reports the addresses in answers to the agent. Two instances run,\n\
                      so that each can be replaced without the loss of a query.",
        files: &[
            ("sdp.yaml", "usr/share/holdfast/sdp.yaml"),
            (
                "holdfast-sdp@.service",
                "usr/lib/systemd/system/holdfast-sdp@.service",
            ),
            (
                "holdfast-sdp.sysusers",
                "usr/lib/sysusers.d/holdfast-sdp.conf",
            ),
            (
                "holdfast-sdp.tmpfiles",
                "usr/lib/tmpfiles.d/holdfast-sdp.conf",
            ),
        ],
        directories: &[],
    },
];

/// Builds the programs, then makes the packages and the tarball. Returns these files and the file
/// of their sums.
pub(crate) fn run(profile: Profile) -> Result<Vec<PathBuf>> {
    packages::install(packages::PACKAGE)?;
    let programs = image::build(profile)?;
    let home = workspace::target_dir()?.join("packages");
    let trees = trees(&home, &programs)?;
    let mut made = debs(&home, &trees, VERSION, Compression::Small)?;
    made.push(tarball(&home, &trees)?);
    made.push(archive::sums(&home, &made)?);
    Ok(made)
}

/// A tree of files for each package, in new directories below `home`.
fn trees(home: &Path, programs: &[PathBuf; 2]) -> Result<Vec<PathBuf>> {
    if home.exists() {
        fs::remove_dir_all(home).with_context(|| format!("removing {}", home.display()))?;
    }
    fs::create_dir_all(home)?;
    let pages = home.join("pages");
    tree::pages(&pages)?;
    let make = |package: &Package| -> Result<PathBuf> {
        let root = home.join(package.name);
        tree::make(&root, package, programs, &pages.join(package.name))
            .with_context(|| format!("package {}", package.name))?;
        Ok(root)
    };
    let trees = PACKAGES.iter().map(make).collect();
    fs::remove_dir_all(pages)?;
    trees
}

/// The Debian packages of the trees, with this version.
fn debs(
    home: &Path,
    trees: &[PathBuf],
    version: &str,
    compression: Compression,
) -> Result<Vec<PathBuf>> {
    let packages = PACKAGES.iter().zip(trees);
    let made = packages.map(|(package, tree)| deb::make(home, tree, package, version, compression));
    made.collect()
}

/// One archive with all trees, for hosts of other distributions.
fn tarball(home: &Path, trees: &[PathBuf]) -> Result<PathBuf> {
    let name = format!("holdfast-{VERSION}-linux-{ARCHITECTURE}");
    let all = home.join(&name);
    fs::create_dir_all(&all)?;
    for tree in trees {
        let mut copy = process::command("cp", &["-a"]);
        copy.arg(tree.join(".")).arg(&all);
        process::output(copy)?;
    }
    // What postinst does with a package's settings.
    let mut settings = process::command(
        "sh",
        &[
            "-c",
            "cp -p \"$0\"/usr/share/holdfast/*.yaml \"$0\"/etc/holdfast/",
        ],
    );
    settings.arg(&all);
    process::output(settings)?;
    let to = home.join(format!("{name}.tar.gz"));
    archive::gzipped(&to, home, &name, &[])?;
    fs::remove_dir_all(all)?;
    Ok(to)
}

/// Packages with two versions, for tests: they differ in nothing but the texts of their settings files.
pub(crate) fn of_two_versions(profile: Profile) -> Result<[Vec<PathBuf>; 2]> {
    packages::install(packages::PACKAGE)?;
    let programs = image::build(profile)?;
    let home = workspace::target_dir()?.join("packages-test");
    let trees = trees(&home, &programs)?;
    let first = debs(&home, &trees, VERSION, Compression::Fast)?;
    for (package, tree) in PACKAGES.iter().zip(&trees) {
        let settings = package.files.iter().map(|(_, to)| tree.join(to));
        for file in settings.filter(|file| file.extension() == Some("yaml".as_ref())) {
            let text = fs::read_to_string(&file)? + "# of the next version\n";
            fs::write(file, text)?;
        }
    }
    let next = format!("{VERSION}+next");
    Ok([first, debs(&home, &trees, &next, Compression::Fast)?])
}
