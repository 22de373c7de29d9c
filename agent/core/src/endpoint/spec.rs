//! An endpoint as its source describes it.

use std::net::IpAddr;

use crate::datapath::link::Link;

/// An endpoint as its source describes it, resolved on the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointSpec {
    /// Stable key at its source (document name, or `cli/<netns>/<interface>`).
    pub key: String,
    /// Labels, `source:key[=value]`. With `pod`, only those besides the pod's labels.
    pub labels: Vec<String>,
    /// The pod that it is, `namespace/name`: its labels and named ports are the pod's.
    pub pod: Option<String>,
    /// Its uid, if the source has it: a pod of the same name with another uid is another pod.
    pub pod_uid: Option<String>,
    pub interface: PodInterface,
    /// Addresses of the pod's interface (at most one of each family is used).
    pub addresses: Vec<IpAddr>,
    /// Where the network namespace was found, for people.
    pub netns: String,
}

/// Both ends of a pod's interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodInterface {
    /// Index of the host-side interface.
    pub ifindex: u32,
    /// Name of the host-side interface.
    pub ifname: String,
    /// MAC inside the pod.
    pub mac: [u8; 6],
    /// MAC of the host side.
    pub node_mac: [u8; 6],
    /// Whether the host side is a port of a bridge.
    pub on_bridge: bool,
    /// What neighbour discovery on the pod's link needs.
    pub link: Link,
}
