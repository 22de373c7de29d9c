//! Flags about containers of the host's runtimes, and about the hook that starts them under policy.

use std::{path::PathBuf, time::Duration};

use clap::Args;
use dns_policy::duration;

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
}

/// `oci-hook`
#[derive(Clone, Debug, Args)]
pub struct OciHookArgs {
    /// Socket of the running agent
    #[arg(long, default_value = ADMIN_SOCKET)]
    pub admin_socket: PathBuf,
    /// Directory in which the agent stored which containers have a document, for the time when it does not run
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
    #[arg(long, value_parser = duration::parse, default_value = "20s")]
    pub wait: Duration,
}
