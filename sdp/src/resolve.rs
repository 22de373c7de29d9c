//! Endpoint of the client and identity of the server: the interface to `cilium_lxc` and `cilium_ipcache`, or to the tables in their place.

use std::net::IpAddr;

use daemon::quota::Holder;
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
    /// The address belongs to no known endpoint: refused.
    Unknown,
}

impl From<Who> for Holder {
    fn from(who: Who) -> Self {
        match who {
            Who::Endpoint { id, ifindex, .. } => Self::Endpoint { id, ifindex },
            Who::Host => Self::Host,
            Who::Unknown => Self::Unknown,
        }
    }
}

/// What a resolver said of the addresses in one batch of queries: datagrams that
/// came together are judged by one look each, and the next batch looks again.
#[derive(Debug, Default)]
pub struct Looked {
    who: Vec<(IpAddr, Who)>,
    whom: Vec<(IpAddr, IdentityId)>,
}

impl Looked {
    /// Forgets it all: another batch begins.
    pub fn clear(&mut self) {
        self.who.clear();
        self.whom.clear();
    }

    /// As [`Resolver::who`].
    pub fn who(&mut self, resolver: &dyn Resolver, client: IpAddr) -> Who {
        once(&mut self.who, client, || resolver.who(client))
    }

    /// As [`Resolver::whom`].
    pub fn whom(&mut self, resolver: &dyn Resolver, server: IpAddr) -> IdentityId {
        once(&mut self.whom, server, || resolver.whom(server))
    }
}

fn once<T: Copy>(known: &mut Vec<(IpAddr, T)>, ip: IpAddr, look: impl FnOnce() -> T) -> T {
    // Newest first: neighbours in a batch often are of one pod.
    if let Some((_, found)) = known.iter().rev().find(|(of, _)| *of == ip) {
        return *found;
    }
    let found = look();
    known.push((ip, found));
    found
}

/// Turns addresses into endpoints and identities. Called on every query, from
/// every worker: must not block.
pub trait Resolver: Send + Sync + 'static {
    /// Who has the address `client`.
    fn who(&self, client: IpAddr) -> Who;

    /// Identity of the server at `server`; without an entry, the world identity of its family.
    fn whom(&self, server: IpAddr) -> IdentityId;
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
        let client = Who::Endpoint {
            id: EndpointId(7),
            identity: IdentityId(1007),
            ifindex: 3,
        };
        assert_eq!(Holder::from(client), Holder::from(instance));
    }

    #[test]
    fn sources_without_an_endpoint_share_one_place() {
        assert_eq!(Holder::from(Who::Unknown), Holder::Unknown);
        assert_ne!(Holder::from(Who::Host), Holder::from(Who::Unknown));
    }
}
