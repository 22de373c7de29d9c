//! Why an interface could not be found, with the remedy.

use std::{fmt, io, path::Path};

use nix::errno::Errno;

use super::Netns;

/// Why an interface could not be found.
#[derive(Debug, thiserror::Error)]
pub enum DiscoverError {
    /// The namespace does not exist.
    #[error("{}", no_netns(.0))]
    NoNetns(Netns),
    /// The file is not a network namespace.
    #[error(
        "{path} is no network namespace ({found}): {netns} must name a file of `ip netns add` or of the \
         container runtime",
        path = .netns.path().display()
    )]
    NotNetns { netns: Netns, found: String },
    /// A name that would leave /run/netns.
    #[error(
        "{0:?} is not a name of a network namespace; give the name as `ip netns list` shows it"
    )]
    BadName(String),
    /// The namespace could not be opened.
    #[error(
        "network namespace {netns} cannot be opened: {source}; run the agent as root (it needs CAP_NET_ADMIN, and CAP_SYS_PTRACE for the namespace of a process)"
    )]
    Open { netns: Netns, source: io::Error },
    /// The interface is not in the namespace.
    #[error("network namespace {netns} has no interface {ifname}; it has: {present}")]
    NoInterface {
        netns: Netns,
        ifname: String,
        /// Names of the interfaces in the namespace, as text for the message.
        present: String,
    },
    /// The interface is not one end of a veth pair whose other end is here.
    #[error(
        "interface {ifname} of network namespace {netns} ({kind}) is not one end of a veth pair whose other end is in this node's own network namespace"
    )]
    NoPeer {
        netns: Netns,
        ifname: String,
        /// Kind of the interface, as the kernel calls it.
        kind: String,
    },
    /// The host's interface does not lead to another namespace.
    #[error(
        "interface {interface} ({kind}) is not one end of a veth pair whose other end is in another network namespace"
    )]
    NoPair {
        interface: String,
        /// Kind of the interface, as the kernel calls it.
        kind: String,
    },
    /// The interface has no address.
    #[error(
        "interface {ifname} of network namespace {netns} has no address yet; add one (`ip -n {netns} address add …`) and try again"
    )]
    NoAddress { netns: Netns, ifname: String },
    /// The interface has addresses, but none of them counts.
    #[error(
        "no address of interface {ifname} of network namespace {netns} can be used: this node routes none of {addresses} to {host}. An address counts only if the node sends its packets to that interface: give {ifname} the address that `ip route show dev {host}` has, or, if the address is right, add the route that is missing (`ip route add ADDRESS dev {host}`)"
    )]
    NotRouted {
        netns: Netns,
        ifname: String,
        /// Name of the host-side interface.
        host: String,
        /// Addresses of `ifname`; the node routes none of them to `host`.
        addresses: String,
    },
    /// The host side is a port of a bridge that the node does not use itself.
    #[error(
        "interface {ifname} of network namespace {netns} is on bridge {bridge}, through which \
         this node reaches none of its addresses, so a DNS proxy of the node could not answer it. \
         Give the bridge an address of the pods' network (`ip address add … dev {bridge}`)"
    )]
    BridgeWithoutAddress {
        netns: Netns,
        ifname: String,
        bridge: String,
    },
    /// The kernel refused a request.
    #[error("rtnetlink in network namespace {netns}: {reason}")]
    Netlink {
        netns: Netns,
        /// What the kernel or the system said.
        reason: String,
    },
}

impl DiscoverError {
    pub(super) fn netlink(netns: &Netns, reason: impl fmt::Display) -> Self {
        Self::Netlink {
            netns: netns.clone(),
            reason: reason.to_string(),
        }
    }

    /// Whether the error shows nothing about the interface, because the look-up itself failed.
    pub(crate) fn shows_nothing(&self) -> bool {
        match self {
            Self::Netlink { .. } => true,
            // `EINVAL` shows that the file is no network namespace.
            Self::Open { source, .. } => source.raw_os_error() != Some(Errno::EINVAL as i32),
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
        Netns::Container {
            name,
            process: None,
        } => format!("the container {name} does not run"),
        Netns::Container { name, .. } => format!("the container {name} has ended"),
        Netns::Behind(interface) => format!("this host has no interface {interface}"),
        Netns::Path(path) => format!(
            "network namespace {} does not exist: the agent finds no such file; in a container of \
             its own, the agent needs the directory {} of the node at the same path",
            path.display(),
            path.parent().unwrap_or(Path::new("/")).display()
        ),
    }
}
