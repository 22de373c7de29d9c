//! DNS rules as Cilium spells them: by server address and regular expression (`DNSRulesV2`).

use std::collections::BTreeMap;

use dns_policy::{
    name::Fqdn,
    rule::{EndpointRules, NameRule, NameRules, Servers},
};
use ipnet::IpNet;
use serde::Serialize;

use super::ServerAddresses;

/// `DNSRulesV2`: decimal `1 << 24 | protocol << 16 | port` → rules.
pub(super) type RulesV2 = BTreeMap<String, Vec<RuleV2>>;

/// A rule by address and regular expression.
#[derive(Serialize)]
pub(super) struct RuleV2 {
    #[serde(rename = "Re")]
    re: String,
    #[serde(rename = "IPs")]
    ips: Option<BTreeMap<String, Empty>>,
}

/// An empty JSON object: Cilium writes a set as a map to Go's empty struct.
#[derive(Serialize)]
pub(super) struct Empty {}

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

/// The regular expression (RE2) of a rule's names, as Cilium writes it: anchored, unless it matches
/// every name. A [`NameRules::Regex`] stays unchanged.
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
