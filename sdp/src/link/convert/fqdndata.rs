//! Messages of the FQDNData service ↔ our own types. The service's encoding: addresses of mappings
//! are text in byte fields, addresses of endpoints are raw, prefixes are raw with a trailing length
//! byte. The rules of one endpoint come in several rows.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use dns_policy::{
    boot_time::BootTime,
    mapping::{self, Mapping},
    pattern,
    rule::{
        EndpointRules, NameRule, NameRules, PortRules, RulesOf, SelectorRule, Servers, Transport,
    },
};
use fqdn_proto::fqdndata as wire;
use ipnet::IpNet;
use shared_maps::{EndpointId, IdentityId};

use crate::{
    maps::AgentTables,
    query_report::{Event, Failure, QueryReport, Times},
    rules_journal::MOST_PREFIXES,
};

/// Time for which a repeated mapping counts if its TTL ran out while there was no agent, seconds.
const EXPIRED_REPLAY_SECS: u64 = 30;
const TYPE_A: u32 = 1;
const TYPE_AAAA: u32 = 28;

/// A `PolicyState` as we use it.
#[derive(Debug, Default)]
pub(in crate::link) struct State {
    pub(in crate::link) rules: Vec<RulesOf>,
    pub(in crate::link) tables: AgentTables,
    /// Parts that could not be used. They allow nothing.
    pub(in crate::link) odd: Vec<String>,
    /// Number of servers in rows that are skipped because of their transport. SCTP is part of `protocol: ANY`.
    pub(in crate::link) skipped: u64,
}

type RulesByPort = BTreeMap<(u16, Transport), Vec<SelectorRule>>;

pub(in crate::link) fn state(from: wire::PolicyState) -> State {
    let mut state = State::default();
    let mut endpoints: BTreeMap<EndpointId, RulesByPort> = BTreeMap::new();
    for row in from.egress_l7_dns_policy {
        let Ok(id) = u16::try_from(row.source_endpoint_id) else {
            state.odd.push(format!(
                "endpoint {} is out of range",
                row.source_endpoint_id
            ));
            continue;
        };
        // An endpoint that is named has rules, even if they allow nothing.
        let ports = endpoints.entry(EndpointId(id)).or_default();
        let names = names(&row.dns_pattern, id, &mut state.odd);
        for (at, servers) in servers(&row.dns_servers, id, &mut state) {
            let rule = SelectorRule {
                selector: "FQDNData".to_owned(),
                servers: Servers::Identities(servers),
                names: names.clone(),
            };
            // A row comes once for each address of the endpoint.
            let rules = ports.entry(at).or_default();
            if !rules.contains(&rule) {
                rules.push(rule);
            }
        }
    }
    state.rules = endpoints.into_iter().map(rules_of).collect();
    for row in from.identity_to_endpoint_mapping {
        for info in row.endpoint_info {
            let Ok(id) = u16::try_from(info.id) else {
                continue;
            };
            for ip in info.ip.iter().filter_map(|bytes| mapping::address(bytes)) {
                state
                    .tables
                    .add_endpoint(ip, EndpointId(id), IdentityId(row.identity));
            }
        }
    }
    for row in from.identity_to_prefix_mapping {
        for prefix in row.prefix.iter().filter_map(|bytes| prefix(bytes)) {
            state.tables.add_prefix(prefix, IdentityId(row.identity));
        }
    }
    state
}

fn rules_of((endpoint, ports): (EndpointId, RulesByPort)) -> RulesOf {
    let ports = ports.into_iter();
    let ports = ports.map(|((port, transport), rules)| PortRules {
        port,
        transport,
        rules,
    });
    RulesOf {
        endpoint,
        rules: EndpointRules {
            ports: ports.collect(),
        },
    }
}

impl State {
    /// Prefixes of the servers that the rules name, up to the number that is kept for a start
    /// without an agent.
    pub(in crate::link) fn servers(&self) -> BTreeMap<IpNet, IdentityId> {
        let selectors = self.rules.iter().flat_map(|of| &of.rules.ports);
        let mut named = BTreeSet::new();
        for rule in selectors.flat_map(|port| &port.rules) {
            if let Servers::Identities(servers) = &rule.servers {
                named.extend(servers.iter().copied());
            }
        }
        let of_servers = self
            .tables
            .prefixes()
            .filter(|(_, identity)| named.contains(identity));
        of_servers.take(MOST_PREFIXES).collect()
    }
}

