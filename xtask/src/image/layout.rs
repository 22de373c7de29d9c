//! An image from a root file system: umoci makes an OCI layout, skopeo makes a layout with the
//! image's name, and tar makes an archive of the latter.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::text;
use crate::{archive, process};

/// Name and tag of the image, as in the charts.
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
    let date = archive::date()?;
    same_times(root, &date)?;
    let history = format!("--history.created={date}");
    umoci(&["insert", &history, "--image", &image, &text(root)?, "/"])?;
    let entry = format!("/usr/local/bin/{program}");
    umoci(&[
        "config",
        "--created",
        &date,
        &history,
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
    let file = home.join(format!("{program}.tar"));
    let named = home.join(format!("{program}.named"));
    if named.exists() {
        fs::remove_dir_all(&named)?;
    }
    let to = format!("oci:{}:{}", text(&named)?, name(program));
    let args = ["copy", "--quiet", &format!("oci:{image}"), &to];
    process::output(process::command("skopeo", &args))?;
    archive::uncompressed(&file, &named, &["oci-layout", "index.json", "blobs"])?;
    fs::remove_dir_all(named)?;
    Ok(file)
}

/// Gives all files below a directory the same time.
fn same_times(root: &Path, date: &str) -> Result<()> {
    let script = r#"find "$1" -exec touch --no-dereference --date="$2" {} +"#;
    let touch = ["-c", script, "sh", &text(root)?, date];
    process::output(process::command("sh", &touch)).map(drop)
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
