//! DNS rules in two spellings: Cilium's by server address and regular expression
//! (`DNSRulesV2`), and ours by server identity and name.

use std::collections::{BTreeMap, BTreeSet};

use dns_policy::{
    name::Fqdn,
    pattern::restored,
    rule::{EndpointRules, NameRule, NameRules, PortRules, SelectorRule, Servers, Transport},
};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use shared_maps::IdentityId;

use super::{FileError, RulesInFile, ServerAddresses};

/// Version of `HoldfastDNSRules` that this program writes. A newer one is refused.
const VERSION: u64 = 1;

/// `DNSRulesV2`: decimal `1 << 24 | protocol << 16 | port` → rules.
pub(super) type RulesV2 = BTreeMap<String, Vec<RuleV2>>;

/// A rule by address and regular expression.
#[derive(Serialize, Deserialize)]
pub(super) struct RuleV2 {
    #[serde(rename = "Re", default)]
    re: String,
    #[serde(rename = "IPs", default)]
    ips: Option<BTreeMap<String, Empty>>,
}

/// An empty JSON object: Cilium writes a set as a map to Go's empty struct.
#[derive(Serialize, Deserialize)]
pub(super) struct Empty {}

/// DNS rules under the key `HoldfastDNSRules`.
#[derive(Serialize, Deserialize)]
pub(super) struct OwnRules {
    version: u64,
    boot_id: String,
    start: u64,
    revision: u64,
    ports: Vec<OwnPort>,
}

#[derive(Serialize, Deserialize)]
struct OwnPort {
    port: u16,
    protocol: u8,
    rules: Vec<OwnRule>,
}

#[derive(Serialize, Deserialize)]
struct OwnRule {
    selector: String,
    #[serde(default)]
    any_server: bool,
    #[serde(default)]
    servers: BTreeSet<u32>,
    /// None at all allows every name.
    #[serde(default)]
    names: Vec<OwnName>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum OwnName {
    MatchName(String),
    MatchPattern(String),
}

/// Renders rules as `HoldfastDNSRules`, by server identity and name.
pub(super) fn own(rules: &RulesInFile) -> OwnRules {
    let ports = rules.rules.ports.iter().map(|port| OwnPort {
        port: port.port,
        protocol: port.transport.number(),
        rules: port.rules.iter().filter_map(own_rule).collect(),
    });
    OwnRules {
        version: VERSION,
        boot_id: rules.boot_id.clone(),
        start: rules.start,
        revision: rules.revision,
        ports: ports.collect(),
    }
}

/// Rules by prefix or regular expression come from files only and are not written again.
fn own_rule(rule: &SelectorRule) -> Option<OwnRule> {
    let (any_server, servers) = match &rule.servers {
        Servers::Any => (true, BTreeSet::new()),
        Servers::Identities(ids) => (false, ids.iter().map(|id| id.0).collect()),
        Servers::Prefixes(_) => return None,
    };
    let names = match &rule.names {
        NameRules::All => Vec::new(),
        NameRules::Names(list) if list.is_empty() => return None,
        NameRules::Names(list) => list
            .iter()
            .map(|name| match name {
                NameRule::Name(text) => OwnName::MatchName(text.clone()),
                NameRule::Pattern(text) => OwnName::MatchPattern(text.clone()),
            })
            .collect(),
        NameRules::Regex(_) => return None,
    };
    Some(OwnRule {
        selector: rule.selector.clone(),
        any_server,
        servers,
        names,
    })
}

/// Reads `HoldfastDNSRules`; a newer version and an unknown protocol are refused.
pub(super) fn read_own(own: OwnRules) -> Result<RulesInFile, FileError> {
    if own.version > VERSION {
        return Err(FileError::Newer(own.version));
    }
    let mut ports = Vec::new();
    for port in own.ports {
        let Some(transport) = Transport::from_number(port.protocol) else {
            let value = port.protocol.to_string();
            return Err(FileError::Field {
                field: "HoldfastDNSRules.ports.protocol",
                value,
            });
        };
        let rules = port.rules.into_iter().map(|rule| SelectorRule {
            selector: rule.selector,
            servers: if rule.any_server {
                Servers::Any
            } else {
                Servers::Identities(rule.servers.into_iter().map(IdentityId).collect())
            },
            names: if rule.names.is_empty() {
                NameRules::All
            } else {
                NameRules::Names(rule.names.into_iter().map(own_name).collect())
            },
        });
        ports.push(PortRules {
            port: port.port,
            transport,
            rules: rules.collect(),
        });
    }
    Ok(RulesInFile {
        boot_id: own.boot_id,
        start: own.start,
        revision: own.revision,
        rules: EndpointRules { ports },
    })
}

fn own_name(name: OwnName) -> NameRule {
    match name {
        OwnName::MatchName(text) => NameRule::Name(text),
        OwnName::MatchPattern(text) => NameRule::Pattern(text),
    }
}

/// Spells rules by address; at most `limit` addresses per rule.
pub(super) fn v2(rules: &EndpointRules, servers: &ServerAddresses, limit: usize) -> RulesV2 {
    let mut found = RulesV2::new();
    for port in &rules.ports {
        let number = 1 << 24 | u32::from(port.transport.number()) << 16 | u32::from(port.port);
        let list = port.rules.iter().map(|rule| RuleV2 {
            re: expression(&rule.names),
            ips: match &rule.servers {
                Servers::Any => None,
                Servers::Identities(ids) => {
                    let prefixes = ids.iter().filter_map(|id| servers.get(id)).flatten();
                    Some(addresses(prefixes.take(limit)))
                }
                Servers::Prefixes(prefixes) => Some(addresses(prefixes.iter().take(limit))),
            },
        });
        // No address at all would read as "any server".
        let list: Vec<_> = list
            .filter(|rule| rule.ips.as_ref().is_none_or(|ips| !ips.is_empty()))
            .collect();
        if !list.is_empty() {
            found.insert(number.to_string(), list);
        }
    }
    found
}

fn addresses<'a>(prefixes: impl Iterator<Item = &'a IpNet>) -> BTreeMap<String, Empty> {
    let text = |prefix: &IpNet| {
        if prefix.prefix_len() == prefix.max_prefix_len() {
            prefix.addr().to_string()
        } else {
            prefix.to_string()
        }
    };
    prefixes.map(|prefix| (text(prefix), Empty {})).collect()
}

