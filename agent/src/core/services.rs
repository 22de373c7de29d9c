//! Services of the cluster: each has an identity, which its addresses have.
//!
//! A packet to a Service is judged before the node translates it. The identity's entries follow from
//! those of the identities behind it ([`super::policy_model`]); here they are read from the addresses
//! of its backends, whenever one of these changes ([`super::service_backends`]).
//!
//! An address belongs to the first Service that has it.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use dns_policy::boot_time::BootTime;
use ipnet::IpNet;
use shared_maps::IdentityId;

use super::{
    service_backends::{DepartedPods, Exception, Graces, SKEW},
    state::State,
};
use crate::{
    ipcache::metadata::{Claim, Owner},
    kubernetes::service_at::ServiceAt,
    labels::{Label, LabelSet, SERVICE},
    source_event::SourceEvent,
};

/// The Services that the cluster has.
#[derive(Debug, Default)]
pub(super) struct Services {
    known: BTreeMap<Arc<str>, KnownService>,
    /// Services that have an address, the first one first.
    holders: BTreeMap<IpAddr, Vec<Arc<str>>>,
    /// Addresses as they are claimed in the ipcache.
    claimed: BTreeMap<IpAddr, (Owner, IdentityId)>,
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
}

#[derive(Debug)]
pub(super) struct KnownService {
    pub(super) at: Arc<ServiceAt>,
    /// None while it has no address, or while no number is free.
    pub(super) identity: Option<IdentityId>,
    /// Backends that are not judged by the identities of their addresses.
    exceptions: BTreeMap<IpAddr, Exception>,
}

