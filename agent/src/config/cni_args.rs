//! Flags about the CNI plugin.

use std::path::PathBuf;

use clap::Args;

use crate::cni::install::CniPlaces;

/// Where the plugin finds the agent by default; the plugin's own default.
const SOCKET: &str = "/run/holdfast/cni.sock";

/// Where container runtimes keep network namespaces.
const NETNS_DIR: &str = "/run/netns";

/// Flags about the place of the CNI plugin on the node.
#[derive(Clone, Debug, Args)]
pub struct PluginArgs {
    /// Socket on which the CNI plugin holdfast-cni asks for pods to be put under policy, for root only.
    /// Without it and --cni-conf-dir the plugin is not served; with --cni-conf-dir the default is
    /// /run/holdfast/cni.sock
    #[arg(long, value_name = "FILE")]
    pub cni_socket: Option<PathBuf>,
    /// Directory of the node's CNI configuration, for example /etc/cni/net.d. Once this
    /// program is ready, it writes 05-holdfast.conflist there: the first configuration of the directory,
    /// with holdfast-cni as its last plugin. The other files stay as they are
    #[arg(long, value_name = "DIR")]
    pub cni_conf_dir: Option<PathBuf>,
    /// Directory of the node's CNI plugins, for example /opt/cni/bin. holdfast-cni is copied
    /// there, from the directory of this program
    #[arg(long, value_name = "DIR")]
    pub cni_bin_dir: Option<PathBuf>,
}

/// Flags about pods of the CNI plugin, and of pods that are older.
#[derive(Clone, Debug, Args)]
pub struct CniArgs {
    #[command(flatten)]
    pub plugin: PluginArgs,
    /// Directory of the node's network namespaces. The agent puts pods of this node that run without an
    /// endpoint, because they are older than the agent, under policy: it finds them by the address of
    /// the interface eth0 in each namespace. Needs --kubernetes; with it and --cni-conf-dir the default
    /// is /run/netns
    #[arg(long, value_name = "DIR")]
    pub cni_netns_dir: Option<PathBuf>,
}

impl PluginArgs {
    /// Where the plugin and its configuration go; none = the agent installs neither.
    pub(crate) fn places(&self) -> Option<CniPlaces> {
        let wanted = self.cni_conf_dir.is_some() || self.cni_bin_dir.is_some();
        wanted.then(|| CniPlaces {
            conf_dir: self.cni_conf_dir.clone(),
            bin_dir: self.cni_bin_dir.clone(),
            socket: self.socket().unwrap_or_else(|| PathBuf::from(SOCKET)),
        })
    }

    /// The plugin's socket; none = the plugin is not served.
    pub(crate) fn socket(&self) -> Option<PathBuf> {
        let default = self.cni_conf_dir.as_ref().map(|_| PathBuf::from(SOCKET));
        self.cni_socket.clone().or(default)
    }
}

impl CniArgs {
    /// Where pods that run without an endpoint are found; none = nowhere.
    pub(super) fn netns_dir(&self) -> Option<PathBuf> {
        let default = self.plugin.cni_conf_dir.as_ref();
        let default = default.map(|_| PathBuf::from(NETNS_DIR));
        self.cni_netns_dir.clone().or(default)
    }
}
