//! Flags about the CNI plugin.

use std::path::PathBuf;

use clap::Args;

/// Flags about the CNI plugin.
#[derive(Clone, Debug, Args)]
pub struct CniArgs {
    /// Socket on which the CNI plugin holdfast-cni asks for pods to be put under policy, for root only.
    /// The plugin's own default is /run/holdfast/cni.sock. Without this flag the agent does not serve it
    #[arg(long, value_name = "FILE", env = "HOLDFAST_CNI_SOCKET")]
    pub cni_socket: Option<PathBuf>,
}

impl CniArgs {
    /// The plugin's socket; none = the plugin is not served.
    pub(super) fn socket(&self) -> Option<PathBuf> {
        self.cni_socket.clone()
    }
}
