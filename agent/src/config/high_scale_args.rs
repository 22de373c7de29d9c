//! Flags about the tunnel between nodes.

use std::io;

use agent_core::{
    high_scale::scope::{KeptLabels, PodScope},
    tunnel_mode::Stage,
};
use agent_datapath::tunnel::{TunnelMode, TunnelSettings};
use clap::{ArgAction, Args, ValueEnum};
use shared_maps::tunnel::DEFAULT_PORT;

use super::ConfigError;

/// Send the identity of the sending pod with packets between nodes, so that no node has to know the pods of other nodes
#[derive(Clone, Debug, Args)]
pub struct HighScaleArgs {
    /// Use a VXLAN tunnel between nodes, in which each packet carries the identity of the pod that sent it. Without
    /// this flag there is no tunnel. Change all nodes of the cluster from one value to the next, in the order off,
    /// decap-only, full. Every value needs --enable-ipv6=false. full also needs a network that routes the addresses of
    /// pods, --identity-allocation=cluster or CiliumIdentity documents in --policy-dir, and a CiliumWorldCIDRs document
    /// with the blocks outside of the cluster: packets to these are not wrapped, and without a document none are
    #[arg(long, value_enum, value_name = "MODE")]
    pub high_scale_ipcache: Option<HighScaleMode>,
    /// Network device through which this node reaches other nodes; an Ethernet device. Repeat the flag for several
    /// devices. Default: the device of the default route of IPv4
    #[arg(long, value_name = "DEVICE")]
    pub high_scale_device: Vec<String>,
    /// UDP port of the tunnel. It must be the same on all nodes, and no other VXLAN device of the node may use it
    #[arg(long, value_name = "PORT", default_value_t = DEFAULT_PORT, value_parser = clap::value_parser!(u16).range(1..))]
    pub tunnel_port: u16,
    /// With --high-scale-ipcache=full: do not read pods of other nodes, except those of --high-scale-keep. This saves
    /// about 3 KB of memory and one entry of the ipcache for each pod. It costs that toEndpoints selects only pods of
    /// this node and kept ones; for all others, write blocks (toCIDR). Set it after no node has counted packets of the
    /// reason `plain` for 10 minutes
    #[arg(long, default_value_t = false, action = ArgAction::Set)]
    pub high_scale_prune: bool,
    /// With --high-scale-prune: the labels of pods that every node reads, as KEY=VALUE. A pod must have all labels of
    /// a list with commas. Repeat the flag, or write semicolons, for several such lists
    #[arg(
        long,
        value_name = "LABELS",
        value_delimiter = ';',
        default_value = "k8s-app=kube-dns"
    )]
    pub high_scale_keep: Vec<KeptLabels>,
    /// Start although this node skips a step. The steps are: without --high-scale-ipcache, off, decap-only, full,
    /// --high-scale-prune; the way back has the opposite order. Pods lose packets while one node wraps and another does
    /// not unwrap yet
    #[arg(long, default_value_t = false, action = ArgAction::Set)]
    pub high_scale_force: bool,
}

/// What the tunnel needs of the other settings.
pub(super) struct NodeSettings {
    pub(super) ipv4: bool,
    pub(super) ipv6: bool,
    /// Identities come from objects of the cluster, or from documents.
    pub(super) has_shared_identities: bool,
    /// Blocks of pods are given, or read from objects of the cluster.
    pub(super) knows_pod_blocks: bool,
    /// Finds the device of the default route.
    pub(super) default_device: fn() -> io::Result<Option<String>>,
}

/// `--high-scale-ipcache`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HighScaleMode {
    /// Pods cannot send packets to the port of the tunnel
    Off,
    /// The node also unwraps packets of the tunnel
    DecapOnly,
    /// The node also wraps packets to pods of other nodes, which makes each packet 50 bytes longer
    Full,
}

impl From<HighScaleMode> for TunnelMode {
    fn from(mode: HighScaleMode) -> Self {
        match mode {
            HighScaleMode::Off => Self::Off,
            HighScaleMode::DecapOnly => Self::DecapOnly,
            HighScaleMode::Full => Self::Full,
        }
    }
}

impl HighScaleArgs {
    /// The mode of the node.
    pub(super) fn mode(&self) -> Option<TunnelMode> {
        self.high_scale_ipcache.map(TunnelMode::from)
    }

    /// The place of the node in a migration.
    pub(crate) fn stage(&self) -> Stage {
        Stage::of(self.mode(), self.high_scale_prune)
    }

    /// The pods that are read on this node.
    pub(super) fn pods(&self, node: String) -> PodScope {
        match self.stage() {
            Stage::Pruned => PodScope::Kept {
                node,
                keep: self.high_scale_keep.clone(),
            },
            _ => PodScope::All,
        }
    }

    /// The tunnel's settings; none without a mode.
    pub(super) fn settings(
        &self,
        node: &NodeSettings,
    ) -> Result<Option<TunnelSettings>, ConfigError> {
        let Some(mode) = self.mode() else {
            return self.without_mode().map(|()| None);
        };
        let knows_pod_blocks = node.knows_pod_blocks;
        if self.high_scale_prune && mode != TunnelMode::Full {
            return Err(ConfigError::new(
                "high-scale-prune",
                "needs --high-scale-ipcache=full, because plain packets carry no identity",
            ));
        }
        if mode == TunnelMode::Full && !node.has_shared_identities {
            return Err(ConfigError::new(
                "high-scale-ipcache",
                "full needs numbers that mean the same on all nodes; add --identity-allocation=cluster, or \
                 --policy-dir with the CiliumIdentity documents that `holdfast-agent identity assign` prints",
            ));
        }
        if node.ipv6 {
            return Err(ConfigError::new(
                "high-scale-ipcache",
                "carries IPv4 only; add --enable-ipv6=false, with which policy of IPv6 is not \
                 enforced, or leave this out",
            ));
        }
        if !node.ipv4 {
            return Err(ConfigError::new(
                "high-scale-ipcache",
                "carries IPv4 only, which --enable-ipv4=false turns off",
            ));
        }
        Ok(Some(TunnelSettings {
            mode,
            devices: self.devices(node.default_device)?,
            port: self.tunnel_port,
            knows_pod_blocks,
        }))
    }

    fn devices(
        &self,
        default_device: fn() -> io::Result<Option<String>>,
    ) -> Result<Vec<String>, ConfigError> {
        if !self.high_scale_device.is_empty() {
            return Ok(self.high_scale_device.clone());
        }
        let refused = |reason: String| ConfigError::new("high-scale-device", reason);
        let found = default_device().map_err(|error| {
            refused(format!("is absent, and the routes cannot be read: {error}"))
        })?;
        let device = found.ok_or_else(|| {
            refused("is absent, and there is no default route of IPv4; name a device".to_owned())
        })?;
        Ok(vec![device])
    }

    fn without_mode(&self) -> Result<(), ConfigError> {
        let refused = |flag| {
            let reason = "has no effect without --high-scale-ipcache; add that, or leave this out";
            Err(ConfigError::new(flag, reason))
        };
        if !self.high_scale_device.is_empty() {
            return refused("high-scale-device");
        }
        if self.tunnel_port != DEFAULT_PORT {
            return refused("tunnel-port");
        }
        if self.high_scale_prune {
            return refused("high-scale-prune");
        }
        Ok(())
    }
}

#[cfg(test)]
mod vectors;
