//! The state as plain data.

mod describe;
mod directory;
pub mod standing;

use std::{collections::BTreeSet, net::IpAddr};

use shared_maps::{EndpointId, IdentityId, tunnel};

use dns_policy::{
    name::Fqdn,
    rule::{EndpointRules, NameRules, Servers, Transport},
};

use super::{
    Core,
    snapshot::{
        DnsRulesView, ENDPOINT, EndpointView, IdentityView, IpcacheView, LimitView, NameView,
        PolicyView, RejectedView, SelectorView, Snapshot, Summary,
    },
    state::State,
};
use crate::{
    endpoint::{endpoint::Endpoint, spec::EndpointSpec},
    fqdn::{cache::EndpointNames, servers::NameServers},
    kubernetes::external_ips::ExternalIps,
    named_port::NamedPorts,
    policy::{document::PolicyError, repository::is_about},
};

/// Maximum number of endpoints whose problem a summary spells out.
const MAX_PROBLEMS: usize = 8;
/// Maximum number of refused documents in a summary.
const MAX_REFUSED: usize = 3;
/// Maximum number of characters of each text about one of these documents: an author may write a value of any length.
const MAX_REASON: usize = 300;

impl Core {
    /// Number and key of each endpoint.
    pub fn endpoint_keys(&self) -> Vec<(EndpointId, String)> {
        let endpoints = self.state.endpoints.iter();
        endpoints
            .map(|endpoint| (endpoint.id, endpoint.spec.key.clone()))
            .collect()
    }

    /// Interfaces with programs of a number of an earlier run that no endpoint has.
    pub fn left_behind(&self) -> Vec<(EndpointId, u32)> {
        self.state.endpoints.left().iter().collect()
    }

    /// Endpoints whose number other nodes do not know: their packets in the tunnel carry `reserved:init`. The pod of
    /// each, or its key if it is no pod.
    pub fn without_shared_number(&self) -> Vec<String> {
        let unknown = self.state.endpoints.iter();
        let unknown = unknown.filter(|e| tunnel::vni_of_endpoint(e.identity) != e.identity.0);
        let names = unknown.map(|e| e.spec.pod.as_ref().unwrap_or(&e.spec.key).clone());
        names.collect()
    }

    /// How far limits are used up. If each endpoint has such a limit for itself, the highest use
    /// counts.
    pub fn limits(&self) -> Vec<LimitView> {
        let state = &self.state;
        let config = &state.config;
        let of_endpoints = |used: fn(&Endpoint) -> usize| {
            let endpoints = state.endpoints.iter().map(used);
            endpoints.max().unwrap_or_default()
        };
        let of_names = |used: fn(&EndpointNames) -> usize| {
            let endpoints = state
                .learned
                .names
                .endpoints()
                .map(|(_, names)| used(names));
            endpoints.max().unwrap_or_default()
        };
        vec![
            limit(
                "ipcache entries",
                state.ipcache.realised(),
                Some(config.ipcache_max),
            ),
            limit(
                "policy map entries of an endpoint",
                of_endpoints(Endpoint::policy_entries),
                Some(config.policy_map_max),
            ),
            limit(
                "identities of addresses",
                state.numbers.local_len(),
                numbers(IdentityId::LOCAL_MIN, IdentityId::LOCAL_MAX),
            ),
            limit("identities of names", state.numbers.budget().len(), None),
            limit(
                "identities of names in combination",
                state.numbers.budget().combinations(),
                config.max_fqdn_identities,
            ),
            limit(
                "identities of endpoints",
                state.numbers.endpoints_len(),
                numbers(IdentityId::ENDPOINT_MIN, IdentityId::ENDPOINT_MAX),
            ),
            limit(
                "endpoints",
                state.endpoints.len(),
                Some(usize::from(u16::MAX)),
            ),
            limit(
                "addresses of names of an endpoint",
                of_names(|names| names.held),
                Some(config.max_pairs_per_endpoint),
            ),
            limit(
                "addresses of an endpoint kept for connections",
                of_names(|names| names.zombies.len()),
                Some(config.max_deferred_deletes),
            ),
        ]
    }
}

