//! Which containers have a document, on disk: the OCI hook reads it while no agent answers.

use std::{collections::BTreeSet, ffi::OsStr, fs, io, path::Path};

use daemon::lookup::present;
use serde::{Deserialize, Serialize};

use super::{ContainerName, store};
use crate::endpoint::discover::{Netns, bridge, leading_to};

/// Extension of a file in the directory of stored endpoints, which a boot does not empty.
pub(crate) const EXTENSION: &str = "containers";

/// The containers that must not start without policy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedContainers {
    containers: BTreeSet<ContainerName>,
    /// Bridges whose ports are endpoints.
    #[serde(default)]
    bridges: BTreeSet<String>,
    /// Interfaces that are closed until they are endpoints. The hook does not need them.
    #[serde(default)]
    interfaces: BTreeSet<String>,
}

impl NamedContainers {
    pub(crate) fn of(
        containers: impl Iterator<Item = ContainerName>,
        bridges: impl Iterator<Item = String>,
        interfaces: impl Iterator<Item = String>,
    ) -> Self {
        Self {
            containers: containers.collect(),
            bridges: bridges.collect(),
            interfaces: interfaces.collect(),
        }
    }

    /// Reads one file; empty if it does not exist.
    pub(crate) fn of_file(path: &Path) -> io::Result<Self> {
        let Some(text) = store::read(path)? else {
            return Ok(Self::default());
        };
        serde_json::from_slice(&text)
            .map_err(|error| io::Error::other(format!("{}: {error}", path.display())))
    }

    /// Reads the files of all agents in `dir`; empty if `dir` does not exist.
    ///
    /// # Errors
    /// A file cannot be read, or another user may write it.
    pub fn read(dir: &Path) -> io::Result<Self> {
        let mut all = Self::default();
        for entry in present(fs::read_dir(dir))?.into_iter().flatten() {
            let path = entry?.path();
            if path.extension() == Some(OsStr::new(EXTENSION)) {
                all.add(&Self::of_file(&path)?);
            }
        }
        Ok(all)
    }

    /// Adds the names that `other` has.
    pub(crate) fn add(&mut self, other: &Self) {
        self.containers.extend(other.containers.iter().cloned());
        self.bridges.extend(other.bridges.iter().cloned());
        self.interfaces.extend(other.interfaces.iter().cloned());
    }

    /// Removes the names that `other` has.
    pub(crate) fn take_out(&mut self, other: &Self) {
        self.containers
            .retain(|name| !other.containers.contains(name));
        self.bridges.retain(|name| !other.bridges.contains(name));
        self.interfaces
            .retain(|name| !other.interfaces.contains(name));
    }

    /// Whether every container may start without the agent.
    pub fn is_empty(&self) -> bool {
        self.containers.is_empty() && self.bridges.is_empty()
    }

    /// Interfaces that are closed until they are endpoints.
    pub(crate) fn interfaces(&self) -> &BTreeSet<String> {
        &self.interfaces
    }

    /// Whether documents name containers, and not only bridges.
    pub fn has_containers(&self) -> bool {
        !self.containers.is_empty()
    }

    /// The bridge with a document that the process `pid` is connected to.
    ///
    /// # Errors The process's interfaces, or the ports of bridges, cannot be looked for.
    pub fn bridge_of(&self, pid: u32) -> io::Result<Option<String>> {
        if self.bridges.is_empty() {
            return Ok(None);
        }
        let leading = leading_to(&Netns::Pid(pid), "").map_err(io::Error::other)?;
        let connected = bridge::ports_by_bridge()
            .map_err(io::Error::other)?
            .into_iter()
            .filter(|(_, ports)| ports.iter().any(|(index, _)| leading.contains(index)));
        let mut bridges = connected.map(|(bridge, _)| bridge);
        Ok(bridges.find(|bridge| self.bridges.contains(bridge)))
    }

    /// Whether a container has a document.
    pub fn has(&self, container: &ContainerName) -> bool {
        self.containers.contains(container)
    }
}
