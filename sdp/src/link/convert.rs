//! Messages of the native service ↔ our own types.

pub(super) mod fqdndata;

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use daemon::state_dir::StateDir;
use dns_policy::{
    boot_time::BootTime,
    epoch::Epoch,
    mapping::{EndpointInstance, Mapping, Refusal, address, address_bytes},
    name::Fqdn,
    pattern,
    rule::{
        EndpointRules, NameRule, NameRules, PortRules, RulesOf, SelectorRule, Servers, Transport,
    },
};
use fqdn_proto::native as wire;
use shared_maps::{EndpointId, IdentityId};

use crate::sink::{Batch, Grant, MappingResult, Outgoing, Promise};

/// Converts a state directory. Device 0 with inode 0 stands for unknown.
pub(super) fn state_dir(message: wire::StateDir) -> StateDir {
    let inode = (message.device, message.inode);
    StateDir {
        path: message.path.into(),
        inode: (inode != (0, 0)).then_some(inode),
    }
}

/// Converts a state directory into a message for the other side.
pub(super) fn to_state_dir(dir: &StateDir) -> wire::StateDir {
    let (device, inode) = dir.inode.unwrap_or_default();
    wire::StateDir {
        path: dir.path.to_string_lossy().into_owned(),
        device,
        inode,
    }
}

/// Why rules cannot be used. Their whole revision is then refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RulesError {
    /// Number of an endpoint that does not fit into 16 bits.
    #[error("endpoint {0} is out of range 0..=65535")]
    Endpoint(u32),
    /// A port that is 0 or does not fit into 16 bits.
    #[error("endpoint {endpoint}: port {port} is out of range 1..=65535")]
    Port { endpoint: u16, port: u32 },
    /// A protocol that is neither TCP nor UDP.
    #[error("endpoint {endpoint}: protocol {protocol} is neither 6 (TCP) nor 17 (UDP)")]
    Protocol { endpoint: u16, protocol: u32 },
    /// A name that has both match_name and match_pattern, or neither.
    #[error(
        "endpoint {endpoint}, selector {selector:?}: a name needs exactly one of match_name and match_pattern"
    )]
    Name { endpoint: u16, selector: String },
    /// A name or pattern that is malformed.
    #[error("endpoint {endpoint}, selector {selector:?}: {reason}")]
    Pattern {
        endpoint: u16,
        selector: String,
        reason: String,
    },
}

/// DNS rules in a state of the FQDNData service, and the state's malformed parts, which allow
/// nothing.
pub fn fqdndata_rules(state: fqdn_proto::fqdndata::PolicyState) -> (Vec<RulesOf>, Vec<String>) {
    let state = fqdndata::state(state);
    let _servers = state.servers();
    (state.rules, state.odd)
}

pub(super) fn epoch(epoch: wire::AgentEpoch) -> Epoch {
    Epoch {
        boot_id: epoch.boot_id,
        start: epoch.start,
    }
}

pub(super) fn epoch_out(epoch: &Epoch) -> wire::AgentEpoch {
    wire::AgentEpoch {
        boot_id: epoch.boot_id.clone(),
        start: epoch.start,
    }
}

/// Converts the rules of one endpoint. Fails on the first value that is out of range or malformed.
pub fn rules(from: wire::EndpointDnsRules) -> Result<RulesOf, RulesError> {
    let endpoint = endpoint_id(from.endpoint_id)?;
    let ports = from
        .ports
        .into_iter()
        .map(|port| port_rules(endpoint.0, port));
    Ok(RulesOf {
        endpoint,
        rules: EndpointRules {
            ports: ports.collect::<Result<_, _>>()?,
        },
    })
}

pub(super) fn endpoint_id(id: u32) -> Result<EndpointId, RulesError> {
    u16::try_from(id)
        .map(EndpointId)
        .map_err(|_| RulesError::Endpoint(id))
}

