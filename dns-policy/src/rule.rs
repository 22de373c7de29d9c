//! DNS rules as values, free of any wire format.
//!
//! The agent renders them from policy, the link receives them over gRPC, and
//! restore reads them from `ep_config.json`; [`crate::table`] compiles them.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use shared_maps::{EndpointId, IdentityId};

shared_maps::words! {
    /// Transport of a DNS query.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Transport {
        /// UDP, IP protocol 17.
        Udp => "udp",
        /// TCP, IP protocol 6.
        Tcp => "tcp",
    }
}

impl Transport {
    /// IP protocol number: 17 or 6.
    pub const fn number(self) -> u8 {
        match self {
            Self::Udp => 17,
            Self::Tcp => 6,
        }
    }

    /// The transport with this IP protocol number.
    pub const fn from_number(number: u8) -> Option<Self> {
        match number {
            17 => Some(Self::Udp),
            6 => Some(Self::Tcp),
            _ => None,
        }
    }
}

/// All DNS rules of one endpoint. A port and transport without an entry is denied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointRules {
    /// Rules by server port and transport.
    pub ports: Vec<PortRules>,
}

/// Rules for one server port and transport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortRules {
    /// Port of the DNS server.
    pub port: u16,
    /// Transport that the rules apply to.
    pub transport: Transport,
    /// A query is allowed if any of these allows it.
    pub rules: Vec<SelectorRule>,
}

/// Names that may be asked of the servers that one selector selects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelectorRule {
    /// The selector as the policy has it, for people.
    pub selector: String,
    /// Servers that the rule is about.
    pub servers: Servers,
    /// Names that may be asked.
    pub names: NameRules,
}

/// Servers that a rule allows queries to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Servers {
    /// Every server, except the address of a Service.
    Any,
    /// Servers that have one of these identities.
    Identities(BTreeSet<IdentityId>),
    /// Servers at these addresses: restored rules of Cilium's own files, which name no identity.
    Prefixes(Vec<IpNet>),
}

/// Names that a rule allows queries for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NameRules {
    /// Every name, including the root and odd names. It stands for a rule without DNS names, for
    /// which the datapath sends no query to the proxy. Where another rule of the port sends the
    /// server's queries to the proxy, this rule allows every name ([`PortRules::sends_to_proxy`]).
    All,
    /// Names that one of these matches; an empty list matches none.
    Names(Vec<NameRule>),
    /// A restored regular expression (already anchored) that could not be read back into names.
    Regex(String),
}

impl NameRules {
    /// Every name, of a rule by which the datapath sends queries to the proxy.
    pub fn every_name() -> Self {
        Self::Names(vec![NameRule::Pattern("*".to_owned())])
    }
}

impl Servers {
    /// Whether a server with this identity and address is one of these servers.
    pub fn select(&self, identity: IdentityId, address: IpAddr) -> bool {
        match self {
            // A Service needs a rule that names it, because its port may differ from the port of
            // its backends.
            Self::Any => !identity.is_service(),
            Self::Identities(ids) => ids.contains(&identity),
            Self::Prefixes(prefixes) => prefixes.iter().any(|prefix| prefix.contains(&address)),
        }
    }

    /// The servers that are also among `others`; `None` if there are none.
    fn among(&self, others: &[&Self]) -> Option<Self> {
        let is_any = others.iter().any(|other| matches!(other, Self::Any));
        let identities = others.iter().filter_map(|other| match other {
            Self::Identities(ids) => Some(ids),
            _ => None,
        });
        let identities: BTreeSet<IdentityId> = identities.flatten().copied().collect();
        match self {
            _ if is_any => Some(self.clone()),
            Self::Any => {
                let ids = identities.into_iter().filter(|id| !id.is_service());
                let ids: BTreeSet<IdentityId> = ids.collect();
                (!ids.is_empty()).then_some(Self::Identities(ids))
            }
            Self::Identities(own) => {
                let ids: BTreeSet<IdentityId> = own.intersection(&identities).copied().collect();
                (!ids.is_empty()).then_some(Self::Identities(ids))
            }
            // Only restored rules have prefixes, and all of them are for ports whose queries go to
            // the proxy.
            Self::Prefixes(_) => Some(self.clone()),
        }
    }
}

