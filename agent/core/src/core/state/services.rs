//! Services that the core knows, with their addresses, their identities and their backends.

pub(crate) mod addresses;
pub(crate) mod backends;

use crate::{
    core::state::services::{
        addresses::{ServiceAddresses, Standing},
        backends::{Behind, DepartedPod, DepartedPods, Exception, Graces, SKEW},
    },
    ipcache::owners::Owner,
    kubernetes::{
        node_interfaces::NodeInterfaces,
        service_at::{Family, ServiceAt},
    },
    name_objects::TrustedServers,
    policy::cluster::Protocol,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use dns_policy::boot_time::BootTime;
use ipnet::IpNet;
use shared_maps::IdentityId;

/// Port of a DNS Service.
const DNS_PORT: u16 = 53;

/// The Services that the cluster has.
#[derive(Debug, Default)]
pub(crate) struct Services {
    pub(crate) known: BTreeMap<Arc<str>, KnownService>,
    pub(crate) addresses: ServiceAddresses,
    /// Services by the addresses of their backends.
    behind: BTreeMap<IpAddr, BTreeSet<Arc<str>>>,
    /// Services whose backends may have other identities than before.
    pub(crate) dirty: BTreeSet<Arc<str>>,
    /// When to compute a Service again: the time of an unknown backend or of a departed pod ends then.
    expiries: BTreeSet<(BootTime, Arc<str>)>,
    pub(crate) graces: Graces,
    pub(crate) departed: DepartedPods,
    /// Addresses of the node, as they were reported.
    pub(crate) node: BTreeSet<IpAddr>,
    pub(crate) interfaces: NodeInterfaces,
}

#[derive(Debug)]
pub(crate) struct KnownService {
    pub(crate) at: Arc<ServiceAt>,
    /// Identities of the Service's addresses by family. A family is missing if the Service has no address of that
    /// family, or while no number is free.
    pub(crate) identities: BTreeMap<Family, IdentityId>,
    /// External addresses that do not count, because of `--k8s-external-ips`.
    pub(crate) refused: Vec<IpAddr>,
    /// Addresses that the Service has because of the interface `nodelocaldns`.
    pub(crate) local_dns: BTreeSet<IpAddr>,
    /// Backends that are not judged by the identities of their addresses.
    pub(crate) exceptions: BTreeMap<IpAddr, Exception>,
}

impl Services {
    pub(crate) fn len(&self) -> usize {
        self.known.len()
    }

    /// Addresses of the Service `namespace/name`.
    pub(crate) fn addresses_of(&self, key: &str) -> Vec<IpAddr> {
        let service = self.known.get(key);
        service.map_or_else(Vec::new, |service| service.at.addresses().collect())
    }

    /// Addresses that the name of the Service `namespace/name` has in the cluster's DNS.
    pub(crate) fn cluster_ips_of(&self, key: &str) -> Vec<IpAddr> {
        let standings = self.known.get(key).map(|service| service.at.standings());
        let all = standings.into_iter().flatten();
        all.filter(|(_, standing)| *standing == Standing::Cluster)
            .map(|(address, _)| address)
            .collect()
    }

    /// DNS servers of the Service `namespace/name`: pods ask its addresses in the cluster, or a
    /// backend. Only its port 53 counts.
    pub(crate) fn dns_servers(&self, key: &str) -> TrustedServers {
        let mut found = TrustedServers::default();
        let Some(KnownService { at, .. }) = self.known.get(key) else {
            return found;
        };
        let ports = at.ports.iter();
        for port in ports.filter(|port| port.port == DNS_PORT && port.protocol != Protocol::Sctp) {
            let addresses = at.cluster_ips.iter();
            let addresses = addresses.map(|address| SocketAddr::new(*address, port.port));
            found.asked.extend(addresses);
            let readable = port
                .backends
                .iter()
                .filter(|backend| !backend.address.is_unspecified());
            for backend in readable {
                let own = backend.port.unwrap_or(port.port);
                if own == 0 {
                    continue;
                }
                let server = SocketAddr::new(backend.address, own);
                found.asked.insert(server);
                if backend.is_ready {
                    found.backends.insert(server);
                }
            }
        }
        found
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &ServiceAt> {
        self.known.values().map(|service| &*service.at)
    }

    /// Identities of Services, each with its Service and the family of addresses that have it.
    pub(crate) fn identities(&self) -> impl Iterator<Item = (IdentityId, &ServiceAt, Family)> {
        let known = self.known.values();
        known.flat_map(|service| {
            let identities = service.identities.iter();
            identities.map(|(family, id)| (*id, &*service.at, *family))
        })
    }

    /// Addresses that do not count because of `--k8s-external-ips`, with their Services.
    pub(crate) fn refused(&self) -> impl Iterator<Item = (IpAddr, &str)> {
        let known = self.known.iter();
        known.flat_map(|(key, service)| {
            let refused = service.refused.iter();
            refused.map(move |address| (*address, &**key))
        })
    }

    /// The interfaces of the node from which addresses of Services follow.
    pub(crate) fn interfaces(&self) -> &NodeInterfaces {
        &self.interfaces
    }

    /// Which Service has which address.
    pub(crate) fn addresses(&self) -> &ServiceAddresses {
        &self.addresses
    }

    pub(crate) fn get(&self, key: &str) -> Option<&KnownService> {
        self.known.get(key)
    }

    /// Services with a backend at an address.
    pub(crate) fn behind(&self, address: IpAddr) -> Option<&BTreeSet<Arc<str>>> {
        self.behind.get(&address)
    }

    /// Why a backend is not judged by the identity of its address.
    pub(crate) fn exception(&self, service: &str, backend: IpAddr) -> Option<Exception> {
        self.known.get(service)?.exceptions.get(&backend).copied()
    }

    /// Notes the backends of a Service that are not judged by the identities of their addresses.
    pub(crate) fn set_exceptions(
        &mut self,
        key: &Arc<str>,
        exceptions: BTreeMap<IpAddr, Exception>,
        now: BootTime,
    ) {
        let ends = exceptions.values().filter_map(|exception| match exception {
            Exception::Unknown(since) => Some(since.plus_secs(SKEW)),
            Exception::Departed(_) => None,
        });
        let next = ends.filter(|until| *until > now).min();
        self.expiries.extend(next.map(|at| (at, Arc::clone(key))));
        if let Some(known) = self.known.get_mut(key) {
            known.exceptions = exceptions;
        }
    }

    /// Plans to compute these Services again at time `at`.
    pub(crate) fn look_again(&mut self, at: BootTime, services: BTreeSet<Arc<str>>) {
        self.expiries
            .extend(services.into_iter().map(|key| (at, key)));
    }

    /// When the next Service has to be computed again.
    pub(crate) fn next_expiry(&self) -> Option<BootTime> {
        self.expiries.first().map(|(at, _)| *at)
    }

    /// Notes that a prefix has another identity: marks the Services with backends in it as dirty.
    pub(crate) fn note_identity(&mut self, prefix: IpNet) {
        if self.behind.is_empty() {
            return;
        }
        let (first, last) = (prefix.network(), prefix.broadcast());
        let services = self.behind.range(first..=last).flat_map(|(_, keys)| keys);
        self.dirty.extend(services.cloned());
    }

    pub(crate) fn take_dirty(&mut self, now: BootTime) -> BTreeSet<Arc<str>> {
        while let Some((at, key)) = self.expiries.pop_first() {
            if at > now {
                self.expiries.insert((at, key));
                break;
            }
            self.dirty.insert(key);
        }
        std::mem::take(&mut self.dirty)
    }

    pub(crate) fn index(&mut self, key: &Arc<str>, old: &BTreeSet<IpAddr>, new: &BTreeSet<IpAddr>) {
        for address in old.difference(new) {
            if let Some(services) = self.behind.get_mut(address) {
                services.remove(key);
                if services.is_empty() {
                    self.behind.remove(address);
                }
            }
        }
        for address in new.difference(old) {
            let services = self.behind.entry(*address).or_default();
            services.insert(Arc::clone(key));
        }
    }
}

impl Services {
    /// The owner and the identity that the ipcache must have for an address.
    pub(crate) fn claim_of(&self, address: IpAddr) -> Option<(Owner, IdentityId)> {
        let addresses = self.addresses();
        let (standing, key) = addresses.holders.get(&address)?.first()?;
        let owner = match standing {
            Standing::Cluster => Owner::Service(Arc::clone(key)),
            _ if addresses.is_dns_server(address) => return None,
            _ => Owner::ExternalService(Arc::clone(key)),
        };
        let identity = self.get(key)?.identities.get(&Family::of(address));
        // If no number is free, the address becomes unmanaged, which no policy selects. Without an
        // entry it would count as the world.
        Some((owner, identity.copied().unwrap_or(IdentityId::UNMANAGED)))
    }
}

impl Services {
    /// Notes that a pod loses these addresses. If slices still name the pod at one of them, its identity
    /// stays held for a while. Returns the identity to release, if any: `identity` if it is not held, or
    /// else the one that was held for the pod before.
    pub(crate) fn depart(
        &mut self,
        pod: &Arc<str>,
        addresses: Vec<IpAddr>,
        identity: IdentityId,
        now: BootTime,
    ) -> Option<IdentityId> {
        let mut services: BTreeSet<Arc<str>> = BTreeSet::new();
        for address in &addresses {
            let behind = self.behind(*address).into_iter().flatten();
            let naming = behind.filter(|key| self.names_pod(key, *address, pod));
            services.extend(naming.cloned());
        }
        if services.is_empty() {
            return Some(identity);
        }
        let until = now.plus_secs(SKEW);
        self.look_again(until, services);
        let departed = DepartedPod {
            identity,
            addresses,
            until,
        };
        let before = self.departed.pods.insert(Arc::clone(pod), departed);
        if let Some(before) = &before {
            self.departed.ends.remove(&(before.until, Arc::clone(pod)));
        }
        self.departed.ends.insert((until, Arc::clone(pod)));
        before.map(|before| before.identity)
    }
}

impl Services {
    /// Whether slices of a Service name a pod at an address.
    fn names_pod(&self, service: &str, address: IpAddr, pod: &Arc<str>) -> bool {
        let Some(known) = self.get(service) else {
            return false;
        };
        let mut backends = known.at.ports.iter().flat_map(|port| &port.backends);
        backends.any(|backend| backend.address == address && backend.pod.as_ref() == Some(pod))
    }

    pub(crate) fn exceptions(
        &mut self,
        behind: &BTreeMap<IpAddr, Behind>,
        now: BootTime,
    ) -> BTreeMap<IpAddr, Exception> {
        let mut graces = std::mem::take(&mut self.graces);
        let is_named = |address: &IpAddr| self.behind(*address).is_some();
        let exceptions = behind.iter().filter_map(|(address, behind)| {
            let exception = match behind {
                Behind::Known(_) => return None,
                Behind::Departed(identity) => Exception::Departed(*identity),
                Behind::UnknownPod => Exception::Unknown(graces.since(*address, now, is_named)),
            };
            Some((*address, exception))
        });
        let exceptions = exceptions.collect();
        self.graces = graces;
        exceptions
    }
}
