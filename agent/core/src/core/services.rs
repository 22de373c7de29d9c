//! Services of the cluster: each has an identity, which its addresses have; one for each family,
//! because the families have different backends.
//!
//! A packet to a Service is judged before the node translates it. The identity's entries follow from
//! those of the identities behind it ([`super::policy_model`]); here they are read from the addresses
//! of its backends, whenever one of these changes ([`super::service_backends`]).
//! Which Service has an address says [`super::service_addresses`].

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use dns_policy::boot_time::BootTime;
use ipnet::IpNet;
use shared_maps::IdentityId;

use super::{
    config::DNS_SERVICE,
    service_addresses::{ServiceAddresses, Standing},
    service_backends::{DepartedPods, Exception, Graces, SKEW},
    state::State,
};
use crate::{
    kubernetes::node_interfaces::NodeInterfaces,
    kubernetes::{
        external_ips::ExternalIps,
        service_at::{Family, ServiceAt},
    },
    labels::{Label, LabelSet, SERVICE},
    name_objects::TrustedServers,
    policy::cluster::Protocol,
    source_event::SourceEvent,
};

/// Port of a DNS Service.
const DNS_PORT: u16 = 53;

/// The Services that the cluster has.
#[derive(Debug, Default)]
pub(super) struct Services {
    known: BTreeMap<Arc<str>, KnownService>,
    pub(super) addresses: ServiceAddresses,
    /// Services by the addresses of their backends.
    behind: BTreeMap<IpAddr, BTreeSet<Arc<str>>>,
    /// Services whose backends may have other identities than before.
    dirty: BTreeSet<Arc<str>>,
    /// When unknown backends are no longer left out.
    expiries: BTreeSet<(BootTime, Arc<str>)>,
    pub(super) graces: Graces,
    pub(super) departed: DepartedPods,
    /// Addresses of the node, as they were reported.
    node: BTreeSet<IpAddr>,
    interfaces: NodeInterfaces,
}

#[derive(Debug)]
pub(super) struct KnownService {
    pub(super) at: Arc<ServiceAt>,
    /// Of its addresses of each family; none where it has no address, or while no number is free.
    pub(super) identities: BTreeMap<Family, IdentityId>,
    /// Addresses outside that do not count, because of `--k8s-external-ips`.
    refused: Vec<IpAddr>,
    /// Those of its addresses that it has because of the interface `nodelocaldns`.
    local_dns: BTreeSet<IpAddr>,
    /// Backends that are not judged by the identities of their addresses.
    exceptions: BTreeMap<IpAddr, Exception>,
}

impl ServiceAt {
    fn backends(&self) -> BTreeSet<IpAddr> {
        let backends = self.ports.iter().flat_map(|port| &port.backends);
        backends.map(|backend| backend.address).collect()
    }
}