fn refused(error: &PolicyError) -> RejectedView {
    RejectedView {
        source: error.source_name.clone(),
        key: error.key.clone(),
        reason: format!("{}: {}; {}", error.field, error.reason, error.remedy),
    }
}

fn limit(what: &str, used: usize, most: Option<usize>) -> LimitView {
    LimitView {
        what: what.to_owned(),
        used,
        most,
    }
}

/// How many identities there are from `first` to `last`.
fn numbers(first: IdentityId, last: IdentityId) -> Option<usize> {
    usize::try_from(last.0 - first.0 + 1).ok()
}

impl State {
    pub(super) fn summary(&self) -> Summary {
        let unrestricted = || self.endpoints.iter().filter(|e| self.is_unrestricted(e));
        Summary {
            revision: self.proxies.publication.revision(),
            published_revision: self.proxies.publication.published_revision(),
            synced: self.restoration.is_synced(),
            endpoints: self.endpoints.len(),
            endpoints_unrestricted: unrestricted().count(),
            unrestricted: unrestricted()
                .map(|e| e.spec.pod.as_ref().unwrap_or(&e.spec.key).clone())
                .take(MAX_PROBLEMS)
                .collect(),
            policies: self.policies_in_force(),
            policies_rejected: self.policy.rejected().len(),
            refused: self.named_refusals(),
            local_identities: self.numbers.local_len(),
            fqdn_identities: self.numbers.budget().len(),
            fqdn_combinations: self.numbers.budget().combinations(),
            fqdn_identities_max: self.config.max_fqdn_identities,
            addresses_limited: self.numbers.budget().limited(),
            endpoint_identities: self.numbers.endpoints_len(),
            cluster_identities: self.numbers.cluster_counts(),
            pods: self.cluster.pods.len(),
            pods_without_identity: self.cluster.pods.without_identity().count(),
            namespaces: self.cluster.namespaces,
            network_policies: self.network_policies(),
            firewalls: self.firewall_summary(),
            fqdn_selectors: self.policy.name_selectors_len(),
            only_trusted_names: self.config.name_servers == NameServers::Trusted,
            external_ips_refused: self.config.external_ips == ExternalIps::Refuse,
            services: self.cluster.services.len(),
            services_mixed: self.mixed_services(),
            ipcache_entries: self.ipcache.realised(),
            ipcache_max: self.config.ipcache_max,
            policy_map_max: self.config.policy_map_max,
            selectors: self.policy.selectors().len(),
            names_live: self.learned.names.live(),
            names_zombies: self.learned.names.zombies(),
            pairs: self.learned.names.pairs(),
            pending_steps: self.retry.failed_steps() + self.files.failures().count(),
            full_policy_maps: self.full_policy_maps(),
            endpoint_problems: self.endpoint_problems(),
            trouble: self
                .retry
                .reason()
                .or(self.files.failures().next())
                .cloned(),
            counters: self.counters.clone(),
        }
    }

    pub(super) fn snapshot(&self) -> Snapshot {
        let allocated = self.numbers.allocated().into_iter();
        let mut identities: Vec<IdentityView> = allocated
            .map(|(id, labels, references)| {
                let (source, since) = self.numbers.origin(id);
                IdentityView {
                    id: id.0,
                    labels: labels.texts(),
                    references,
                    source,
                    since,
                }
            })
            .collect();
        identities.sort_by_key(|identity| identity.id);
        let rejected = self.policy.rejected().iter().map(refused);
        let waiting = self.endpoints.waiting().map(|(spec, reason)| RejectedView {
            source: ENDPOINT.to_owned(),
            key: Some(spec.key.clone()),
            reason: reason.clone(),
        });
        Snapshot {
            summary: self.summary(),
            endpoints: self
                .endpoints
                .iter()
                .map(|endpoint| self.endpoint(endpoint))
                .collect(),
            identities,
            ipcache: self.prefixes(),
            selectors: self.selector_views(),
            names: self.name_views(),
            policies: self.policies(),
            rejected: rejected.chain(waiting).collect(),
        }
    }

    fn is_unrestricted(&self, endpoint: &Endpoint) -> bool {
        let subject = self.policy.subject(endpoint.identity);
        let held = self.restoration.hold().has(endpoint.id);
        let is_free = |subject: &crate::core::state::policy_model::subject::Subject| {
            let policy = subject.policy();
            !policy.egress.enforced && !policy.ingress.enforced && !subject.has_tier()
        };
        !held && subject.is_some_and(is_free)
    }

