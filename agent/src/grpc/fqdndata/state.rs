//! The whole state as one message.

use std::collections::{BTreeMap, BTreeSet};

use agent_core::core::{Directory, state::location::RuleKey};
use dns_policy::{
    boot_time::BootTime,
    mapping::address_bytes,
    rule::{NameRules, SelectorRule, Servers},
};
use fqdn_proto::fqdndata::{
    DnsPolicy, DnsServer, EndpointInfo, IdentityToEndpointMapping, IdentityToPrefixMapping,
    PolicyState,
};
use ipnet::IpNet;
use shared_maps::IdentityId;

use super::sent_rules::{At, SentRules};
use crate::proxies::RulesTable;

/// A pattern that matches no name.
const NOTHING: &str = ".";
/// The reserved identities. A rule that allows every server lists all of them.
const RESERVED: std::ops::RangeInclusive<u32> = IdentityId::HOST.0..=IdentityId::WORLD_IPV6.0;

/// Whether two states are equal apart from their request ids.
pub(super) fn same(one: &PolicyState, other: &PolicyState) -> bool {
    one.egress_l7_dns_policy == other.egress_l7_dns_policy
        && one.identity_to_endpoint_mapping == other.identity_to_endpoint_mapping
        && one.identity_to_prefix_mapping == other.identity_to_prefix_mapping
}

/// Builds the message. For each rule in `sent_rules` that is not in force any more, the message has
/// a rule that matches nothing.
pub(super) fn build(
    table: &RulesTable,
    directory: &Directory,
    sent_rules: &mut SentRules,
    now: BootTime,
) -> PolicyState {
    let every: Vec<u32> = RESERVED
        .chain(directory.identities.iter().map(|id| id.0))
        .collect();
    let mut policies = Vec::new();
    let mut current = BTreeSet::new();
    for (endpoint, rules) in &table.endpoints {
        for port in &rules.ports {
            let key = (*endpoint, port.port, port.transport);
            current.insert(key);
            if port.rules.is_empty() {
                policies.push(nothing(key));
            }
            policies.extend(port.rules.iter().map(|rule| policy(key, rule, &every)));
        }
    }
    policies.extend(
        sent_rules
            .rules(now, &current, directory)
            .into_iter()
            .map(nothing),
    );
    PolicyState {
        egress_l7_dns_policy: policies,
        request_id: String::new(),
        identity_to_endpoint_mapping: endpoints(&sent_rules.addresses(now, directory)),
        identity_to_prefix_mapping: prefixes(&directory.prefixes),
    }
}

/// Omits the prefixes that change no decision: every rule treats such a prefix like the longest remaining prefix
/// that contains it. Usually some dozens remain, however many addresses the node has learned; docs/src/grpc.md
/// describes the exception. Also omits servers of identities that no remaining prefix has.
pub(super) fn shrink(state: &mut PolicyState, directory: &Directory) {
    let mut named_by: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (n, policy) in state.egress_l7_dns_policy.iter().enumerate() {
        for server in &policy.dns_servers {
            let rules = named_by.entry(server.dns_server_identity).or_default();
            if rules.last() != Some(&n) {
                rules.push(n);
            }
        }
    }
    let nobody = Vec::new();
    let mut all = directory.prefixes.clone();
    all.sort_unstable_by_key(|(prefix, _)| (prefix.network(), prefix.prefix_len()));
    let mut above: Vec<(IpNet, &Vec<usize>)> = Vec::new();
    let mut kept = Vec::new();
    for (prefix, identity) in all {
        while above.pop_if(|(top, _)| !top.contains(&prefix)).is_some() {}
        let rules = named_by.get(&identity.0).unwrap_or(&nobody);
        if above
            .last()
            .is_none_or(|(_, inherited)| *inherited != rules)
        {
            above.push((prefix, rules));
            kept.push((prefix, identity));
        }
    }
    state.identity_to_prefix_mapping = prefixes(&kept);
    let listed: BTreeSet<u32> = kept.iter().map(|(_, id)| id.0).chain(RESERVED).collect();
    for policy in &mut state.egress_l7_dns_policy {
        let first = policy.dns_servers.first().cloned();
        policy
            .dns_servers
            .retain(|server| listed.contains(&server.dns_server_identity));
        if let Some(first) = first.filter(|_| policy.dns_servers.is_empty()) {
            // The client would ignore a rule without a server, and keep the former rule.
            policy.dns_servers.push(DnsServer {
                dns_server_identity: 0,
                ..first
            });
        }
    }
}

fn policy(key: RuleKey, rule: &SelectorRule, every: &[u32]) -> DnsPolicy {
    let dns_pattern = match &rule.names {
        NameRules::All => Vec::new(),
        NameRules::Names(names) => {
            let patterns = names.iter().map(|name| name.text().to_owned());
            let mut patterns: Vec<String> = patterns.collect();
            if patterns.is_empty() {
                patterns.push(NOTHING.to_owned());
            }
            patterns
        }
        // Only rules that are read from files have regular expressions.
        NameRules::Regex(_) => vec![NOTHING.to_owned()],
    };
    let identities: Vec<u32> = match &rule.servers {
        Servers::Any => every.to_vec(),
        Servers::Identities(set) if !set.is_empty() => set.iter().map(|id| id.0).collect(),
        Servers::Identities(_) | Servers::Prefixes(_) => vec![0],
    };
    DnsPolicy {
        source_endpoint_id: key.0.0.into(),
        dns_pattern,
        dns_servers: identities
            .into_iter()
            .map(|identity| server(key, identity))
            .collect(),
    }
}

fn nothing(key: RuleKey) -> DnsPolicy {
    DnsPolicy {
        source_endpoint_id: key.0.0.into(),
        dns_pattern: vec![NOTHING.to_owned()],
        dns_servers: vec![server(key, 0)],
    }
}

fn server((_, port, transport): RuleKey, identity: u32) -> DnsServer {
    DnsServer {
        dns_server_identity: identity,
        dns_server_port: port.into(),
        dns_server_proto: transport.number().into(),
    }
}

/// One entry per address: the client finds no endpoint by the second address of an entry.
fn endpoints(addresses: &[At]) -> Vec<IdentityToEndpointMapping> {
    let mut by_identity: BTreeMap<u32, Vec<EndpointInfo>> = BTreeMap::new();
    for (address, endpoint, identity) in addresses {
        let infos = by_identity.entry(identity.0).or_default();
        infos.push(EndpointInfo {
            id: endpoint.0.into(),
            ip: vec![address_bytes(*address)],
        });
    }
    by_identity
        .into_iter()
        .map(|(identity, endpoint_info)| IdentityToEndpointMapping {
            identity,
            endpoint_info,
        })
        .collect()
}

fn prefixes(prefixes: &[(IpNet, IdentityId)]) -> Vec<IdentityToPrefixMapping> {
    let mut by_identity: BTreeMap<u32, Vec<Vec<u8>>> = BTreeMap::new();
    for (prefix, identity) in prefixes {
        let mut bytes = address_bytes(prefix.network());
        bytes.push(prefix.prefix_len());
        by_identity.entry(identity.0).or_default().push(bytes);
    }
    by_identity
        .into_iter()
        .map(|(identity, prefix)| IdentityToPrefixMapping { identity, prefix })
        .collect()
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
