//! An endpoint as people name it, in every command.

use clap::Args;

/// The endpoint that a command is about.
#[derive(Clone, Debug, Args)]
pub struct EndpointArg {
    /// Endpoint: its number, key, name, pod (namespace/name), container (podman/NAME) or address
    #[arg(value_name = "ENDPOINT")]
    pub endpoint: String,
}

/// The only endpoint that a list is about.
#[derive(Clone, Debug, Args)]
pub struct EndpointFilter {
    /// Only this endpoint: its number, key, name, pod (namespace/name), container (podman/NAME) or
    /// address
    #[arg(long, value_name = "ENDPOINT")]
    pub endpoint: Option<String>,
}
