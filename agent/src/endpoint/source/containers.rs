//! Endpoints that are containers: which process runs in the container with a name, and containers that are about to
//! start.

use std::io;

use daemon::lookup::Lookup;

use super::{EndpointBook, EndpointDocument, State};
use crate::endpoint::{
    container::{ContainerName, Containers, Process},
    discover::{DiscoverError, Netns, has_own_users, is_own, ways_out},
};

/// A container that is about to start: its network exists, and its program does not run yet.
#[derive(Debug)]
pub(crate) struct ContainerStart {
    /// The runtime's id of the container.
    pub(crate) id: String,
    /// Process that becomes the container's first one.
    pub(crate) pid: u32,
}

/// A container that may start once these endpoints are in force.
#[derive(Debug, Default)]
pub(crate) struct StartingContainer {
    pub(crate) name: Option<ContainerName>,
    pub(crate) keys: Vec<String>,
}

/// Why a container must not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    /// The agent has not read the documents yet.
    #[error(
        "the agent has not read the documents of endpoints yet; `holdfast-agent status` says why if that lasts"
    )]
    Starting,
    /// The container may have a name that a document names.
    #[error(
        "the container {0} is not in podman's store, so its name is not known: documents name containers, \
         and it may be one of them. A container with --rootfs has no name there; of another store, give \
         the agent --podman-root"
    )]
    Nameless(String),
    #[error("the names of podman's containers cannot be read: {0}")]
    Store(io::Error),
    #[error(
        "the agent finds no process {pid}: it must run in the host's own PID namespace{}",
        reason(.error)
    )]
    Process { pid: u32, error: Option<io::Error> },
    #[error(
        "the container {0} uses the network of the host, and policy is at a container's own interface: start it \
         with a network of its own, or remove its document"
    )]
    HostNetwork(ContainerName),
    #[error(
        "no document is about the interface {ifname} of the container {name}: write one with container: {name} \
         and ifname: {ifname}, or start the container without that network"
    )]
    Further { name: ContainerName, ifname: String },
    #[error(
        "the container {0} has a user namespace of its own and no network yet: podman connects such a container \
         only after this hook, and its first packets would be open. Start it without --userns and --uidmap, or in a \
         pod whose network is there (podman run --pod), or remove its document"
    )]
    LateNetwork(ContainerName),
    #[error(
        "{what} had a document when the agent ran before, and these are not accepted now: {files}. `holdfast-agent \
         status` says why: correct them, or delete them"
    )]
    Unread { what: String, files: String },
    #[error("endpoint {key}: {reason}")]
    Unresolved { key: String, reason: String },
    #[error(transparent)]
    Discover(#[from] DiscoverError),
}

fn reason(error: &Option<io::Error>) -> String {
    error
        .as_ref()
        .map_or_else(String::new, |error| format!(" ({error})"))
}

impl EndpointBook {
    /// Why the agent cannot look for the containers of documents, and what happens to their endpoints meanwhile.
    pub(crate) fn containers_unseen(&self) -> Option<String> {
        let state = self.state.lock();
        let failure = state.containers_failure.as_ref()?;
        Some(format!(
            "the agent cannot see which containers run ({failure}): their endpoints stay as they are, and containers \
             with a document do not start"
        ))
    }

    /// Begins to put a container under policy, if a document names it. May block.
    pub(crate) fn start_container(
        &self,
        start: &ContainerStart,
    ) -> Result<StartingContainer, StartError> {
        let mut state = self.state.lock();
        let is_listed = state.dir.is_none() || state.listing.listed;
        if state.listing.starting || !is_listed {
            return Err(StartError::Starting);
        }
        let mut documents = state.documents.values();
        let has_bridges = documents.any(|document| document.bridge.is_some());
        let has_containers = state.documents.values().any(is_container);
        let may_be_named = has_containers || state.listing.unread.has_containers();
        if !has_bridges && !may_be_named && state.listing.unread.is_empty() {
            return Ok(StartingContainer::default());
        }
        let name = state
            .containers
            .name_of(&start.id)
            .map_err(StartError::Store)?;
        if name.is_none() && may_be_named && Containers::may_have_name(&start.id) {
            return Err(StartError::Nameless(start.id.clone()));
        }
        if state.about(name.as_ref()).is_empty() {
            state.refuse_unread(name.as_ref(), start.pid)?;
            if !has_bridges {
                let keys = Vec::new();
                return Ok(StartingContainer { name, keys });
            }
        }
        let process = match Process::now(start.pid) {
            Lookup::Found(process) => process,
            other => {
                return Err(StartError::Process {
                    pid: start.pid,
                    error: other.error(),
                });
            }
        };
        let keys = state.endpoints_of(name.as_ref(), start.pid)?;
        state.containers.starts(&start.id, process);
        state.locate_containers();
        for key in &keys {
            state.follow(key, &*self.deliver);
            if let Some(reason) = state.problems.unresolved.get(key) {
                return Err(StartError::Unresolved {
                    key: key.clone(),
                    reason: reason.clone(),
                });
            }
        }
        Ok(StartingContainer { name, keys })
    }
}

impl State {
    /// Endpoints of a container whose process is `pid`: one for each interface by which packets leave the container. A
    /// container without such an interface has none.
    fn endpoints_of(
        &mut self,
        name: Option<&ContainerName>,
        pid: u32,
    ) -> Result<Vec<String>, StartError> {
        let named = self.about(name);
        let must = name.filter(|_| !named.is_empty());
        let netns = Netns::Pid(pid);
        if is_own(&netns) {
            let refused = must.map(|name| Err(StartError::HostNetwork(name.clone())));
            return refused.unwrap_or_else(|| Ok(Vec::new()));
        }
        self.expand_bridges();
        let ways_out = ways_out(&netns)?;
        if let Some(name) = must.filter(|_| ways_out.is_empty() && has_own_users(pid)) {
            return Err(StartError::LateNetwork(name.clone()));
        }
        let mut endpoints = Vec::new();
        for ifname in ways_out {
            let of_interface = named.iter().filter(|(_, of)| *of == ifname);
            let mut keys: Vec<String> = of_interface.map(|(key, _)| key.clone()).collect();
            if keys.is_empty() {
                keys = self.ports_to(&netns, &ifname)?;
            }
            if let Some(name) = must.filter(|_| keys.is_empty()) {
                let name = name.clone();
                return Err(StartError::Further { name, ifname });
            }
            endpoints.extend(keys);
        }
        Ok(endpoints)
    }

    /// Documents about a container, each with the interface that it is about.
    fn about(&self, name: Option<&ContainerName>) -> Vec<(String, String)> {
        let documents = self.documents.iter();
        let documents =
            documents.filter(|(_, document)| name.is_some() && document.container.as_ref() == name);
        documents
            .map(|(key, document)| (key.clone(), document.ifname.clone()))
            .collect()
    }

    /// Finds the process of each container that a document names. A document whose container cannot be looked for
    /// stays as it was.
    pub(super) fn locate_containers(&mut self) {
        self.containers_failure = None;
        for document in self.documents.values_mut() {
            let Some(name) = &document.container else {
                continue;
            };
            match self.containers.process(name) {
                Lookup::Found(pid) => document.process = Some(pid),
                Lookup::Gone => document.process = None,
                Lookup::Unknown(error) => {
                    self.containers_failure = Some(format!("{name}: {error}"));
                }
            }
        }
    }
}

fn is_container(document: &EndpointDocument) -> bool {
    document.container.is_some()
}
