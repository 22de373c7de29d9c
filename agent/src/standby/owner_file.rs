//! What the owner of a node says of itself, in its state directory: a standby reads this even if the owner hangs.

use std::{io, path::Path};

use daemon::state_file::{self, Content, StateFileError, write_json};
use serde::{Deserialize, Serialize};

use crate::config::Settings;

const FILE: &str = "owner.json";
const VERSION: u32 = 1;

/// The content of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OwnerFile {
    version: u32,
    /// Version of the program that owns the node.
    pub(crate) release: String,
    /// The name that the owner has for this node.
    pub(crate) node: String,
    pub(crate) settings: Settings,
}

impl OwnerFile {
    pub(crate) fn new(node: &str, settings: Settings) -> Self {
        Self {
            version: VERSION,
            release: env!("CARGO_PKG_VERSION").to_owned(),
            node: node.to_owned(),
            settings,
        }
    }

    pub(crate) fn write(&self, state_dir: &Path) -> io::Result<()> {
        write_json(&state_dir.join(FILE), self)
    }

    /// `None` if there is no such file, or a damaged one: only the owner writes it.
    ///
    /// # Errors
    /// The file cannot be read, or a newer release wrote it.
    pub(crate) fn read(state_dir: &Path) -> Result<Option<Self>, StateFileError> {
        match state_file::read_versioned(&state_dir.join(FILE), VERSION)? {
            Content::Found(file) => Ok(Some(file)),
            Content::Absent | Content::Damaged(_) => Ok(None),
        }
    }
}
