//! From "interface eth0 of network namespace pod1" to what the datapath needs.
//!
//! A thread of its own enters the namespace, asks rtnetlink and ends there: a
//! thread that has changed its namespace never goes back to a pool.

mod addresses;
mod attributes;
mod behind;
pub(crate) mod bridge;
mod enter;
mod leading;
mod links;
mod present;
mod successor;

pub(crate) use self::{
    addresses::{Claims, Known},
    leading::{lead_apart, leading_to},
    successor::successors,
};

use std::{
    fmt, io,
    net::{IpAddr, Ipv6Addr},
    path::{Path, PathBuf},
    pin::pin,
    thread,
};

use agent_core::datapath::link::Link;
use nix::errno::Errno;
use serde::{Deserialize, Serialize};
use tokio_stream::StreamExt as _;

use self::{
    addresses::{HostSide, routed_to},
    attributes::{mac_of, name_of, peer_of},
    enter::enter_netns,
    present::Present,
};

/// Directory of named network namespaces (`ip netns add`).
const NETNS_DIR: &str = "/run/netns";

/// A network namespace as people name it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Netns {
    /// A file in /run/netns.
    Name(String),
    /// The namespace of a process.
    Pid(u32),
    /// A file anywhere, by its absolute path.
    Path(PathBuf),
}

impl Netns {
    /// The file to enter it by.
    pub fn path(&self) -> PathBuf {
        match self {
            Self::Name(name) => Path::new(NETNS_DIR).join(name),
            Self::Pid(pid) => PathBuf::from(format!("/proc/{pid}/ns/net")),
            Self::Path(path) => path.clone(),
        }
    }
}

impl fmt::Display for Netns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Pid(pid) => write!(f, "pid-{pid}"),
            Self::Path(path) => path.display().fmt(f),
        }
    }
}

/// What was found about a pod's interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Discovered {
    /// Index of the host-side interface.
    pub ifindex: u32,
    /// Name of the host-side interface.
    pub ifname: String,
    /// Addresses that count, IPv4 first: not all that the pod's interface has.
    pub addresses: Vec<IpAddr>,
    /// MAC of the pod's interface.
    pub mac: [u8; 6],
    /// MAC of the host side.
    pub node_mac: [u8; 6],
    /// Whether the host side is a port of a bridge.
    pub on_bridge: bool,
    /// What neighbour discovery on the pod's link needs.
    pub link: Link,
    /// Every address of the pod's interface that is not link-local.
    pub present: Vec<IpAddr>,
    /// Further interfaces of the pod that lead to another namespace.
    pub others: Vec<String>,
    /// What the host side is a port of, if that is not a bridge of the kernel.
    pub foreign_master: Option<String>,
}

/// Why an interface could not be found.
#[derive(Debug, thiserror::Error)]
pub enum DiscoverError {
    /// The namespace does not exist.
    #[error("{}", no_netns(.0))]
    NoNetns(Netns),
    /// The file is none of a namespace.
    #[error(
        "{path} is no network namespace ({found}): {netns} must name a file of `ip netns add` or of the \
         container runtime",
        path = .netns.path().display()
    )]
    NotNetns {
        /// The namespace.
        netns: Netns,
        /// What the file is.
        found: String,
    },
    /// A name that would leave /run/netns.
    #[error(
        "{0:?} is not a name of a network namespace; give the name as `ip netns list` shows it"
    )]
    BadName(String),
    /// The namespace could not be entered.
    #[error(
        "network namespace {netns} cannot be entered: {source}; run the agent as root (it needs CAP_SYS_ADMIN)"
    )]
    Enter {
        /// The namespace.
        netns: Netns,
        /// Why.
        source: io::Error,
    },
    /// The interface is not in the namespace.
    #[error("network namespace {netns} has no interface {ifname}; it has: {present}")]
    NoInterface {
        /// The namespace.
        netns: Netns,
        /// The interface.
        ifname: String,
        /// What is there.
        present: String,
    },
    /// The interface is no end of a veth pair whose other end is here.
    #[error(
        "interface {ifname} of network namespace {netns} ({kind}) is not one end of a veth pair whose other end is in this node's own network namespace"
    )]
    NoPeer {
        /// The namespace.
        netns: Netns,
        /// The interface.
        ifname: String,
        /// Kind of the interface, as the kernel calls it.
        kind: String,
    },
    /// The interface has no address.
    #[error(
        "interface {ifname} of network namespace {netns} has no address yet; add one (`ip -n {netns} address add …`) and try again"
    )]
    NoAddress {
        /// The namespace.
        netns: Netns,
        /// The interface.
        ifname: String,
    },
    /// The interface has addresses, and none of them counts.
    #[error(
        "no address of interface {ifname} of network namespace {netns} can be used: this node routes none of {addresses} to {host}. An address counts only if the node sends its packets to that interface: give {ifname} the address that `ip route show dev {host}` has, or, if the address is right, add the route that is missing (`ip route add ADDRESS dev {host}`)"
    )]
    NotRouted {
        /// The namespace.
        netns: Netns,
        /// The interface.
        ifname: String,
        /// Its host side.
        host: String,
        /// Its addresses.
        addresses: String,
    },
    /// The host side is a port of a bridge that the node does not use itself.
    #[error(
        "interface {ifname} of network namespace {netns} is on bridge {bridge}, through which \
         this node reaches none of its addresses, so a DNS proxy of the node could not answer it. \
         Give the bridge an address of the pods' network (`ip address add … dev {bridge}`)"
    )]
    BridgeWithoutAddress {
        /// The namespace.
        netns: Netns,
        /// The interface.
        ifname: String,
        /// The bridge.
        bridge: String,
    },
    /// The kernel refused a request.
    #[error("rtnetlink in network namespace {netns}: {reason}")]
    Netlink {
        /// The namespace.
        netns: Netns,
        /// What the kernel or the system said.
        reason: String,
    },
}

