//! What the model knows about one question: may this endpoint talk to that name or address?
//!
//! The other half, what the kernel has, is read by the agent.

mod dns_servers;
pub mod elsewhere;
pub mod outcome;
pub mod peer_found;
mod services;
mod untrusted;
mod warnings;

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use dns_policy::{
    endpoint_name::{self, EndpointNames},
    name::Fqdn,
    pattern::Pattern,
    rule::{EndpointRules, NameRule, NameRules},
};
use ipnet::IpNet;
use shared_maps::{EndpointId, IdentityId};

pub use self::untrusted::{MeantBy, UntrustedAnswer};
use self::{elsewhere::Elsewhere, peer_found::PeerFound};
use super::{
    Core,
    snapshot::{DnsRulesView, EndpointView, NameView},
    state::State,
};
use crate::{
    core::state::policy_model::subject::Subject as PolicySubject,
    endpoint::endpoint::Endpoint,
    labels::LabelSet,
    policy::{
        model::{EndpointPolicy, Side},
        repository::Repository,
        rule::Peers,
        trace::{self, FlowDirection, Match, Port, RuleView},
    },
    selector::selector::{Selector, Subject},
};

/// The other side of a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    Name(Fqdn),
    Address(IpAddr),
}

/// What the model has on an endpoint and a target.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Findings {
    pub endpoint: EndpointView,
    /// Intended revision of the endpoint's policy map.
    pub wanted_revision: u64,
    /// The Service (`namespace/name`) whose DNS name in the cluster the target is.
    pub service: Option<String>,
    pub dns: LookupRules,
    /// EgressFirewalls that leave a family of the endpoint and the target open, with the reason.
    pub open_families: Vec<String>,
    /// Rules whose name selectors match the name.
    pub by_name: Vec<RuleView>,
    /// Whether an ordered list (EgressFirewall) applies to packets that the endpoint sends.
    pub has_tier: bool,
    /// Whether pods of other nodes are not read (`--high-scale-prune`).
    pub is_pruned: bool,
    /// For a name: its addresses that this endpoint learned. For an address: its names, from any
    /// endpoint.
    pub names: Vec<NameView>,
    /// Addresses of the name that only other endpoints learned.
    pub elsewhere: Vec<NameView>,
    /// Answers that gave an address to a name of the endpoint's policy, and do not count.
    pub untrusted: Vec<UntrustedAnswer>,
    /// DNS servers whose answers count.
    pub trusted_dns: Vec<SocketAddr>,
    /// Addresses of the name that answers had lately and that got no label
    /// (`--tofqdns-refuse-prefix`).
    pub refused: Vec<IpAddr>,
    /// Each address in question: the target itself, or the addresses of the name.
    pub addresses: Vec<AddressFound>,
    /// For a name: identities of unknown addresses outside the cluster, one for each family of the
    /// endpoint.
    pub worlds: Vec<IdentityId>,
}

/// DNS rules about a name, by what happens to a query for it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LookupRules {
    /// Rules that allow the query, with the servers to which queries go through the proxy.
    pub allowed: Vec<DnsRulesView>,
    /// Selectors of servers to which queries pass without the proxy.
    pub direct: Vec<String>,
    /// Servers that policy closes.
    pub closed: Vec<ClosedServers>,
}

/// DNS servers that policy closes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClosedServers {
    pub selector: String,
    /// The rules that deny them; empty if no rule allows them.
    pub rules: Vec<RuleView>,
}

/// What the model has on an address.
#[derive(Clone, Debug, PartialEq)]
pub struct AddressFound {
    pub address: IpAddr,
    /// The longest prefix with an intended identity.
    pub prefix: Option<String>,
    /// Objects and programs that gave that prefix its labels.
    pub owners: Vec<String>,
    /// The intended identity; 0 = none.
    pub wanted: u32,
    /// The identity that the datapath was given; `None` = no entry.
    pub given: Option<u32>,
    /// Whether its labels got no identity.
    pub unresolved: bool,
    /// Whether the circuit breaker gave it the identity of only some of its names.
    pub limited: bool,
    /// The identity that the kernel gives it if no entry covers it.
    pub world: u32,
    /// The endpoint of this node that has it.
    pub endpoint: Option<EndpointId>,
    /// Where the pod that has it is judged, if it is of another node.
    pub elsewhere: Option<Elsewhere>,
    /// The refused prefix that it is in: no answer gives it a label (`--tofqdns-refuse-prefix`).
    pub refused: Option<IpNet>,
}

