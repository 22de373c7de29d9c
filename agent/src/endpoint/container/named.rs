//! Which containers have a document, on disk: the OCI hook reads it while no agent answers.

use std::{collections::BTreeSet, ffi::OsStr, fs, io, path::Path};

use daemon::lookup::present;
use serde::{Deserialize, Serialize};

use super::{ContainerName, store};

/// Of a file in the directory of stored endpoints, which a boot does not empty.
pub(crate) const EXTENSION: &str = "containers";

/// The containers that are not to start without policy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedContainers {
    containers: BTreeSet<ContainerName>,
}

impl NamedContainers {
    pub(crate) fn of(containers: impl Iterator<Item = ContainerName>) -> Self {
        Self {
            containers: containers.collect(),
        }
    }

    /// Reads the files of all agents in `dir`; without one there are none.
    ///
    /// # Errors
    /// A file cannot be read, or another user may write it.
    pub fn read(dir: &Path) -> io::Result<Self> {
        let mut all = Self::default();
        for entry in present(fs::read_dir(dir))?.into_iter().flatten() {
            let path = entry?.path();
            if path.extension() == Some(OsStr::new(EXTENSION))
                && let Some(text) = store::read(&path)?
            {
                let read: Self = serde_json::from_slice(&text)
                    .map_err(|error| io::Error::other(format!("{}: {error}", path.display())))?;
                all.containers.extend(read.containers);
            }
        }
        Ok(all)
    }

    pub fn is_empty(&self) -> bool {
        self.containers.is_empty()
    }

    /// Whether a container has a document.
    pub fn has(&self, container: &ContainerName) -> bool {
        self.containers.contains(container)
    }
}
