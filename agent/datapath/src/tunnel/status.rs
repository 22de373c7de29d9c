//! How the tunnel is: written by its task, read by `status` and metrics.

use std::sync::Arc;

use agent_core::{high_scale::objects::World, tunnel_mode::TunnelMode};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// The tunnel of this node.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct TunnelView {
    /// `off`, `decap-only` or `full`.
    pub mode: String,
    /// Devices that lead to other nodes.
    pub devices: Vec<String>,
    /// Longest IP packet of a pod that needs no fragments, in bytes.
    pub inner_mtu: u32,
    /// UDP port of wrapped packets.
    pub port: u16,
    /// Packets to pods of other nodes are wrapped.
    pub wraps: bool,
    /// Blocks outside of the cluster; none = unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub world_blocks: Option<usize>,
    /// Why nothing is wrapped, or why blocks are not used, although they should be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub world_problem: Option<String>,
    /// Why the programs or the device are not as they should be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<String>,
    /// Other nodes that have a CiliumNode; none = the objects are not listed yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other_nodes: Option<usize>,
    /// Nodes whose CiliumNode does not say that they unwrap packets; empty unless this node wraps.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub behind: Vec<String>,
}

/// Shared by the tunnel's task, `status` and metrics.
#[derive(Clone, Debug, Default)]
pub struct TunnelStatus(Arc<Mutex<TunnelView>>);

impl TunnelStatus {
    /// As it is now.
    pub fn view(&self) -> TunnelView {
        self.0.lock().clone()
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut TunnelView)) {
        change(&mut self.0.lock());
    }
}

/// Why blocks outside of the cluster are not used, in words.
pub(super) fn problem(world: &World, mode: TunnelMode, wraps: bool) -> Option<String> {
    let is_full = mode == TunnelMode::Full;
    match world {
        World::Blocks(_) => None,
        World::Unknown => (is_full && !wraps).then(|| {
            "--high-scale-ipcache full wraps nothing yet: CiliumWorldCIDRs are not listed".to_owned()
        }),
        World::Absent => is_full.then(|| {
            "--high-scale-ipcache full wraps nothing, because no CiliumWorldCIDRs object is in force: it would wrap packets to \
             the Internet; create one with the blocks outside of the cluster, or with cidrs: [] if there are none"
                .to_owned()
        }),
        World::TooMany(too_many) => Some(format!(
            "CiliumWorldCIDRs: {too_many}, and {}; write wider blocks",
            match is_full && !wraps {
                true => "no packet is wrapped",
                false => "the list before stays in force",
            }
        )),
    }
}
