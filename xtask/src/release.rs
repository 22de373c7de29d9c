//! `cargo xtask release`: every artefact in one directory.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, ensure};

use crate::{
    archive,
    image::{self, Profile},
    packaging::{self, VERSION},
    process, repository, workspace,
};

const CHARTS: [&str; 2] = ["holdfast", "holdfast-sdp"];

/// Makes all artefacts from a clean work tree. Two runs for one commit give the same bytes.
pub(crate) fn run(profile: Profile) -> Result<()> {
    process::require_root("`cargo xtask release`")?;
    let target = workspace::target_dir()?;
    let home = target.join("release-artifacts");
    if home.exists() {
        fs::remove_dir_all(&home)?;
    }
    fs::create_dir_all(&home)?;
    let mut made = Vec::new();
    let mut keep = |from: &Path| -> Result<()> {
        let to = home.join(from.file_name().context("a file's name")?);
        fs::copy(from, &to).with_context(|| format!("copying {}", from.display()))?;
        made.push(to);
        Ok(())
    };
    for file in packaging::run(profile)? {
        if !file.ends_with("SHA256SUMS") {
            keep(&file)?;
        }
    }
    for check in image::run(profile)? {
        println!("  ok: {check}");
    }
    for program in image::names() {
        let archive = target.join("image").join(format!("{program}.tar"));
        let versioned = archive.with_file_name(format!("{program}-image-{VERSION}.tar"));
        fs::copy(archive, &versioned)?;
        keep(&versioned)?;
        fs::remove_file(versioned)?;
    }
    for chart in CHARTS {
        let to = target.join(format!("{chart}-{VERSION}.tgz"));
        pack(chart, &to)?;
        keep(&to)?;
        fs::remove_file(to)?;
    }
    archive::sums(&home, &made)?;
    println!("  {}", home.display());
    Ok(())
}

/// Packs a chart like `helm package`, but without the current time.
fn pack(chart: &str, to: &Path) -> Result<()> {
    let charts = repository::root().join("charts");
    let manifest = fs::read_to_string(charts.join(chart).join("Chart.yaml"))?;
    ensure!(
        manifest
            .lines()
            .any(|line| line == format!("version: {VERSION}")),
        "charts/{chart}/Chart.yaml has another version than Cargo.toml: {VERSION}"
    );
    let ignored = fs::read_to_string(charts.join(chart).join(".helmignore")).unwrap_or_default();
    let without: Vec<String> = ignored
        .lines()
        .map(|line| match line.strip_suffix('/') {
            Some(directory) => format!("{chart}/{directory}"),
            None => line.to_owned(),
        })
        .collect();
    archive::gzipped(to, &charts, chart, &without)
}