/// Reads `DNSRulesV2`; ports with an unknown protocol are left out.
pub(super) fn read_v2(rules: &RulesV2) -> EndpointRules {
    let mut ports = Vec::new();
    for (key, list) in rules {
        let Some(number) = key.parse::<u32>().ok() else {
            continue;
        };
        let (Ok(protocol), Ok(port)) = (
            u8::try_from(number >> 16 & 0xff),
            u16::try_from(number & 0xffff),
        ) else {
            continue;
        };
        let Some(transport) = Transport::from_number(protocol) else {
            continue;
        };
        let rules = list.iter().map(|rule| SelectorRule {
            selector: "restored".to_owned(),
            servers: match &rule.ips {
                None => Servers::Any,
                Some(ips) if ips.is_empty() => Servers::Any,
                Some(ips) => Servers::Prefixes(ips.keys().filter_map(|ip| prefix(ip)).collect()),
            },
            names: restored::names_of(&rule.re),
        });
        ports.push(PortRules {
            port,
            transport,
            rules: rules.collect(),
        });
    }
    EndpointRules { ports }
}

fn prefix(text: &str) -> Option<IpNet> {
    let (text, cluster) = text.split_once('@').unwrap_or((text, "0"));
    if cluster != "0" {
        return None;
    }
    let address: Option<std::net::IpAddr> = text.parse().ok();
    address.map(IpNet::from).or_else(|| text.parse().ok())
}

/// The anchored regular expression (RE2) of a rule set (`cilium-compat` 4).
fn expression(names: &NameRules) -> String {
    match names {
        NameRules::All => "(?:)".to_owned(),
        NameRules::Regex(text) => text.clone(),
        NameRules::Names(list) => {
            let list: Vec<String> = list.iter().map(alternative).collect();
            if list.iter().any(|text| text == ".*") {
                return "(?:)".to_owned();
            }
            format!("^(?:{})$", list.join("|"))
        }
    }
}

fn alternative(rule: &NameRule) -> String {
    const STAR: &str = "[-a-zA-Z0-9_]*";
    const LABELS: &str = "([-a-zA-Z0-9_]+([.][-a-zA-Z0-9_]+){0,})[.]";
    let text = match rule {
        NameRule::Name(text) => return Fqdn::normalise(text).as_str().replace('.', "[.]"),
        NameRule::Pattern(text) => text.trim().to_ascii_lowercase(),
    };
    let stars = text.bytes().take_while(|byte| *byte == b'*').count();
    let (_, rest) = text.split_at(stars);
    if stars > 0 && matches!(rest, "" | ".") {
        return ".*".to_owned();
    }
    let (mut found, rest) = match rest.strip_prefix('.') {
        Some(rest) if stars >= 2 => (LABELS.to_owned(), rest),
        _ => (String::new(), text.as_str()),
    };
    let rest = Fqdn::normalise(rest);
    let mut wild = false;
    for c in rest.as_str().chars() {
        match c {
            '*' if wild => continue,
            '*' => found.push_str(STAR),
            '.' => found.push_str("[.]"),
            c => found.push(c),
        }
        wild = c == '*';
    }
    found
}
