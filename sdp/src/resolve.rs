//! Who asks, and whom: the one interface to `cilium_lxc` and `cilium_ipcache`, or what stands in for them.

use std::net::IpAddr;

use shared_maps::{EndpointId, IdentityId};

/// Who sent a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// An endpoint of this node.
    Endpoint {
        /// Its number.
        id: EndpointId,
        /// Its identity.
        identity: IdentityId,
        /// Its host-side interface: tells instances of one number apart.
        ifindex: u32,
    },
    /// The node itself (flag HOST in `cilium_lxc`).
    Host,
    /// Nobody we know: refused.
    Unknown,
}

/// Turns addresses into endpoints and identities. Called on every query, from
/// every worker: must not block.
pub trait Resolver: Send + Sync + 'static {
    /// Who has the address `client`.
    fn who(&self, client: IpAddr) -> Who;

    /// Identity of the server at `server`; without an entry, the world identity of its family.
    fn whom(&self, server: IpAddr) -> IdentityId;
}
