//! `DNSRulesV2` of Cilium's files: rules by the addresses of servers.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;
use serde::Deserialize;

use crate::{
    pattern::restored,
    rule::{EndpointRules, PortRules, SelectorRule, Servers, Transport},
};

/// Rows that were passed over.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SkippedRows {
    /// Entries of another transport: `protocol: ANY` includes SCTP.
    pub other_transport: u64,
    /// Errors in the other entries.
    pub odd: Vec<String>,
}

impl SkippedRows {
    /// Number of rows that were passed over.
    pub fn count(&self) -> u64 {
        self.other_transport
            .saturating_add(u64::try_from(self.odd.len()).unwrap_or(u64::MAX))
    }
}

#[derive(Deserialize)]
struct RawRegex {
    #[serde(rename = "Re")]
    expression: Option<String>,
    #[serde(rename = "IPs", default)]
    servers: Option<BTreeMap<String, serde_json::Value>>,
}

/// The rules of each port and protocol. Only a malformed row is ignored: a missing row can only deny.
pub fn by_address(
    by_port: BTreeMap<String, serde_json::Value>,
    skipped: &mut SkippedRows,
) -> EndpointRules {
    let mut ports = Vec::with_capacity(by_port.len());
    for (key, rows) in by_port {
        let (port, protocol) = match port_proto(&key) {
            Some(found) => found,
            None => {
                skipped.odd.push(format!("DNSRulesV2 has the key {key:?}"));
                continue;
            }
        };
        let Some(transport) = Transport::from_number(protocol) else {
            skipped.other_transport += 1;
            continue;
        };
        let rows = match rows {
            serde_json::Value::Array(rows) => rows,
            serde_json::Value::Null => Vec::new(),
            other => vec![other],
        };
        let mut rules = Vec::with_capacity(rows.len());
        for row in rows {
            match rule_by_address(row) {
                Ok(rule) => rules.extend(rule),
                Err(error) => skipped.odd.push(format!("DNSRulesV2 {key}: {error}")),
            }
        }
        ports.push(PortRules {
            port,
            transport,
            rules,
        });
    }
    EndpointRules { ports }
}

/// The rule of a row. `None` if it is only about servers of other clusters.
fn rule_by_address(row: serde_json::Value) -> Result<Option<SelectorRule>, String> {
    let raw: RawRegex = serde_json::from_value(row).map_err(|error| error.to_string())?;
    Ok(servers(raw.servers.as_ref())?.map(|servers| SelectorRule {
        selector: "restored".to_owned(),
        servers,
        names: restored::names_of(raw.expression.as_deref().unwrap_or("(?:)")),
    }))
}

/// Unpacks `1<<24 | protocol<<16 | port`.
fn port_proto(key: &str) -> Option<(u16, u8)> {
    let [version, protocol, high, low] = key.parse::<u32>().ok()?.to_be_bytes();
    (version == 1).then(|| (u16::from_be_bytes([high, low]), protocol))
}

/// The servers of a row. `None` if it is only about servers of other clusters.
fn servers(raw: Option<&BTreeMap<String, serde_json::Value>>) -> Result<Option<Servers>, String> {
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
            .map_err(|_| format!("{text:?} is neither an address nor a prefix"))?;
        prefixes.insert(prefix);
    }
    Ok((!prefixes.is_empty()).then(|| Servers::Prefixes(prefixes.into_iter().collect())))
}
