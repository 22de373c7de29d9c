//! An image from a root file system: umoci makes an OCI layout, skopeo an archive of it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::text;
use crate::process;

/// Name and tag, as the charts have them.
pub(super) fn name(program: &str) -> String {
    format!("localhost/{program}:{}", env!("CARGO_PKG_VERSION"))
}

/// Makes the archive, which `ctr images import` and `skopeo copy oci-archive:…` read.
pub(super) fn archive(home: &Path, root: &Path, program: &str) -> Result<PathBuf> {
    let layout = layout(home, program);
    if layout.exists() {
        fs::remove_dir_all(&layout)?;
    }
    let path = text(&layout)?;
    let image = format!("{path}:image");
    let umoci = |args: &[&str]| process::output(process::command("umoci", args)).map(drop);
    umoci(&["init", "--layout", &path])?;
    umoci(&["new", "--image", &image])?;
    umoci(&["insert", "--image", &image, &text(root)?, "/"])?;
    let entry = format!("/usr/local/bin/{program}");
    umoci(&[
        "config",
        "--image",
        &image,
        "--config.entrypoint",
        &entry,
        "--config.env",
        "PATH=/usr/local/bin",
        "--config.user",
        "0:0",
        "--config.label",
        "org.opencontainers.image.licenses=Apache-2.0",
        "--config.label",
        concat!(
            "org.opencontainers.image.version=",
            env!("CARGO_PKG_VERSION")
        ),
        "--os",
        "linux",
        "--architecture",
        "amd64",
    ])?;
    let archive = home.join(format!("{program}.tar"));
    if archive.exists() {
        fs::remove_file(&archive)?;
    }
    let to = format!("oci-archive:{}:{}", text(&archive)?, name(program));
    let args = ["copy", "--quiet", &format!("oci:{image}"), &to];
    process::output(process::command("skopeo", &args))?;
    Ok(archive)
}

/// OCI configuration of the image, as skopeo prints it.
pub(super) fn config(home: &Path, program: &str) -> Result<Value> {
    let image = format!("oci:{}:image", text(&layout(home, program))?);
    let args = ["inspect", "--config", &image];
    let config = process::output(process::command("skopeo", &args))?;
    serde_json::from_str(&config).context("the image's configuration")
}

fn layout(home: &Path, program: &str) -> PathBuf {
    home.join(format!("{program}.oci"))
}
