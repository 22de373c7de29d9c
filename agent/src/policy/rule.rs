//! Validated rules: what a policy document says, free of its syntax.

use std::{fmt, sync::Arc};

use holdfast_sdp::policy::rule::NameRule;

use crate::selector::selector::{LabelSelector, Selector};

/// One rule of a document (`spec`, or an element of `specs`).
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// Endpoints it is about.
    pub subject: LabelSelector,
    /// What they may send.
    pub egress: Direction,
    /// What they may receive.
    pub ingress: Direction,
}

/// One direction of a rule.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Direction {
    /// What no rule allows is denied.
    pub default_deny: bool,
    /// Allowed and denied peers.
    pub peers: Vec<Arc<PeerRule>>,
}

/// Peers, and ports of the destination.
#[derive(Clone, Debug, PartialEq)]
pub struct PeerRule {
    /// Where its document says so, for example `spec.egress[0]`.
    pub path: Arc<str>,
    /// Denies instead of allowing.
    pub deny: bool,
    /// Who is on the other side.
    pub peers: Peers,
    /// On which ports; empty = all.
    pub ports: Vec<PortRule>,
}

/// The other side.
#[derive(Clone, Debug, PartialEq)]
pub enum Peers {
    /// Anyone.
    Any,
    /// Whoever any of these selects; an empty list selects nobody.
    Selectors(Vec<Selector>),
}

/// Ports of one protocol.
#[derive(Clone, Debug, PartialEq)]
pub struct PortRule {
    /// Protocol.
    pub protocol: Protocol,
    /// First port (ICMP: type).
    pub first: u16,
    /// Last port.
    pub last: u16,
    /// Send it through the DNS proxy, which allows these names.
    pub dns: Option<DnsNames>,
}

/// Names that DNS queries may ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DnsNames {
    /// Every name.
    All,
    /// Names that one of these matches.
    Names(Vec<NameRule>),
}

/// Protocol of a port rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP, UDP and SCTP.
    Any,
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
    /// ICMP; the port is the type.
    Icmp,
    /// ICMPv6; the port is the type.
    Icmpv6,
}

impl Protocol {
    /// IP protocol numbers.
    pub const fn numbers(self) -> &'static [u8] {
        match self {
            Self::Any => &[6, 17, 132],
            Self::Tcp => &[6],
            Self::Udp => &[17],
            Self::Sctp => &[132],
            Self::Icmp => &[1],
            Self::Icmpv6 => &[58],
        }
    }
}

impl fmt::Display for PortRule {
    /// `TCP 80`, `UDP 7000-7010`, `ICMP type 8`, `ANY any port`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let protocol = match self.protocol {
            Protocol::Any => "ANY",
            Protocol::Tcp => "TCP",
            Protocol::Udp => "UDP",
            Protocol::Sctp => "SCTP",
            Protocol::Icmp => return write!(f, "ICMP type {}", self.first),
            Protocol::Icmpv6 => return write!(f, "ICMPv6 type {}", self.first),
        };
        match (self.first, self.last) {
            (0, u16::MAX) => write!(f, "{protocol} any port"),
            (first, last) if first == last => write!(f, "{protocol} {first}"),
            (first, last) => write!(f, "{protocol} {first}-{last}"),
        }
    }
}

impl PortRule {
    /// Whether it covers every port of its protocol.
    pub const fn is_every_port(&self) -> bool {
        self.first == 0 && self.last == u16::MAX
    }

    /// Whether a packet of this protocol to this port is meant.
    pub fn covers(&self, protocol: u8, port: u16) -> bool {
        self.protocol.numbers().contains(&protocol) && (self.first..=self.last).contains(&port)
    }
}

impl Rule {
    /// Every selector of its peers.
    pub fn selectors(&self) -> impl Iterator<Item = &Selector> {
        self.egress
            .peers
            .iter()
            .chain(&self.ingress.peers)
            .flat_map(|rule| rule.selectors())
    }
}

impl PeerRule {
    /// Selectors of its peers.
    pub fn selectors(&self) -> std::slice::Iter<'_, Selector> {
        match &self.peers {
            Peers::Any => [].iter(),
            Peers::Selectors(selectors) => selectors.iter(),
        }
    }
}
