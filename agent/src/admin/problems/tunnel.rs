//! Problems of the tunnel between nodes.

use agent_core::{core::snapshot::Summary, first_of::first_of};
use agent_datapath::tunnel::TunnelView;

use super::NODES;

/// Problems of the tunnel: its programs or device are not as they should be, the blocks outside of
/// the cluster are unknown or not all in use, or other nodes do not unwrap packets.
pub(in super::super) fn of_view(tunnel: &TunnelView) -> impl Iterator<Item = String> + use<> {
    let fault = tunnel.fault.iter();
    let fault = fault.map(|fault| format!("the tunnel between nodes: {fault}"));
    let world = tunnel.world_problem.iter().cloned();
    let behind = Some(&tunnel.behind).filter(|behind| !behind.is_empty() && tunnel.wraps);
    let behind = behind.map(|behind| {
        format!(
            "{} of the cluster's nodes do not unwrap packets, and pods there get none from this node: {}; start their \
             agents with --high-scale-ipcache=decap-only",
            behind.len(),
            first_of(behind, NODES)
        )
    });
    let all: Vec<String> = fault.chain(world).chain(behind).collect();
    all.into_iter()
}

/// No other node is known to a node that wraps packets and reads no objects of an API server, where each agent
/// writes its own CiliumNode.
pub(in super::super) fn other_nodes_unknown(tunnel: &TunnelView, has_api: bool) -> Option<String> {
    let is_alone = tunnel.wraps && !has_api && tunnel.other_nodes == Some(0);
    is_alone.then(|| {
        "the tunnel between nodes: no CiliumNode document of another node is known, so that packets of pods to the \
         addresses of other nodes are wrapped, and lost there; put a CiliumNode document of each node into --policy-dir"
            .to_owned()
    })
}

/// Endpoints whose number other nodes do not know, on a node that wraps packets. If agents make the numbers of the
/// cluster, another problem says why they do not.
pub(in super::super) fn numbers_not_shared(
    tunnel: &TunnelView,
    summary: &Summary,
    endpoints: &[String],
) -> Option<String> {
    let is_local = tunnel.wraps && summary.cluster_identities.is_none() && !endpoints.is_empty();
    is_local.then(|| {
        format!(
            "the tunnel between nodes: packets of {} endpoints of this node carry reserved:init, because no \
             CiliumIdentity has their labels: {}; put the documents that `holdfast-agent identity assign` prints into \
             --policy-dir",
            endpoints.len(),
            first_of(endpoints, NODES)
        )
    })
}

#[cfg(test)]
mod tests {
    use agent_core::identity::cluster::ClusterCounts;

    use super::*;

    #[test]
    fn nodes_without_an_api_server_need_documents_of_the_others() {
        let of = |wraps: bool, other_nodes: Option<usize>, has_api: bool| {
            let tunnel = TunnelView {
                wraps,
                other_nodes,
                ..TunnelView::default()
            };
            other_nodes_unknown(&tunnel, has_api)
        };
        let problem = of(true, Some(0), false).unwrap();
        for says in ["wrapped, and lost", "--policy-dir"] {
            assert!(problem.contains(says), "{problem}");
        }
        for (wraps, other_nodes, has_api) in [
            (false, Some(0), false),
            (true, None, false),
            (true, Some(1), false),
            (true, Some(0), true),
        ] {
            assert_eq!(of(wraps, other_nodes, has_api), None);
        }
    }

    #[test]
    fn endpoints_whose_numbers_are_not_shared_are_named() {
        let of = |wraps: bool, cluster: bool, count: usize| {
            let tunnel = TunnelView {
                wraps,
                ..TunnelView::default()
            };
            let summary = Summary {
                cluster_identities: cluster.then(ClusterCounts::default),
                ..Summary::default()
            };
            let endpoints: Vec<String> = (0..count)
                .map(|number| format!("default/{number}"))
                .collect();
            numbers_not_shared(&tunnel, &summary, &endpoints)
        };
        let problem = of(true, false, 12).unwrap();
        for says in [
            "packets of 12 endpoints of this node carry reserved:init",
            "default/0, ",
            "and 2 more; put",
            "`holdfast-agent identity assign`",
        ] {
            assert!(problem.contains(says), "{problem}");
        }
        for (wraps, cluster, count) in [(false, false, 1), (true, true, 1), (true, false, 0)] {
            assert_eq!(of(wraps, cluster, count), None);
        }
    }
}