fn port_rules(endpoint: u16, from: wire::PortDnsRules) -> Result<PortRules, RulesError> {
    let port = u16::try_from(from.port).ok().filter(|port| *port != 0);
    let protocol = u8::try_from(from.protocol)
        .ok()
        .and_then(Transport::from_number);
    Ok(PortRules {
        port: port.ok_or(RulesError::Port {
            endpoint,
            port: from.port,
        })?,
        transport: protocol.ok_or(RulesError::Protocol {
            endpoint,
            protocol: from.protocol,
        })?,
        rules: from
            .rules
            .into_iter()
            .map(|rule| selector_rule(endpoint, rule))
            .collect::<Result<_, _>>()?,
    })
}

fn selector_rule(endpoint: u16, from: wire::DnsSelectorRule) -> Result<SelectorRule, RulesError> {
    let servers = if from.any_server {
        Servers::Any
    } else {
        let identities: BTreeSet<_> = from.server_identities.into_iter().map(IdentityId).collect();
        Servers::Identities(identities)
    };
    let mut names = Vec::with_capacity(from.names.len());
    for name in from.names {
        names.push(name_rule(endpoint, &from.selector, name)?);
    }
    let names = if names.is_empty() {
        NameRules::All
    } else {
        NameRules::Names(names)
    };
    Ok(SelectorRule {
        selector: from.selector,
        servers,
        names,
    })
}

fn name_rule(
    endpoint: u16,
    selector: &str,
    from: wire::FqdnSelector,
) -> Result<NameRule, RulesError> {
    let rule = match (from.match_name.is_empty(), from.match_pattern.is_empty()) {
        (false, true) => NameRule::Name(from.match_name),
        (true, false) => NameRule::Pattern(from.match_pattern),
        _ => {
            return Err(RulesError::Name {
                endpoint,
                selector: selector.to_owned(),
            });
        }
    };
    pattern::validate_rule(&rule).map_err(|error| RulesError::Pattern {
        endpoint,
        selector: selector.to_owned(),
        reason: error.to_string(),
    })?;
    Ok(rule)
}

pub(super) fn batch_out(batch: Batch) -> Vec<wire::MappingUp> {
    let mut out = Vec::with_capacity(batch.revoked.len() + 1);
    for id in batch.revoked {
        let ack = wire::LeaseRevokedAck { id };
        out.push(wire::MappingUp {
            kind: Some(wire::mapping_up::Kind::RevokedAck(ack)),
        });
    }
    if !batch.mappings.is_empty() {
        let mappings = batch.mappings.into_iter().map(mapping_out).collect();
        let batch = wire::MappingBatch { mappings };
        out.push(wire::MappingUp {
            kind: Some(wire::mapping_up::Kind::Batch(batch)),
        });
    }
    out
}

fn mapping_out(out: Outgoing) -> wire::FqdnMapping {
    let Mapping {
        endpoint,
        name,
        addresses,
        ttl,
        seen_at,
        rcode,
        server,
        transport,
        replayed,
    } = out.mapping;
    wire::FqdnMapping {
        sequence: out.sequence,
        endpoint: Some(instance_out(endpoint)),
        name: name.as_str().to_owned(),
        addresses: addresses.into_iter().map(address_bytes).collect(),
        ttl,
        seen_at: seen_at.nanos(),
        rcode: rcode.into(),
        server_ip: address_bytes(server.ip()),
        server_port: SocketAddr::port(&server).into(),
        protocol: transport.number().into(),
        replayed,
        leased: out.leased,
    }
}

fn instance_out(endpoint: EndpointInstance) -> wire::EndpointInstance {
    wire::EndpointInstance {
        id: endpoint.id.0.into(),
        client_ip: address_bytes(endpoint.client),
        ifindex: endpoint.ifindex,
    }
}

