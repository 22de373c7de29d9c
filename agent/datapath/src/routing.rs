//! Rules and routes that deliver redirected packets on this node.
//!
//! ```text
//!  ip rule  pref 9 fwmark 0x200/0xf00 lookup 2004
//!  ip route local default dev lo table 2004
//! ```

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use rtnetlink::{
    Error, Handle, RouteMessageBuilder, RuleAddRequest,
    packet_route::{
        route::{RouteAttribute, RouteFlags, RouteProtocol, RouteScope, RouteType},
        rule::{RuleAction, RuleAttribute},
    },
};
use shared_maps::mark::{MAGIC_MASK, MAGIC_TO_PROXY, TO_PROXY_RULE_PREF, TO_PROXY_TABLE};
use tokio_stream::StreamExt as _;

use crate::{
    route_query,
    sysctl::{self, SysctlError},
};

/// Index of the loopback interface in every network namespace.
const LOOPBACK: u32 = 1;

const IPV4_FORWARDING: &str = "net.ipv4.ip_forward";
const IPV6_FORWARDING: &str = "net.ipv6.conf.all.forwarding";
/// Destinations with which the route of a redirected packet is checked. The kernel delivers a
/// packet to an address of the node before our rule. So each family has two addresses, of networks
/// that no node has (RFC 2544, RFC 6666, RFC 5180).
const PROBES4: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(198, 19, 255, 254)),
    IpAddr::V4(Ipv4Addr::new(198, 18, 255, 254)),
];
const PROBES6: [IpAddr; 2] = [
    IpAddr::V6(Ipv6Addr::new(0x100, 0, 0, 0, 0, 0, 0, 0x53)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 2, 0, 0, 0, 0, 0, 0x53)),
];

/// Why routing could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum RoutingError {
    /// The netlink socket cannot be opened.
    #[error("netlink: {0}")]
    Socket(#[from] io::Error),
    /// The kernel refused a rule or route.
    #[error("{what}: {source}")]
    Netlink {
        /// The rule or route, in the syntax of `ip`.
        what: &'static str,
        source: Error,
    },
    /// A kernel parameter could not be set.
    #[error(transparent)]
    Sysctl(#[from] SysctlError),
}

/// Installs rules, routes and forwarding for the families given. Safe to repeat.
pub async fn install(ipv4: bool, ipv6: bool) -> Result<(), RoutingError> {
    if ipv4 {
        sysctl::set(IPV4_FORWARDING)?;
    }
    if ipv6 {
        sysctl::set(IPV6_FORWARDING)?;
    }
    let (connection, handle, _messages) = rtnetlink::new_connection()?;
    let work = async {
        if ipv4 {
            let rule = to_proxy(handle.rule().add().v4());
            let what = "ip rule add pref 9 fwmark 0x200/0xf00 lookup 2004";
            there(what, rule.execute().await)?;
            let route = local(RouteMessageBuilder::<Ipv4Addr>::new()).build();
            let what = "ip route replace local default dev lo table 2004";
            there(what, handle.route().add(route).replace().execute().await)?;
        }
        if ipv6 {
            let rule = to_proxy(handle.rule().add().v6());
            let what = "ip -6 rule add pref 9 fwmark 0x200/0xf00 lookup 2004";
            there(what, rule.execute().await)?;
            let route = local(RouteMessageBuilder::<Ipv6Addr>::new()).build();
            let what = "ip -6 route replace local default dev lo table 2004";
            there(what, handle.route().add(route).replace().execute().await)?;
        }
        Ok(())
    };
    driven(connection, work).await
}

/// Drives a netlink connection until the work is done.
async fn driven<T>(
    connection: impl Future<Output = ()>,
    work: impl Future<Output = Result<T, RoutingError>>,
) -> Result<T, RoutingError> {
    tokio::select! {
        result = work => result,
        () = connection => Err(io::Error::from(io::ErrorKind::BrokenPipe).into()),
    }
}

/// What keeps redirected packets from being delivered on this node; empty if nothing does.
///
/// Asks the kernel where it would route a redirected packet, so it also finds a rule that was put
/// before ours and a route that was put in place of ours.
pub async fn faults(ipv4: bool, ipv6: bool) -> Result<Vec<String>, RoutingError> {
    let (connection, handle, _messages) = rtnetlink::new_connection()?;
    let work = async {
        let mut faults = Vec::new();
        if ipv4 {
            faults.extend(sysctl_fault(IPV4_FORWARDING));
            faults.extend(route_fault(&handle, "IPv4", &PROBES4).await);
        }
        if ipv6 {
            faults.extend(sysctl_fault(IPV6_FORWARDING));
            faults.extend(route_fault(&handle, "IPv6", &PROBES6).await);
        }
        Ok(faults)
    };
    driven(connection, work).await
}

/// What is wrong with the route of redirected packets of one family.
async fn route_fault(handle: &Handle, family: &str, probes: &[IpAddr]) -> Option<String> {
    let mut fault = None;
    for probe in probes {
        fault = match lookup(handle, *probe).await {
            Ok((TO_PROXY_TABLE, RouteType::Local)) => return None,
            Ok((table, kind)) => Some(format!(
                "{family} packets for the proxy go by table {table} ({kind:?}) instead of \
                 table {TO_PROXY_TABLE}: `ip rule` shows whether another rule comes before {TO_PROXY_RULE_PREF}"
            )),
            Err(error) => Some(format!(
                "{family} packets for the proxy are not routed: {error}"
            )),
        };
    }
    fault
}

/// Table and kind of the route that a redirected packet to `to` takes.
async fn lookup(handle: &Handle, to: IpAddr) -> Result<(u32, RouteType), Error> {
    let mut message = route_query::to(to);
    // Without this flag, the reply for IPv4 names the main table, whichever table has the route.
    message.header.flags |= RouteFlags::LookupTable;
    message
        .attributes
        .push(RouteAttribute::Mark(MAGIC_TO_PROXY));
    let mut routes = std::pin::pin!(handle.route().get(message).execute());
    let Some(route) = routes.try_next().await? else {
        return Ok((0, RouteType::Unspec));
    };
    let table = route
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            RouteAttribute::Table(table) => Some(*table),
            _ => None,
        });
    let table = table.unwrap_or_else(|| u32::from(route.header.table));
    Ok((table, route.header.kind))
}