impl Core {
    /// Endpoints whose number, key, pod, namespace, interface or address matches a text.
    pub fn endpoints_called(&self, text: &str) -> Vec<(EndpointId, String)> {
        let endpoints = self.state.endpoints.iter();
        let named = endpoints.map(|endpoint| {
            let names = EndpointNames {
                id: endpoint.id.0,
                key: &endpoint.spec.key,
                pod: endpoint.spec.pod.as_deref(),
                place: &endpoint.spec.netns,
                interface: &endpoint.spec.interface.ifname,
                addresses: endpoint.addresses().collect(),
            };
            (endpoint, names)
        });
        let found = endpoint_name::called(text, named).into_iter();
        found.map(|e| (e.id, e.spec.key.clone())).collect()
    }

    /// An endpoint as lists show it; `None` if the number is unknown.
    pub fn endpoint_view(&self, id: EndpointId) -> Option<EndpointView> {
        let endpoint = self.state.endpoints.get(id)?;
        Some(self.state.endpoint(endpoint))
    }

    /// What the model has on an endpoint and a target; `None` if there is no such endpoint.
    pub fn findings(&self, endpoint: EndpointId, target: &Target) -> Option<Findings> {
        let state = &self.state;
        let endpoint = state.endpoints.get(endpoint)?;
        let subject = state.policy.subject(endpoint.identity);
        let mut findings = Findings {
            endpoint: state.endpoint(endpoint),
            wanted_revision: subject.map_or(0, |subject| subject.revision()),
            has_tier: subject.is_some_and(|subject| subject.has_tier()),
            is_pruned: state.config.pods.prunes(),
            ..Findings::default()
        };
        match target {
            Target::Name(name) => self.find_name(&mut findings, endpoint, subject, name),
            Target::Address(address) => findings.names = state.names_of(*address),
        }
        findings.open_families = state.open_families_of(endpoint, target);
        if let Some(subject) = subject {
            state.find_untrusted(&mut findings, subject, target);
        }
        let addresses = state.addresses_in_question(&findings, target).into_iter();
        findings.addresses = addresses.map(|ip| state.address(ip)).collect();
        Some(findings)
    }

    fn find_name(
        &self,
        findings: &mut Findings,
        endpoint: &Endpoint,
        subject: Option<&PolicySubject>,
        name: &Fqdn,
    ) {
        let state = &self.state;
        if let Some(subject) = subject {
            let rules = rules_about(subject.dns(), name);
            let servers = state.dns_servers_of(endpoint, &rules);
            findings.dns = LookupRules {
                allowed: super::view::dns_views(&servers.rules),
                direct: servers.direct,
                closed: self.closed_servers(endpoint.id, servers.closed),
            };
            findings.by_name = rules_by_name(subject.policy(), name);
        }
        (findings.names, findings.elsewhere) = state
            .addresses_of(name)
            .into_iter()
            .partition(|view| view.endpoint == endpoint.id.0);
        let own: Vec<&String> = findings.names.iter().map(|view| &view.address).collect();
        findings
            .elsewhere
            .retain(|view| !own.contains(&&view.address));
        findings.refused = state.learned.closed.refused_of(name);
        findings.service = state.service_named(name);
        findings.worlds = state.worlds_of(endpoint);
    }

    fn closed_servers(
        &self,
        endpoint: EndpointId,
        closed: Vec<(String, IdentityId, Port)>,
    ) -> Vec<ClosedServers> {
        let closed = closed.into_iter().map(|(selector, server, at)| {
            let peer = self.peer(endpoint, FlowDirection::Egress, server, Some(at));
            ClosedServers {
                selector,
                rules: peer.deciding(),
            }
        });
        let mut closed: Vec<ClosedServers> = closed.collect();
        closed.dedup();
        closed
    }

    /// Rules with a block that covers an address. They are not about the address if it is a pod's
    /// or a node's.
    pub fn rules_with_block_of(
        &self,
        endpoint: EndpointId,
        direction: FlowDirection,
        address: IpAddr,
    ) -> Vec<RuleView> {
        let state = &self.state;
        let endpoint = state.endpoints.get(endpoint);
        let subject = endpoint.and_then(|endpoint| state.policy.subject(endpoint.identity));
        let rules = subject.map(|subject| &side_of(subject.policy(), direction).rules);
        let found = rules.into_iter().flatten().filter_map(|rule| {
            let mut selectors = rule.rule.selectors();
            let covers = |selector: &&Selector| matches!(selector, Selector::Cidr(block) if block.covers(address));
            let selector = selectors.find(covers)?;
            Some(RuleView::of(&Match {
                rule,
                selector: Some(selector),
                receiver: None,
            }))
        });
        found.collect()
    }