impl ServiceAt {
    fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.cluster_ips.iter().chain(&self.external_ips).copied()
    }

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

    /// Every Service with its identity.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&ServiceAt, Option<IdentityId>)> {
        let known = self.known.values();
        known.map(|service| (&*service.at, service.identity))
    }

    /// The Service to which an address in the cluster belongs.
    pub(super) fn at_cluster_ip(&self, address: IpAddr) -> Option<&str> {
        match self.claimed.get(&address)? {
            (Owner::Service(key), _) => Some(key),
            _ => None,
        }
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

    /// Addresses that several Services have: the address, its Service, and another one.
    pub(super) fn contested(&self) -> impl Iterator<Item = (IpAddr, &str, &str)> {
        self.holders.iter().flat_map(|(address, holders)| {
            let (first, others) = holders
                .split_first()
                .map_or(("", holders.as_slice()), |(f, o)| (&**f, o));
            others.iter().map(move |other| (*address, first, &**other))
        })
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

    fn hold(&mut self, key: &Arc<str>, old: &BTreeSet<IpAddr>, new: &BTreeSet<IpAddr>) {
        for address in old.difference(new) {
            if let Some(holders) = self.holders.get_mut(address) {
                holders.retain(|holder| holder != key);
                if holders.is_empty() {
                    self.holders.remove(address);
                }
            }
        }
        for address in new.difference(old) {
            let holders = self.holders.entry(*address).or_default();
            holders.push(Arc::clone(key));
        }
    }

    /// What the ipcache shall say of an address.
    fn claim_of(&self, address: IpAddr) -> Option<(Owner, IdentityId)> {
        let key = self.holders.get(&address)?.first()?;
        let service = self.known.get(key)?;
        let owner = match service.at.cluster_ips.contains(&address) {
            true => Owner::Service(Arc::clone(key)),
            false => Owner::ExternalService(Arc::clone(key)),
        };
        // An address of the cluster is never the world, although no policy selects it then.
        Some((owner, service.identity.unwrap_or(IdentityId::UNMANAGED)))
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
        let own = own.filter(|address| self.cluster.services.at_cluster_ip(*address).is_none());
        let own: Vec<IpAddr> = own.collect();
        self.set_node_addresses(&own);
    }

    fn put_service(&mut self, mut at: ServiceAt) {
        self.keep_families(&mut at);
        let key = Arc::clone(&at.key);
        let before = self.cluster.services.known.remove(&key);
        let had = before.as_ref().and_then(|before| before.identity);
        let has_address = at.addresses().next().is_some();
        let identity = match had {
            Some(identity) => Some(identity).filter(|_| has_address),
            None if has_address => self.acquire_service(&key),
            None => None,
        };
        let old = before.as_ref().map(|before| Arc::clone(&before.at));
        let service = KnownService {
            at: Arc::new(at),
            identity,
            exceptions: before.map(|before| before.exceptions).unwrap_or_default(),
        };
        self.exchange_service(&key, old.as_deref(), Some(service));
        if let Some(gone) = had.filter(|_| identity.is_none()) {
            self.drop_service_identity(gone);
        }
    }

    fn remove_service(&mut self, key: &str) {
        let Some((key, before)) = self.cluster.services.known.remove_entry(key) else {
            return;
        };
        self.exchange_service(&key, Some(&before.at), None);
        if let Some(gone) = before.identity {
            self.drop_service_identity(gone);
        }
    }

    /// Leaves out addresses of families that are off, and backends of families in which the Service
    /// has no address. Adds `--k8s-dns-alias`.
    fn keep_families(&self, at: &mut ServiceAt) {
        let config = &self.config;
        let aliases = config.service_aliases.iter();
        let aliases = aliases.filter(|(_, service)| **service == *at.key);
        let aliases = aliases.map(|(address, _)| *address);
        at.cluster_ips.extend(aliases);
        at.external_ips
            .retain(|address| !at.cluster_ips.contains(address));
        let is_on = |address: &IpAddr| match address {
            IpAddr::V4(_) => config.enable_ipv4,
            IpAddr::V6(_) => config.enable_ipv6,
        };
        at.cluster_ips.retain(is_on);
        at.external_ips.retain(is_on);
        let families: BTreeSet<bool> = at.addresses().map(|address| address.is_ipv4()).collect();
        for port in &mut at.ports {
            let backends = &mut port.backends;
            backends.retain(|backend| families.contains(&backend.address.is_ipv4()));
        }
    }

    fn acquire_service(&mut self, key: &str) -> Option<IdentityId> {
        self.acquire_local(&LabelSet::new(vec![Label::new(SERVICE, key, "")]))
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
        let addresses = |at: Option<&ServiceAt>| -> BTreeSet<IpAddr> {
            at.into_iter().flat_map(ServiceAt::addresses).collect()
        };
        let at = new.as_ref().map(|new| Arc::clone(&new.at));
        let (was, is) = (addresses(old), addresses(at.as_deref()));
        self.cluster
            .services
            .index(key, &backends(old), &backends(at.as_deref()));
        self.cluster.services.hold(key, &was, &is);
        if let Some(new) = new {
            self.cluster.services.dirty.insert(Arc::clone(key));
            self.cluster.services.known.insert(Arc::clone(key), new);
        }
        let mut node_changed = false;
        for address in was.union(&is) {
            self.claim_service_address(*address);
            node_changed |= self.cluster.services.node.contains(address);
        }
        if node_changed {
            self.apply_node_addresses();
        }
    }

    fn claim_service_address(&mut self, address: IpAddr) {
        let wanted = self.cluster.services.claim_of(address);
        let has = self.cluster.services.claimed.get(&address).cloned();
        if wanted == has {
            return;
        }
        let prefix = IpNet::from(address);
        match wanted.clone() {
            Some((owner, identity)) => {
                let claim = Claim::Identity(identity);
                self.ipcache.claim(prefix, owner.clone(), claim);
                self.cluster
                    .services
                    .claimed
                    .insert(address, (owner, identity));
            }
            None => drop(self.cluster.services.claimed.remove(&address)),
        }
        let owner = wanted.map(|(owner, _)| owner);
        if let Some((old, _)) = has.filter(|(old, _)| Some(old) != owner.as_ref()) {
            self.ipcache.unclaim(prefix, &old);
        }
    }
}
