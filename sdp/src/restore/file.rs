//! One `ep_config.json`, ours or Cilium's.
//!
//! Cilium's `DNSRulesV2` maps a packed protocol and port to regular
//! expressions with server addresses. Ours adds `HoldfastDNSRules`, the rules
//! by server identity and selector, which stay right when a server moves.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;
use serde::Deserialize;
use shared_maps::{EndpointId, IdentityId};

use crate::{
    pattern::{self, restored},
    policy::rule::{
        EndpointRules, NameRule, NameRules, PortRules, SelectorRule, Servers, Transport,
    },
};

/// Newest version of `HoldfastDNSRules` that is understood.
pub const VERSION: u64 = 1;

/// What is used of a file.
#[derive(Debug, PartialEq, Eq)]
pub struct EndpointFile {
    /// Number.
    pub id: EndpointId,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// Host-side interface.
    pub ifindex: u32,
    /// Identity.
    pub identity: IdentityId,
    /// DNS rules, if it has any.
    pub rules: Option<EndpointRules>,
}

/// What is wrong with a file.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// Not JSON, or a field of another type.
    #[error("damaged: {0}")]
    Json(#[from] serde_json::Error),
    /// A field's text cannot be read.
    #[error("damaged: {field} is {value:?}")]
    Field {
        /// Its name.
        field: &'static str,
        /// Its text.
        value: String,
    },
    /// Written by a newer version.
    #[error("HoldfastDNSRules has version {0}, this program knows up to {VERSION}: upgrade it")]
    Newer(u64),
    /// A name or pattern that is not valid.
    #[error("HoldfastDNSRules, selector {selector:?}: {reason}")]
    Name {
        /// Selector of the rule.
        selector: String,
        /// What is wrong.
        reason: String,
    },
}