    /// How many endpoints have a policy map without room for their policy: all that have a problem and
    /// do not keep the policy of the last run.
    fn full_policy_maps(&self) -> usize {
        let hold = self.restoration.hold();
        let full = self.endpoints.iter();
        full.filter(|endpoint| endpoint.problem.is_some() && !hold.has(endpoint.id))
            .count()
    }

    /// The documents that `status` names.
    fn named_refusals(&self) -> Vec<RejectedView> {
        let first = self.policy.rejected().iter().take(MAX_REFUSED);
        first
            .map(|error| refused(error).cut_to(MAX_REASON))
            .collect()
    }

    fn endpoint_problems(&self) -> Vec<String> {
        let problems = self.endpoints.iter().filter_map(|endpoint| {
            let why = endpoint.why_not()?;
            Some(format!(
                "endpoint {} ({}): {why}",
                endpoint.id, endpoint.spec.key
            ))
        });
        let waiting = self.endpoints.waiting().map(|(spec, why)| {
            let key = &spec.key;
            match self.keeps_policy(spec) {
                true => format!("endpoint {key} keeps the policy that it had: {why}"),
                false => format!("endpoint {key} is not in force: {why}"),
            }
        });
        problems.chain(waiting).take(MAX_PROBLEMS).collect()
    }

    /// Number of policies; documents of other kinds, such as nodes, do not count.
    fn policies_in_force(&self) -> usize {
        let documents = self.policy.repository().iter();
        let policies = documents.filter(|document| document.is_policy());
        policies.count()
    }

    /// Whether an endpoint that waits has programs and a policy map at its interface, of this run
    /// or of an earlier one.
    fn keeps_policy(&self, waiting: &EndpointSpec) -> bool {
        let own = self.endpoints.by_key(&waiting.key);
        let own = own.and_then(|id| self.endpoints.get(id));
        own.is_some_and(|own| {
            own.spec.interface.ifindex == waiting.interface.ifindex && own.policy_map.is_some()
        })
    }

    pub(super) fn endpoint(&self, endpoint: &Endpoint) -> EndpointView {
        let subject = self.policy.subject(endpoint.identity);
        EndpointView {
            id: endpoint.id.0,
            key: endpoint.spec.key.clone(),
            pod: endpoint.spec.pod.clone(),
            identity: endpoint.identity.0,
            labels: endpoint.labels.texts(),
            named_ports: NamedPorts::of(&endpoint.labels).texts(),
            ipv4: endpoint.ipv4.map(|ip| ip.to_string()),
            ipv6: endpoint.ipv6.map(|ip| ip.to_string()),
            ifindex: endpoint.spec.interface.ifindex,
            ifname: endpoint.spec.interface.ifname.clone(),
            netns: endpoint.spec.netns.clone(),
            state: if endpoint.restored {
                "restored"
            } else {
                "ready"
            }
            .to_owned(),
            enable_policy: self
                .policy
                .repository()
                .mode_of(&endpoint.labels)
                .to_string(),
            egress_enforced: subject.is_some_and(|s| s.policy().egress.enforced),
            ingress_enforced: subject.is_some_and(|s| s.policy().ingress.enforced),
            policies: subject
                .map(|s| s.policy().documents.clone())
                .unwrap_or_default(),
            firewalls: subject.map(firewalls_of).unwrap_or_default(),
            policy_entries: endpoint.policy_entries(),
            policy_revision: endpoint.policy_revision,
            dns_rules: subject.map(|s| dns_views(s.dns())).unwrap_or_default(),
            problem: endpoint.why_not().cloned(),
        }
    }

    fn prefixes(&self) -> Vec<IpcacheView> {
        let mut found = Vec::new();
        self.ipcache.for_each(|prefix, metadata| {
            found.push(IpcacheView {
                prefix: prefix.to_string(),
                identity: metadata.desired.map_or(0, |id| id.0),
                realised: metadata.realised.map(|id| id.0),
                owners: metadata
                    .owners()
                    .into_iter()
                    .map(ToString::to_string)
                    .collect(),
            });
        });
        found
    }

