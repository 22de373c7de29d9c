//! Warnings about Services, for the operator.

use std::collections::{BTreeMap, BTreeSet};

use shared_maps::{
    IdentityId,
    policy::{EGRESS, INGRESS},
};

use crate::{
    core::{
        config::DNS_SERVICE,
        state::{
            State,
            policy_model::subject::Subject,
            services::backends::{Exception, SKEW},
        },
    },
    first_of::first_of,
    identity::scopes::is_remote_node,
    ipcache::owners::Owner,
    kubernetes::service_at::{BackendAt, Family, PortAt, ServiceAt},
    labels::K8S,
    policy::{
        compute::service::{self, Backend},
        document::Body,
    },
};

/// Maximum number of endpoints that a warning names.
const NAMED: usize = 5;

const DNS_PORT: u16 = 53;

/// A backend that policy does not allow.
struct Refused<'a> {
    port: &'a PortAt,
    backend: &'a BackendAt,
    identity: IdentityId,
}

impl State {
    /// Services with the address of another Service, and Services that are closed because policy treats
    /// their backends differently.
    pub(crate) fn service_warnings(&self) -> Vec<String> {
        let mut found: Vec<String> = self.without_pod_blocks().into_iter().collect();
        let contested = self.cluster.services.addresses().contested().map(|(address, first, other)| {
            format!(
                "Service {other}: its address {address} is that of Service {first}, which had it \
                 first and keeps it: give one of them another address"
            )
        });
        found.extend(contested);
        found.extend(self.interface_warnings());
        found.extend(self.refused_addresses());
        let by_identity: BTreeMap<IdentityId, (&ServiceAt, Family)> =
            match self.policy.has_mixed_services() {
                true => {
                    let all = self.cluster.services.identities();
                    all.map(|(id, at, family)| (id, (at, family))).collect()
                }
                false => BTreeMap::new(),
            };
        found.extend(self.dns_on_nodes());
        found.extend(self.closed_to_other_nodes());
        for (_, subject) in self.policy.subjects() {
            for id in subject.mixed_services() {
                let of = by_identity.get(id);
                found.extend(of.and_then(|(at, family)| self.mixed(subject, at, *family)));
            }
        }
        found
    }

    /// Addresses in `spec.externalIPs` that are not judged as the Service.
    fn refused_addresses(&self) -> Vec<String> {
        let by_flag = self.cluster.services.refused().map(|(address, key)| {
            format!(
                "Service {key}: its address {address} in spec.externalIPs is not judged as the \
                 Service, because of --k8s-external-ips=refuse: nodes translate it all the same, and \
                 a pod that may send to {address} reaches the Service's pods: remove it"
            )
        });
        let addresses = self.cluster.services.addresses();
        let taken = addresses.external().filter_map(|(address, key)| {
            let metadata = self.ipcache.get(address.into())?;
            let other = match metadata.identity() {
                Some(identity) if identity.is_service() => return None,
                // The Service has no number yet.
                Some(IdentityId::UNMANAGED) => return None,
                _ if addresses.is_dns_server(address) => {
                    "is a DNS server to which a policy allows queries".to_owned()
                }
                _ => {
                    let has = |label: &str| {
                        let mut labels = metadata.labels();
                        labels.any(|labels| labels.has_reserved(label))
                    };
                    let owners = metadata.owners().into_iter();
                    let mut others =
                        owners.filter(|owner| !matches!(owner, Owner::ExternalService(_)));
                    match others.next() {
                        _ if has("kube-apiserver") => "is an API server's".to_owned(),
                        Some(owner) => format!("is that of {owner}"),
                        None => return None,
                    }
                }
            };
            Some(format!(
                "Service {key}: its address {address} in spec.externalIPs {other}, and is judged as \
                 that, although nodes translate the Service's ports there: give the Service another \
                 address"
            ))
        });
        by_flag.chain(taken).collect()
    }

