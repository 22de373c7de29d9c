//! DNS rules in an endpoint's `ep_config.json`: ours by server identity and name
//! (`HoldfastDNSRules`), Cilium's by server address and regular expression (`DNSRulesV2`).

pub mod by_address;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use shared_maps::IdentityId;

use crate::rule::{
    EndpointRules, NameRule, NameRules, PortRules, SelectorRule, Servers, Transport,
};

/// Newest version of [`StoredRules`] that is understood, and the one that is written.
pub const VERSION: u64 = 1;

/// A port has rules for this IP protocol, which is neither UDP nor TCP.
#[derive(Debug, thiserror::Error)]
#[error("field HoldfastDNSRules.ports.protocol: `{0}` cannot be read")]
pub struct UnknownProtocol(u8);

/// Rules under the key `HoldfastDNSRules`.
#[derive(Debug, Serialize, Deserialize)]
pub struct StoredRules {
    /// Version of the format.
    pub version: u64,
    /// Boot id of the machine when the rules were written.
    pub boot_id: String,
    /// Start count of the agent that wrote them.
    #[serde(default)]
    pub start: u64,
    /// Revision of the policy when the rules were written.
    #[serde(default)]
    pub revision: u64,
    #[serde(default)]
    ports: Vec<StoredPort>,
}

#[derive(Debug, Serialize, Deserialize)]
struct StoredPort {
    port: u16,
    protocol: u8,
    #[serde(default)]
    rules: Vec<StoredRule>,
}

#[derive(Debug, Serialize, Deserialize)]
struct StoredRule {
    #[serde(default)]
    selector: String,
    #[serde(default)]
    any_server: bool,
    #[serde(default)]
    servers: BTreeSet<u32>,
    /// An empty list allows every name.
    #[serde(default)]
    names: Vec<NameRule>,
}

impl StoredRules {
    /// Rules as the agent writes them in its run `start` since the boot `boot_id`.
    pub fn new(rules: &EndpointRules, boot_id: &str, start: u64, revision: u64) -> Self {
        let ports = rules.ports.iter().map(|port| StoredPort {
            port: port.port,
            protocol: port.transport.number(),
            rules: port.rules.iter().filter_map(stored_rule).collect(),
        });
        Self {
            version: VERSION,
            boot_id: boot_id.to_owned(),
            start,
            revision,
            ports: ports.collect(),
        }
    }

    /// The rules. Their names are not checked.
    ///
    /// # Errors
    /// A port is of another protocol than UDP and TCP.
    pub fn into_rules(self) -> Result<EndpointRules, UnknownProtocol> {
        let port = |port: StoredPort| {
            let transport = Transport::from_number(port.protocol);
            Ok(PortRules {
                port: port.port,
                transport: transport.ok_or(UnknownProtocol(port.protocol))?,
                rules: port.rules.into_iter().map(selector_rule).collect(),
            })
        };
        let ports = self.ports.into_iter().map(port);
        let ports = ports.collect::<Result<Vec<_>, UnknownProtocol>>()?;
        Ok(EndpointRules { ports })
    }
}

/// Rules by prefix or regular expression come only from files, and are not written again.
fn stored_rule(rule: &SelectorRule) -> Option<StoredRule> {
    let (any_server, servers) = match &rule.servers {
        Servers::Any => (true, BTreeSet::new()),
        Servers::Identities(ids) => (false, ids.iter().map(|id| id.0).collect()),
        Servers::Prefixes(_) => return None,
    };
    let names = match &rule.names {
        NameRules::All => Vec::new(),
        NameRules::Names(list) if list.is_empty() => return None,
        NameRules::Names(list) => list.clone(),
        NameRules::Regex(_) => return None,
    };
    Some(StoredRule {
        selector: rule.selector.clone(),
        any_server,
        servers,
        names,
    })
}

fn selector_rule(rule: StoredRule) -> SelectorRule {
    SelectorRule {
        selector: rule.selector,
        servers: match rule.any_server {
            true => Servers::Any,
            false => Servers::Identities(rule.servers.into_iter().map(IdentityId).collect()),
        },
        names: match rule.names.is_empty() {
            true => NameRules::All,
            false => NameRules::Names(rule.names),
        },
    }
}
