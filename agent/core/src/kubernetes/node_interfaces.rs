//! What interfaces of this node say about Services.

use std::{collections::BTreeSet, net::IpAddr};

/// What interfaces of the node say about Services.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeInterfaces {
    /// Addresses of `nodelocaldns`, where NodeLocal DNSCache listens.
    pub local_dns: BTreeSet<IpAddr>,
    /// Whether there is `kube-ipvs0`: kube-proxy is then in IPVS mode.
    pub has_ipvs: bool,
}
