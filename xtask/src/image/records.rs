//! What an image says about itself: its licences and its list of components.

use std::{env, path::Path};

use anyhow::{Context as _, Result};

use super::{inventory::Inventory, licences, sbom};
use crate::process;

/// Writes the licences and the SBOM of the image into its root file system, which has the programs
/// and Debian's packages already.
pub(crate) fn write(image: &str, root: &Path) -> Result<()> {
    let inventory = Inventory::of(root)?;
    licences::write(root, &inventory)?;
    sbom::write(root, image, &inventory, &date()?)
}

/// Time of the commit, or SOURCE_DATE_EPOCH, so that the same sources make the same bytes.
fn date() -> Result<String> {
    #[expect(
        clippy::disallowed_methods,
        reason = "the convention of reproducible builds"
    )]
    let seconds = match env::var("SOURCE_DATE_EPOCH") {
        Ok(seconds) => seconds,
        Err(_) => process::output(process::command("git", &["show", "-s", "--format=%ct"]))
            .context("the time of the commit; without git, set SOURCE_DATE_EPOCH")?,
    };
    let at = format!("--date=@{}", seconds.trim());
    let date = process::command("date", &["--utc", &at, "+%Y-%m-%dT%H:%M:%SZ"]);
    Ok(process::output(date)?.trim().to_owned())
}
