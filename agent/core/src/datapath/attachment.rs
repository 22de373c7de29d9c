//! What an endpoint's programs need to know, and the interface to which they are attached.

use std::net::{Ipv4Addr, Ipv6Addr};

use shared_maps::{
    EndpointId, IdentityId,
    endpoint::{EndpointConfig, HAS_IPV4, HAS_IPV6},
};

use crate::datapath::link::Link;

/// What the programs of one endpoint need to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    pub endpoint: EndpointId,
    pub identity: IdentityId,
    /// Index of the host-side interface.
    pub ifindex: u32,
    pub ipv4: Option<Ipv4Addr>,
    pub ipv6: Option<Ipv6Addr>,
    /// MAC of the pod's interface.
    pub mac: [u8; 6],
    /// MAC under which a bridge delivers the pod's frames to this node; `None` if the interface is
    /// on no bridge.
    pub gateway_mac: Option<[u8; 6]>,
    /// What neighbour discovery on its link needs.
    pub link: Link,
}

impl Attachment {
    /// The settings that the programs find.
    pub fn config(&self) -> EndpointConfig {
        let mut flags = 0;
        for (has, flag) in [
            (self.ipv4.is_some(), HAS_IPV4),
            (self.ipv6.is_some(), HAS_IPV6),
        ] {
            if has {
                flags |= flag;
            }
        }
        let mut config = EndpointConfig {
            identity: self.identity.0,
            ifindex: self.ifindex,
            ipv6: self.ipv6.map_or([0; 16], |ip| ip.octets()),
            ipv4: self.ipv4.map_or([0; 4], |ip| ip.octets()),
            id: self.endpoint.0,
            mac: self.mac,
            gateway_mac: self.gateway_mac.unwrap_or_default(),
            flags,
            ..EndpointConfig::default()
        };
        self.link.configure(&mut config);
        config
    }
}
