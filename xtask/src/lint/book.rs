//! The guide as a book: mdBook, from the registry of Python, in a directory below `target/`.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

use crate::{process, progress::step, python, repository, workspace};

/// Python packages that contain the program of mdBook, with checksums, for amd64 and arm64.
const REQUIREMENTS: &str = include_str!("book/requirements.txt");

/// Makes the book in `target/guide`. A warning of mdBook is an error.
pub(super) fn build() -> Result<()> {
    let (program, target) = (install()?, workspace::target_dir()?.join("guide"));
    let book = repository::root().join("docs");
    let args = ["build", text(&book)?, "--dest-dir", text(&target)?];
    let output = process::command(text(&program)?, &args)
        .output()
        .context("mdbook")?;
    let log = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success() && !log.contains("WARN") && !log.contains("ERROR"),
        "mdbook: {}",
        log.trim()
    );
    Ok(())
}

/// Downloads mdBook if it is missing.
pub(crate) fn install() -> Result<PathBuf> {
    let home = workspace::target_dir()?.join("tools/guide");
    let why = "makes the guide, to check it";
    python::environment(&home, REQUIREMENTS, "mdbook", why)
        .context("`cargo xtask setup --only lint` needs the network")?;
    step("mdbook is there", why);
    Ok(home.join("bin/mdbook"))
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().context("a path that is not UTF-8")
}
