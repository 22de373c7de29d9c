//! The *stored list*: the last complete list of the cluster's objects, on disk
//! (`state/cluster.json`). The agent uses it if the API server is away at the agent's start.
//!
//! Each line is an object; lines are sorted by key. A new file is the former one with later changes,
//! so that no copy of the objects is in memory.

mod merge;
mod read;

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use agent_core::policy::source::cluster::Changed;
use daemon::{regular_file, state_file::rename_synced};
use dns_policy::wall_time;

pub use self::read::{Stored, read};

/// Name of the file in the state directory.
const FILE: &str = "cluster.json";
/// Ending of the file with the part of the first listing that was read so far.
const PARTIAL: &str = ".partial";
/// Version of the file that this program writes.
const VERSION: u32 = 1;

/// The cluster of a listing, described by the facts that an agent knows before the API server answers.
/// The uid of the namespace kube-system identifies a cluster, but it is one of the listed objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// URL of the API server.
    pub server: String,
    /// The cluster's name, from `--cluster-name`.
    pub cluster: String,
    /// Fingerprints of the certificates that the API server's certificate is verified with; empty
    /// if the settings name none.
    pub authorities: Vec<String>,
}

/// Why a stored list cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ListingError {
    /// The file cannot be read.
    #[error("{path}: {source}", path = .path.display())]
    Io { path: PathBuf, source: io::Error },
    /// A newer version of the program wrote the file.
    #[error("{path} has version {found}, and this program reads version {VERSION}; run the newer release", path = .path.display())]
    Version { path: PathBuf, found: u64 },
    /// The file is torn or damaged.
    #[error("{path} is damaged ({reason}); remove it", path = .path.display())]
    Damaged { path: PathBuf, reason: String },
    /// The file describes another cluster.
    #[error("{path} is of another cluster: its {field} is {found}, not {wanted}; remove it, or correct the API server of this agent (the first list of this cluster replaces the file)", path = .path.display())]
    Foreign {
        path: PathBuf,
        /// Which part of the [`Origin`] differs, for the error message.
        field: &'static str,
        found: String,
        wanted: String,
    },
    /// The listing was last confirmed too long ago.
    #[error("{path} was right {hours} hours ago for the last time, which is too long", path = .path.display())]
    Old {
        path: PathBuf,
        /// Hours since the listing was last confirmed.
        hours: u64,
    },
}

/// Writes the stored list of the cluster.
#[derive(Debug)]
pub struct ListingFile {
    path: PathBuf,
    origin: Origin,
    /// The file to which the next changes apply; `None` = they apply to an empty listing.
    base: Option<PathBuf>,
}

impl ListingFile {
    /// Writes the listing in a state directory. The file that is there stays until a listing is complete.
    pub fn new(state: &Path, origin: Origin) -> Self {
        let path = Self::path(state);
        // An earlier run that ended during a listing may have left this file.
        let _absent = fs::remove_file(ending(&path, PARTIAL));
        Self {
            path,
            origin,
            base: None,
        }
    }

    /// Path of the file in the agent's state directory.
    pub fn path(state: &Path) -> PathBuf {
        state.join(FILE)
    }

    /// Writes changes of a listing that is not complete yet.
    pub(crate) fn spill(&mut self, changes: &Changed) -> io::Result<()> {
        let partial = ending(&self.path, PARTIAL);
        let new = ending(&partial, ".new");
        merge::merge(self.base.as_deref(), changes, &self.origin, &new)?;
        fs::rename(&new, &partial)?;
        self.base = Some(partial);
        Ok(())
    }

    /// Stores the complete listing: the base with these changes.
    pub(crate) fn save(&mut self, changes: &Changed) -> io::Result<()> {
        let new = ending(&self.path, ".new");
        let file = merge::merge(self.base.as_deref(), changes, &self.origin, &new)?;
        rename_synced(&file, &new, &self.path)?;
        if self.base.as_ref().is_some_and(|base| *base != self.path) {
            fs::remove_file(ending(&self.path, PARTIAL))?;
        }
        self.base = Some(self.path.clone());
        Ok(())
    }

    /// Notes that the stored list is still right.
    pub(crate) fn confirm(&self) -> io::Result<()> {
        match &self.base {
            Some(base) if *base == self.path => {
                let file = regular_file::open(base).map_err(io::Error::other)?;
                file.set_modified(wall_time::of_file())
            }
            _ => Ok(()),
        }
    }
}

fn ending(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

#[cfg(test)]
mod tests;