    fn selector_views(&self) -> Vec<SelectorView> {
        let entries = self
            .policy
            .selectors()
            .entries()
            .map(|(_, entry)| SelectorView {
                selector: entry.selector.to_string(),
                kind: entry.selector.kind().to_owned(),
                users: entry.users,
                identities: entry.selections.iter().map(|id| id.0).collect(),
            });
        entries.collect()
    }

    fn name_views(&self) -> Vec<NameView> {
        self.name_views_where(|_, _| true)
    }

    /// Learned addresses for which `wanted` returns true.
    pub(super) fn name_views_where(
        &self,
        wanted: impl Fn(&Fqdn, &IpAddr) -> bool,
    ) -> Vec<NameView> {
        let mut found = Vec::new();
        for (id, names) in self.learned.names.endpoints() {
            let pair = |name: &Fqdn, address: &IpAddr| {
                let entry = self.learned.names.name(name);
                let pair = entry.and_then(|entry| entry.pairs.get(address));
                let lease_end = pair.and_then(|pair| pair.lease_end);
                NameView {
                    endpoint: id.0,
                    name: name.as_str().to_owned(),
                    address: address.to_string(),
                    lease_end: lease_end.map_or(0, |end| end.nanos()),
                    ..NameView::default()
                }
            };
            for (name, addresses) in &names.names {
                let addresses = addresses.iter();
                let addresses = addresses.filter(|(address, _)| wanted(name, address));
                found.extend(addresses.map(|(address, lookup)| NameView {
                    source: "lookup".to_owned(),
                    ttl: lookup.ttl,
                    seen_at: lookup.seen.nanos(),
                    expires_at: lookup.expires.nanos(),
                    ..pair(name, address)
                }));
            }
            for (address, zombie) in &names.zombies {
                let names = zombie.names.iter().filter(|name| wanted(name, address));
                found.extend(names.map(|name| NameView {
                    source: "connection".to_owned(),
                    expires_at: zombie.delete_pending.nanos(),
                    ..pair(name, address)
                }));
            }
        }
        found.sort_by(|one, other| {
            (one.endpoint, &one.name, &one.address).cmp(&(
                other.endpoint,
                &other.name,
                &other.address,
            ))
        });
        found
    }

    fn network_policies(&self) -> usize {
        let documents = self.policy.repository().iter();
        let of_kubernetes = documents.filter(|document| {
            let kind = document.key.split('/').next();
            kind == Some("NetworkPolicy")
        });
        of_kubernetes.count()
    }

    fn policies(&self) -> Vec<PolicyView> {
        let documents = self.policy.repository().iter().map(|document| {
            let selected = self
                .endpoints
                .iter()
                .filter(|e| is_about(document, &e.labels));
            PolicyView {
                key: document.key.clone(),
                source: document.source.clone(),
                warnings: document.warnings.clone(),
                endpoints: selected.map(|endpoint| endpoint.id.0).collect(),
            }
        });
        documents.collect()
    }
}

/// Documents with an ordered list about what a subject sends.
fn firewalls_of(subject: &crate::core::state::policy_model::subject::Subject) -> Vec<String> {
    let tier = subject.policy().egress.tier.iter();
    let documents: BTreeSet<&str> = tier.map(|rule| rule.document.as_ref()).collect();
    documents.into_iter().map(str::to_owned).collect()
}

pub(super) fn dns_views(rules: &EndpointRules) -> Vec<DnsRulesView> {
    let mut found = Vec::new();
    for port in &rules.ports {
        let protocol = match port.transport {
            Transport::Udp => "UDP",
            Transport::Tcp => "TCP",
        };
        found.extend(port.rules.iter().map(|rule| DnsRulesView {
            port: port.port,
            protocol: protocol.to_owned(),
            selector: rule.selector.clone(),
            servers: match &rule.servers {
                Servers::Identities(ids) => Some(ids.iter().map(|id| id.0).collect()),
                Servers::Any | Servers::Prefixes(_) => None,
            },
            names: match &rule.names {
                NameRules::All => None,
                NameRules::Names(list) => {
                    Some(list.iter().map(|name| name.text().to_owned()).collect())
                }
                NameRules::Regex(text) => Some(vec![text.clone()]),
            },
        }));
    }
    found
}
