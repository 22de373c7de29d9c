//! From "interface eth0 of network namespace pod1" to what the datapath needs.
//!
//! A separate thread asks rtnetlink about the pod's namespace and this one. It never enters the pod's namespace.

mod addresses;
mod attributes;
mod behind;
pub(crate) mod bridge;
pub(crate) mod by_route;
mod error;
mod host_side;
mod inside;
mod leading;
mod links;
mod pod_side;
pub(crate) mod ports;
mod present;
mod successor;

pub(crate) use self::{
    addresses::{Claims, Known},
    error::DiscoverError,
    leading::{has_own_users, is_own, lead_apart, leading_to, ways_out},
    successor::successors,
};

use std::{
    fmt, io,
    net::IpAddr,
    path::{Path, PathBuf},
    thread,
};

use agent_core::endpoint::spec::PodInterface;
use serde::{Deserialize, Serialize};

use super::container::ContainerName;

use self::{
    attributes::name_of, host_side::host_side, inside::Inside, pod_side::pod_side, present::Present,
};

/// Directory of named network namespaces (`ip netns add`).
const NETNS_DIR: &str = "/run/netns";

/// A network namespace as people name it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Netns {
    /// Name of a file in `/run/netns`, as `ip netns list` shows it.
    Name(String),
    /// The namespace of a process.
    Pid(u32),
    /// A file anywhere, by its absolute path.
    Path(PathBuf),
    /// The namespace of a container.
    Container {
        name: ContainerName,
        /// Its first process; `None` = the container does not run.
        process: Option<u32>,
    },
    /// The namespace behind an interface of this host, by the name of that interface.
    Behind(String),
}

impl Netns {
    /// The file of the namespace.
    pub fn path(&self) -> PathBuf {
        match self {
            Self::Name(name) => Path::new(NETNS_DIR).join(name),
            Self::Pid(pid) => PathBuf::from(format!("/proc/{pid}/ns/net")),
            Self::Path(path) => path.clone(),
            Self::Container { process, .. } => {
                // No process has number 0.
                PathBuf::from(format!("/proc/{}/ns/net", process.unwrap_or(0)))
            }
            Self::Behind(interface) => PathBuf::from(format!("/proc/0/{interface}")),
        }
    }
}

impl fmt::Display for Netns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Pid(pid) => write!(f, "pid-{pid}"),
            Self::Path(path) => path.display().fmt(f),
            Self::Container { name, .. } => name.fmt(f),
            Self::Behind(interface) => write!(f, "interface/{interface}"),
        }
    }
}

/// What was found about a pod's interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Discovered {
    pub interface: PodInterface,
    /// Addresses that count, IPv4 first; the pod's interface may have others.
    pub addresses: Vec<IpAddr>,
    /// Every address of the pod's interface that is not link-local.
    pub present: Vec<IpAddr>,
    /// Further interfaces of the pod that lead to another namespace.
    pub others: Vec<String>,
    /// Name of the interface that the host side is a port of, if that is not a bridge of the kernel.
    pub foreign_master: Option<String>,
}

/// Finds the interface `ifname` of `netns`, its host side, and which of its addresses count.
/// Blocks for a few milliseconds: call it from a thread that may block.
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
    let inside = look_inside(netns, {
        let netns = netns.clone();
        let ifname = ifname.to_owned();
        async move |inside| pod_side(&inside, &netns, &ifname).await
    })?;
    let host = on_thread(netns, {
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
            host: host.interface.ifname,
            addresses: addresses.join(", "),
        });
    }
    Ok(Discovered {
        interface: host.interface,
        addresses: host.addresses,
        present: inside.addresses,
        others: inside.others,
        foreign_master: host.foreign_master,
    })
}

/// Addresses of the interface `ifname` of `netns`, which may be of any kind.
pub(crate) fn addresses_in(netns: &Netns, ifname: &str) -> Result<Vec<IpAddr>, DiscoverError> {
    look_inside(netns, {
        let (netns, ifname) = (netns.clone(), ifname.to_owned());
        async move |inside| {
            let failed = |error: io::Error| DiscoverError::netlink(&netns, error);
            let mut present = Present::default();
            let mut index = None;
            let read = inside.each_link(|link| {
                let name = name_of(&link).unwrap_or_default();
                if name == ifname {
                    index = Some(link.header.index);
                }
                present.add(name);
            });
            read.await.map_err(failed)?;
            let index = index.ok_or_else(|| DiscoverError::NoInterface {
                netns: netns.clone(),
                ifname: ifname.clone(),
                present: present.to_string(),
            })?;
            inside.addresses(index).await.map_err(failed)
        }
    })
}

/// Runs `work` with a reader of `netns`, on a thread that ends when `work` ends.
fn look_inside<T: Send + 'static>(
    netns: &Netns,
    work: impl AsyncFnOnce(Inside) -> Result<T, DiscoverError> + Send + 'static,
) -> Result<T, DiscoverError> {
    let target = netns.clone();
    with_socket(netns, Checks::Strict, async move |handle| {
        work(Inside::open(handle, &target).await?).await
    })
}

/// Runs `work` with an rtnetlink socket of this namespace, on a thread that ends when `work` ends. Errors
/// name `netns`.
fn on_thread<T: Send + 'static>(
    netns: &Netns,
    work: impl AsyncFnOnce(rtnetlink::Handle) -> Result<T, DiscoverError> + Send + 'static,
) -> Result<T, DiscoverError> {
    with_socket(netns, Checks::Usual, work)
}

/// What the kernel checks in a query (NETLINK_GET_STRICT_CHK).
#[derive(Clone, Copy)]
enum Checks {
    Usual,
    /// The kernel refuses what it would otherwise ignore.
    Strict,
}

fn with_socket<T: Send + 'static>(
    netns: &Netns,
    checks: Checks,
    work: impl AsyncFnOnce(rtnetlink::Handle) -> Result<T, DiscoverError> + Send + 'static,
) -> Result<T, DiscoverError> {
    let target = netns.clone();
    let body = move || -> Result<T, DiscoverError> {
        let failed = |error: io::Error| DiscoverError::netlink(&target, error);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(failed)?;
        runtime.block_on(async {
            let socket = match checks {
                Checks::Usual => rtnetlink::new_connection(),
                Checks::Strict => rtnetlink::new_connection_with_strict_check(),
            };
            let (connection, handle, _) = socket.map_err(failed)?;
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