impl DiscoverError {
    fn netlink(netns: &Netns, reason: impl fmt::Display) -> Self {
        Self::Netlink {
            netns: netns.clone(),
            reason: reason.to_string(),
        }
    }

    /// Whether it shows nothing about the interface: it could not be looked for.
    pub(crate) fn shows_nothing(&self) -> bool {
        match self {
            Self::Netlink { .. } => true,
            // The file is no network namespace.
            Self::Enter { source, .. } => source.raw_os_error() != Some(Errno::EINVAL as i32),
            _ => false,
        }
    }
}

fn no_netns(netns: &Netns) -> String {
    match netns {
        Netns::Name(name) => format!(
            "network namespace {name} does not exist ({} is missing); `ip netns list` shows the \
             names, and --pid selects the namespace of a process",
            netns.path().display()
        ),
        Netns::Pid(pid) => format!(
            "there is no process {pid} (the agent finds no {}); give the id of a running process \
             as the agent's own PID namespace numbers it, or a name with --netns",
            netns.path().display()
        ),
        Netns::Path(path) => format!(
            "network namespace {} does not exist: the agent finds no such file; in a container of \
             its own, the agent needs the directory {} of the node at the same path",
            path.display(),
            path.parent().unwrap_or(Path::new("/")).display()
        ),
    }
}

/// Finds the interface `ifname` of `netns`, its host side, and which of its addresses count.
/// Blocks for a few milliseconds: call it from a thread that may.
pub(crate) fn discover(
    netns: &Netns,
    ifname: &str,
    claims: &Claims,
) -> Result<Discovered, DiscoverError> {
    if let Netns::Name(name) = netns
        && (name.is_empty() || name.contains('/') || name.starts_with('.'))
    {
        return Err(DiscoverError::BadName(name.clone()));
    }
    let inside = on_thread(netns, true, {
        let netns = netns.clone();
        let ifname = ifname.to_owned();
        async move |handle| pod_side(&handle, &netns, &ifname).await
    })?;
    let host = on_thread(netns, false, {
        let (netns, ifname) = (netns.clone(), ifname.to_owned());
        let (claims, inside) = (claims.clone(), inside.clone());
        async move |handle| host_side(&handle, &netns, &ifname, &inside, &claims).await
    })?;
    if host.candidates.is_empty() {
        return Err(DiscoverError::NoAddress {
            netns: netns.clone(),
            ifname: ifname.to_owned(),
        });
    }
    if host.addresses.is_empty() {
        let addresses: Vec<String> = host.candidates.iter().map(ToString::to_string).collect();
        return Err(DiscoverError::NotRouted {
            netns: netns.clone(),
            ifname: ifname.to_owned(),
            host: host.name,
            addresses: addresses.join(", "),
        });
    }
    Ok(Discovered {
        ifindex: inside.peer,
        ifname: host.name,
        addresses: host.addresses,
        mac: host.pod_mac,
        node_mac: host.mac,
        on_bridge: host.on_bridge,
        link: host.link,
        present: inside.addresses,
        others: inside.others,
        foreign_master: host.foreign_master,
    })
}

