//! The agent's data, and the snapshot of it, which always contains everything.

use std::collections::BTreeMap;
use std::net::IpAddr;

use fqdn_proto::fqdndata as wire;
use ipnet::IpNet;

/// IP protocol numbers to which `protocol: ANY` of a policy expands: UDP, TCP and SCTP.
const PROTOCOLS: [u32; 3] = [17, 6, 132];

/// An endpoint of the node.
#[derive(Clone, Debug)]
pub struct Endpoint {
    pub id: u16,
    pub identity: u32,
    /// Addresses, in the order of their text.
    pub addresses: Vec<IpAddr>,
}

/// One DNS rule of an identity.
#[derive(Clone, Debug)]
pub struct Rule {
    /// Patterns and names. An empty list allows all names.
    pub patterns: Vec<String>,
    /// Identities of the servers, which are allowed on port 53 with any protocol.
    pub servers: Vec<u32>,
}

impl Rule {
    /// Allows `patterns` at the server identity `server`.
    pub fn new(server: u32, patterns: &[&str]) -> Self {
        Self {
            patterns: patterns.iter().map(|p| (*p).to_owned()).collect(),
            servers: vec![server],
        }
    }
}

/// Everything that goes into a snapshot.
#[derive(Clone, Debug, Default)]
pub struct World {
    pub endpoints: Vec<Endpoint>,
    /// DNS rules by the identity of endpoints.
    pub rules: BTreeMap<u32, Vec<Rule>>,
    /// Prefixes and their identities, without the prefixes of endpoints.
    pub prefixes: Vec<(IpNet, u32)>,
}

impl World {
    /// The endpoint that has an address.
    pub fn endpoint_of(&self, address: IpAddr) -> Option<&Endpoint> {
        let has = |endpoint: &&Endpoint| endpoint.addresses.contains(&address);
        self.endpoints.iter().find(has)
    }

    /// The data of an agent right after its start: only the prefixes of pods, without servers and
    /// endpoints.
    pub fn at_start(&self) -> Self {
        let own = self.endpoints.iter().flat_map(|endpoint| {
            let of = |ip: &IpAddr| (IpNet::from(*ip), endpoint.identity);
            endpoint.addresses.iter().map(of)
        });
        Self {
            prefixes: own.collect(),
            ..Self::default()
        }
    }

    /// Its data before it has regenerated its endpoints.
    pub fn without_rules(&self) -> Self {
        Self {
            rules: BTreeMap::new(),
            ..self.clone()
        }
    }

    /// The snapshot in the form of Cilium's agent (1.20-dev): each rule once for each endpoint,
    /// each identity with all its prefixes.
    pub(super) fn snapshot(&self, request_id: String) -> wire::PolicyState {
        let mut policies = Vec::new();
        let mut endpoints: BTreeMap<u32, Vec<wire::EndpointInfo>> = BTreeMap::new();
        let mut prefixes: BTreeMap<u32, Vec<Vec<u8>>> = BTreeMap::new();
        for endpoint in &self.endpoints {
            endpoints
                .entry(endpoint.identity)
                .or_default()
                .push(wire::EndpointInfo {
                    id: endpoint.id.into(),
                    ip: endpoint.addresses.iter().map(|ip| raw(*ip)).collect(),
                });
            for address in &endpoint.addresses {
                let prefix = binary(IpNet::from(*address));
                prefixes.entry(endpoint.identity).or_default().push(prefix);
            }
            for rule in self.rules.get(&endpoint.identity).into_iter().flatten() {
                policies.push(policy(endpoint.id, rule));
            }
        }
        for (prefix, identity) in &self.prefixes {
            prefixes.entry(*identity).or_default().push(binary(*prefix));
        }
        let endpoints = endpoints.into_iter().map(|(identity, endpoint_info)| {
            wire::IdentityToEndpointMapping {
                identity,
                endpoint_info,
            }
        });
        let prefixes = prefixes
            .into_iter()
            .map(|(identity, prefix)| wire::IdentityToPrefixMapping { identity, prefix });
        wire::PolicyState {
            egress_l7_dns_policy: policies,
            request_id,
            identity_to_endpoint_mapping: endpoints.collect(),
            identity_to_prefix_mapping: prefixes.collect(),
        }
    }
}

fn policy(endpoint: u16, rule: &Rule) -> wire::DnsPolicy {
    let server = |identity: u32, protocol| wire::DnsServer {
        dns_server_identity: identity,
        dns_server_port: 53,
        dns_server_proto: protocol,
    };
    let servers = rule
        .servers
        .iter()
        .flat_map(|identity| PROTOCOLS.map(|protocol| server(*identity, protocol)));
    wire::DnsPolicy {
        source_endpoint_id: endpoint.into(),
        dns_pattern: rule.patterns.clone(),
        dns_servers: servers.collect(),
    }
}

fn raw(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

fn binary(prefix: IpNet) -> Vec<u8> {
    let mut bytes = raw(prefix.addr());
    bytes.push(prefix.prefix_len());
    bytes
}