fn names(patterns: &[String], endpoint: u16, odd: &mut Vec<String>) -> NameRules {
    if patterns.is_empty() {
        return NameRules::All;
    }
    let mut names = Vec::with_capacity(patterns.len());
    for text in patterns {
        let rule = NameRule::Pattern(text.clone());
        match pattern::validate_rule(&rule) {
            Ok(()) => names.push(rule),
            Err(error) => odd.push(format!("endpoint {endpoint}: {error}")),
        }
    }
    NameRules::Names(names)
}

fn servers(
    servers: &[wire::DnsServer],
    endpoint: u16,
    state: &mut State,
) -> BTreeMap<(u16, Transport), BTreeSet<IdentityId>> {
    let mut by_port: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    for server in servers {
        let port = u16::try_from(server.dns_server_port)
            .ok()
            .filter(|port| *port != 0);
        let protocol = u8::try_from(server.dns_server_proto).ok();
        let transport = protocol.and_then(Transport::from_number);
        if port.is_some() && protocol.is_some() && transport.is_none() {
            state.skipped += 1;
            continue;
        }
        let (Some(port), Some(transport)) = (port, transport) else {
            state.odd.push(format!(
                "endpoint {endpoint}: port {}, protocol {} (named ports are not conveyed)",
                server.dns_server_port, server.dns_server_proto
            ));
            continue;
        };
        let identities = by_port.entry((port, transport)).or_default();
        // 0 stands for "nothing is selected now".
        if server.dns_server_identity != 0 {
            identities.insert(IdentityId(server.dns_server_identity));
        }
    }
    by_port
}

fn prefix(bytes: &[u8]) -> Option<IpNet> {
    let (len, address) = bytes.split_last()?;
    IpNet::new(mapping::address(address)?, *len).ok()
}

pub(in crate::link) fn ack(request_id: String) -> wire::PolicyStateResponse {
    wire::PolicyStateResponse {
        response: wire::ResponseCode::NoError.into(),
        request_id,
    }
}

/// A mapping in the form that the agent's cache takes: a response with the rest of its TTL.
pub(in crate::link) fn mapping_out(
    mapping: &Mapping,
    client: IdentityId,
    server: IdentityId,
    now: BootTime,
) -> wire::FqdnMapping {
    let mut types: Vec<u32> = mapping
        .addresses
        .iter()
        .map(|ip| if ip.is_ipv4() { TYPE_A } else { TYPE_AAAA })
        .collect();
    types.dedup();
    wire::FqdnMapping {
        fqdn: mapping.name.as_str().to_owned(),
        record_ip: mapping.addresses.iter().map(text).collect(),
        ttl: ttl_left(mapping, now),
        source_identity: client.0,
        source_ip: text(&mapping.endpoint.client),
        response_code: mapping.rcode.into(),
        metrics_data: Some(wire::MetricsData {
            dns_response_data: Some(wire::DnsResponseData {
                is_response: true,
                cnames: Vec::new(),
                qtypes: types.first().copied().into_iter().collect(),
                answer_types: types,
            }),
            server_addr: mapping.server.to_string(),
            server_identity: server.0,
            protocol: mapping.transport.as_str().to_owned(),
            allowed: true,
            ..wire::MetricsData::default()
        }),
    }
}

