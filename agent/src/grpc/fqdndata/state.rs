//! The whole state as one message.

use std::collections::{BTreeMap, BTreeSet};

use fqdn_proto::fqdndata::{
    DnsPolicy, DnsServer, EndpointInfo, IdentityToEndpointMapping, IdentityToPrefixMapping,
    PolicyState,
};
use holdfast_sdp::policy::rule::{NameRule, NameRules, SelectorRule, Servers, Transport};
use shared_maps::{EndpointId, IdentityId};

use crate::{core::Directory, grpc::convert, proxies::RulesTable};

/// A name that nothing matches.
const NOTHING: &str = ".";
/// Reserved identities: a rule for any server names them all.
const RESERVED: std::ops::RangeInclusive<u32> = IdentityId::HOST.0..=IdentityId::WORLD_IPV6.0;

/// What the client keys its rules by.
pub(super) type RuleKey = (EndpointId, u16, Transport);

/// Whether two states say the same, whatever their request ids.
pub(super) fn same(one: &PolicyState, other: &PolicyState) -> bool {
    one.egress_l7_dns_policy == other.egress_l7_dns_policy
        && one.identity_to_endpoint_mapping == other.identity_to_endpoint_mapping
        && one.identity_to_prefix_mapping == other.identity_to_prefix_mapping
}

/// Builds the message. `known`: keys this client was given before; those
/// without rules now get one that nothing matches.
pub(super) fn build(
    table: &RulesTable,
    directory: &Directory,
    known: &mut BTreeSet<RuleKey>,
) -> PolicyState {
    let every: Vec<u32> = RESERVED
        .chain(directory.identities.iter().map(|id| id.0))
        .collect();
    let mut policies = Vec::new();
    let mut now = BTreeSet::new();
    for (endpoint, rules) in &table.endpoints {
        for port in &rules.ports {
            let key = (*endpoint, port.port, port.transport);
            now.insert(key);
            if port.rules.is_empty() {
                policies.push(nothing(key));
            }
            policies.extend(port.rules.iter().map(|rule| policy(key, rule, &every)));
        }
    }
    policies.extend(known.difference(&now).map(|key| nothing(*key)));
    known.extend(now);
    PolicyState {
        egress_l7_dns_policy: policies,
        request_id: String::new(),
        identity_to_endpoint_mapping: endpoints(directory),
        identity_to_prefix_mapping: prefixes(directory),
    }
}

fn policy(key: RuleKey, rule: &SelectorRule, every: &[u32]) -> DnsPolicy {
    let dns_pattern = match &rule.names {
        NameRules::All => Vec::new(),
        NameRules::Names(names) => {
            let mut patterns: Vec<String> = names
                .iter()
                .map(|name| match name {
                    NameRule::Name(text) | NameRule::Pattern(text) => text.clone(),
                })
                .collect();
            if patterns.is_empty() {
                patterns.push(NOTHING.to_owned());
            }
            patterns
        }
        // Rules in force are never of files.
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
fn endpoints(directory: &Directory) -> Vec<IdentityToEndpointMapping> {
    let mut by_identity: BTreeMap<u32, Vec<EndpointInfo>> = BTreeMap::new();
    for place in &directory.places {
        let infos = by_identity.entry(place.identity.0).or_default();
        infos.extend(place.addresses.iter().map(|ip| EndpointInfo {
            id: place.id.0.into(),
            ip: vec![convert::octets(*ip)],
        }));
    }
    by_identity
        .into_iter()
        .map(|(identity, endpoint_info)| IdentityToEndpointMapping {
            identity,
            endpoint_info,
        })
        .collect()
}

fn prefixes(directory: &Directory) -> Vec<IdentityToPrefixMapping> {
    let mut by_identity: BTreeMap<u32, Vec<Vec<u8>>> = BTreeMap::new();
    for (prefix, identity) in &directory.prefixes {
        let mut bytes = convert::octets(prefix.network());
        bytes.push(prefix.prefix_len());
        by_identity.entry(identity.0).or_default().push(bytes);
    }
    by_identity
        .into_iter()
        .map(|(identity, prefix)| IdentityToPrefixMapping { identity, prefix })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use holdfast_sdp::policy::rule::{EndpointRules, PortRules};

    use super::*;
    use crate::core::Place;

    fn table(servers: Servers, names: NameRules) -> RulesTable {
        let rules = EndpointRules {
            ports: vec![PortRules {
                port: 53,
                transport: Transport::Udp,
                rules: vec![SelectorRule {
                    selector: "s".to_owned(),
                    servers,
                    names,
                }],
            }],
        };
        RulesTable {
            revision: 1,
            ready: true,
            endpoints: [(EndpointId(7), Arc::new(rules))].into(),
        }
    }

    fn directory() -> Directory {
        Directory {
            places: vec![Place {
                id: EndpointId(7),
                identity: IdentityId(256),
                ifindex: 3,
                addresses: vec!["10.0.0.2".parse().unwrap(), "fd00::2".parse().unwrap()],
            }],
            identities: vec![IdentityId(256)],
            prefixes: vec![("10.0.0.2/32".parse().unwrap(), IdentityId(256))],
        }
    }

    #[test]
    fn any_server_names_every_identity() {
        let state = build(
            &table(Servers::Any, NameRules::All),
            &directory(),
            &mut BTreeSet::new(),
        );
        let policy = &state.egress_l7_dns_policy[0];
        let identities: Vec<u32> = policy
            .dns_servers
            .iter()
            .map(|server| server.dns_server_identity)
            .collect();
        assert_eq!(identities, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 256]);
        assert!(policy.dns_pattern.is_empty());
    }

    #[test]
    fn each_address_has_an_entry_of_its_own() {
        let state = build(&RulesTable::default(), &directory(), &mut BTreeSet::new());
        let infos = &state.identity_to_endpoint_mapping[0].endpoint_info;
        assert_eq!(infos.len(), 2);
        assert!(infos.iter().all(|info| info.id == 7 && info.ip.len() == 1));
        assert_eq!(
            state.identity_to_prefix_mapping[0].prefix,
            [vec![10, 0, 0, 2, 32]]
        );
    }

    #[test]
    fn rules_that_vanish_are_revoked_by_name() {
        let mut known = BTreeSet::new();
        build(
            &table(Servers::Any, NameRules::All),
            &directory(),
            &mut known,
        );
        let state = build(&RulesTable::default(), &directory(), &mut known);
        let [policy] = state.egress_l7_dns_policy.as_slice() else {
            panic!("{state:?}");
        };
        assert_eq!(policy.dns_pattern, ["."]);
        assert_eq!(policy.dns_servers[0].dns_server_identity, 0);
        assert_eq!(policy.dns_servers[0].dns_server_port, 53);
    }

    #[test]
    fn no_names_is_not_every_name() {
        let rules = table(Servers::Any, NameRules::Names(Vec::new()));
        let state = build(&rules, &directory(), &mut BTreeSet::new());
        assert_eq!(state.egress_l7_dns_policy[0].dns_pattern, ["."]);
    }
}