pub(super) fn result(message: &wire::MappingResult) -> MappingResult {
    // An end of 0 means that there is no lease.
    let lease_end = (message.lease_end > 0).then_some(BootTime::from_nanos(message.lease_end));
    let grant = Grant {
        durable: message.durable,
        promise: Promise::of_lease(lease_end),
        revision: message.revision,
    };
    let refusal = match message.refusal() {
        wire::MappingRefusal::EndpointUnknown => Refusal::EndpointUnknown,
        wire::MappingRefusal::NotAllowed => Refusal::NotAllowed,
        wire::MappingRefusal::Invalid => Refusal::Invalid,
        wire::MappingRefusal::RateLimited => Refusal::RateLimited,
        wire::MappingRefusal::NotRealised | wire::MappingRefusal::Unspecified => {
            Refusal::NotRealised
        }
    };
    MappingResult {
        sequence: message.sequence,
        result: if message.realised {
            Ok(grant)
        } else {
            Err(refusal)
        },
    }
}

/// Reads a revocation: its number, the name (`None` for every lease) and the addresses (none for
/// all addresses of the name).
pub(super) fn revocation(from: &wire::LeaseRevoked) -> (u64, Option<Fqdn>, Vec<IpAddr>) {
    let addresses: Vec<_> = from
        .addresses
        .iter()
        .filter_map(|bytes| address(bytes))
        .collect();
    // An address that cannot be read makes the revocation cover more: one lease too few only costs
    // a wait.
    let unread = addresses.len() != from.addresses.len();
    let name = (!from.name.is_empty()).then(|| Fqdn::normalise(&from.name));
    (from.id, name, if unread { Vec::new() } else { addresses })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wire_rules(names: Vec<wire::FqdnSelector>) -> wire::EndpointDnsRules {
        wire::EndpointDnsRules {
            endpoint_id: 5,
            ports: vec![wire::PortDnsRules {
                port: 53,
                protocol: 17,
                rules: vec![wire::DnsSelectorRule {
                    selector: "k8s-app=dns".into(),
                    server_identities: vec![300, 200],
                    any_server: false,
                    names,
                }],
            }],
        }
    }

    fn selector(name: &str, pattern: &str) -> wire::FqdnSelector {
        wire::FqdnSelector {
            match_name: name.into(),
            match_pattern: pattern.into(),
        }
    }

    #[test]
    fn rules_are_converted_unchanged() {
        let taken = rules(wire_rules(vec![
            selector("a.com", ""),
            selector("", "*.b.com"),
        ]))
        .unwrap();
        assert_eq!(taken.endpoint, EndpointId(5));
        let rule = &taken.rules.ports[0].rules[0];
        assert_eq!(
            rule.names,
            NameRules::Names(vec![
                NameRule::Name("a.com".into()),
                NameRule::Pattern("*.b.com".into())
            ])
        );
        assert_eq!(
            rule.servers,
            Servers::Identities([IdentityId(200), IdentityId(300)].into())
        );
        assert_eq!(
            rules(wire_rules(vec![])).unwrap().rules.ports[0].rules[0].names,
            NameRules::All
        );
    }

    #[test]
    fn ambiguous_values_are_refused_by_name() {
        let error = |from| rules(from).unwrap_err().to_string();
        assert!(error(wire_rules(vec![selector("a.com", "b.com")])).contains("exactly one"));
        assert!(error(wire_rules(vec![selector("", "")])).contains("exactly one"));
        let bad = error(wire_rules(vec![selector("", "a{1,2}.x")]));
        assert!(bad.contains("k8s-app=dns"), "{bad}");
        let mut from = wire_rules(vec![]);
        from.ports[0].protocol = 1;
        assert!(error(from.clone()).contains("protocol 1"));
        from.ports[0].port = 70_000;
        assert!(error(from.clone()).contains("70000"));
        from.endpoint_id = 65_536;
        assert!(error(from).contains("65536"));
    }

    #[test]
    fn an_unreadable_address_widens_a_revocation() {
        let from = wire::LeaseRevoked {
            id: 1,
            name: "A.com".into(),
            addresses: vec![vec![1, 2, 3, 4], vec![1]],
        };
        assert_eq!(
            revocation(&from),
            (1, Some(Fqdn::normalise("a.com.")), vec![])
        );
    }
}