/// Addresses of the interface `ifname` of `netns`, of whatever kind it is.
pub(crate) fn addresses_in(netns: &Netns, ifname: &str) -> Result<Vec<IpAddr>, DiscoverError> {
    on_thread(netns, true, {
        let (netns, ifname) = (netns.clone(), ifname.to_owned());
        async move |handle| {
            let failed = |error: rtnetlink::Error| DiscoverError::netlink(&netns, error);
            let mut present = Present::default();
            let mut index = None;
            let mut links = pin!(handle.link().get().execute());
            while let Some(link) = links.next().await {
                let link = link.map_err(failed)?;
                let name = name_of(&link).unwrap_or_default();
                if name == ifname {
                    index = Some(link.header.index);
                }
                present.add(name);
            }
            let index = index.ok_or_else(|| DiscoverError::NoInterface {
                netns: netns.clone(),
                ifname: ifname.clone(),
                present: present.to_string(),
            })?;
            let found = links::addresses(&handle, index).await.map_err(failed)?;
            Ok(found.into_iter().map(|(address, _)| address).collect())
        }
    })
}

/// Runs `work` with an rtnetlink socket of `netns` (`enter`) or of this
/// process, on a thread that ends with it.
fn on_thread<T: Send + 'static>(
    netns: &Netns,
    enter: bool,
    work: impl AsyncFnOnce(rtnetlink::Handle) -> Result<T, DiscoverError> + Send + 'static,
) -> Result<T, DiscoverError> {
    let target = netns.clone();
    let body = move || -> Result<T, DiscoverError> {
        let failed = |error: io::Error| DiscoverError::netlink(&target, error);
        if enter {
            enter_netns(&target)?;
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(failed)?;
        runtime.block_on(async {
            let (connection, handle, _) = rtnetlink::new_connection().map_err(failed)?;
            let work = work(handle);
            tokio::select! {
                () = connection => Err(DiscoverError::netlink(&target, "the socket closed")),
                result = work => result,
            }
        })
    };
    thread::Builder::new()
        .name("discover".to_owned())
        .spawn(body)
        .map_err(|error| DiscoverError::netlink(netns, error))?
        .join()
        .map_err(|_| DiscoverError::netlink(netns, "the thread ended unexpectedly"))?
}

#[derive(Clone)]
struct PodSide {
    index: u32,
    peer: u32,
    mac: [u8; 6],
    addresses: Vec<IpAddr>,
    link_locals: Vec<Ipv6Addr>,
    kind: String,
    /// Further interfaces that lead to another namespace.
    others: Vec<String>,
}

async fn pod_side(
    handle: &rtnetlink::Handle,
    netns: &Netns,
    ifname: &str,
) -> Result<PodSide, DiscoverError> {
    let failed = |error: rtnetlink::Error| DiscoverError::netlink(netns, error);
    let mut present = Present::default();
    let mut others = Vec::new();
    let mut found = None;
    let mut links = pin!(handle.link().get().execute());
    while let Some(link) = links.next().await {
        let link = link.map_err(failed)?;
        let name = name_of(&link).unwrap_or_default();
        if name == ifname {
            found = Some(link);
        } else {
            if behind::leads_elsewhere(&link) && others.len() < Present::NAMED {
                others.push(name.clone());
            }
            present.add(name);
        }
    }
    let link = found.ok_or_else(|| DiscoverError::NoInterface {
        netns: netns.clone(),
        ifname: ifname.to_owned(),
        present: present.to_string(),
    })?;
    let kind = behind::kind(&link);
    let no_peer = || DiscoverError::NoPeer {
        netns: netns.clone(),
        ifname: ifname.to_owned(),
        kind: kind.clone(),
    };
    let peer = peer_of(&link).ok_or_else(no_peer)?;
    let mac = mac_of(&link).ok_or_else(no_peer)?;
    let index = link.header.index;
    let mut addresses = Vec::new();
    let mut link_locals = Vec::new();
    for (ip, _) in links::addresses(handle, index).await.map_err(failed)? {
        match ip {
            IpAddr::V6(v6) if v6.is_unicast_link_local() => link_locals.push(v6),
            ip if !is_link_local(ip) => addresses.push(ip),
            _ => {}
        }
    }
    addresses.sort_by_key(|ip| ip.is_ipv6());
    addresses.dedup();
    Ok(PodSide {
        index,
        peer,
        mac,
        addresses,
        link_locals,
        kind,
        others,
    })
}

struct HostInterface {
    name: String,
    mac: [u8; 6],
    /// The MAC of the pod's interface that counts.
    pod_mac: [u8; 6],
    /// Addresses that were looked at.
    candidates: Vec<IpAddr>,
    /// Those of them that count.
    addresses: Vec<IpAddr>,
    on_bridge: bool,
    link: Link,
    foreign_master: Option<String>,
}

async fn host_side(
    handle: &rtnetlink::Handle,
    netns: &Netns,
    ifname: &str,
    inside: &PodSide,
    claims: &Claims,
) -> Result<HostInterface, DiscoverError> {
    let no_peer = || DiscoverError::NoPeer {
        netns: netns.clone(),
        ifname: ifname.to_owned(),
        kind: inside.kind.clone(),
    };
    let failed = |error: io::Error| DiscoverError::netlink(netns, error);
    let link = behind::pair_to(handle, inside.peer, netns, inside.index).await;
    let link = link.map_err(failed)?.ok_or_else(no_peer)?;
    let master = bridge::master(&link);
    let side = match master {
        Some(_) => HostSide::Port,
        None => HostSide::Routed,
    };
    let candidates = claims.candidates(side, inside.peer, &inside.addresses);
    let addresses = match side {
        HostSide::Port => candidates.clone(),
        HostSide::Routed => routed_to(handle, inside.peer, &candidates)
            .await
            .map_err(|error| DiscoverError::netlink(netns, error))?,
    };
    let bridge = bridge::of(&link);
    if let Some(bridge) = bridge {
        check_bridge(handle, netns, ifname, bridge, &addresses).await?;
    }
    let foreign_master = match master.filter(|_| bridge.is_none()) {
        Some(master) => Some(links::name(handle, master).await),
        None => None,
    };
    let mac = mac_of(&link).ok_or_else(no_peer)?;
    let claimed = claims.link_locals(side, inside.peer, &inside.link_locals);
    let pod_mac = claims.mac(side, inside.peer, inside.mac);
    let ends = links::Ends {
        host_side: inside.peer,
        pod_mac,
        node_mac: mac,
        bridge,
    };
    let found = links::of(handle, &ends, &claimed, &addresses)
        .await
        .map_err(failed)?;
    Ok(HostInterface {
        name: name_of(&link).ok_or_else(no_peer)?,
        mac,
        pod_mac,
        candidates,
        addresses,
        on_bridge: bridge.is_some(),
        link: found,
        foreign_master,
    })
}

/// Refuses a bridge by which the node does not reach the pod.
async fn check_bridge(
    handle: &rtnetlink::Handle,
    netns: &Netns,
    ifname: &str,
    bridge: u32,
    addresses: &[IpAddr],
) -> Result<(), DiscoverError> {
    let leads = bridge::leads_to(handle, bridge, addresses).await;
    let leads = leads.map_err(|error| DiscoverError::netlink(netns, error))?;
    if addresses.is_empty() || leads {
        return Ok(());
    }
    Err(DiscoverError::BridgeWithoutAddress {
        netns: netns.clone(),
        ifname: ifname.to_owned(),
        bridge: links::name(handle, bridge).await,
    })
}

fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_namespace_is_named_with_the_remedy() {
        let error = discover(
            &Netns::Name("hf-none-such".to_owned()),
            "eth0",
            &Claims::default(),
        )
        .unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("hf-none-such") && text.contains("ip netns list"),
            "{text}"
        );
    }

    #[test]
    fn a_name_cannot_leave_the_directory() {
        for name in ["", "../../proc/1/ns/net", ".."] {
            let error =
                discover(&Netns::Name(name.to_owned()), "eth0", &Claims::default()).unwrap_err();
            assert!(
                matches!(error, DiscoverError::BadName(_)),
                "{name:?}: {error}"
            );
        }
    }
}
