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
    /// Addresses outside that are routed to nodes and translated there, sorted.
    pub external_ips: Vec<IpAddr>,
    /// Its ports, in the order of the Service.
    pub ports: Vec<PortAt>,
}

/// A port of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortAt {
    /// Its name; empty if it has none.
    pub name: String,
    /// Its protocol.
    pub protocol: Protocol,
    /// The port that clients use.
    pub port: u16,
    /// Its backends, sorted: ready ones, others, and terminating ones. They serve those addresses
    /// of the Service that are of their family.
    pub backends: Vec<BackendAt>,
}

/// Where a port of a Service leads.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BackendAt {
    /// Address.
    pub address: IpAddr,
    /// Port; none = the Service's port.
    pub port: Option<u16>,
    /// It may get new connections.
    pub is_ready: bool,
    /// The pod, `namespace/name`, if the slice names one.
    pub pod: Option<Arc<str>>,
}
