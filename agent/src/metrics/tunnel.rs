//! Metrics of the tunnel between nodes.

use std::fmt;

use daemon::{families, metrics::Families};

use super::Sample;

impl Sample {
    pub(super) fn tunnel(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let Some(tunnel) = &self.scrape.tunnel else {
            return Ok(());
        };
        let view = tunnel.view();
        families! { out;
            /// 1 while packets to pods of other nodes are wrapped (--high-scale-ipcache full, and the blocks
            /// outside of the cluster are known); 0 otherwise
            gauge tunnel_wraps = view.wraps;
            /// Blocks of addresses outside of the cluster (CiliumWorldCIDRs)
            gauge tunnel_world_cidrs = view.world_blocks.unwrap_or_default();
            /// 1 while the tunnel between nodes is not in the state that --high-scale-ipcache requires.
            /// `holdfast-agent status` gives the reason
            gauge tunnel_faulty = view.fault.is_some() || view.world_problem.is_some();
            /// Nodes whose CiliumNode does not say that they unwrap packets, while this node wraps them
            gauge tunnel_nodes_behind = view.behind.len();
        }
    }
}
