//! Debian's packages in a root file system, and in the programs.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

use super::text;
use crate::process;

/// Control data of packages, one file each: the place that scanners know from distroless images.
pub(super) const STATUS: &str = "var/lib/dpkg/status.d";
/// End of the name of a file with the sums of a package's files.
pub(super) const SUMS: &str = ".md5sums";
/// Files that a package's scripts generate from its files.
pub(super) const GENERATED: [(&str, &str); 1] =
    [("etc/ssl/certs/ca-certificates.crt", "ca-certificates")];
/// Libraries in a static program.
const STATIC: [&str; 2] = ["libc.a", "libgcc_eh.a"];

/// A package of Debian.
#[derive(Clone, Debug)]
pub(super) struct Package {
    pub(super) name: String,
    pub(super) version: String,
    pub(super) source: String,
    pub(super) architecture: String,
    /// Files of the package in the root file system, relative to the root.
    pub(super) files: BTreeSet<String>,
    /// Text of the file with the package's licences, if the file exists.
    pub(super) copyright: Option<String>,
}

impl Package {
    /// Parses control data in the form of `dpkg-deb --field` and of dpkg's database.
    fn parse(control: &str, root: &Path) -> Result<Self> {
        let field = |name: &str| {
            let mut lines = control.lines();
            let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
            value.map(ToOwned::to_owned)
        };
        let needed = |name: &str| field(name).with_context(|| format!("no {name}: {control}"));
        let name = needed("Package")?;
        // The source may have its own version: `gcc-12 (12.2.0-14)`.
        let source = field("Source").unwrap_or_else(|| name.clone());
        let source = source.split(' ').next().unwrap_or_default().to_owned();
        let copyright = root.join("usr/share/doc").join(&name).join("copyright");
        Ok(Self {
            version: needed("Version")?,
            architecture: needed("Architecture")?,
            source,
            files: BTreeSet::new(),
            copyright: fs::read_to_string(copyright).ok(),
            name,
        })
    }

    /// Names of the common licences that its copyright file refers to.
    pub(super) fn common_licences(&self) -> BTreeSet<&str> {
        let text = self.copyright.as_deref().unwrap_or_default();
        let mut parts = text.split("/usr/share/common-licenses/");
        parts.next();
        let is_end = |c: char| !c.is_ascii_alphanumeric() && c != '-' && c != '.';
        parts
            .filter_map(|rest| rest.split(is_end).next())
            .map(|name| name.trim_end_matches('.'))
            .collect()
    }
}

/// Debian's version in a root file system, such as `12`.
pub(super) fn version(root: &Path) -> Result<String> {
    let path = root.join("usr/lib/os-release");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let mut lines = text.lines();
    let version = lines.find_map(|line| line.strip_prefix("VERSION_ID="));
    Ok(version
        .context("no VERSION_ID")?
        .trim_matches('"')
        .to_owned())
}

/// Packages in a root file system, by its [`STATUS`].
pub(super) fn packages(root: &Path) -> Result<Vec<Package>> {
    let status = root.join(STATUS);
    let mut paths = Vec::new();
    for entry in fs::read_dir(&status).with_context(|| status.display().to_string())? {
        paths.push(entry?.path());
    }
    paths.sort();
    let mut packages = Vec::new();
    for path in paths {
        let path = text(&path)?;
        if path.ends_with(SUMS) {
            continue;
        }
        let mut package = Package::parse(&fs::read_to_string(&path)?, root)?;
        let sums = fs::read_to_string(format!("{path}{SUMS}")).unwrap_or_default();
        let files = sums.lines().filter_map(|line| line.split_once("  "));
        let files = files.map(|(_, file)| file.strip_prefix("./").unwrap_or(file));
        package.files = files.map(ToOwned::to_owned).collect();
        for (file, of) in GENERATED {
            if of == package.name {
                package.files.insert(file.to_owned());
            }
        }
        package.files.retain(|file| root.join(file).is_file());
        packages.push(package);
    }
    Ok(packages)
}

/// Packages of this machine whose libraries are in static programs.
pub(super) fn in_static_programs() -> Result<Vec<Package>> {
    let mut packages = Vec::new();
    for library in STATIC {
        let name = format!("-print-file-name={library}");
        let path = process::output(process::command("cc", &[&name]))?;
        let path = fs::canonicalize(path.trim()).with_context(|| library.to_owned())?;
        let owner = owner(&path)?;
        let control = process::output(process::command("dpkg-query", &["--status", &owner]))?;
        packages.push(Package::parse(&control, Path::new("/"))?);
    }
    Ok(packages)
}

/// The package of this machine that has the file.
pub(super) fn owner(path: &Path) -> Result<String> {
    let found = process::output(process::command("dpkg-query", &["-S", &text(path)?]))?;
    let owner = found.split(": ").next().unwrap_or_default();
    Ok(owner.split(':').next().unwrap_or_default().to_owned())
}

/// Regular files below a directory, relative to it.
pub(super) fn files(root: &Path) -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    let mut waiting: Vec<PathBuf> = vec![root.to_owned()];
    while let Some(dir) = waiting.pop() {
        for entry in fs::read_dir(&dir)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                waiting.push(entry.path());
            } else if kind.is_file() {
                found.insert(text(entry.path().strip_prefix(root)?)?);
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_licences_are_found() {
        let text =
            "in /usr/share/common-licenses/LGPL-2.1.\nand '/usr/share/common-licenses/GPL-2'";
        let package = Package {
            name: "libc6".to_owned(),
            version: String::new(),
            source: String::new(),
            architecture: String::new(),
            files: BTreeSet::new(),
            copyright: Some(text.to_owned()),
        };
        assert!(
            package
                .common_licences()
                .into_iter()
                .eq(["GPL-2", "LGPL-2.1"])
        );
    }
}
