//! Flags about containers of the host's runtimes, and about the hook that starts them under policy.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    time::Duration,
};

use clap::Args;
use dns_policy::duration;
use nix::libc::IFNAMSIZ;

use super::args::ADMIN_SOCKET;

/// Root directory of podman's containers.
const PODMAN_ROOT: &str = "/var/lib/containers/storage";

/// Flags of `run` about containers.
#[derive(Clone, Debug, Args)]
pub struct ContainerArgs {
    /// Root directory of podman's containers, its graphroot: there the agent finds which container has the name
    /// that a document has
    #[arg(long, value_name = "DIR", default_value = PODMAN_ROOT)]
    pub podman_root: PathBuf,
    /// What becomes of packets at ports of a bridge that are not endpoints: docker0=closed drops them in both
    /// directions, also while the agent does not run, and open, the default, passes them; several with commas. Only
    /// ports that lead to containers and virtual machines count
    #[arg(long, value_name = "BRIDGE=open|closed", value_delimiter = ',', value_parser = unknown_containers)]
    pub unknown_containers: Vec<(String, bool)>,
}

impl ContainerArgs {
    /// Bridges whose ports are closed unless they are endpoints.
    pub(crate) fn closed_bridges(&self) -> BTreeSet<String> {
        let given: BTreeMap<_, _> = self.unknown_containers.iter().cloned().collect();
        let closed = given.into_iter().filter(|(_, is_closed)| *is_closed);
        closed.map(|(bridge, _)| bridge).collect()
    }
}

/// A bridge, and whether it is closed.
fn unknown_containers(text: &str) -> Result<(String, bool), String> {
    let is_name = |name: &str| (1..IFNAMSIZ).contains(&name.len()) && !name.contains(['/', ' ']);
    match text.split_once('=') {
        Some((bridge, what @ ("open" | "closed"))) if is_name(bridge) => {
            Ok((bridge.to_owned(), what == "closed"))
        }
        _ => Err("write a bridge and open or closed, for example docker0=closed".to_owned()),
    }
}

/// `oci-hook`
#[derive(Clone, Debug, Args)]
pub struct OciHookArgs {
    /// Unix socket through which commands reach the running program
    #[arg(long, value_name = "PATH", default_value = ADMIN_SOCKET)]
    pub admin_socket: PathBuf,
    /// Directory in which the agent stores the endpoints that `endpoint add` added; also which containers have a
    /// document, which the hook reads while no agent answers
    #[arg(
        long,
        value_name = "DIR",
        default_value = "/var/lib/holdfast/endpoints"
    )]
    pub endpoint_store: PathBuf,
    /// Root directory of podman's containers, as the agent has it
    #[arg(long, value_name = "DIR", default_value = PODMAN_ROOT)]
    pub podman_root: PathBuf,
    /// How long a container with a document waits for the agent, at most 20 s, before its start fails
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "20s")]
    pub wait: Duration,
}