    /// Interfaces of NodeLocal DNSCache and of kube-proxy that need a setting.
    fn interface_warnings(&self) -> Vec<String> {
        let services = &self.cluster.services;
        let interfaces = services.interfaces();
        let mut found = Vec::new();
        if interfaces.has_ipvs {
            found.push(
                "there is an interface kube-ipvs0: kube-proxy is in IPVS mode, which takes queries \
                 to ClusterIPs before the DNS proxy gets them: use its mode nftables or iptables"
                    .to_owned(),
            );
        }
        let free = interfaces.local_dns.iter();
        let free = free.filter(|address| services.addresses().holder(**address).is_none());
        if services.len() > 0 {
            found.extend(free.map(|address| {
                format!(
                    "the interface nodelocaldns has {address}, and there is no Service \
                     {DNS_SERVICE}: start the agent with --k8s-dns-alias={address}=NAMESPACE/NAME, \
                     with the DNS Service of this cluster"
                )
            }));
        }
        found
    }

    /// A warning if there are Services, and no block of pods is known.
    fn without_pod_blocks(&self) -> Option<String> {
        let count = self.cluster.services.len();
        let mut documents = self.policy.repository().iter();
        let has_blocks = !self.config.pod_blocks.is_empty()
            || documents.any(|document| match &document.body {
                Body::Node(node) => !node.pod_blocks.is_empty(),
                _ => false,
            });
        (count > 0 && !has_blocks).then(|| {
            format!(
                "there are Services ({count}), and the blocks of pods are not known: a new pod \
                 closes its Service to restricted endpoints until the pod's document is read, and \
                 until then its address is the world: start the agent with --pod-cidr, or add the \
                 Node documents with spec.podCIDRs"
            )
        })
    }

    /// How many Services policy closes because of some of their backends.
    pub(crate) fn mixed_services(&self) -> usize {
        let mixed = self.policy.mixed_services();
        if mixed.is_empty() {
            return 0;
        }
        let all = self.cluster.services.identities();
        let keys = all.filter(|(id, _, _)| mixed.contains(id));
        keys.map(|(_, at, _)| &at.key)
            .collect::<BTreeSet<_>>()
            .len()
    }

    /// DNS Services that are closed because their pods use their nodes' network: no label selects
    /// these.
    fn dns_on_nodes(&self) -> Vec<String> {
        let mut found = Vec::new();
        for at in self.cluster.services.iter() {
            let ports = at.ports.iter().filter(|port| port.port == DNS_PORT);
            let on_nodes = ports.filter(|port| {
                let mut backends = port.backends.iter();
                !port.backends.is_empty()
                    && backends
                        .all(|backend| self.known_behind(&at.key, backend).is_some_and(is_node))
            });
            for port in on_nodes {
                let closed = self.policy.subjects().find(|(_, subject)| {
                    let restricted = subject.policy().egress.enforced;
                    restricted
                        && port
                            .backends
                            .iter()
                            .any(|backend| !self.is_allowed(subject, at, port, backend))
                });
                let Some(id) = closed.and_then(|(_, subject)| subject.endpoints().first()) else {
                    continue;
                };
                let (number, protocol) = (port.port, port.protocol.as_str());
                found.push(format!(
                    "Service {} is closed to endpoint {id} at {number}/{protocol}: its pods use the \
                     network of their nodes, and toEndpoints does not select nodes: allow the \
                     entities host and remote-node there",
                    at.key
                ));
                break;
            }
        }
        found
    }

    /// Pods behind DNS Services whose ingress policy drops queries that proxies of other nodes
    /// forward.
    fn closed_to_other_nodes(&self) -> Vec<String> {
        let own = self.config.node_name.as_deref();
        let mut documents = self.policy.repository().iter();
        let has_others = documents.any(|document| match &document.body {
            Body::Node(node) => own != Some(node.name.as_str()),
            _ => false,
        });
        let mut found = Vec::new();
        if !has_others {
            return found;
        }
        for at in self.cluster.services.iter() {
            let ports = at.ports.iter().filter(|port| port.port == DNS_PORT);
            let backends = ports.flat_map(|port| port.backends.iter().map(move |b| (port, b)));
            let closed = backends.filter_map(|(port, backend)| {
                let id = self.endpoints.by_address(backend.address)?;
                let subject = self.policy.subject(self.endpoints.get(id)?.identity)?;
                let of = Backend {
                    identity: IdentityId::REMOTE_NODE,
                    port: backend.port.unwrap_or(port.port),
                };
                let protocol = port.protocol.number();
                let open = service::allows(subject.all_entries(), INGRESS, protocol, of);
                (!open).then_some((id, of.port, port.protocol.as_str()))
            });
            let first = closed.into_iter().next();
            found.extend(first.map(|(id, port, protocol)| {
                format!(
                    "endpoint {id} is behind Service {}, and its ingress policy does not allow \
                     remote-node at {port}/{protocol}: DNS queries that the proxies of other nodes \
                     forward are dropped: add fromEntities: [remote-node]",
                    at.key
                )
            }));
        }
        found
    }

