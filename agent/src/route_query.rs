//! Asking the kernel which route a packet takes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rtnetlink::{RouteMessageBuilder, packet_route::route::RouteMessage};

/// The query for the route to one address (RTM_GETROUTE).
pub(crate) fn to(address: IpAddr) -> RouteMessage {
    match address {
        IpAddr::V4(to) => RouteMessageBuilder::<Ipv4Addr>::new()
            .destination_prefix(to, 32)
            .build(),
        IpAddr::V6(to) => RouteMessageBuilder::<Ipv6Addr>::new()
            .destination_prefix(to, 128)
            .build(),
    }
}
