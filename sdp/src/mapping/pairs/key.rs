//! The keys of pairs: endpoint, server and name.

use std::net::SocketAddr;

use dns_policy::{
    mapping::{EndpointInstance, Mapping},
    name::Fqdn,
};

/// A name that an endpoint looked up at a server. Answers of different servers are not merged,
/// because the agent may trust one server and not another.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    pub(crate) asked: Asked,
    pub(crate) name: Fqdn,
}

/// The client and the server of a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Asked {
    pub(crate) endpoint: EndpointInstance,
    pub(crate) server: SocketAddr,
}

impl Key {
    /// Key under which the pairs of an answer are stored.
    pub(crate) fn of(mapping: &Mapping) -> Self {
        Self {
            asked: Asked::of(mapping),
            name: mapping.name.clone(),
        }
    }
}

impl Asked {
    pub(super) fn of(mapping: &Mapping) -> Self {
        Self {
            endpoint: mapping.endpoint,
            server: mapping.server,
        }
    }
}