#[derive(Deserialize)]
struct Raw {
    #[serde(rename = "ID")]
    id: u16,
    #[serde(rename = "IPv4", default)]
    ipv4: Option<String>,
    #[serde(rename = "IPv6", default)]
    ipv6: Option<String>,
    #[serde(rename = "IfIndex", default)]
    ifindex: i64,
    #[serde(rename = "SecLabel", default)]
    identity: Option<RawIdentity>,
    #[serde(rename = "DNSRulesV2", default)]
    by_address: Option<BTreeMap<String, Vec<RawRegex>>>,
    #[serde(rename = "HoldfastDNSRules", default)]
    by_identity: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct RawIdentity {
    id: u32,
}

#[derive(Deserialize)]
struct RawRegex {
    #[serde(rename = "Re")]
    expression: Option<String>,
    #[serde(rename = "IPs", default)]
    servers: Option<BTreeMap<String, serde_json::Value>>,
}

#[derive(Deserialize)]
struct RawVersion {
    version: u64,
}

#[derive(Deserialize)]
struct RawRules {
    boot_id: String,
    #[serde(default)]
    ports: Vec<RawPort>,
}

#[derive(Deserialize)]
struct RawPort {
    port: u16,
    protocol: u8,
    #[serde(default)]
    rules: Vec<RawSelector>,
}

#[derive(Deserialize)]
struct RawSelector {
    #[serde(default)]
    selector: String,
    #[serde(default)]
    any_server: bool,
    #[serde(default)]
    servers: Vec<u32>,
    #[serde(default)]
    names: Vec<RawName>,
}

#[derive(Deserialize)]
struct RawName {
    #[serde(default)]
    match_name: Option<String>,
    #[serde(default)]
    match_pattern: Option<String>,
}

/// Reads a file's bytes. Rules by identity count only for the boot `boot_id`:
/// identity numbers of another one mean nothing.
pub fn parse(bytes: &[u8], boot_id: &str) -> Result<EndpointFile, FileError> {
    let raw: Raw = serde_json::from_slice(bytes)?;
    let mut addresses = Vec::new();
    for (field, text) in [("IPv4", &raw.ipv4), ("IPv6", &raw.ipv6)] {
        if let Some(text) = text.as_deref().filter(|text| !text.is_empty()) {
            let bad = || FileError::Field {
                field,
                value: text.to_owned(),
            };
            addresses.push(text.parse().map_err(|_| bad())?);
        }
    }
    let ifindex = u32::try_from(raw.ifindex).map_err(|_| FileError::Field {
        field: "IfIndex",
        value: raw.ifindex.to_string(),
    })?;
    let ours = raw
        .by_identity
        .map(|value| by_identity(value, boot_id))
        .transpose()?
        .flatten();
    let rules = match (ours, raw.by_address) {
        (Some(rules), _) => Some(rules),
        (None, Some(by_port)) => Some(by_address(&by_port)?),
        (None, None) => None,
    };
    Ok(EndpointFile {
        id: EndpointId(raw.id),
        addresses,
        ifindex,
        identity: IdentityId(raw.identity.map_or(0, |identity| identity.id)),
        rules,
    })
}

fn by_identity(
    value: serde_json::Value,
    boot_id: &str,
) -> Result<Option<EndpointRules>, FileError> {
    let RawVersion { version } = RawVersion::deserialize(&value)?;
    if version > VERSION {
        return Err(FileError::Newer(version));
    }
    let raw: RawRules = serde_json::from_value(value)?;
    if raw.boot_id != boot_id {
        return Ok(None);
    }
    let mut ports = Vec::with_capacity(raw.ports.len());
    for port in raw.ports {
        let transport = Transport::from_number(port.protocol).ok_or(FileError::Field {
            field: "HoldfastDNSRules.ports.protocol",
            value: port.protocol.to_string(),
        })?;
        let rules = port
            .rules
            .into_iter()
            .map(selector_rule)
            .collect::<Result<_, _>>()?;
        ports.push(PortRules {
            port: port.port,
            transport,
            rules,
        });
    }
    Ok(Some(EndpointRules { ports }))
}

fn selector_rule(raw: RawSelector) -> Result<SelectorRule, FileError> {
    let mut names = Vec::with_capacity(raw.names.len());
    for name in raw.names {
        let wrong = |reason: String| FileError::Name {
            selector: raw.selector.clone(),
            reason,
        };
        let rule = match (name.match_name, name.match_pattern) {
            (Some(name), None) => NameRule::Name(name),
            (None, Some(pattern)) => NameRule::Pattern(pattern),
            _ => {
                return Err(wrong(
                    "needs exactly one of match_name and match_pattern".into(),
                ));
            }
        };
        pattern::validate_rule(&rule).map_err(|error| wrong(error.to_string()))?;
        names.push(rule);
    }
    Ok(SelectorRule {
        servers: if raw.any_server {
            Servers::Any
        } else {
            Servers::Identities(raw.servers.into_iter().map(IdentityId).collect())
        },
        names: if names.is_empty() {
            NameRules::All
        } else {
            NameRules::Names(names)
        },
        selector: raw.selector,
    })
}

fn by_address(by_port: &BTreeMap<String, Vec<RawRegex>>) -> Result<EndpointRules, FileError> {
    let mut ports = Vec::with_capacity(by_port.len());
    for (key, expressions) in by_port {
        let bad = || FileError::Field {
            field: "DNSRulesV2",
            value: key.clone(),
        };
        let (port, transport) = port_proto(key).ok_or_else(bad)?;
        let mut rules = Vec::with_capacity(expressions.len());
        for raw in expressions {
            let Some(servers) = servers(raw.servers.as_ref())? else {
                continue;
            };
            rules.push(SelectorRule {
                selector: "restored".to_owned(),
                servers,
                names: restored::names_of(raw.expression.as_deref().unwrap_or("(?:)")),
            });
        }
        ports.push(PortRules {
            port,
            transport,
            rules,
        });
    }
    Ok(EndpointRules { ports })
}

/// Unpacks `1<<24 | protocol<<16 | port`.
fn port_proto(key: &str) -> Option<(u16, Transport)> {
    let [version, protocol, high, low] = key.parse::<u32>().ok()?.to_be_bytes();
    let transport = Transport::from_number(protocol)?;
    (version == 1).then(|| (u16::from_be_bytes([high, low]), transport))
}

/// `None`: servers of other clusters only.
fn servers(
    raw: Option<&BTreeMap<String, serde_json::Value>>,
) -> Result<Option<Servers>, FileError> {
    let Some(raw) = raw.filter(|raw| !raw.is_empty()) else {
        return Ok(Some(Servers::Any));
    };
    let mut prefixes = BTreeSet::new();
    for text in raw.keys() {
        let (address, cluster) = text.split_once('@').unwrap_or((text, "0"));
        if cluster != "0" {
            continue;
        }
        let prefix = address
            .parse::<IpNet>()
            .or_else(|_| address.parse::<IpAddr>().map(IpNet::from))
            .map_err(|_| FileError::Field {
                field: "DNSRulesV2.IPs",
                value: text.clone(),
            })?;
        prefixes.insert(prefix);
    }
    Ok((!prefixes.is_empty()).then(|| Servers::Prefixes(prefixes.into_iter().collect())))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CILIUM: &str = r#"{
        "ID": 7, "IPv4": "10.0.0.7", "IPv6": "fd00::7", "IfName": "lxc1", "IfIndex": 12,
        "SecLabel": {"id": 300, "labels": {}}, "DNSHistory": [], "DNSZombies": {},
        "DNSRulesV2": {
            "17891381": [{"Re": "(?:)", "IPs": null},
                         {"Re": "^(?:sub[.]ubuntu[.]com[.])$", "IPs": {"10.0.0.53": {}, "10.1.0.0/16@0": {}, "10.2.0.1@3": {}}}],
            "17170485": [{"Re": "^-$", "IPs": {"10.2.0.1@3": {}}}]
        }
    }"#;

