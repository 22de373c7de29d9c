//! The node's interfaces, as far as its tables need them.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr},
};

/// What the tables need of the node's interfaces, which are named by their indexes. None of it
/// matters while every pod of the node is open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeLinks {
    /// The bridges that pods of this node are on.
    pub bridges: BTreeSet<u32>,
    /// Ports of bridges that lead to no pod of this node. Every other port counts as a pod's, even
    /// one that is not known yet.
    pub other_ports: BTreeSet<u32>,
    /// Pods of this node that are on one of these bridges.
    pub bridged: BTreeSet<IpAddr>,
    /// Broadcast addresses of the node's networks.
    pub broadcasts: BTreeSet<Ipv4Addr>,
    /// Interfaces by which packets of this node's pods come, and no others.
    pub senders: BTreeSet<u32>,
    /// Addresses of this node's pods.
    pub addresses: BTreeSet<IpAddr>,
    /// UDP ports at which the node's tunnels receive, besides those that VXLAN and Geneve use by default.
    pub tunnel_ports: BTreeSet<u16>,
}

/// UDP ports of VXLAN (as registered, and as flannel and k3s use it) and of Geneve.
pub(crate) const TUNNEL_PORTS: [u16; 3] = [4789, 8472, 6081];
