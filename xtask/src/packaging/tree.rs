//! The files of a package, below a directory.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

use super::Package;
use crate::{
    image::{inventory::Kind, records},
    process, repository, workspace,
};

/// Directory of the programs.
const PROGRAMS: &str = "usr/bin";
const MAN: &str = "usr/share/man/man1";

/// Makes man pages and completions of all programs, in a directory for each.
pub(super) fn pages(home: &Path) -> Result<()> {
    let mut test = workspace::test(&["command_line_files"]);
    test.arg("man_pages_and_completions")
        .env("HOLDFAST_PAGES", home);
    process::run(test)
}

/// Makes the tree of the package at `root`. `pages` has the man pages and completions of its
/// program.
pub(super) fn make(
    root: &Path,
    package: &Package,
    [dynamic, static_]: &[PathBuf; 2],
    pages: &Path,
) -> Result<()> {
    let bin = directory(root, PROGRAMS)?;
    strip(&dynamic.join(package.name), &bin.join(package.name))?;
    for program in package.also {
        strip(&static_.join(program), &bin.join(program))?;
    }
    for (from, to) in package.files {
        let from = repository::root().join("packaging").join(from);
        copy(&from, root, to)?;
    }
    for path in package.directories {
        directory(root, path)?;
    }
    place_pages(root, package.name, pages)?;
    // Debian requires this name.
    let copyright = format!("usr/share/doc/{}/copyright", package.name);
    copy(&repository::root().join("LICENSE"), root, &copyright)?;
    records::write(package.name, root, Kind::Package)?;
    let mut modes = process::command("chmod", &["-R", "u=rwX,go=rX"]);
    modes.arg(root);
    process::output(modes).map(drop)
}

/// Man pages are compressed, and each completion has the name that its shell looks for.
fn place_pages(root: &Path, program: &str, pages: &Path) -> Result<()> {
    let man = directory(root, MAN)?;
    let completions = [
        (
            format!("{program}.bash"),
            format!("usr/share/bash-completion/completions/{program}"),
        ),
        (
            format!("_{program}"),
            format!("usr/share/zsh/vendor-completions/_{program}"),
        ),
        (
            format!("{program}.fish"),
            format!("usr/share/fish/vendor_completions.d/{program}.fish"),
        ),
    ];
    for (from, to) in completions {
        copy(&pages.join(from), root, &to)?;
    }
    for entry in fs::read_dir(pages)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "1") {
            let name = path.file_name().context("a page's name")?;
            let to = man.join(name);
            fs::copy(&path, &to)?;
            let mut gzip = process::command("gzip", &["-9n"]);
            gzip.arg(&to);
            process::output(gzip)?;
        }
    }
    Ok(())
}

fn strip(program: &Path, to: &Path) -> Result<()> {
    let mut strip = process::command("strip", &["-o"]);
    strip.arg(to).arg(program);
    process::output(strip).map(drop)
}

fn copy(from: &Path, root: &Path, to: &str) -> Result<()> {
    let to = root.join(to);
    fs::create_dir_all(to.parent().context("a directory")?)?;
    fs::copy(from, &to).with_context(|| format!("copying {}", from.display()))?;
    Ok(fs::set_permissions(to, fs::Permissions::from_mode(0o644))?)
}

fn directory(root: &Path, path: &str) -> Result<PathBuf> {
    let path = root.join(path);
    fs::create_dir_all(&path).with_context(|| format!("making {}", path.display()))?;
    Ok(path)
}