/// A report in the form that the agent counts and logs. The agent learns only from a response with
/// addresses.
pub(in crate::link) fn report_out(report: &QueryReport) -> wire::FqdnMapping {
    let (failure, content) = match &report.event {
        Event::Query => (None, None),
        Event::Failed(failure) => (Some(*failure), None),
        Event::Answer(content) => (None, Some(content)),
    };
    let error = match failure {
        None => wire::ProxyErrorType::None,
        Some(Failure::Timeout) => wire::ProxyErrorType::Timeout,
        Some(Failure::Overload) => wire::ProxyErrorType::SemaphoreFailed,
        Some(Failure::Unreachable | Failure::Undecodable) => wire::ProxyErrorType::Proxy,
    };
    let types = content.map(|content| content.types.iter().copied().map(u32::from));
    wire::FqdnMapping {
        fqdn: report.name.as_str().to_owned(),
        record_ip: content.map_or_else(Vec::new, |c| c.addresses.iter().map(text).collect()),
        ttl: content.map_or(0, |content| content.ttl),
        source_identity: report.identity.0,
        source_ip: text(&report.client.ip()),
        response_code: content.map_or(0, |content| content.rcode.into()),
        metrics_data: Some(wire::MetricsData {
            processing_stats: Some(stats(&report.times)),
            dns_response_data: Some(wire::DnsResponseData {
                is_response: content.is_some(),
                cnames: content.map_or_else(Vec::new, |content| content.cnames.clone()),
                qtypes: vec![report.qtype.into()],
                answer_types: types.map_or_else(Vec::new, Iterator::collect),
            }),
            source_port: report.client.port().into(),
            server_addr: report.server.to_string(),
            server_identity: report.server_identity.0,
            protocol: report.transport.as_str().to_owned(),
            allowed: report.allowed,
            error_message: failure.map_or_else(String::new, |failure| failure.to_string()),
            error_type: error.into(),
        }),
    }
}

/// Durations in the agent's form. The time for which a query waits for a place in flight is not
/// measured.
fn stats(times: &Times) -> wire::ProcessingStats {
    let nanos = |span: Duration| i64::try_from(span.as_nanos()).unwrap_or(i64::MAX);
    wire::ProcessingStats {
        total: nanos(times.processing + times.upstream),
        processing: nanos(times.processing),
        upstream: nanos(times.upstream),
        semaphore_acquire: 0,
        policy_check: nanos(times.policy_check),
    }
}

fn text(ip: &IpAddr) -> Vec<u8> {
    ip.to_string().into_bytes()
}

