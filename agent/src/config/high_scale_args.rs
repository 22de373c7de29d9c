//! Flags about the tunnel between nodes.

use agent_core::{
    high_scale::scope::{KeptLabels, PodScope},
    tunnel_mode::Stage,
};
use agent_datapath::tunnel::{self, TunnelMode, TunnelSettings};
use clap::{ArgAction, Args, ValueEnum};
use shared_maps::tunnel::DEFAULT_PORT;

use super::ConfigError;

/// Send the sender's identity with packets between nodes, so that no node has to know the pods of others
#[derive(Clone, Debug, Args)]
pub struct HighScaleArgs {
    /// Part of this node in the tunnel between nodes, whose packets carry the identity of their sender;
    /// none if absent. All nodes go from one to the next: `off` lets no pod send to the tunnel's port;
    /// `decap-only` unwraps packets, too; `full` wraps packets to pods of other nodes, too, except
    /// those to the blocks of CiliumWorldCIDRs documents; without such a document it wraps nothing. Needs
    /// --enable-ipv6=false, addresses of pods that the network routes, and identities that are the same
    /// on all nodes
    #[arg(long, value_enum, value_name = "MODE")]
    pub high_scale_ipcache: Option<HighScaleMode>,
    /// Device that leads to other nodes; may be repeated. The device of the default route if absent
    #[arg(long, value_name = "DEVICE")]
    pub high_scale_device: Vec<String>,
    /// UDP port of the tunnel, the same on all nodes
    #[arg(long, value_name = "PORT", default_value_t = DEFAULT_PORT, value_parser = clap::value_parser!(u16).range(1..))]
    pub tunnel_port: u16,
    /// With `full`: pods of other nodes are not read, except for those of --high-scale-keep. toEndpoints and
    /// Services of pods then mean those and the pods of this node; write blocks for others. Not before `status` of
    /// all nodes says that plain packets of pods of other nodes are 0
    #[arg(long, default_value_t = false, action = ArgAction::Set)]
    pub high_scale_prune: bool,
    /// With --high-scale-prune: labels of pods that are read on every node, as KEY=VALUE, several with commas;
    /// may be repeated, or written with semicolons
    #[arg(
        long,
        value_name = "LABELS",
        value_delimiter = ';',
        default_value = "k8s-app=kube-dns"
    )]
    pub high_scale_keep: Vec<KeptLabels>,
    /// Start although a step was left out: nodes go from no mode to off, decap-only, full and --high-scale-prune, and
    /// back in this order, so that no node sends packets that another does not unwrap
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
}

/// `--high-scale-ipcache`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HighScaleMode {
    /// Pods may not send to the tunnel's port
    Off,
    /// Packets of the tunnel are unwrapped
    DecapOnly,
    /// Packets to pods of other nodes are wrapped
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
            devices: self.devices()?,
            port: self.tunnel_port,
            knows_pod_blocks,
        }))
    }

    fn devices(&self) -> Result<Vec<String>, ConfigError> {
        if !self.high_scale_device.is_empty() {
            return Ok(self.high_scale_device.clone());
        }
        let refused = |reason: String| ConfigError::new("high-scale-device", reason);
        let found = tunnel::default_device().map_err(|error| {
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
