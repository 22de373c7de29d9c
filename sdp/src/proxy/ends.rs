//! The two ends of a query: its endpoint and its server.

use std::net::{IpAddr, SocketAddr};

use dns_policy::mapping::EndpointInstance;
use shared_maps::IdentityId;

use super::Proxy;

use crate::{
    query::pending::{Arrival, Identities},
    resolve::{LookupCache, QueryClient},
    stats::{Fallback, QueryResult},
    transparent::Mode,
};

impl Proxy {
    /// The endpoint that sent a query and the identities of both ends, or the result under which
    /// the query is refused.
    pub(super) fn ends(
        &self,
        from: &Arrival,
        lookups: &mut LookupCache,
    ) -> Result<(EndpointInstance, Identities), QueryResult> {
        if self.leads_back(from.server) {
            return Err(QueryResult::Loop);
        }
        let client = from.client.ip();
        let (id, identity, ifindex) = match lookups.client(&*self.resolver, client) {
            QueryClient::Endpoint {
                id,
                identity,
                ifindex,
            } => (id, identity, ifindex),
            QueryClient::Host => return Err(QueryResult::HostSource),
            QueryClient::Unknown => return Err(QueryResult::UnknownSource),
        };
        let endpoint = EndpointInstance {
            id,
            client,
            ifindex,
        };
        let identities = Identities {
            client: identity,
            server: lookups.server(&*self.resolver, from.server.ip()),
        };
        Ok((endpoint, identities))
    }

    /// The address from which to send the query of `client` to `server`; `None` for the node's
    /// address.
    pub(super) fn source(&self, client: SocketAddr, server: IdentityId) -> Option<SocketAddr> {
        if !self.config.transparent.is_for(server) {
            return None;
        }
        match self.config.transparent.mode() {
            Mode::On => Some(self.config.transparent.source(client)),
            Mode::Off => None,
            Mode::Blocked => {
                self.stats().fallbacks.inc(Fallback::NoReturnPath);
                None
            }
        }
    }

    /// Whether a query to `server` could return to this proxy, or has no destination.
    pub(crate) fn leads_back(&self, server: SocketAddr) -> bool {
        let ip = server.ip().to_canonical();
        let multicast = match ip {
            IpAddr::V4(ip) => ip.is_multicast() || ip.is_broadcast(),
            IpAddr::V6(ip) => ip.is_multicast(),
        };
        ip.is_unspecified()
            || multicast
            || server.port() == 0
            || server.port() == self.config.port
            || (ip.is_loopback() && !self.config.loopback_servers)
    }
}