fn ttl_left(mapping: &Mapping, now: BootTime) -> u32 {
    if !mapping.replayed {
        return mapping.ttl;
    }
    let passed = now.nanos().saturating_sub(mapping.seen_at.nanos()) / 1_000_000_000;
    let left = u64::from(mapping.ttl).saturating_sub(passed);
    let left = if left == 0 { EXPIRED_REPLAY_SECS } else { left };
    u32::try_from(left).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        mapping::pairs::tests::mapping,
        maps::PinnedMaps,
        query_report::Content,
        resolve::{QueryClient, Resolver},
    };

    fn server(identity: u32, port: u32, proto: u32) -> wire::DnsServer {
        wire::DnsServer {
            dns_server_identity: identity,
            dns_server_port: port,
            dns_server_proto: proto,
        }
    }

    #[test]
    fn rows_of_one_endpoint_add_up() {
        let row = |patterns: &[&str], servers: &[wire::DnsServer]| wire::DnsPolicy {
            source_endpoint_id: 7,
            dns_pattern: patterns.iter().map(|p| (*p).to_owned()).collect(),
            dns_servers: servers.to_vec(),
        };
        let state = state(wire::PolicyState {
            egress_l7_dns_policy: vec![
                row(
                    &["*.a.com", "b{1}"],
                    &[server(300, 53, 17), server(301, 53, 17)],
                ),
                row(
                    &[],
                    &[server(0, 53, 17), server(302, 53, 6), server(302, 0, 6)],
                ),
            ],
            ..wire::PolicyState::default()
        });
        assert_eq!(state.rules.len(), 1);
        let ports = &state.rules[0].rules.ports;
        let udp = ports
            .iter()
            .find(|port| port.transport == Transport::Udp)
            .unwrap();
        assert_eq!(udp.rules.len(), 2);
        assert_eq!(
            udp.rules[0].servers,
            Servers::Identities([IdentityId(300), IdentityId(301)].into())
        );
        assert_eq!(
            udp.rules[0].names,
            NameRules::Names(vec![NameRule::Pattern("*.a.com".into())])
        );
        assert_eq!(
            udp.rules[1].servers,
            Servers::Identities([].into()),
            "0 selects nothing"
        );
        assert_eq!(state.odd.len(), 2, "{:?}", state.odd);
    }

    #[test]
    fn tables_are_read_from_raw_bytes() {
        let state = state(wire::PolicyState {
            identity_to_endpoint_mapping: vec![wire::IdentityToEndpointMapping {
                identity: 400,
                endpoint_info: vec![wire::EndpointInfo {
                    id: 7,
                    ip: vec![vec![10, 0, 0, 7]],
                }],
            }],
            identity_to_prefix_mapping: vec![wire::IdentityToPrefixMapping {
                identity: 500,
                prefix: vec![vec![10, 1, 2, 3, 16], vec![1, 2, 3]],
            }],
            ..wire::PolicyState::default()
        });
        let dir = tempfile::tempdir().unwrap();
        let maps = PinnedMaps::open(dir.path(), true);
        maps.set_agent_tables(state.tables);
        assert!(matches!(
            maps.client(IpAddr::from([10, 0, 0, 7])),
            QueryClient::Endpoint {
                id: EndpointId(7),
                identity: IdentityId(400),
                ..
            }
        ));
        assert_eq!(maps.server(IpAddr::from([10, 1, 9, 9])), IdentityId(500));
    }

    #[test]
    fn a_mapping_contains_all_that_the_agent_needs() {
        let out = mapping_out(
            &mapping("a.com", &[1], 60, 0),
            IdentityId(400),
            IdentityId(500),
            BootTime::START.plus_secs(50),
        );
        assert_eq!((out.ttl, out.fqdn.as_str()), (60, "a.com."));
        assert_eq!(
            (out.record_ip, out.source_ip),
            (vec![b"192.0.2.1".to_vec()], b"10.0.0.1".to_vec())
        );
        let metrics = out.metrics_data.unwrap();
        assert!(metrics.allowed && metrics.dns_response_data.unwrap().is_response);
        assert_eq!(metrics.server_addr, "10.0.0.53:53");
    }

    #[test]
    fn a_notice_fills_every_field() {
        let report = |event| report_out(&crate::query_report::tests::report(event));
        let query = report(Event::Query);
        let metrics = query.metrics_data.unwrap();
        let details = metrics.dns_response_data.unwrap();
        assert!(!details.is_response && metrics.allowed);
        assert_eq!(details.qtypes, [1]);
        assert_eq!(
            (query.source_identity, &query.source_ip[..]),
            (400, &b"10.0.0.7"[..])
        );
        assert_eq!((metrics.source_port, metrics.server_identity), (4711, 500));
        assert_eq!(
            (metrics.server_addr.as_str(), metrics.protocol.as_str()),
            ("10.0.0.53:53", "tcp")
        );
        assert_eq!(metrics.error_message, "");

        let failed = report(Event::Failed(Failure::Timeout));
        let metrics = failed.metrics_data.unwrap();
        assert_eq!(metrics.error_type(), wire::ProxyErrorType::Timeout);
        assert!(!metrics.error_message.is_empty());

        let answer = report(Event::Answer(Content {
            rcode: 0,
            addresses: vec![IpAddr::from([192, 0, 2, 1])],
            ttl: 30,
            cnames: vec!["b.com.".into()],
            types: vec![5, 1],
        }));
        assert_eq!((answer.ttl, answer.record_ip.len()), (30, 1));
        let metrics = answer.metrics_data.unwrap();
        let stats = metrics.processing_stats.unwrap();
        assert_eq!(
            (
                stats.total,
                stats.processing,
                stats.upstream,
                stats.policy_check
            ),
            (43, 3, 40, 2)
        );
        let details = metrics.dns_response_data.unwrap();
        assert!(details.is_response);
        assert_eq!(
            (details.cnames, details.answer_types),
            (vec!["b.com.".into()], vec![5, 1])
        );
    }

    #[test]
    fn a_replay_has_the_remaining_ttl() {
        let replay = Mapping {
            replayed: true,
            ..mapping("a.com", &[1], 60, 0)
        };
        assert_eq!(ttl_left(&replay, BootTime::START.plus_secs(50)), 10);
        assert_eq!(ttl_left(&replay, BootTime::START.plus_secs(600)), 30);
    }
}