    /// What the model has on an identity as a peer of an endpoint.
    pub fn peer(
        &self,
        endpoint: EndpointId,
        direction: FlowDirection,
        peer: IdentityId,
        port: Option<Port>,
    ) -> PeerFound {
        let state = &self.state;
        let labels = state.policy.labels_of(peer).cloned();
        let endpoint = state.endpoints.get(endpoint);
        let Some(own) = endpoint.and_then(|endpoint| state.policy.subject(endpoint.identity))
        else {
            return PeerFound::default();
        };
        if peer.is_service() {
            return state.service_peer(own, direction, peer, port);
        }
        let side = side_of(own.policy(), direction);
        let known = labels.as_ref().map(LabelSet::texts);
        let subject = Subject::new(peer, labels.unwrap_or_else(|| LabelSet::new(Vec::new())));
        let decision = port.map(|port| trace::judge(side, direction, own.labels(), &subject, port));
        PeerFound {
            labels: known,
            verdict: decision.as_ref().map(|decision| decision.verdict),
            tier: decision.as_ref().and_then(|decision| decision.tier_view()),
            by: decision
                .iter()
                .flat_map(|decision| decision.views())
                .collect(),
            about: trace::about(side, direction, own.labels(), &subject)
                .iter()
                .map(RuleView::of)
                .collect(),
            service: None,
        }
    }

    /// The Service or the pod that has an address, as a text.
    pub(crate) fn object_at(&self, address: IpAddr) -> Option<String> {
        self.state.object_at(address)
    }
}

impl Core {
    /// A copy of the documents in force.
    pub fn repository(&self) -> Repository {
        self.state.policy.repository().clone()
    }

    /// Labels of an endpoint; `None` if the number is unknown.
    pub fn labels_of(&self, endpoint: EndpointId) -> Option<LabelSet> {
        let endpoint = self.state.endpoints.get(endpoint)?;
        Some(endpoint.labels.clone())
    }

    /// Labels of the pod `namespace/name`.
    pub fn labels_of_pod(&self, pod: &str) -> Option<LabelSet> {
        self.state.cluster.pods.labels_of(pod).cloned()
    }

    /// Addresses of the pod or of the Service `namespace/name`, IPv4 first. If both have addresses, the
    /// pod's.
    pub fn addresses_called(&self, name: &str) -> Vec<IpAddr> {
        let cluster = &self.state.cluster;
        let of_pod = cluster.pods.addresses_of(name);
        let mut found: Vec<IpAddr> = match of_pod.is_empty() {
            false => of_pod.to_vec(),
            true => cluster.services.addresses_of(name),
        };
        found.sort_unstable();
        found
    }

    /// What selectors see at an address; `None` if it has no identity.
    pub fn subject_at(&self, address: IpAddr) -> Option<Subject> {
        let identity = self.state.ipcache.identity_of(address)?;
        let labels = self.state.policy.labels_of(identity)?;
        Some(Subject::new(identity, labels.clone()))
    }
}

/// One side of a policy.
pub(crate) fn side_of(policy: &EndpointPolicy, direction: FlowDirection) -> &Side {
    match direction {
        FlowDirection::Egress => &policy.egress,
        FlowDirection::Ingress => &policy.ingress,
    }
}

fn rules_by_name(policy: &EndpointPolicy, name: &Fqdn) -> Vec<RuleView> {
    let mut found = Vec::new();
    for rule in &policy.egress.rules {
        let Peers::Selectors(list) = &rule.rule.peers else {
            continue;
        };
        let matching = list.iter().find(|selector| match selector {
            Selector::Fqdn(fqdn) => selects(fqdn, name),
            _ => false,
        });
        found.extend(matching.map(|selector| {
            RuleView::of(&Match {
                rule,
                selector: Some(selector),
                receiver: None,
            })
        }));
    }
    found.extend(trace::tier_by_name(&policy.egress, name));
    found
}

/// Whether a `toFQDNs` rule of egress selects a name.
pub(super) fn selects_name(policy: &EndpointPolicy, name: &Fqdn) -> bool {
    let rules = policy.egress.rules.iter();
    let mut selectors = rules.flat_map(|rule| rule.rule.selectors());
    selectors.any(|selector| matches!(selector, Selector::Fqdn(fqdn) if selects(fqdn, name)))
}

