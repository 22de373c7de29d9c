//! A table of nf_tables as plain values: counters, sets, verdict maps, chains and their rules.
//!
//! Two tables with equal values judge every packet alike. Names are the names that nft(8) shows: at
//! most 255 bytes of letters, digits and `_`. No two sets and no two chains of a table have the
//! same name.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{Ipv4Addr, Ipv6Addr},
};

use crate::policy::Protocol;

/// The packets that the chains of a table see.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TableFamily {
    /// Packets of IPv4 and IPv6, after the routing decision.
    #[default]
    Inet,
    /// Frames at ports of bridges.
    Bridge,
}

/// A table of one family. An empty table need not exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// The kind of packets that the table sees.
    pub family: TableFamily,
    /// Name as nft(8) shows it, without the family.
    pub name: String,
    /// Names of the counters that rules use.
    pub counters: BTreeSet<String>,
    /// Sets by their names.
    pub sets: BTreeMap<String, Set>,
    /// Verdict maps by their names, which differ from the names of sets.
    pub maps: BTreeMap<String, VerdictMap>,
    /// Chains by their names. Every chain that another chain jumps to is among them.
    pub chains: BTreeMap<String, Chain>,
}

impl Table {
    /// A table of family `inet` with nothing in it.
    pub fn new(name: &str) -> Self {
        Self::of(TableFamily::Inet, name)
    }

    /// A table with nothing in it.
    pub fn of(family: TableFamily, name: &str) -> Self {
        Self {
            family,
            name: name.to_owned(),
            counters: BTreeSet::new(),
            sets: BTreeMap::new(),
            maps: BTreeMap::new(),
            chains: BTreeMap::new(),
        }
    }

    /// Whether the table has no objects.
    pub fn is_empty(&self) -> bool {
        *self == Self::of(self.family, &self.name)
    }
}

/// A named set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Set {
    /// Type of every element.
    pub key: Key,
    /// Members.
    pub elements: BTreeSet<Element>,
}

/// A named map from an address to a verdict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerdictMap {
    /// Type of the keys.
    pub key: Type,
    /// Verdict of each key.
    pub elements: BTreeMap<Value, Verdict>,
}

/// Type of a set's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// Single values: [`Element::One`].
    One(Type),
    /// Pairs of values: [`Element::Pair`].
    Pair(Type, Type),
    /// Values in ranges (`flags interval`): [`Element::Range`]. Ranges of a set neither overlap nor
    /// touch, because such ranges are merged.
    Ranges(Type),
}

/// Type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Type {
    /// `iface_index`
    Interface,
    /// `ipv4_addr`
    Ipv4,
    /// `ipv6_addr`
    Ipv6,
    /// `inet_service`
    Port,
    /// `ether_type`: the protocol of a frame, such as 0x0800 for IPv4.
    EtherType,
}

/// A member of a set.
///
/// All members of one set are of the kind that its [`Key`] names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Element {
    /// A single value.
    One(Value),
    /// A concatenation: `first . second`.
    Pair(Value, Value),
    /// From the first value to the last, both of one type.
    Range(Value, Value),
}

impl Element {
    /// The ranges of a set: the given ranges, merged where they overlap or touch.
    pub fn merged(ranges: impl IntoIterator<Item = (Value, Value)>) -> BTreeSet<Self> {
        let sorted: BTreeSet<(Value, Value)> = ranges.into_iter().collect();
        let mut merged: Vec<(Value, Value)> = Vec::new();
        for (first, last) in sorted {
            match merged.last_mut() {
                Some((_, end)) if end.next().is_none_or(|next| first <= next) => {
                    *end = last.max(*end);
                }
                _ => merged.push((first, last)),
            }
        }
        let ranges = merged.into_iter();
        ranges
            .map(|(first, last)| Self::Range(first, last))
            .collect()
    }
}

/// A value that a field of a packet can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Value {
    /// Index of an interface.
    Interface(u32),
    /// An IPv4 address.
    Ipv4(Ipv4Addr),
    /// An IPv6 address.
    Ipv6(Ipv6Addr),
    /// A port of a transport protocol.
    Port(u16),
    /// Number of the protocol in a frame.
    EtherType(u16),
}

impl Value {
    /// Type of the sets that can contain this value.
    pub const fn of_type(self) -> Type {
        match self {
            Self::Interface(_) => Type::Interface,
            Self::Ipv4(_) => Type::Ipv4,
            Self::Ipv6(_) => Type::Ipv6,
            Self::Port(_) => Type::Port,
            Self::EtherType(_) => Type::EtherType,
        }
    }

    /// The next value; `None` after the last of its type.
    pub fn next(self) -> Option<Self> {
        match self {
            Self::Interface(index) => index.checked_add(1).map(Self::Interface),
            Self::Ipv4(address) => {
                let next = address.to_bits().checked_add(1);
                next.map(|bits| Self::Ipv4(Ipv4Addr::from_bits(bits)))
            }
            Self::Ipv6(address) => {
                let next = address.to_bits().checked_add(1);
                next.map(|bits| Self::Ipv6(Ipv6Addr::from_bits(bits)))
            }
            Self::Port(port) => port.checked_add(1).map(Self::Port),
            Self::EtherType(number) => number.checked_add(1).map(Self::EtherType),
        }
    }

