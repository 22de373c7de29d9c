//! DNS rules as values, free of any wire format.
//!
//! The agent renders them from policy, the link receives them over gRPC, and
//! restore reads them from `ep_config.json`; [`super`] compiles them.

use std::collections::BTreeSet;

use ipnet::IpNet;
use shared_maps::{EndpointId, IdentityId};

/// Transport of a DNS query.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Transport {
    /// UDP, IP protocol 17.
    Udp,
    /// TCP, IP protocol 6.
    Tcp,
}

impl Transport {
    /// IP protocol number.
    pub const fn number(self) -> u8 {
        match self {
            Self::Udp => 17,
            Self::Tcp => 6,
        }
    }

    /// From an IP protocol number.
    pub const fn from_number(number: u8) -> Option<Self> {
        match number {
            17 => Some(Self::Udp),
            6 => Some(Self::Tcp),
            _ => None,
        }
    }
}

/// All DNS rules of one endpoint. No entry for a port and transport denies it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointRules {
    /// Rules by server port and transport.
    pub ports: Vec<PortRules>,
}

/// Rules for one server port and transport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortRules {
    /// Server port.
    pub port: u16,
    /// Transport.
    pub transport: Transport,
    /// A query is allowed if any of these allows it.
    pub rules: Vec<SelectorRule>,
}

/// Names that may be asked of the servers one selector selects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelectorRule {
    /// The selector as the policy has it, for people.
    pub selector: String,
    /// Servers the rule is about.
    pub servers: Servers,
    /// Names that may be asked.
    pub names: NameRules,
}

/// Servers of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Servers {
    /// Any server.
    Any,
    /// Servers of these identities.
    Identities(BTreeSet<IdentityId>),
    /// Servers at these addresses: restored rules of Cilium's own files, which name no identity.
    Prefixes(Vec<IpNet>),
}

/// Names of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NameRules {
    /// Every name, the root and odd ones included.
    All,
    /// Names that one of these matches; an empty list matches none.
    Names(Vec<NameRule>),
    /// A restored regular expression (already anchored) that could not be read back into names.
    Regex(String),
}

/// One `matchName` or `matchPattern`, as the policy spells it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NameRule {
    /// Exactly this name.
    Name(String),
    /// A pattern with `*` wildcards.
    Pattern(String),
}

/// Rules of one endpoint with its number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RulesOf {
    /// The endpoint.
    pub endpoint: EndpointId,
    /// Its rules; without ports it has none.
    pub rules: EndpointRules,
}