/// DNS rules that allow the name.
fn rules_about(rules: &EndpointRules, name: &Fqdn) -> EndpointRules {
    let mut matching = rules.clone();
    for port in &mut matching.ports {
        port.rules.retain(|rule| match &rule.names {
            NameRules::All => true,
            NameRules::Names(list) => list.iter().any(|rule| {
                Pattern::parse(rule).is_ok_and(|pattern| pattern.matches(name.as_str()))
            }),
            NameRules::Regex(_) => false,
        });
    }
    matching
}

fn selects(selector: &NameRule, name: &Fqdn) -> bool {
    let mut probe = crate::fqdn::names::NameSelectors::default();
    probe
        .add(selector)
        .is_some_and(|matcher| matcher.matches(name))
}

impl State {
    /// Addresses that the target has, in order.
    fn addresses_in_question(&self, findings: &Findings, target: &Target) -> BTreeSet<IpAddr> {
        if let Target::Address(address) = target {
            return [*address].into();
        }
        let service = findings.service.as_deref();
        let service = service.map(|key| self.cluster.services.cluster_ips_of(key));
        let known = findings.names.iter().chain(&findings.elsewhere);
        let known = known.filter_map(|view| view.address.parse().ok());
        let known = known.chain(findings.refused.iter().copied());
        known.chain(service.into_iter().flatten()).collect()
    }

    fn addresses_of(&self, name: &Fqdn) -> Vec<NameView> {
        let mut found = self.name_views_where(|known, _| known == name);
        found.sort_by(|one, other| one.address.cmp(&other.address));
        found
    }

    /// The Service with addresses of its own that has this name in the cluster's DNS:
    /// `SERVICE.NAMESPACE.svc`, with or without a cluster domain.
    fn service_named(&self, name: &Fqdn) -> Option<String> {
        let mut labels = name.as_str().trim_end_matches('.').split('.');
        let (service, namespace) = (labels.next()?, labels.next()?);
        if labels.next() != Some("svc") {
            return None;
        }
        let key = format!("{namespace}/{service}");
        let addresses = self.cluster.services.cluster_ips_of(&key);
        (!addresses.is_empty()).then_some(key)
    }

    fn names_of(&self, address: IpAddr) -> Vec<NameView> {
        self.name_views_where(|_, known| *known == address)
    }

    /// Identities of addresses outside the cluster without an entry, one for each family of an
    /// endpoint. Both families count for an endpoint without an address.
    pub(super) fn worlds_of(&self, endpoint: &Endpoint) -> Vec<IdentityId> {
        let has = |family: fn(&IpAddr) -> bool| endpoint.addresses().any(|own| family(&own));
        let (has_ipv4, has_ipv6) = (has(IpAddr::is_ipv4), has(IpAddr::is_ipv6));
        let ipv4 = (has_ipv4 || !has_ipv6).then_some(IpAddr::from([0_u8; 4]));
        let ipv6 = (has_ipv6 || !has_ipv4).then_some(IpAddr::from([0_u8; 16]));
        let any = ipv4.into_iter().chain(ipv6);
        let mut worlds: Vec<IdentityId> = any.map(|any| self.world_of(any)).collect();
        worlds.dedup();
        worlds
    }

    fn address(&self, address: IpAddr) -> AddressFound {
        let host = IpNet::from(address);
        let longest = self.ipcache.longest(address);
        let (prefix, metadata) = match longest {
            Some((prefix, metadata)) => (Some(prefix), Some(metadata)),
            None => (None, None),
        };
        AddressFound {
            address,
            prefix: prefix.map(|prefix| prefix.to_string()),
            owners: metadata
                .map(|metadata| metadata.owners().iter().map(ToString::to_string).collect())
                .unwrap_or_default(),
            wanted: metadata.and_then(|m| m.desired).map_or(0, |id| id.0),
            given: self.ipcache.in_force_at(host).map(|id| id.0),
            unresolved: metadata.is_some_and(|metadata| metadata.unresolved),
            limited: prefix.is_some_and(|prefix| self.numbers.budget().is_limited(prefix)),
            world: self.world_of(address).0,
            endpoint: self.endpoints.by_address(address),
            elsewhere: self.elsewhere(address),
            refused: self.config.refused_prefixes.covering(address),
        }
    }
}
