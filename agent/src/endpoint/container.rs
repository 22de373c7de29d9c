//! Containers of the runtimes on this host: which process a container's name means now.
//!
//! ```text
//!  name ─► id ─► first process ─► network namespace
//!       │     └ state of runc or crun (/run), or what the OCI hook reported
//!       └ store of podman, or of docker
//! ```
//! Only files of root count. Annotations and labels of images and containers are not read.

mod name;
mod named;
mod process;
mod store;

pub use self::{
    name::{ContainerName, ContainerNameError, Runtime},
    named::NamedContainers,
};
pub(crate) use self::{
    named::EXTENSION,
    process::{Process, start_time},
};

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

use daemon::lookup::Lookup;

use self::store::Names;

/// Root directory of docker.
const DOCKER_ROOT: &str = "/var/lib/docker";
/// Directories in which the OCI runtimes of podman, CRI-O and docker have a directory for each container.
const STATES: [&str; 3] = ["/run/runc", "/run/crun", "/run/docker/runtime-runc/moby"];

/// Hexadecimal digits of an id that podman gives.
const ID: usize = 64;

/// The containers of this host.
#[derive(Debug)]
pub struct Containers {
    podman: Names,
    docker: Names,
    states: Vec<PathBuf>,
    /// First process of each container that was found, by the id of the container.
    processes: BTreeMap<String, Process>,
}

impl Containers {
    /// Containers of docker, and of the podman whose root directory is `podman_root`.
    pub fn of(podman_root: &Path) -> Self {
        Self {
            podman: Names::of_podman(podman_root),
            docker: Names::of_docker(Path::new(DOCKER_ROOT)),
            states: STATES.map(PathBuf::from).to_vec(),
            processes: BTreeMap::new(),
        }
    }

    /// The first process of a container; `Gone` if the container does not run.
    pub(crate) fn process(&mut self, name: &ContainerName) -> Lookup<u32> {
        let names = match name.runtime() {
            Runtime::Podman => &mut self.podman,
            Runtime::Docker => &mut self.docker,
        };
        let id = match names.id_of(name.name()) {
            Ok(Some(id)) => id,
            Ok(None) => return Lookup::Gone,
            Err(error) => return Lookup::Unknown(error),
        };
        if let Some(process) = self.processes.get(&id) {
            match process.runs() {
                Lookup::Found(()) => return Lookup::Found(process.pid),
                Lookup::Unknown(error) => return Lookup::Unknown(error),
                Lookup::Gone => {}
            }
        }
        let found = process::in_states(&self.states, &id);
        match &found {
            Lookup::Found(process) => self.processes.insert(id, process.clone()),
            Lookup::Gone => self.processes.remove(&id),
            Lookup::Unknown(_) => None,
        };
        found.map(|process| process.pid)
    }

    /// Whether podman may give this id to a container with a name. Containers of `podman build` have another kind of
    /// id.
    pub fn may_have_name(id: &str) -> bool {
        id.len() == ID && id.bytes().all(|byte| byte.is_ascii_hexdigit())
    }

    /// The name of podman's container with this id. `None`: it is not a container of podman.
    pub fn name_of(&mut self, id: &str) -> io::Result<Option<ContainerName>> {
        let name = self.podman.name_of(id)?;
        Ok(name.and_then(|name| ContainerName::new(Runtime::Podman, name)))
    }

    /// Records the first process of a starting container, of which its runtime has no state yet.
    pub(crate) fn starts(&mut self, id: &str, process: Process) {
        // Forgets containers that have ended.
        self.processes
            .retain(|_, process| !process.runs().is_gone());
        self.processes.insert(id.to_owned(), process);
    }
}
