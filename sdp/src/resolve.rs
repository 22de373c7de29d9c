//! Endpoint of the client and identity of the server: the interface to `cilium_lxc` and
//! `cilium_ipcache`, or to the tables that replace them.

use std::net::IpAddr;

use limits::quota::Holder;
use shared_maps::{EndpointId, IdentityId};

/// The sender of a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryClient {
    /// An endpoint of this node.
    Endpoint {
        id: EndpointId,
        identity: IdentityId,
        /// Host-side interface. It distinguishes instances with the same number.
        ifindex: u32,
    },
    /// The node itself (flag HOST in `cilium_lxc`).
    Host,
    /// The address belongs to no known endpoint, so the query is refused.
    Unknown,
}

impl From<QueryClient> for Holder {
    fn from(client: QueryClient) -> Self {
        match client {
            QueryClient::Endpoint { id, ifindex, .. } => Self::Endpoint { id, ifindex },
            QueryClient::Host => Self::Host,
            QueryClient::Unknown => Self::Unknown,
        }
    }
}

/// Answers of the resolver for the addresses in one batch of queries. Datagrams that
/// arrived together share one lookup per address; the next batch looks up again.
#[derive(Debug, Default)]
pub struct LookupCache {
    clients: Vec<(IpAddr, QueryClient)>,
    servers: Vec<(IpAddr, IdentityId)>,
}

impl LookupCache {
    /// Forgets all answers: another batch begins.
    pub fn clear(&mut self) {
        self.clients.clear();
        self.servers.clear();
    }

    /// Like [`Resolver::client`], with one lookup for each address in a batch.
    pub fn client(&mut self, resolver: &dyn Resolver, client: IpAddr) -> QueryClient {
        once(&mut self.clients, client, || resolver.client(client))
    }

    /// Like [`Resolver::server`], with one lookup for each address in a batch.
    pub fn server(&mut self, resolver: &dyn Resolver, server: IpAddr) -> IdentityId {
        once(&mut self.servers, server, || resolver.server(server))
    }
}

fn once<T: Copy>(known: &mut Vec<(IpAddr, T)>, ip: IpAddr, look: impl FnOnce() -> T) -> T {
    // The newest come first: neighbours in a batch are often of one pod.
    if let Some((_, found)) = known.iter().rev().find(|(of, _)| *of == ip) {
        return *found;
    }
    let found = look();
    known.push((ip, found));
    found
}

/// Turns addresses into endpoints and identities. Every worker calls it for every query, so it must
/// not block.
pub trait Resolver: Send + Sync + 'static {
    /// The endpoint that has the address `client`.
    fn client(&self, client: IpAddr) -> QueryClient;

    /// Identity of the server at `server`. Without an entry, this is the world identity of its
    /// family.
    fn server(&self, server: IpAddr) -> IdentityId;
}

#[cfg(test)]
mod tests {
    use dns_policy::mapping::EndpointInstance;

    use super::*;

    #[test]
    fn a_client_and_its_instance_share_one_place() {
        let instance = EndpointInstance {
            id: EndpointId(7),
            client: [10, 0, 0, 7].into(),
            ifindex: 3,
        };
        let client = QueryClient::Endpoint {
            id: EndpointId(7),
            identity: IdentityId(1007),
            ifindex: 3,
        };
        assert_eq!(Holder::from(client), Holder::from(instance));
    }

    #[test]
    fn sources_without_an_endpoint_share_one_place() {
        assert_eq!(Holder::from(QueryClient::Unknown), Holder::Unknown);
        assert_ne!(
            Holder::from(QueryClient::Host),
            Holder::from(QueryClient::Unknown)
        );
    }
}
