//! Why the tunnel cannot be set up.

use std::{io, path::PathBuf};

use shared_maps::user::MapError;

use super::super::program::ProgramError;

/// Why the tunnel cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TunnelError {
    /// A native device is not there.
    #[error("--high-scale-device {0}: there is no such device; name one that `ip link` lists")]
    NoDevice(String),
    /// A native device's packets have no Ethernet header.
    #[error(
        "--high-scale-device {0}: not an Ethernet device, so that its packets cannot be wrapped; name the Ethernet \
         device that leads to other nodes"
    )]
    NotEthernet(String),
    /// Another tunnel has the port.
    #[error(
        "--tunnel-port {port}: the VXLAN device {device} uses this port; choose another port, the same one on all \
         nodes"
    )]
    PortInUse { port: u16, device: String },
    /// The kernel writes an address of its own into what it wraps.
    #[error(
        "--high-scale-ipcache full: this kernel does not let a program set the source address of wrapped packets; use \
         Linux 6.0 or later, or the mode decap-only"
    )]
    NoOuterSource,
    /// The netlink socket cannot be used.
    #[error("netlink: {0}")]
    Socket(io::Error),
    /// The kernel refuses a request about a device.
    #[error("{what}: {source}")]
    Netlink {
        /// The request, such as "removing device hf_vxlan".
        what: &'static str,
        source: rtnetlink::Error,
    },
    /// The map of settings or of blocks.
    #[error(transparent)]
    Map(#[from] MapError),
    /// A directory of links, or a pin.
    #[error("{path}: {source}", path = .path.display())]
    Directory { path: PathBuf, source: io::Error },
    /// A program cannot be loaded, attached or pinned.
    #[error(transparent)]
    Program(#[from] ProgramError),
}

impl TunnelError {
    /// Whether the same may succeed a moment later.
    pub fn is_passing(&self) -> bool {
        matches!(self, Self::Socket(_) | Self::Netlink { .. })
    }
}
