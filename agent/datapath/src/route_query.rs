//! Asking the kernel which route a packet takes.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    pin::pin,
};

use nix::errno::Errno;
use rtnetlink::{
    Error, Handle, RouteMessageBuilder,
    packet_route::route::{RouteFlags, RouteMessage},
};
use tokio_stream::StreamExt as _;

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

/// The route to one address; `None` if the kernel says that there is none.
pub async fn answer(handle: &Handle, address: IpAddr) -> io::Result<Option<RouteMessage>> {
    ask(handle, to(address)).await
}

/// The entry of the routing table that leads to an address; `None` if the kernel says that there is none.
pub async fn entry(handle: &Handle, address: IpAddr) -> io::Result<Option<RouteMessage>> {
    let mut query = to(address);
    query.header.flags |= RouteFlags::FibMatch;
    ask(handle, query).await
}

async fn ask(handle: &Handle, query: RouteMessage) -> io::Result<Option<RouteMessage>> {
    let mut routes = pin!(handle.route().get(query).execute());
    match routes.next().await {
        Some(Ok(route)) => Ok(Some(route)),
        Some(Err(Error::NetlinkError(message))) => {
            let code = -message.raw_code();
            match is_no_route(Errno::from_raw(code)) {
                true => Ok(None),
                false => Err(io::Error::from_raw_os_error(code)),
            }
        }
        Some(Err(error)) => Err(io::Error::other(error.to_string())),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Whether an error shows that there is no route: the table has none, or one of type unreachable,
/// prohibit or blackhole (`fib_props` in the kernel), or the node lacks the family.
fn is_no_route(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::ENETUNREACH
            | Errno::EHOSTUNREACH
            | Errno::EACCES
            | Errno::EINVAL
            | Errno::ENODEV
            | Errno::EOPNOTSUPP
            | Errno::EAFNOSUPPORT
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_that_is_no_answer_about_a_route_is_none() {
        assert!(is_no_route(Errno::ENETUNREACH) && is_no_route(Errno::EINVAL));
        for errno in [Errno::ENOBUFS, Errno::ENOMEM, Errno::EMFILE, Errno::EPERM] {
            assert!(!is_no_route(errno), "{errno}");
        }
    }
}
