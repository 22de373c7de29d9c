//! Answers of the admin interface of `netpol run`. The command line uses the same types.

use std::{collections::BTreeMap, net::IpAddr};

use agent_cluster::health::ClusterView;
use serde::{Deserialize, Serialize};

/// Answer to `/v1/netpol/status`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct NetpolStatus {
    pub version: String,
    /// Process id of `netpol run`.
    pub pid: u32,
    /// Whether the policies are in force as the documents say.
    pub ready: bool,
    /// Name of the node: pods with it in `spec.nodeName` are its own.
    #[serde(default)]
    pub node: String,
    /// NetworkPolicies that were read.
    pub policies: usize,
    /// Documents that are refused, with reason and remedy.
    pub refused: Vec<String>,
    /// Pods of this node that have an address of their own.
    pub pods: usize,
    /// Pods of this node that a policy restricts.
    pub restricted: usize,
    pub table: TableView,
    /// NetworkPolicies that do not fit into the table: they allow nothing.
    #[serde(default)]
    pub set_aside: Vec<String>,
    /// Policies of kinds that are not enforced, by kind.
    pub not_enforced: BTreeMap<String, usize>,
    /// Packets that were dropped, by counter of the table; `None` if the counters cannot be read.
    pub dropped: Option<BTreeMap<String, u64>>,
    /// How often the table was made again, because another program had changed it.
    pub repairs: u64,
    /// Problems that need attention; empty if there are none.
    pub problems: Vec<String>,
    /// Documents that may not mean what their authors think.
    pub warnings: Vec<String>,
    /// The cluster that objects are read from.
    pub cluster: Option<ClusterView>,
    /// Files for a VPP vswitch, with `--vpp-export-dir`.
    #[serde(default)]
    pub exports: Option<ExportsView>,
}

/// Files that follow the policies.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct ExportsView {
    /// Path of their directory.
    pub directory: String,
    /// Seconds since a file was written last; `None` = not by this process.
    pub written_seconds: Option<u64>,
}

/// Sizes of the table, and its last change.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct TableView {
    /// Whether the kernel has had a table of this process.
    pub is_begun: bool,
    /// Chains of pods.
    pub chains: usize,
    /// Groups of peers.
    pub groups: usize,
    /// Addresses in these groups and in blocks.
    pub addresses: usize,
    /// Seconds since the table was changed; `None` = not by this process.
    pub changed_seconds: Option<u64>,
    /// Number of elements of the last change.
    pub changed_elements: usize,
}

/// One pod of the answer to `/v1/netpol/pods`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct NetpolPod {
    /// `namespace/name`
    pub pod: String,
    /// Each address, with the interface, bridge or device that leads to it.
    pub addresses: Vec<(IpAddr, String)>,
    /// Policies that restrict what the pod may receive; empty if it may receive everything.
    pub ingress: Vec<String>,
    /// Policies that restrict what the pod may send; empty if it may send everything.
    pub egress: Vec<String>,
}

/// Answer to `/v1/netpol/why`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct NetpolWhy {
    pub from: IpSide,
    pub to: IpSide,
    /// Destination port and protocol; `None` = no port was asked for.
    pub port: Option<String>,
    /// Whether the connection may be opened (without a port: at some port). False while policies are not in force.
    pub allowed: bool,
    /// Whether the policies allow the connection at none of the ports in question.
    #[serde(default)]
    pub is_denied: bool,
    /// Without a port: the open ports, such as `5432/TCP`; `any` for every port and protocol.
    #[serde(default)]
    pub open: Option<Vec<String>>,
    /// Whether one end is the node itself, whose packets from and to its own pods pass.
    #[serde(default)]
    pub is_of_node: bool,
    /// The ends that are pods of this node with policies about their direction.
    pub sides: Vec<SideView>,
    /// Why the kernel may judge otherwise; `None` = the kernel has these rules.
    pub not_in_force: Option<String>,
}

/// One end of a connection.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct IpSide {
    pub address: String,
    /// The pod that has the address, `namespace/name`.
    pub pod: Option<String>,
    /// The node of the pod.
    #[serde(default)]
    pub node: Option<String>,
    /// Whether the pod runs on this node.
    pub is_here: bool,
}

/// Policies of one end about the connection.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct SideView {
    pub pod: String,
    /// `egress`: the pod sends; `ingress`: it receives.
    pub direction: String,
    /// Policies that restrict the direction.
    pub policies: Vec<String>,
    /// Policies of this list that allow nothing, because they do not fit into the table.
    #[serde(default)]
    pub set_aside: Vec<String>,
    /// The rule that allows the connection, as `NetworkPolicy/namespace/name field`; without a port, all rules that
    /// open a port. `None` = denied.
    pub allowed_by: Option<String>,
    /// Without a port: the ports that these rules open.
    #[serde(default)]
    pub open: Option<Vec<String>>,
}
