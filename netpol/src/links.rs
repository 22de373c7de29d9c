//! The properties of the node's interfaces that its tables need.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr},
};

/// What the tables need to know about the node's interfaces, which are identified by their indexes.
/// It has no effect while every pod of the node is open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeLinks {
    /// The bridges to which pods of this node are connected.
    pub bridges: BTreeSet<u32>,
    /// Ports of bridges that lead to no pod of this node. Every other port counts as a pod's, even
    /// one that is not known yet.
    pub other_ports: BTreeSet<u32>,
    /// Addresses of this node's pods that are connected to one of these bridges.
    pub bridged: BTreeSet<IpAddr>,
    /// Broadcast addresses of the node's networks.
    pub broadcasts: BTreeSet<Ipv4Addr>,
    /// Interfaces by which only packets of this node's pods come.
    pub senders: BTreeSet<u32>,
    /// Addresses of this node's pods.
    pub addresses: BTreeSet<IpAddr>,
    /// UDP ports at which the node's tunnels receive, in addition to the default ports of VXLAN and Geneve.
    pub tunnel_ports: BTreeSet<u16>,
}

/// UDP ports of VXLAN (the registered one, and the one that flannel and k3s use) and of Geneve.
pub(crate) const TUNNEL_PORTS: [u16; 3] = [4789, 8472, 6081];
