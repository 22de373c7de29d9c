//! The image of pods' first process: one static program.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::sent::{ALLOWED, FORBIDDEN, LEAK};
use crate::shell;

/// Name and tag of the image.
pub(super) const NAME: &str = "localhost/first-process:1";

/// Makes an archive of the image below `home`.
pub(super) fn archive(home: &Path) -> Result<PathBuf> {
    let program = first_process(home)?;
    let root = home.join("first-process.root");
    std::fs::create_dir_all(&root)?;
    std::fs::copy(program, root.join("first-process"))?;
    let layout = home.join("first-process.oci");
    let [layout, root] = [&layout, &root].map(|path| path.to_str());
    let layout = layout.context("a path that is not UTF-8")?;
    let root = root.context("a path that is not UTF-8")?;
    let image = format!("{layout}:1");
    shell::run("umoci", &["init", "--layout", layout])?;
    shell::run("umoci", &["new", "--image", &image])?;
    shell::run("umoci", &["insert", "--image", &image, root, "/"])?;
    let entry = "--config.entrypoint";
    let config = ["config", "--image", &image, entry, "/first-process"];
    shell::run("umoci", &config)?;
    let archive = home.join("first-process.tar");
    let to = format!("oci-archive:{}:{NAME}", archive.display());
    shell::run("skopeo", &["copy", "--quiet", &format!("oci:{image}"), &to])?;
    Ok(archive)
}

/// Compiles the program below `home`.
pub(super) fn first_process(home: &Path) -> Result<PathBuf> {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src/cri/first_process.c");
    let program = home.join("first-process");
    let mut compile = Command::new("musl-gcc");
    compile.args(["-static", "-O1", source, "-o"]).arg(&program);
    for (name, at) in [("FORBIDDEN", FORBIDDEN), ("ALLOWED", ALLOWED)] {
        compile.arg(format!("-D{name}_ADDRESS=\"{}\"", at.ip()));
        compile.arg(format!("-D{name}_PORT={}", at.port()));
    }
    compile.arg(format!("-DLEAK=\"{LEAK}\""));
    shell::finish(&mut compile)?;
    Ok(program)
}
