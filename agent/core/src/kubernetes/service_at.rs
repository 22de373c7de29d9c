//! A Service, as the core needs it.

use std::{net::IpAddr, sync::Arc};

use crate::policy::cluster::Protocol;

/// A Service with its backends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceAt {
    /// `namespace/name`.
    pub key: Arc<str>,
    /// Its addresses in the cluster, sorted.
    pub cluster_ips: Vec<IpAddr>,
    /// Addresses of its load balancer outside the cluster, which nodes translate; sorted.
    pub load_balancer_ips: Vec<IpAddr>,
    /// Other addresses outside the cluster, which its author wrote and nodes translate; sorted.
    pub external_ips: Vec<IpAddr>,
    /// Its ports, in the order of the Service.
    pub ports: Vec<PortAt>,
}

/// Family of an address. Each has its own backends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Family {
    V4,
    V6,
}

impl Family {
    pub(crate) const fn of(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }
}

impl PortAt {
    /// Backends behind the addresses of a family.
    pub(crate) fn backends_of(&self, family: Family) -> impl Iterator<Item = &BackendAt> {
        let backends = self.backends.iter();
        backends.filter(move |backend| Family::of(backend.address) == family)
    }
}

/// A port of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortAt {
    /// Its name; empty if it has none.
    pub name: String,
    pub protocol: Protocol,
    /// The port that clients use.
    pub port: u16,
    /// The port of each node that also leads to the backends.
    pub node_port: Option<u16>,
    /// Its backends, sorted: ready ones, others, and terminating ones. A backend serves the
    /// Service's addresses of its own family.
    pub backends: Vec<BackendAt>,
}

/// Where a port of a Service leads.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BackendAt {
    pub address: IpAddr,
    /// Port; `None` = the Service's port.
    pub port: Option<u16>,
    /// Whether it may get new connections.
    pub is_ready: bool,
    /// The pod, `namespace/name`, if the slice names one.
    pub pod: Option<Arc<str>>,
}
