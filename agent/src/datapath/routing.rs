//! Rules and routes that deliver redirected packets on this node.
//!
//! ```text
//!  ip rule  pref 9 fwmark 0x200/0xf00 lookup 2004
//!  ip route local default dev lo table 2004
//! ```

use std::{
    fs, io,
    net::{Ipv4Addr, Ipv6Addr},
};

use rtnetlink::{
    Error, Handle, RouteMessageBuilder,
    packet_route::{
        route::{RouteMessage, RouteProtocol, RouteScope, RouteType},
        rule::{RuleAction, RuleAttribute},
    },
};
use shared_maps::mark::{MAGIC_MASK, MAGIC_TO_PROXY, TO_PROXY_RULE_PREF, TO_PROXY_TABLE};

/// Index of the loopback interface in every network namespace.
const LOOPBACK: u32 = 1;

/// Why routing could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum RoutingError {
    /// No netlink socket.
    #[error("netlink: {0}")]
    Socket(#[from] io::Error),
    /// The kernel refused.
    #[error("{what}: {source}")]
    Netlink {
        /// The rule or route, as `ip` would have it.
        what: &'static str,
        /// What the kernel said.
        source: Error,
    },
    /// A kernel parameter could not be set.
    #[error("sysctl {name}=1: {source}; set it before the agent starts")]
    Sysctl {
        /// Its name.
        name: &'static str,
        /// Why.
        source: io::Error,
    },
}

/// Installs rules, routes and forwarding for the families given. Safe to repeat.
pub async fn install(ipv4: bool, ipv6: bool) -> Result<(), RoutingError> {
    if ipv4 {
        set_sysctl("net.ipv4.ip_forward")?;
    }
    if ipv6 {
        set_sysctl("net.ipv6.conf.all.forwarding")?;
    }
    let (connection, handle, _messages) = rtnetlink::new_connection()?;
    let work = async {
        if ipv4 {
            install_v4(&handle).await?;
        }
        if ipv6 {
            install_v6(&handle).await?;
        }
        Ok(())
    };
    tokio::select! {
        result = work => result,
        () = connection => Err(io::Error::from(io::ErrorKind::BrokenPipe).into()),
    }
}

async fn install_v4(handle: &Handle) -> Result<(), RoutingError> {
    let mut rule = handle
        .rule()
        .add()
        .v4()
        .table_id(TO_PROXY_TABLE)
        .action(RuleAction::ToTable)
        .priority(TO_PROXY_RULE_PREF)
        .fw_mark(MAGIC_TO_PROXY);
    rule.message_mut()
        .attributes
        .push(RuleAttribute::FwMask(MAGIC_MASK));
    there(
        "ip rule add pref 9 fwmark 0x200/0xf00 lookup 2004",
        rule.execute().await,
    )?;
    let route = local(RouteMessageBuilder::<Ipv4Addr>::new()).build();
    add_route(
        handle,
        "ip route replace local default dev lo table 2004",
        route,
    )
    .await
}

async fn install_v6(handle: &Handle) -> Result<(), RoutingError> {
    let mut rule = handle
        .rule()
        .add()
        .v6()
        .table_id(TO_PROXY_TABLE)
        .action(RuleAction::ToTable)
        .priority(TO_PROXY_RULE_PREF)
        .fw_mark(MAGIC_TO_PROXY);
    rule.message_mut()
        .attributes
        .push(RuleAttribute::FwMask(MAGIC_MASK));
    there(
        "ip -6 rule add pref 9 fwmark 0x200/0xf00 lookup 2004",
        rule.execute().await,
    )?;
    let route = local(RouteMessageBuilder::<Ipv6Addr>::new()).build();
    add_route(
        handle,
        "ip -6 route replace local default dev lo table 2004",
        route,
    )
    .await
}

fn local<T>(route: RouteMessageBuilder<T>) -> RouteMessageBuilder<T> {
    route
        .table_id(TO_PROXY_TABLE)
        .kind(RouteType::Local)
        .scope(RouteScope::Host)
        .protocol(RouteProtocol::Kernel)
        .output_interface(LOOPBACK)
}

async fn add_route(
    handle: &Handle,
    what: &'static str,
    route: RouteMessage,
) -> Result<(), RoutingError> {
    there(what, handle.route().add(route).replace().execute().await)
}

/// "It exists" is as good as done.
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

/// Sets a kernel parameter to 1 unless it is: where it is read-only it may be right already.
fn set_sysctl(name: &'static str) -> Result<(), RoutingError> {
    let path = format!("/proc/sys/{}", name.replace('.', "/"));
    if fs::read_to_string(&path).is_ok_and(|value| value.trim() == "1") {
        return Ok(());
    }
    fs::write(&path, "1").map_err(|source| RoutingError::Sysctl { name, source })
}