    #[test]
    fn ciliums_own_file_is_read() {
        let file = parse(CILIUM.as_bytes(), "boot").unwrap();
        assert_eq!(
            (file.id, file.ifindex, file.identity),
            (EndpointId(7), 12, IdentityId(300))
        );
        assert_eq!(file.addresses.len(), 2);
        let rules = file.rules.unwrap();
        let udp = rules
            .ports
            .iter()
            .find(|port| port.transport == Transport::Udp)
            .unwrap();
        assert_eq!(udp.port, 53);
        assert_eq!(
            (&udp.rules[0].servers, &udp.rules[0].names),
            (&Servers::Any, &NameRules::All)
        );
        let Servers::Prefixes(prefixes) = &udp.rules[1].servers else {
            panic!("no prefixes")
        };
        assert_eq!(prefixes.len(), 2);
        assert!(matches!(&udp.rules[1].names, NameRules::Names(names) if names.len() == 1));
        let tcp = rules
            .ports
            .iter()
            .find(|port| port.transport == Transport::Tcp)
            .unwrap();
        assert!(
            tcp.rules.is_empty(),
            "servers of another cluster are not any server"
        );
    }

    fn ours(version: u64, boot_id: &str, name: &str) -> String {
        format!(
            r#"{{"ID": 7, "IPv4": "10.0.0.7", "IfIndex": 12, "SecLabel": {{"id": 300}},
            "DNSRulesV2": {{"17891381": [{{"Re": "(?:)", "IPs": null}}]}},
            "HoldfastDNSRules": {{"version": {version}, "boot_id": "{boot_id}", "start": 3, "revision": 9,
              "ports": [{{"port": 53, "protocol": 17, "rules": [
                {{"selector": "dns", "any_server": false, "servers": [200], "names": [{name}]}}]}}]}}}}"#
        )
    }

    #[test]
    fn rules_by_identity_are_preferred() {
        let text = ours(
            1,
            "boot",
            r#"{"match_name": "a.com"}, {"match_pattern": "*.b.com"}"#,
        );
        let rules = parse(text.as_bytes(), "boot").unwrap().rules.unwrap();
        let rule = &rules.ports[0].rules[0];
        assert_eq!(rule.servers, Servers::Identities([IdentityId(200)].into()));
        assert!(matches!(&rule.names, NameRules::Names(names) if names.len() == 2));
    }

    #[test]
    fn rules_by_identity_of_another_boot_do_not_count() {
        let text = ours(1, "earlier", "");
        let rules = parse(text.as_bytes(), "boot").unwrap().rules.unwrap();
        assert_eq!(rules.ports[0].rules[0].servers, Servers::Any);
    }

    #[test]
    fn a_newer_version_is_refused_by_name() {
        let error = parse(ours(2, "boot", "").as_bytes(), "boot").unwrap_err();
        assert!(error.to_string().contains("version 2"), "{error}");
    }

    #[test]
    fn damage_is_named() {
        let error = |text: &str| parse(text.as_bytes(), "boot").unwrap_err().to_string();
        assert!(error("{").contains("damaged"));
        assert!(error(r#"{"ID": 7, "IPv4": "10.0.0"}"#).contains("IPv4"));
        assert!(error(r#"{"ID": 7, "DNSRulesV2": {"53": []}}"#).contains("DNSRulesV2"));
        let both = ours(1, "boot", r#"{"match_name": "a", "match_pattern": "b"}"#);
        assert!(error(&both).contains("exactly one"));
    }
}
