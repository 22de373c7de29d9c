//! The form that every access control understands: addresses, protocol, ports and an action.

use std::{cmp::Reverse, fmt, net::IpAddr};

use ipnet::IpNet;

use crate::{
    packet::{Packet, PacketPorts},
    policy::Protocol,
    ports::Span,
};

/// A permission or a refusal for some packets.
///
/// If one rule matches a part of the packets of another rule, the narrower rule orders first. So in
/// a sorted list, the first rule that matches a packet is the narrowest one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rule {
    /// Addresses of senders.
    pub source: Net,
    /// Addresses of receivers.
    pub destination: Net,
    /// Protocol and ports.
    pub traffic: Traffic,
    /// What happens to the packets.
    pub action: Action,
}

/// Addresses that a rule matches. IPv4 orders before IPv6, and a longer prefix before a shorter
/// one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Net {
    /// Addresses with this prefix.
    Block(IpNet),
    /// Every address of both families.
    Any,
}

/// Protocol and ports that a rule matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Traffic {
    /// Packets of one protocol.
    Ports {
        /// Protocol of the transport.
        protocol: Protocol,
        /// Ports of the sender.
        source: Span,
        /// Ports of the receiver.
        destination: Span,
    },
    /// Every packet, even one of a protocol without ports.
    Any,
}

/// What happens to a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// It is dropped.
    Deny,
    /// It passes.
    Permit,
}

impl Rule {
    /// Permits every packet.
    pub const PERMIT_ALL: Self = Self::about_all(Action::Permit);
    /// Denies every packet.
    pub const DENY_ALL: Self = Self::about_all(Action::Deny);

    const fn about_all(action: Action) -> Self {
        Self {
            source: Net::Any,
            destination: Net::Any,
            traffic: Traffic::Any,
            action,
        }
    }

    /// Whether the rule matches every packet.
    pub fn is_about_all(&self) -> bool {
        *self == Self::about_all(self.action)
    }

    /// Whether the rule matches this packet.
    pub fn matches(&self, packet: &Packet) -> bool {
        self.source.contains(packet.source)
            && self.destination.contains(packet.destination)
            && self.traffic.matches(packet.ports)
    }

    /// Whether the rule matches every packet that another rule matches.
    pub fn covers(&self, other: &Self) -> bool {
        self.source.covers(other.source)
            && self.destination.covers(other.destination)
            && self.traffic.covers(other.traffic)
    }
}

impl Net {
    /// One address.
    pub fn one(address: IpAddr) -> Self {
        Self::Block(address.into())
    }

    /// Whether the net contains this address.
    pub fn contains(self, address: IpAddr) -> bool {
        match self {
            Self::Any => true,
            Self::Block(block) => block.contains(&address),
        }
    }

    /// Whether the net contains every address of another net.
    pub fn covers(self, other: Self) -> bool {
        match (self, other) {
            (Self::Any, _) => true,
            (Self::Block(_), Self::Any) => false,
            (Self::Block(block), Self::Block(other)) => block.contains(&other),
        }
    }

    /// Whether the net has addresses of the family of `address`.
    pub const fn is_of_family(self, address: IpAddr) -> bool {
        match (self, address) {
            (Self::Any, _)
            | (Self::Block(IpNet::V4(_)), IpAddr::V4(_))
            | (Self::Block(IpNet::V6(_)), IpAddr::V6(_)) => true,
            (Self::Block(_), _) => false,
        }
    }
}

impl Ord for Net {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        let key = |net: &Self| match *net {
            Self::Any => None,
            Self::Block(block) => Some((
                block.addr().is_ipv6(),
                Reverse(block.prefix_len()),
                block.addr(),
            )),
        };
        match (key(self), key(other)) {
            (Some(one), Some(other)) => one.cmp(&other),
            (one, other) => one.is_none().cmp(&other.is_none()),
        }
    }
}

impl PartialOrd for Net {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Traffic {
    /// Packets of the protocol to these ports.
    pub const fn to(protocol: Protocol, destination: Span) -> Self {
        Self::Ports {
            protocol,
            source: Span::ALL,
            destination,
        }
    }

    /// Whether packets with this protocol and these ports are part of the traffic.
    pub fn matches(self, ports: Option<PacketPorts>) -> bool {
        match (self, ports) {
            (Self::Any, _) => true,
            (Self::Ports { .. }, None) => false,
            (
                Self::Ports {
                    protocol,
                    source,
                    destination,
                },
                Some(ports),
            ) => {
                protocol == ports.protocol
                    && source.contains(ports.source)
                    && destination.contains(ports.destination)
            }
        }
    }

    fn covers(self, other: Self) -> bool {
        match (self, other) {
            (Self::Any, _) => true,
            (Self::Ports { .. }, Self::Any) => false,
            (
                Self::Ports {
                    protocol,
                    source,
                    destination,
                },
                Self::Ports {
                    protocol: other,
                    source: from,
                    destination: to,
                },
            ) => protocol == other && source.covers(from) && destination.covers(to),
        }
    }
}

/// The first rule of a list that matches a packet.
pub fn first<'a>(rules: &'a [Rule], packet: &Packet) -> Option<&'a Rule> {
    rules.iter().find(|rule| rule.matches(packet))
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let action = match self.action {
            Action::Deny => "DENY",
            Action::Permit => "PERMIT",
        };
        write!(
            f,
            "{action:<6}  {} -> {}  {}",
            self.source, self.destination, self.traffic
        )
    }
}

impl fmt::Display for Net {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("any"),
            Self::Block(block) => write!(f, "{block}"),
        }
    }
}

impl fmt::Display for Traffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("any protocol"),
            Self::Ports {
                protocol,
                source,
                destination,
            } => {
                if *source != Span::ALL {
                    write!(f, "from {source} to ")?;
                }
                write!(f, "{destination}/{}", protocol.as_str())
            }
        }
    }
}
