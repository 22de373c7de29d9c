//! A NetworkPolicy after all checks, with the defaults of Kubernetes.

use std::collections::BTreeSet;

use ipnet::IpNet;

use crate::{name::PortName, selector::Selector};

/// A valid NetworkPolicy, with the defaults of Kubernetes filled in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkPolicy {
    /// `metadata.namespace`; `default` where the document has none.
    pub namespace: String,
    /// `metadata.name`, which is a DNS subdomain.
    pub name: String,
    /// Pods of the policy's namespace that it restricts.
    pub pods: Selector,
    /// Traffic that these pods may receive.
    pub ingress: Direction,
    /// Traffic that these pods may send.
    pub egress: Direction,
    /// Remarks for the author: the document is valid, but may not mean what it seems to mean.
    pub warnings: Vec<Warning>,
}

/// One direction of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Direction {
    /// `policyTypes` does not list the direction, so the policy does not restrict it.
    Open,
    /// Only traffic that one of the rules allows may pass.
    Restricted(Vec<Rule>),
}

/// An element of `ingress` or `egress`: traffic with one of the peers on one of the ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Field of the rule, for example `spec.ingress[0]`.
    pub path: String,
    /// Peers that may send the traffic (ingress) or receive it (egress).
    pub peers: Peers,
    /// Ports and protocols at which the traffic arrives.
    pub ports: Ports,
}

/// The other side of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peers {
    /// Everyone: `from` or `to` is absent or empty.
    Any,
    /// Any of these peers: the list `from` or `to`, never empty.
    Of(Vec<Peer>),
}

/// An element of `from` or `to`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peer {
    /// Pods that both selectors select.
    Pods {
        /// Namespaces in which the pods are selected.
        namespaces: Namespaces,
        /// The pods in these namespaces.
        pods: Selector,
    },
    /// A block of addresses: `ipBlock`.
    Block(Block),
}

/// The namespaces in which a peer's pods may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Namespaces {
    /// The policy's own namespace: `namespaceSelector` is absent.
    Own,
    /// Namespaces whose labels match the `namespaceSelector`. An empty selector matches all.
    Selected(Selector),
}

/// A block of addresses without its excepted parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    path: String,
    prefix: IpNet,
    except: BTreeSet<IpNet>,
}

/// Protocols and ports that a rule allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ports {
    /// Every port and every protocol, even those without ports: `ports` is absent or empty.
    Any,
    /// Any of these ports: the list `ports`, never empty.
    Of(Vec<Port>),
}

/// An element of `ports`, with the defaults of Kubernetes filled in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Protocol; `TCP` where the element has none.
    pub protocol: Protocol,
    /// Port numbers, or the name of a port.
    pub ports: PortRange,
}

/// Port numbers or a port name, within one protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortRange {
    /// Every port of the protocol: the element has no `port`.
    All,
    /// From the first to the last, both at least 1; use [`PortRange::numbers`] to build it.
    Numbers(Numbers),
    /// The container port with this name and protocol, looked up at each receiving pod.
    Named(PortName),
}

/// Port numbers from `first` to `last`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbers {
    first: u16,
    last: u16,
}

/// Transport protocol that a policy can name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP, which has IP protocol number 6.
    Tcp,
    /// UDP, which has IP protocol number 17.
    Udp,
    /// SCTP, which has IP protocol number 132.
    Sctp,
}

impl Protocol {
    /// Every protocol.
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Sctp];

    /// Reads a protocol in the spelling of Kubernetes.
    pub fn parse(text: &str) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        all.find(|protocol| protocol.as_str() == text)
    }

    /// The protocol with this number in the IP header.
    pub fn from_number(number: u8) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        all.find(|protocol| protocol.number() == number)
    }

    /// Number in the IP header.
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }

    /// The protocol as Kubernetes spells it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        }
    }
}

/// A remark on a valid document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// Path of the field that the remark is about, for example `spec.egress`.
    pub field: String,
    /// The remark, with its remedy.
    pub text: String,
}

impl NetworkPolicy {
    /// The blocks of its rules.
    pub fn blocks(&self) -> impl Iterator<Item = &Block> {
        let directions = [&self.ingress, &self.egress].into_iter();
        let peers = directions
            .flat_map(Direction::rules)
            .flat_map(|rule| match &rule.peers {
                Peers::Any => [].iter(),
                Peers::Of(peers) => peers.iter(),
            });
        peers.filter_map(|peer| match peer {
            Peer::Block(block) => Some(block),
            Peer::Pods { .. } => None,
        })
    }
}

impl Direction {
    /// Rules that allow traffic; empty if the direction is open.
    pub fn rules(&self) -> &[Rule] {
        match self {
            Self::Open => &[],
            Self::Restricted(rules) => rules,
        }
    }
}

/// The position of an `except` that is not a part of its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotAPart(pub usize);

impl Block {
    /// The block `prefix` without `except`. Each `except` must be smaller than `prefix` and inside
    /// it. `path` is the block's field, for example `spec.egress[0].to[1].ipBlock`.
    pub fn new(path: &str, prefix: IpNet, except: &[IpNet]) -> Result<Self, NotAPart> {
        let (prefix, parts) = (prefix.trunc(), except.iter().map(IpNet::trunc));
        let is_part = |part: &IpNet| prefix.contains(part) && *part != prefix;
        match parts.clone().position(|part| !is_part(&part)) {
            Some(at) => Err(NotAPart(at)),
            None => Ok(Self {
                path: path.to_owned(),
                prefix,
                except: parts.collect(),
            }),
        }
    }

    /// Field of the block in its policy, for example `spec.egress[0].to[1].ipBlock`.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The whole block, without host bits.
    pub const fn prefix(&self) -> IpNet {
        self.prefix
    }

    /// Parts of the block that the rule excludes, without host bits.
    pub const fn except(&self) -> &BTreeSet<IpNet> {
        &self.except
    }
}

impl Ports {
    /// Whether one of the ports is a name.
    pub fn has_names(&self) -> bool {
        let is_name = |port: &Port| matches!(port.ports, PortRange::Named(_));
        matches!(self, Self::Of(ports) if ports.iter().any(is_name))
    }
}

impl PortRange {
    /// Ports from `first` to `last`; `None` unless `1 <= first <= last`.
    pub const fn numbers(first: u16, last: u16) -> Option<Self> {
        if first == 0 || last < first {
            return None;
        }
        Some(Self::Numbers(Numbers { first, last }))
    }
}

impl Numbers {
    /// Lowest port of the range, at least 1.
    pub const fn first(self) -> u16 {
        self.first
    }

    /// Highest port of the range, not below `first`.
    pub const fn last(self) -> u16 {
        self.last
    }
}
