//! Conversions between generated messages and the agent's own types.

use std::net::{IpAddr, SocketAddr};

use agent_core::core::event::{self, MAX_ADDRESSES, MAX_NAME, Revocation};
use daemon::state_dir::StateDir;
use dns_policy::{
    boot_time::BootTime,
    epoch::Epoch,
    mapping::{EndpointInstance, Mapping, Realised, Refusal, address, address_bytes},
    name::Fqdn,
    rule::{EndpointRules, NameRule, NameRules, SelectorRule, Servers, Transport},
};
use fqdn_proto::native::{
    AgentEpoch, DnsSelectorRule, EndpointDnsRules, FqdnMapping, FqdnSelector, LeaseRevoked,
    MappingRefusal, MappingResult, PortDnsRules,
};
use shared_maps::EndpointId;

/// Reads a state directory. A device and an inode of 0 mean that they are not known.
pub(super) fn state_dir(message: fqdn_proto::native::StateDir) -> StateDir {
    let inode = (message.device, message.inode);
    StateDir {
        path: message.path.into(),
        inode: (inode != (0, 0)).then_some(inode),
    }
}

/// Makes the message for a state directory.
pub(super) fn to_state_dir(dir: &StateDir) -> fqdn_proto::native::StateDir {
    let (device, inode) = dir.inode.unwrap_or_default();
    fqdn_proto::native::StateDir {
        path: dir.path.to_string_lossy().into_owned(),
        device,
        inode,
    }
}

/// Reads a mapping; `None` if a field is out of range.
pub fn mapping(message: &FqdnMapping) -> Option<Mapping> {
    let endpoint = message.endpoint.as_ref()?;
    let number = message.addresses.len();
    if message.name.is_empty() || message.name.len() > MAX_NAME || number > MAX_ADDRESSES {
        return None;
    }
    let addresses: Vec<IpAddr> = message
        .addresses
        .iter()
        .map(|bytes| address(bytes))
        .collect::<Option<_>>()?;
    if addresses.is_empty() {
        return None;
    }
    Some(Mapping {
        endpoint: EndpointInstance {
            id: EndpointId(u16::try_from(endpoint.id).ok()?),
            client: address(&endpoint.client_ip)?,
            ifindex: endpoint.ifindex,
        },
        name: Fqdn::normalise(&message.name),
        addresses,
        ttl: message.ttl,
        seen_at: BootTime::from_nanos(message.seen_at),
        rcode: u8::try_from(message.rcode).ok()?,
        server: SocketAddr::new(
            address(&message.server_ip)?,
            u16::try_from(message.server_port).ok()?,
        ),
        transport: Transport::from_number(u8::try_from(message.protocol).ok()?)?,
        replayed: message.replayed,
    })
}

/// Result of a mapping whose fields were out of range.
pub(crate) fn invalid(sequence: u64) -> MappingResult {
    MappingResult {
        sequence,
        refusal: MappingRefusal::Invalid.into(),
        ..MappingResult::default()
    }
}

/// Converts the result of a mapping. The refusal is `Unspecified` if the mapping is in force.
pub fn result(result: &event::MappingResult) -> MappingResult {
    let refusal = match result.realised {
        Realised::Yes => MappingRefusal::Unspecified,
        Realised::No(Refusal::EndpointUnknown) => MappingRefusal::EndpointUnknown,
        Realised::No(Refusal::NotAllowed) => MappingRefusal::NotAllowed,
        Realised::No(Refusal::Invalid | Refusal::Rejected) => MappingRefusal::Invalid,
        Realised::No(Refusal::RateLimited) => MappingRefusal::RateLimited,
        Realised::No(Refusal::NotRealised) | Realised::AgentAway => MappingRefusal::NotRealised,
    };
    MappingResult {
        sequence: result.sequence,
        realised: result.realised == Realised::Yes,
        durable: result.durable,
        lease_end: result.lease_end.map_or(0, |end| end.nanos()),
        revision: result.revision,
        refusal: refusal.into(),
    }
}

pub fn revoked(revocation: &Revocation) -> LeaseRevoked {
    LeaseRevoked {
        id: revocation.id,
        name: revocation.name.as_str().to_owned(),
        addresses: revocation
            .addresses
            .iter()
            .map(|ip| address_bytes(*ip))
            .collect(),
    }
}

