//! Addresses of Services, and to which Service each of them belongs.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use shared_maps::IdentityId;

use crate::{
    ipcache::owners::Owner, kubernetes::service_at::ServiceAt, policy::document::PolicyDocument,
    selector::selector::Selector,
};

/// How a Service has an address. The first of these variants counts most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Standing {
    /// An address in the cluster: one of `spec.clusterIPs`, or another that nodes or settings give
    /// the Service.
    Cluster,
    /// An address of its load balancer.
    LoadBalancer,
    /// An address that an author wrote into `spec.externalIPs`.
    External,
}

/// Which Service has which address.
#[derive(Debug, Default)]
pub(crate) struct ServiceAddresses {
    /// Services that have an address; the first one counts.
    pub(crate) holders: BTreeMap<IpAddr, Vec<(Standing, Arc<str>)>>,
    /// Addresses as they are claimed in the ipcache.
    pub(crate) claimed: BTreeMap<IpAddr, (Owner, IdentityId)>,
    /// DNS servers that rules name by address, with the number of these rules.
    pub(crate) dns_servers: BTreeMap<IpAddr, usize>,
}

impl ServiceAt {
    /// All addresses: of the cluster, of load balancers and external ones.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.standings().map(|(address, _)| address)
    }

    /// Every address, and how the Service has it.
    pub(crate) fn standings(&self) -> impl Iterator<Item = (IpAddr, Standing)> {
        let all = [
            (&self.cluster_ips, Standing::Cluster),
            (&self.load_balancer_ips, Standing::LoadBalancer),
            (&self.external_ips, Standing::External),
        ];
        let all = all.into_iter();
        all.flat_map(|(list, standing)| list.iter().map(move |address| (*address, standing)))
    }
}

impl ServiceAddresses {
    /// The Service to which an address in the cluster belongs.
    pub(crate) fn at_cluster_ip(&self, address: IpAddr) -> Option<&str> {
        match self.claimed.get(&address)? {
            (Owner::Service(key), _) => Some(key),
            _ => None,
        }
    }

    /// Addresses that several Services have: the address, its Service, and another Service.
    pub(crate) fn contested(&self) -> impl Iterator<Item = (IpAddr, &str, &str)> {
        self.holders.iter().flat_map(|(address, holders)| {
            let (first, others) = match holders.split_first() {
                Some(((_, first), others)) => (&**first, others),
                None => ("", holders.as_slice()),
            };
            others
                .iter()
                .map(move |(_, other)| (*address, first, &**other))
        })
    }

    /// The Service that an address belongs to.
    pub(crate) fn holder(&self, address: IpAddr) -> Option<&str> {
        let (_, key) = self.holders.get(&address)?.first()?;
        Some(key)
    }

    /// The Service that an address belongs to, unless the Service has the address only by `spec.externalIPs`. Any
    /// author of Services may write that field.
    pub(crate) fn holder_in_cluster(&self, address: IpAddr) -> Option<&str> {
        let (standing, key) = self.holders.get(&address)?.first()?;
        (*standing != Standing::External).then_some(&**key)
    }

    /// External addresses of Services, each with the Service that counts.
    pub(crate) fn external(&self) -> impl Iterator<Item = (IpAddr, &str)> {
        let holders = self.holders.iter();
        holders.filter_map(|(address, holders)| match holders.first()? {
            (Standing::External, key) => Some((*address, &**key)),
            _ => None,
        })
    }

    /// Whether rules with DNS names are about exactly this address.
    pub(crate) fn is_dns_server(&self, address: IpAddr) -> bool {
        self.dns_servers.contains_key(&address)
    }

    /// Follows a Service whose addresses changed.
    pub(crate) fn hold(
        &mut self,
        key: &Arc<str>,
        old: &BTreeMap<IpAddr, Standing>,
        new: &BTreeMap<IpAddr, Standing>,
    ) {
        for (address, standing) in old {
            if new.get(address) == Some(standing) {
                continue;
            }
            if let Some(holders) = self.holders.get_mut(address) {
                holders.retain(|(_, holder)| holder != key);
                if holders.is_empty() {
                    self.holders.remove(address);
                }
            }
        }
        for (address, standing) in new {
            if old.get(address) == Some(standing) {
                continue;
            }
            let holders = self.holders.entry(*address).or_default();
            let at = holders.partition_point(|(other, _)| other <= standing);
            holders.insert(at, (*standing, Arc::clone(key)));
        }
    }
}

/// Single addresses to which rules with DNS names allow queries.
pub(crate) fn dns_servers(document: &PolicyDocument) -> BTreeSet<IpAddr> {
    let rules = document.rules().iter().flat_map(|rule| &rule.egress.peers);
    let about_names = rules.filter(|rule| rule.ports.iter().any(|port| port.dns.is_some()));
    let selectors = about_names.flat_map(|rule| rule.selectors());
    let single = selectors.filter_map(|selector| match selector {
        Selector::Cidr(cidr) if cidr.prefix.prefix_len() == cidr.prefix.max_prefix_len() => {
            Some(cidr.prefix.addr())
        }
        _ => None,
    });
    single.collect()
}
