//! Flags about the tunnel between nodes.

use agent_datapath::tunnel::{self, Blocks, TunnelMode, TunnelSettings};
use clap::{Args, ValueEnum};
use ipnet::Ipv4Net;
use shared_maps::tunnel::DEFAULT_PORT;

use super::ConfigError;

/// Send the sender's identity with packets between nodes, so that no node has to know the pods of others
#[derive(Clone, Debug, Args)]
pub struct HighScaleArgs {
    /// Part of this node in the tunnel between nodes, whose packets carry the identity of their sender;
    /// none if absent. All nodes go from one to the next: `off` lets no pod send to the tunnel's port;
    /// `decap-only` unwraps packets, too; `full` wraps packets to pods of other nodes, too. Needs
    /// --enable-ipv6=false, addresses of pods that the network routes, and identities that are the same
    /// on all nodes
    #[arg(long, value_enum, value_name = "MODE")]
    pub high_scale_ipcache: Option<HighScaleMode>,
    /// Device that leads to other nodes; may be repeated. The device of the default route if absent
    #[arg(long, value_name = "DEVICE")]
    pub high_scale_device: Vec<String>,
    /// Block of IPv4 addresses outside of the cluster, to which packets are not wrapped; may be
    /// repeated. While none is given, `full` wraps nothing
    #[arg(long, value_name = "BLOCK", value_delimiter = ',')]
    pub high_scale_world: Vec<Ipv4Net>,
    /// UDP port of the tunnel, the same on all nodes
    #[arg(long, value_name = "PORT", default_value_t = DEFAULT_PORT, value_parser = clap::value_parser!(u16).range(1..))]
    pub tunnel_port: u16,
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

impl HighScaleArgs {
    /// The tunnel's settings; none without a mode. `ipv4` and `ipv6`: which families the node has.
    pub(super) fn settings(
        &self,
        ipv4: bool,
        ipv6: bool,
    ) -> Result<Option<TunnelSettings>, ConfigError> {
        let Some(mode) = self.high_scale_ipcache else {
            return self.without_mode().map(|()| None);
        };
        if ipv6 {
            return Err(ConfigError::new(
                "high-scale-ipcache",
                "carries IPv4 only; add --enable-ipv6=false, with which policy of IPv6 is not \
                 enforced, or leave this out",
            ));
        }
        if !ipv4 {
            return Err(ConfigError::new(
                "high-scale-ipcache",
                "carries IPv4 only, which --enable-ipv4=false turns off",
            ));
        }
        let world = self.high_scale_world.iter();
        let blocks = Blocks::of(world.map(|block| (block.network(), block.prefix_len())));
        let blocks = blocks.ok_or_else(|| {
            ConfigError::new("high-scale-world", "there are more than 16384 blocks")
        })?;
        Ok(Some(TunnelSettings {
            mode: match mode {
                HighScaleMode::Off => TunnelMode::Off,
                HighScaleMode::DecapOnly => TunnelMode::DecapOnly,
                HighScaleMode::Full => TunnelMode::Full,
            },
            devices: self.devices()?,
            port: self.tunnel_port,
            outside: (!self.high_scale_world.is_empty()).then_some(blocks),
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
        if !self.high_scale_world.is_empty() {
            return refused("high-scale-world");
        }
        if self.tunnel_port != DEFAULT_PORT {
            return refused("tunnel-port");
        }
        Ok(())
    }
}