impl SelectorRule {
    /// Whether the datapath sends queries to the proxy by this rule.
    pub fn has_names(&self) -> bool {
        self.names != NameRules::All
    }
}

impl PortRules {
    /// Whether the datapath sends queries to this server to the proxy. If the server has only rules
    /// without names, its queries pass without the proxy.
    pub fn sends_to_proxy(&self, server: IdentityId, address: IpAddr) -> bool {
        let mut named = self.rules.iter().filter(|rule| rule.has_names());
        named.any(|rule| rule.servers.select(server, address))
    }

    /// Each rule, reduced to the servers whose queries the datapath sends to the proxy; `None` if
    /// the rule has no such server.
    pub fn at_proxy(&self) -> Vec<Option<SelectorRule>> {
        let named = self.rules.iter().filter(|rule| rule.has_names());
        let named: Vec<&Servers> = named.map(|rule| &rule.servers).collect();
        let rules = self.rules.iter().map(|rule| {
            let servers = match rule.has_names() {
                true => rule.servers.clone(),
                false => rule.servers.among(&named)?,
            };
            Some(SelectorRule {
                servers,
                ..rule.clone()
            })
        });
        rules.collect()
    }
}

/// One `matchName` or `matchPattern`, as the policy spells it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum NameRule {
    /// This name and no other (`matchName`).
    #[serde(rename = "match_name")]
    Name(String),
    /// A pattern with `*` wildcards.
    #[serde(rename = "match_pattern")]
    Pattern(String),
}

impl NameRule {
    /// The name, or the pattern.
    pub fn text(&self) -> &str {
        match self {
            Self::Name(text) | Self::Pattern(text) => text,
        }
    }
}

/// The rules of one endpoint, and its number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RulesOf {
    /// Endpoint that the rules apply to.
    pub endpoint: EndpointId,
    /// Rules of the endpoint; without ports there are none.
    pub rules: EndpointRules,
}

#[cfg(test)]
mod tests {
    use super::*;

    const DNS: IdentityId = IdentityId(300);
    const WEB: IdentityId = IdentityId(1 << 24);
    const ADDRESS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 53));

    fn rule(servers: Servers, names: NameRules) -> SelectorRule {
        SelectorRule {
            selector: "s".to_owned(),
            servers,
            names,
        }
    }

    fn only(ids: &[IdentityId]) -> Servers {
        Servers::Identities(ids.iter().copied().collect())
    }

    fn port(rules: Vec<SelectorRule>) -> PortRules {
        PortRules {
            port: 53,
            transport: Transport::Udp,
            rules,
        }
    }

    #[test]
    fn a_rule_without_names_makes_no_dns_server() {
        let named = rule(only(&[DNS]), NameRules::every_name());
        let elsewhere = port(vec![named.clone(), rule(only(&[WEB]), NameRules::All)]);
        assert!(elsewhere.sends_to_proxy(DNS, ADDRESS));
        assert!(!elsewhere.sends_to_proxy(WEB, ADDRESS));
        assert_eq!(elsewhere.at_proxy(), [Some(named.clone()), None]);

        for (plain, wanted) in [
            (only(&[DNS, WEB]), only(&[DNS])),
            (Servers::Any, only(&[DNS])),
        ] {
            let both = port(vec![named.clone(), rule(plain, NameRules::All)]);
            assert!(!both.sends_to_proxy(WEB, ADDRESS));
            assert_eq!(both.at_proxy()[1], Some(rule(wanted, NameRules::All)));
        }
        let everyone = rule(Servers::Any, NameRules::every_name());
        let all = port(vec![everyone, rule(only(&[WEB]), NameRules::All)]);
        assert!(all.sends_to_proxy(WEB, ADDRESS));
        let whole: Vec<_> = all.at_proxy().into_iter().flatten().collect();
        assert_eq!(whole, all.rules);
        let plain = port(vec![rule(Servers::Any, NameRules::All)]);
        assert_eq!(plain.at_proxy(), [None]);
        assert!(!plain.sends_to_proxy(DNS, ADDRESS));
    }
}
