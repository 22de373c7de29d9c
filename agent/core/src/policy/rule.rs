//! Validated rules: what a policy document says, free of its syntax.

use std::{fmt, sync::Arc};

use dns_policy::rule::NameRule;

use crate::{
    labels::LabelSet,
    named_port::{self, PortName},
    selector::selector::{LabelSelector, Selector},
};

/// End of the text of a port whose name has no number at the receiver ([`PortRule::text_at`]).
pub(super) const UNKNOWN_NAME: &str = "is not known)";

/// One rule of a document (`spec`, or an element of `specs`).
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// Endpoints that the rule applies to.
    pub subject: LabelSelector,
    pub egress: Direction,
    pub ingress: Direction,
    /// Ordered rules that drop packets of egress or pass them on: the first rule that covers a
    /// packet decides.
    pub tier: Vec<Arc<TierRule>>,
}

/// One rule of an ordered list that is read before the rules of egress.
#[derive(Clone, Debug, PartialEq)]
pub struct TierRule {
    /// Path of the rule in its document, for example `spec.egress[0]`.
    pub path: Arc<str>,
    /// What happens to a packet that it covers.
    pub action: TierAction,
    /// Destinations: the union of these selectors; an empty list selects none.
    pub selectors: Vec<Selector>,
    /// Ports of the destination. Empty = every protocol and port, ICMP too.
    pub ports: Vec<PortRule>,
}

/// What a tier does with a packet that one of its rules covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TierAction {
    Deny,
    /// The rules of egress decide: `type: Allow` of an EgressFirewall.
    Pass,
}

/// One direction of a rule.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Direction {
    /// Whether what no rule allows is denied.
    pub default_deny: bool,
    /// Rules that allow or deny peers; a deny beats every allow.
    pub peers: Vec<Arc<PeerRule>>,
}

/// Peers, and ports of the destination.
#[derive(Clone, Debug, PartialEq)]
pub struct PeerRule {
    /// Path of the rule in its document, for example `spec.egress[0]`.
    pub path: Arc<str>,
    /// Whether the rule denies instead of allowing.
    pub deny: bool,
    /// Who is on the other side.
    pub peers: Peers,
    /// On which ports; empty = all.
    pub ports: Vec<PortRule>,
}

/// The other side of the traffic that a rule is about.
#[derive(Clone, Debug, PartialEq)]
pub enum Peers {
    /// Every peer, whatever its identity.
    Any,
    /// The union of the selectors; an empty list selects no peer.
    Selectors(Vec<Selector>),
}

/// Ports of one protocol, and the names that DNS queries to them may ask for.
#[derive(Clone, Debug, PartialEq)]
pub struct PortRule {
    pub protocol: Protocol,
    pub ports: Ports,
    /// Names that the DNS proxy allows for this traffic; `None` = it does not go through the proxy.
    pub dns: Option<DnsNames>,
}

/// Ports by number or by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ports {
    /// From the first to the last (ICMP: types).
    Range(u16, u16),
    /// The receiver's port of this name.
    Named(PortName),
}

/// Names that DNS queries may ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DnsNames {
    All,
    /// Names that one of these matches.
    Names(Vec<NameRule>),
}

/// Protocol of a port rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP, UDP and SCTP.
    Any,
    Tcp,
    Udp,
    Sctp,
    /// ICMP; the port is the type.
    Icmp,
    /// ICMPv6; the port is the type.
    Icmpv6,
}

impl Protocol {
    /// Numbers of the IP protocols that it stands for.
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

impl From<netpol::policy::Protocol> for Protocol {
    fn from(protocol: netpol::policy::Protocol) -> Self {
        match protocol {
            netpol::policy::Protocol::Tcp => Self::Tcp,
            netpol::policy::Protocol::Udp => Self::Udp,
            netpol::policy::Protocol::Sctp => Self::Sctp,
        }
    }
}

impl fmt::Display for PortRule {
    /// `TCP 80`, `UDP 7000-7010`, `TCP http`, `ICMP type 8`, `ANY any port`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let protocol = match self.protocol {
            Protocol::Any => "ANY",
            Protocol::Tcp => "TCP",
            Protocol::Udp => "UDP",
            Protocol::Sctp => "SCTP",
            Protocol::Icmp => "ICMP type",
            Protocol::Icmpv6 => "ICMPv6 type",
        };
        match &self.ports {
            Ports::Range(0, u16::MAX) => write!(f, "{protocol} any port"),
            Ports::Range(first, last) if first == last => write!(f, "{protocol} {first}"),
            Ports::Range(first, last) => write!(f, "{protocol} {first}-{last}"),
            Ports::Named(name) => write!(f, "{protocol} {name}"),
        }
    }
}

impl PortRule {
    /// Protocol number, first and last port that it means where the receiver has these labels; empty
    /// where it names a port that the receiver does not have.
    pub fn at(&self, receiver: Option<&LabelSet>) -> impl Iterator<Item = (u8, u16, u16)> {
        let (range, only) = match &self.ports {
            Ports::Range(first, last) => (Some((*first, *last)), None),
            Ports::Named(name) => {
                let place = receiver.and_then(|labels| named_port::find(labels, name));
                let range = place.map(|place| (place.port, place.port));
                (range, place.map(|place| place.protocol))
            }
        };
        let numbers = self.protocol.numbers().iter().copied();
        let numbers = numbers.filter(move |number| only.is_none_or(|only| only == *number));
        numbers.filter_map(move |number| range.map(|(first, last)| (number, first, last)))
    }

    /// Whether it covers a packet of this protocol to this port of the receiver.
    pub fn covers(&self, protocol: u8, port: u16, receiver: Option<&LabelSet>) -> bool {
        self.at(receiver)
            .any(|(number, first, last)| number == protocol && (first..=last).contains(&port))
    }

    /// The port name that it has; `None` if its ports are numbers.
    pub const fn name(&self) -> Option<&PortName> {
        match &self.ports {
            Ports::Named(name) => Some(name),
            Ports::Range(..) => None,
        }
    }

    /// The text for people, with what a port name stands for at the receiver.
    pub fn text_at(&self, receiver: Option<&LabelSet>) -> String {
        match (self.name(), receiver) {
            (Some(name), Some(_)) => match self.at(receiver).next() {
                Some((_, port, _)) => format!("{self} ({port})"),
                None => format!("{self} (port name {name} {UNKNOWN_NAME}"),
            },
            _ => self.to_string(),
        }
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
            .chain(self.tier.iter().flat_map(|rule| &rule.selectors))
    }
}

impl PeerRule {
    /// Splits this rule of egress so that no rule about everyone has ports by name: only endpoints have
    /// names for their ports, each its own.
    pub(super) fn with_named_ports_of_endpoints(self) -> Vec<Self> {
        let is_named = |port: &PortRule| port.name().is_some();
        if self.peers != Peers::Any || !self.ports.iter().any(is_named) {
            return vec![self];
        }
        let (named, numbered): (Vec<_>, Vec<_>) = self.ports.iter().cloned().partition(is_named);
        let every_endpoint = Selector::Labels(LabelSelector::default());
        let mut rules = vec![Self {
            peers: Peers::Selectors(vec![every_endpoint]),
            ports: named,
            ..self.clone()
        }];
        if !numbered.is_empty() {
            rules.push(Self {
                ports: numbered,
                ..self
            });
        }
        rules
    }

    /// Selectors of its peers; empty for [`Peers::Any`].
    pub fn selectors(&self) -> std::slice::Iter<'_, Selector> {
        match &self.peers {
            Peers::Any => [].iter(),
            Peers::Selectors(selectors) => selectors.iter(),
        }
    }
}
