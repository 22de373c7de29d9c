//! Services of the cluster. Each has one identity per address family, because the families have
//! different backends.
//!
//! A packet to a Service is judged before the node translates it. The identity's entries follow from
//! those of the identities behind it ([`super::state::policy_model`]); this file reads the
//! identities behind a Service from the addresses of its backends, whenever one of these changes
//! ([`backends`]). [`addresses`] decides which Service has an address.

mod addresses;
mod backends;
mod warnings;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use shared_maps::IdentityId;

use super::{config::DNS_SERVICE, state::State};
use crate::{
    core::state::services::{KnownService, addresses::Standing},
    kubernetes::{
        external_ips::ExternalIps,
        node_interfaces::NodeInterfaces,
        service_at::{Family, ServiceAt},
    },
    labels::{Label, LabelSet, SERVICE},
    source_event::SourceEvent,
};

impl ServiceAt {
    fn backends(&self) -> BTreeSet<IpAddr> {
        let backends = self.ports.iter().flat_map(|port| &port.backends);
        backends.map(|backend| backend.address).collect()
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

    /// Takes the addresses of the node. An address of a Service does not count, even if an
    /// interface has it.
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

    /// Follows the interfaces of the node: NodeLocal DNSCache listens on addresses of the DNS Service.
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

    /// Drops the identity of a Service that nothing has any more.
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