    fn is_allowed(
        &self,
        subject: &Subject,
        at: &ServiceAt,
        port: &PortAt,
        backend: &BackendAt,
    ) -> bool {
        let Some(identity) = self.known_behind(&at.key, backend) else {
            return true;
        };
        let of = Backend {
            identity,
            port: backend.port.unwrap_or(port.port),
        };
        service::allows(subject.all_entries(), EGRESS, port.protocol.number(), of)
    }

    fn mixed(&self, subject: &Subject, at: &ServiceAt, family: Family) -> Option<String> {
        let endpoints = first_of(subject.endpoints(), NAMED);
        let Refused {
            port,
            backend,
            identity,
        } = self.first_refused(subject, at, family)?;
        let (number, protocol) = (backend.port.unwrap_or(port.port), port.protocol.as_str());
        let who = self.described(at, backend, identity);
        Some(format!(
            "Service {} is closed to endpoint {endpoints} at port {}/{protocol}: policy allows \
             some of its backends, but not {who} at {number}/{protocol}: allow that one too, or \
             give it a Service of its own",
            at.key, port.port
        ))
    }

    /// The first backend of a mixed port that is not allowed.
    fn first_refused<'a>(
        &self,
        subject: &Subject,
        at: &'a ServiceAt,
        family: Family,
    ) -> Option<Refused<'a>> {
        at.ports.iter().find_map(|port| {
            let mut is_mixed = false;
            let mut refused = None;
            for backend in port.backends_of(family) {
                let Some(identity) = self.known_behind(&at.key, backend) else {
                    continue;
                };
                let of = Backend {
                    identity,
                    port: backend.port.unwrap_or(port.port),
                };
                match service::allows(subject.all_entries(), EGRESS, port.protocol.number(), of) {
                    true => is_mixed = true,
                    false => {
                        refused.get_or_insert(Refused {
                            port,
                            backend,
                            identity,
                        });
                    }
                }
            }
            refused.filter(|_| is_mixed)
        })
    }

    /// Identity by which a backend is judged; `None` while the backend is left out.
    pub(crate) fn known_behind(&self, service: &str, backend: &BackendAt) -> Option<IdentityId> {
        match self.cluster.services.exception(service, backend.address) {
            Some(Exception::Unknown(since)) if since.plus_secs(SKEW) > self.now => None,
            Some(Exception::Unknown(_)) => Some(IdentityId::UNKNOWN),
            Some(Exception::Departed(identity)) => Some(identity),
            None => {
                let identity = self.ipcache.identity_of(backend.address);
                Some(identity.unwrap_or(IdentityId::UNKNOWN))
            }
        }
    }

    /// The text for a backend: its address, and its labels or its pod.
    pub(crate) fn described(
        &self,
        at: &ServiceAt,
        backend: &BackendAt,
        identity: IdentityId,
    ) -> String {
        let address = backend.address;
        let exception = self.cluster.services.exception(&at.key, address);
        if let Some(Exception::Unknown(_)) = exception {
            let pod = backend.pod.as_deref().unwrap_or_default();
            return format!("{address} (pod {pod}, which no document describes)");
        }
        let labels = self.policy.labels_of(identity);
        let labels = labels.into_iter().flat_map(|labels| labels.iter());
        let own = labels.filter(|label| label.source() != K8S || !label.key().starts_with("io."));
        let texts = own.map(|label| {
            let text = label.to_string();
            text.strip_prefix("k8s:")
                .map_or(text.clone(), str::to_owned)
        });
        format!("{address} ({})", texts.collect::<Vec<_>>().join(","))
    }
}

/// Whether an identity is this node's or another node's.
fn is_node(identity: IdentityId) -> bool {
    let reserved = [
        IdentityId::HOST,
        IdentityId::REMOTE_NODE,
        IdentityId::KUBE_APISERVER,
    ];
    reserved.contains(&identity) || is_remote_node(identity)
}