    /// The previous value; `None` before the first of its type.
    pub fn previous(self) -> Option<Self> {
        match self {
            Self::Interface(index) => index.checked_sub(1).map(Self::Interface),
            Self::Ipv4(address) => {
                let previous = address.to_bits().checked_sub(1);
                previous.map(|bits| Self::Ipv4(Ipv4Addr::from_bits(bits)))
            }
            Self::Ipv6(address) => {
                let previous = address.to_bits().checked_sub(1);
                previous.map(|bits| Self::Ipv6(Ipv6Addr::from_bits(bits)))
            }
            Self::Port(port) => port.checked_sub(1).map(Self::Port),
            Self::EtherType(number) => number.checked_sub(1).map(Self::EtherType),
        }
    }
}

/// Rules that are tried in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// Whether and where packets enter the chain without a jump.
    pub entry: Entry,
    /// Rules, which are tried from the first to the last.
    pub rules: Vec<Rule>,
}

/// The way into a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Entry {
    /// Packets come only by jumps of other chains.
    Jump,
    /// Every packet that the node forwards: `type filter hook forward priority filter; policy accept`.
    Forward,
    /// Every packet to the node itself: `type filter hook input priority filter; policy accept`.
    Input,
    /// Every frame that a port of a bridge receives, before br_netfilter sees it: `type filter hook
    /// prerouting priority -300; policy accept`, in family `bridge`.
    Arriving,
    /// Every frame from one port of a bridge to another: `type filter hook forward priority -300; policy
    /// accept`, in family `bridge`.
    Leaving,
}

impl Entry {
    /// All ways into a chain, for tests that choose one.
    pub const ALL: [Self; 5] = [
        Self::Jump,
        Self::Forward,
        Self::Input,
        Self::Arriving,
        Self::Leaving,
    ];
}

/// Conditions, and the actions for a packet that meets all of them, in the order of evaluation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Rule(pub Vec<Expression>);

/// A condition or an action of a rule.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Expression {
    /// The packet has this transport protocol, with any ports.
    Protocol(Protocol),
    /// The packet has the protocol with this number.
    Numbered(u8),
    /// The field has a value in this range, whose values have the field's type. For a single value,
    /// both are equal.
    Within(Field, Value, Value),
    /// The field is in the set of this name.
    In(Field, String),
    /// The field is not in the set of this name.
    NotIn(Field, String),
    /// The concatenation of two fields is in the set of this name.
    PairIn(Field, Field, String),
    /// The concatenation of two fields is not in the set of this name.
    PairNotIn(Field, Field, String),
    /// An answer in an open connection: `ct direction reply ct state established`.
    Answer,
    /// A packet about another connection, such as an ICMP error: `ct state related`.
    Related,
    /// A TCP segment without a known connection that does not open one:
    /// `ct state new tcp flags & (fin | syn | rst | ack) != syn`.
    MiddleOfTcp,
    /// An ICMPv6 message of this type. A condition that the frame has IPv6 must come first.
    Icmp6(u8),
    /// Router and neighbour discovery of IPv6 that was not forwarded by a router:
    /// `icmpv6 type 133-137 ip6 hoplimit 255`.
    NeighbourDiscovery,
    /// The counter of this name counts the packet.
    Count(String),
    /// A copy of the packet goes to the netlink group of this number, with this text.
    Log(String, u16),
    /// Applies the verdict that the map of this name has for the field. If it has none, the next
    /// expression follows.
    VerdictIn(Field, String),
    /// The end of the rule.
    Verdict(Verdict),
}

/// A field of a packet. It exists only in packets of its protocol; other packets do not meet the
/// condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Field {
    /// Index of the interface by which the packet came: `iif`.
    Interface,
    /// Index of the interface by which the packet goes: `oif`.
    OutInterface,
    /// The outermost `ether type`: a frame with a VLAN tag has the type of the tag.
    EtherType,
    /// `ip saddr`
    Source4,
    /// `ip daddr`
    Destination4,
    /// `ip6 saddr`
    Source6,
    /// `ip6 daddr`
    Destination6,
    /// `tcp dport`, `udp dport` or `sctp dport`
    Port(Protocol),
    /// The source of the connection's first packet: `ct original ip saddr`.
    Opener4,
    /// `ct original ip6 saddr`
    Opener6,
    /// The source of the connection's answers: `ct reply ip saddr`.
    Answerer4,
    /// `ct reply ip6 saddr`
    Answerer6,
}

/// What happens to a packet.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    /// It passes this table.
    Accept,
    /// It ends here.
    Drop,
    /// Evaluation continues after the jump to this chain.
    Return,
    /// Evaluation continues in the chain of this name.
    Jump(String),
}