impl Services {
    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.known.len()
    }

    /// Addresses of the Service `namespace/name`.
    pub(super) fn addresses_of(&self, key: &str) -> Vec<IpAddr> {
        let service = self.known.get(key);
        service.map_or_else(Vec::new, |service| service.at.addresses().collect())
    }

    /// Addresses that the name of the Service `namespace/name` has in the cluster's DNS.
    pub(super) fn cluster_ips_of(&self, key: &str) -> Vec<IpAddr> {
        let standings = self.known.get(key).map(|service| service.at.standings());
        let all = standings.into_iter().flatten();
        all.filter(|(_, standing)| *standing == Standing::Cluster)
            .map(|(address, _)| address)
            .collect()
    }

    /// DNS servers of the Service `namespace/name`: pods ask its addresses in the cluster, or a
    /// backend. Other ports of it are no DNS servers.
    pub(super) fn dns_servers(&self, key: &str) -> TrustedServers {
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

    /// Every Service.
    pub(super) fn iter(&self) -> impl Iterator<Item = &ServiceAt> {
        self.known.values().map(|service| &*service.at)
    }

    /// Identities of Services, with the family whose addresses have it.
    pub(super) fn identities(&self) -> impl Iterator<Item = (IdentityId, &ServiceAt, Family)> {
        let known = self.known.values();
        known.flat_map(|service| {
            let identities = service.identities.iter();
            identities.map(|(family, id)| (*id, &*service.at, *family))
        })
    }

    /// Addresses that do not count because of `--k8s-external-ips`, with their Services.
    pub(super) fn refused(&self) -> impl Iterator<Item = (IpAddr, &str)> {
        let known = self.known.iter();
        known.flat_map(|(key, service)| {
            let refused = service.refused.iter();
            refused.map(move |address| (*address, &**key))
        })
    }

    /// What interfaces of the node say about Services.
    pub(super) fn interfaces(&self) -> &NodeInterfaces {
        &self.interfaces
    }

    /// Which Service has which address.
    pub(super) fn addresses(&self) -> &ServiceAddresses {
        &self.addresses
    }

    pub(super) fn get(&self, key: &str) -> Option<&KnownService> {
        self.known.get(key)
    }

    /// Services with a backend at an address.
    pub(super) fn behind(&self, address: IpAddr) -> Option<&BTreeSet<Arc<str>>> {
        self.behind.get(&address)
    }

    /// Why a backend is not judged by the identity of its address.
    pub(super) fn exception(&self, service: &str, backend: IpAddr) -> Option<Exception> {
        self.known.get(service)?.exceptions.get(&backend).copied()
    }

    /// Notes the backends of a Service that are not judged by the identities of their addresses.
    pub(super) fn set_exceptions(
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

    /// Renders these Services again at a time.
    pub(super) fn look_again(&mut self, at: BootTime, services: BTreeSet<Arc<str>>) {
        self.expiries
            .extend(services.into_iter().map(|key| (at, key)));
    }

    /// When the next unknown backend is no longer left out.
    pub(super) fn next_expiry(&self) -> Option<BootTime> {
        self.expiries.first().map(|(at, _)| *at)
    }

    /// A prefix has another identity: Services with backends there have to follow.
    pub(super) fn note_identity(&mut self, prefix: IpNet) {
        if self.behind.is_empty() {
            return;
        }
        let (first, last) = (prefix.network(), prefix.broadcast());
        let services = self.behind.range(first..=last).flat_map(|(_, keys)| keys);
        self.dirty.extend(services.cloned());
    }

    pub(super) fn take_dirty(&mut self, now: BootTime) -> BTreeSet<Arc<str>> {
        while let Some((at, key)) = self.expiries.pop_first() {
            if at > now {
                self.expiries.insert((at, key));
                break;
            }
            self.dirty.insert(key);
        }
        std::mem::take(&mut self.dirty)
    }

    fn index(&mut self, key: &Arc<str>, old: &BTreeSet<IpAddr>, new: &BTreeSet<IpAddr>) {
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

impl State {
    pub(super) fn on_services(&mut self, events: Vec<SourceEvent<ServiceAt>>) {
        for event in events {
            match event {
                SourceEvent::Init => self.restoration.services().begin(),
                SourceEvent::Apply(service) => {
                    self.restoration.services().note(&service.key);
                    self.put_service(service);
                }
                SourceEvent::Delete(key) => self.remove_service(&key),
                SourceEvent::InitDone => {
                    let seen = self.restoration.services().end();
                    let known = self.cluster.services.known.keys();
                    let gone = known.filter(|key| !seen.contains(&***key));
                    for key in gone.cloned().collect::<Vec<_>>() {
                        self.remove_service(&key);
                    }
                }
            }
        }
    }

    /// The addresses of the node right now. One that is a Service's is no address of the node, even
    /// if an interface has it.
    pub(super) fn on_node_addresses(&mut self, addresses: &[IpAddr]) {
        self.cluster.services.node = addresses.iter().copied().collect();
        self.apply_node_addresses();
    }

    fn apply_node_addresses(&mut self) {
        let own = self.cluster.services.node.iter().copied();
        let own = own.filter(|address| {
            self.cluster
                .services
                .addresses
                .at_cluster_ip(*address)
                .is_none()
        });
        let own: Vec<IpAddr> = own.collect();
        self.set_node_addresses(&own);
    }

    /// NodeLocal DNSCache listens on addresses that are the DNS Service's.
    pub(super) fn on_node_interfaces(&mut self, interfaces: NodeInterfaces) {
        self.cluster.services.interfaces = interfaces;
        let Some(known) = self.cluster.services.known.get(DNS_SERVICE) else {
            return;
        };
        let mut at = (*known.at).clone();
        at.cluster_ips
            .retain(|address| !known.local_dns.contains(address));
        at.external_ips.extend(&known.refused);
        self.put_service(at);
    }

    fn put_service(&mut self, mut at: ServiceAt) {
        let local_dns = self.local_dns_of(&at);
        at.cluster_ips.extend(&local_dns);
        let refused = self.keep_families(&mut at);
        let key = Arc::clone(&at.key);
        let before = self.cluster.services.known.remove(&key);
        let had = before.as_ref().map(|before| before.identities.clone());
        let had = had.unwrap_or_default();
        let mut identities = BTreeMap::new();
        for family in at.addresses().map(Family::of).collect::<BTreeSet<_>>() {
            let known = had.get(&family).copied();
            let identity = known.or_else(|| self.acquire_service(&key, family));
            identities.extend(identity.map(|identity| (family, identity)));
        }
        let gone = had
            .iter()
            .filter(|(family, _)| !identities.contains_key(family));
        let gone: Vec<IdentityId> = gone.map(|(_, identity)| *identity).collect();
        let old = before.as_ref().map(|before| Arc::clone(&before.at));
        let service = KnownService {
            at: Arc::new(at),
            identities,
            refused,
            local_dns,
            exceptions: before.map(|before| before.exceptions).unwrap_or_default(),
        };
        self.exchange_service(&key, old.as_deref(), Some(service));
        for identity in gone {
            self.drop_service_identity(identity);
        }
    }

    fn remove_service(&mut self, key: &str) {
        let Some((key, before)) = self.cluster.services.known.remove_entry(key) else {
            return;
        };
        self.exchange_service(&key, Some(&before.at), None);
        for identity in before.identities.into_values() {
            self.drop_service_identity(identity);
        }
    }

    /// Addresses of `nodelocaldns` that this Service gets: those that no Service has, if it is the
    /// DNS Service.
    fn local_dns_of(&self, at: &ServiceAt) -> BTreeSet<IpAddr> {
        if *at.key != *DNS_SERVICE {
            return BTreeSet::new();
        }
        let services = &self.cluster.services;
        let aliases = &self.config.service_aliases;
        let local = services.interfaces.local_dns.iter().copied();
        let free = local.filter(|address| {
            let holder = services.addresses.holder_in_cluster(*address);
            let is_alias = aliases.iter().any(|(alias, _)| alias == address);
            holder.is_none_or(|holder| *holder == *at.key)
                && !is_alias
                && !at.cluster_ips.contains(address)
        });
        free.collect()
    }

    /// Leaves out addresses of families that are off, and backends of families in which the Service
    /// has no address. Adds `--k8s-dns-alias`. Gives the addresses that `--k8s-external-ips` refuses.
    fn keep_families(&self, at: &mut ServiceAt) -> Vec<IpAddr> {
        let config = &self.config;
        let aliases = config.service_aliases.iter();
        let aliases = aliases.filter(|(_, service)| **service == *at.key);
        let aliases = aliases.map(|(address, _)| *address);
        at.cluster_ips.extend(aliases);
        at.cluster_ips.sort_unstable();
        at.cluster_ips.dedup();
        let is_on = |address: &IpAddr| match address {
            IpAddr::V4(_) => config.enable_ipv4,
            IpAddr::V6(_) => config.enable_ipv6,
        };
        at.cluster_ips.retain(is_on);
        let in_cluster = &at.cluster_ips;
        for outside in [&mut at.load_balancer_ips, &mut at.external_ips] {
            outside.retain(|address| is_on(address) && !in_cluster.contains(address));
        }
        let refused = match config.external_ips {
            ExternalIps::Judge => Vec::new(),
            ExternalIps::Refuse => std::mem::take(&mut at.external_ips),
        };
        let families: BTreeSet<Family> = at.addresses().map(Family::of).collect();
        for port in &mut at.ports {
            let backends = &mut port.backends;
            backends.retain(|backend| families.contains(&Family::of(backend.address)));
        }
        refused
    }

    fn acquire_service(&mut self, key: &str, family: Family) -> Option<IdentityId> {
        let family = match family {
            Family::V4 => "",
            Family::V6 => "ipv6",
        };
        self.acquire_local(&LabelSet::new(vec![Label::new(SERVICE, key, family)]))
    }

    /// Nothing has the identity of a Service any more.
    fn drop_service_identity(&mut self, id: IdentityId) {
        let touched = self.policy.put_service(id, None);
        self.mark_dirty_peers(&touched);
        self.numbers.release_local(id);
    }

    fn exchange_service(
        &mut self,
        key: &Arc<str>,
        old: Option<&ServiceAt>,
        new: Option<KnownService>,
    ) {
        let backends = |at: Option<&ServiceAt>| at.map(ServiceAt::backends).unwrap_or_default();
        let addresses = |at: Option<&ServiceAt>| -> BTreeMap<IpAddr, Standing> {
            at.into_iter().flat_map(ServiceAt::standings).collect()
        };
        let at = new.as_ref().map(|new| Arc::clone(&new.at));
        let (was, is) = (addresses(old), addresses(at.as_deref()));
        self.cluster
            .services
            .index(key, &backends(old), &backends(at.as_deref()));
        self.cluster.services.addresses.hold(key, &was, &is);
        if let Some(new) = new {
            self.cluster.services.dirty.insert(Arc::clone(key));
            self.cluster.services.known.insert(Arc::clone(key), new);
        }
        let mut node_changed = false;
        for address in was.keys().chain(is.keys()) {
            self.claim_service_address(*address);
            node_changed |= self.cluster.services.node.contains(address);
        }
        if node_changed {
            self.apply_node_addresses();
        }
        if **key == *self.config.dns_service {
            self.refresh_servers();
        }
    }
}
