//! Kernels from the packages of Debian, cached below `target/kernels`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail, ensure};

use super::Kernel;
use crate::{packages, process, progress::step};

/// The package that depends on the newest kernel of its suite.
const NEWEST: &str = "linux-image-amd64";
/// Keys of Debian's archives, including those of older releases.
const KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// The files of a kernel.
#[derive(Debug)]
pub(super) struct Unpacked {
    /// The root of the package.
    pub(super) root: PathBuf,
    /// The version, as `uname -r` prints it.
    pub(super) version: String,
    pub(super) image: PathBuf,
    /// The directory of this version's modules.
    pub(super) modules: PathBuf,
}

/// The kernel's files in `dir`. Downloads the package if `dir` lacks it. To get a newer package,
/// remove `dir`.
pub(super) fn unpacked(kernel: Kernel, dir: &Path) -> Result<Unpacked> {
    let root = dir.join("root");
    if !root.exists() {
        fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
        let package = download(kernel, dir)?;
        let part = dir.join("part");
        if part.exists() {
            fs::remove_dir_all(&part).with_context(|| format!("removing {}", part.display()))?;
        }
        process::run(process::command(
            "dpkg-deb",
            &["-x", &package.to_string_lossy(), &part.to_string_lossy()],
        ))?;
        let files = files(&part)?;
        process::run(process::command(
            "depmod",
            &["-b", &part.to_string_lossy(), &files.version],
        ))?;
        fs::rename(&part, &root).with_context(|| format!("renaming {}", part.display()))?;
        fs::remove_file(&package).with_context(|| format!("removing {}", package.display()))?;
    }
    files(&root)
}

fn files(root: &Path) -> Result<Unpacked> {
    let modules = root.join("lib/modules");
    let version = fs::read_dir(&modules)
        .with_context(|| format!("reading {}", modules.display()))?
        .filter_map(Result::ok)
        .find_map(|entry| entry.file_name().into_string().ok())
        .with_context(|| format!("{} is empty: remove {}", modules.display(), root.display()))?;
    Ok(Unpacked {
        image: root.join("boot").join(format!("vmlinuz-{version}")),
        modules: modules.join(&version),
        version,
        root: root.to_path_buf(),
    })
}

/// Downloads the newest kernel of the suite, with an apt configuration of its own below `dir`.
fn download(kernel: Kernel, dir: &Path) -> Result<PathBuf> {
    let suite = kernel.suite();
    step(
        &format!("download the kernel of {suite}"),
        "guests of `cargo xtask kernels` boot it",
    );
    let apt = dir.join("apt");
    for sub in ["lists/partial", "cache/archives/partial", "parts"] {
        let sub = apt.join(sub);
        fs::create_dir_all(&sub).with_context(|| format!("making {}", sub.display()))?;
    }
    let sources = apt.join("sources.list");
    let line = format!("deb [signed-by={KEYS}] {} {suite} main\n", mirror()?);
    fs::write(&sources, line).with_context(|| format!("writing {}", sources.display()))?;
    let own = |program: &str, args: &[&str]| -> Command {
        let mut command = process::command(program, &[]);
        for (option, path) in [
            ("Dir::Etc::sourcelist", "sources.list"),
            ("Dir::Etc::sourceparts", "parts"),
            ("Dir::State::lists", "lists"),
            ("Dir::Cache", "cache"),
        ] {
            command.arg("-o");
            command.arg(format!("{option}={}", apt.join(path).display()));
        }
        command.args(["-o", "APT::Sandbox::User=root"]).args(args);
        command
    };
    process::run(own("apt-get", &["update", "-qq"]))
        .with_context(|| format!("reading the package lists of {suite}"))?;
    let shown = process::output(own("apt-cache", &["show", NEWEST]))?;
    let package = image_package(&shown)
        .with_context(|| format!("{NEWEST} of {suite} depends on no linux-image-*"))?;
    let mut command = own("apt-get", &["download", "-qq", package]);
    command.current_dir(dir);
    process::run(command)?;
    let found = fs::read_dir(dir)?
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"));
    found.with_context(|| format!("`apt-get download {package}` wrote no .deb"))
}

/// The image that the package depends on, from the output of `apt-cache show`.
fn image_package(shown: &str) -> Option<&str> {
    shown
        .lines()
        .filter_map(|line| line.strip_prefix("Depends: "))
        .flat_map(|depends| depends.split([',', ' ']))
        .find(|word| word.starts_with("linux-image-"))
}

/// The address of Debian's archive that this machine's own apt sources name.
fn mirror() -> Result<String> {
    let find = || -> Result<Option<String>> {
        let targets = process::output(process::command(
            "apt-get",
            &[
                "indextargets",
                "--format",
                "$(REPO_URI) $(ORIGIN) $(LABEL)",
                "Created-By: Packages",
            ],
        ))?;
        Ok(targets
            .lines()
            .find_map(|line| line.strip_suffix(" Debian Debian"))
            .map(str::to_owned))
    };
    if let Some(mirror) = find()? {
        return Ok(mirror);
    }
    packages::update()?;
    let Some(mirror) = find()? else {
        bail!("this machine's apt sources name no archive of Debian: kernels are taken from there");
    };
    ensure!(
        !mirror.contains(' '),
        "the apt sources have an odd address: {mirror}"
    );
    Ok(mirror)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_image_is_found_in_the_dependencies() {
        let shown =
            "Package: linux-image-amd64\nDepends: linux-image-6.1.0-50-amd64 (= 6.1.176-1), x\n";
        assert_eq!(image_package(shown), Some("linux-image-6.1.0-50-amd64"));
        assert_eq!(image_package("Depends: libc6\n"), None);
    }
}
