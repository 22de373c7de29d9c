//! The first packet of a connection, for judging what a policy means for it.

use std::{fmt, net::IpAddr};

use crate::policy::Protocol;

/// The first packet of a connection. If it passes, answers pass, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Packet {
    /// Address of the sender.
    pub source: IpAddr,
    /// Address of the receiver.
    pub destination: IpAddr,
    /// Protocol and ports; `None` for a protocol without ports, such as ICMP.
    pub ports: Option<PacketPorts>,
}

/// The protocol of a packet with ports, and its ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PacketPorts {
    /// Protocol of the transport.
    pub protocol: Protocol,
    /// Port of the sender.
    pub source: u16,
    /// Port of the receiver.
    pub destination: u16,
}

impl fmt::Display for PacketPorts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.destination, self.protocol.as_str())
    }
}