fn sysctl_fault(name: &'static str) -> Option<String> {
    (!sysctl::is_one(name)).then(|| format!("sysctl {name} is not 1"))
}

/// Removes the rules and the routes of both families. Returns the ones that existed.
pub async fn remove() -> Result<Vec<&'static str>, RoutingError> {
    let (connection, handle, _messages) = rtnetlink::new_connection()?;
    let work = async {
        let mut removed = Vec::new();
        let rule = to_proxy(handle.rule().add().v4()).message_mut().clone();
        let done = handle.rule().del(rule).execute().await;
        removed.extend(gone("ip rule del pref 9", "ip rule 9", done)?);
        let rule = to_proxy(handle.rule().add().v6()).message_mut().clone();
        let done = handle.rule().del(rule).execute().await;
        removed.extend(gone("ip -6 rule del pref 9", "ip -6 rule 9", done)?);
        let route = local(RouteMessageBuilder::<Ipv4Addr>::new()).build();
        let done = handle.route().del(route).execute().await;
        let what = "ip route del local default table 2004";
        removed.extend(gone(what, "the local route of table 2004", done)?);
        let route = local(RouteMessageBuilder::<Ipv6Addr>::new()).build();
        let done = handle.route().del(route).execute().await;
        let what = "ip -6 route del local default table 2004";
        removed.extend(gone(what, "the local IPv6 route of table 2004", done)?);
        Ok(removed)
    };
    driven(connection, work).await
}

/// Returns the name of the object if it existed.
fn gone(
    what: &'static str,
    object: &'static str,
    result: Result<(), Error>,
) -> Result<Option<&'static str>, RoutingError> {
    match result {
        Err(Error::NetlinkError(message))
            if matches!(
                message.to_io().raw_os_error(),
                Some(libc::ENOENT | libc::ESRCH | libc::EAFNOSUPPORT)
            ) =>
        {
            Ok(None)
        }
        Err(source) => Err(RoutingError::Netlink { what, source }),
        Ok(()) => Ok(Some(object)),
    }
}

fn to_proxy<T>(rule: RuleAddRequest<T>) -> RuleAddRequest<T> {
    let mut rule = rule
        .table_id(TO_PROXY_TABLE)
        .action(RuleAction::ToTable)
        .priority(TO_PROXY_RULE_PREF)
        .fw_mark(MAGIC_TO_PROXY);
    rule.message_mut()
        .attributes
        .push(RuleAttribute::FwMask(MAGIC_MASK));
    rule
}

fn local<T>(route: RouteMessageBuilder<T>) -> RouteMessageBuilder<T> {
    route
        .table_id(TO_PROXY_TABLE)
        .kind(RouteType::Local)
        .scope(RouteScope::Host)
        .protocol(RouteProtocol::Kernel)
        .output_interface(LOOPBACK)
}

/// An object that exists already is no error.
fn there(what: &'static str, result: Result<(), Error>) -> Result<(), RoutingError> {
    match result {
        Err(Error::NetlinkError(message))
            if message.to_io().kind() == io::ErrorKind::AlreadyExists =>
        {
            Ok(())
        }
        Err(source) => Err(RoutingError::Netlink { what, source }),
        Ok(()) => Ok(()),
    }
}