pub fn epoch(epoch: &Epoch) -> AgentEpoch {
    AgentEpoch {
        boot_id: epoch.boot_id.clone(),
        start: epoch.start,
    }
}

pub fn endpoint_rules(endpoint: EndpointId, rules: &EndpointRules) -> EndpointDnsRules {
    EndpointDnsRules {
        endpoint_id: endpoint.0.into(),
        ports: rules
            .ports
            .iter()
            .map(|port| PortDnsRules {
                port: port.port.into(),
                protocol: port.transport.number().into(),
                rules: port.rules.iter().filter_map(selector_rule).collect(),
            })
            .collect(),
    }
}

/// `None` for a rule that the message cannot express without allowing more than the rule does.
fn selector_rule(rule: &SelectorRule) -> Option<DnsSelectorRule> {
    let (any_server, server_identities) = match &rule.servers {
        Servers::Any => (true, Vec::new()),
        Servers::Identities(set) if set.is_empty() => return None,
        Servers::Identities(set) => (false, set.iter().map(|id| id.0).collect()),
        // Restored rules of files concern only the proxy, and are never sent.
        Servers::Prefixes(_) => return None,
    };
    let names = match &rule.names {
        NameRules::All => Vec::new(),
        NameRules::Names(names) if names.is_empty() => return None,
        NameRules::Names(names) => names.iter().map(name_rule).collect(),
        NameRules::Regex(_) => return None,
    };
    Some(DnsSelectorRule {
        selector: rule.selector.clone(),
        server_identities,
        any_server,
        names,
    })
}

fn name_rule(rule: &NameRule) -> FqdnSelector {
    match rule {
        NameRule::Name(name) => FqdnSelector {
            match_name: name.clone(),
            match_pattern: String::new(),
        },
        NameRule::Pattern(pattern) => FqdnSelector {
            match_name: String::new(),
            match_pattern: pattern.clone(),
        },
    }
}

#[cfg(test)]
mod tests {
    use fqdn_proto::native;

    use super::*;

    fn good() -> FqdnMapping {
        FqdnMapping {
            sequence: 1,
            endpoint: Some(native::EndpointInstance {
                id: 7,
                client_ip: vec![10, 0, 0, 1],
                ifindex: 3,
            }),
            name: "Example.com".to_owned(),
            addresses: vec![vec![192, 0, 2, 1]],
            ttl: 30,
            server_ip: vec![10, 0, 0, 53],
            server_port: 53,
            protocol: 17,
            ..FqdnMapping::default()
        }
    }

    #[test]
    fn reads_a_mapping() {
        let mapping = mapping(&good()).unwrap();
        assert_eq!(mapping.name.as_str(), "example.com.");
        assert_eq!(mapping.server.to_string(), "10.0.0.53:53");
    }

    #[test]
    fn refuses_fields_out_of_range() {
        let broken: [fn(&mut FqdnMapping); 8] = [
            |m| m.endpoint = None,
            |m| m.endpoint.as_mut().unwrap().id = 70_000,
            |m| m.endpoint.as_mut().unwrap().client_ip = vec![1, 2, 3],
            |m| m.addresses.clear(),
            |m| m.addresses.push(vec![0; 5]),
            |m| m.name.clear(),
            |m| m.server_port = 65_536,
            |m| m.protocol = 1,
        ];
        for (index, spoil) in broken.into_iter().enumerate() {
            let mut message = good();
            spoil(&mut message);
            assert!(mapping(&message).is_none(), "case {index}");
        }
    }

    #[test]
    fn a_rule_that_selects_nothing_is_not_sent_as_one_that_selects_all() {
        let rule = SelectorRule {
            selector: "nobody".to_owned(),
            servers: Servers::Identities(Default::default()),
            names: NameRules::All,
        };
        assert!(selector_rule(&rule).is_none());
        let rule = SelectorRule {
            selector: "any".to_owned(),
            servers: Servers::Any,
            names: NameRules::Names(Vec::new()),
        };
        assert!(selector_rule(&rule).is_none());
    }
}
