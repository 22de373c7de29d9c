//! What an image or a package says about itself: its licences and its list of components.

use std::path::Path;

use anyhow::Result;

use super::{
    inventory::{Inventory, Kind},
    licences, sbom,
};
use crate::archive;

/// Writes the licences and the SBOM of the image or package `name` into its root directory. The
/// directory already has the programs, and in an image also Debian's packages.
pub(crate) fn write(name: &str, root: &Path, kind: Kind) -> Result<()> {
    let inventory = Inventory::of(root, kind)?;
    licences::write(&root.join(kind.licences(name)), &inventory)?;
    sbom::write(root, name, &inventory, &archive::date()?)
}
