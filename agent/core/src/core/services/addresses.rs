//! Which Service has an address.
//!
//! Several Services may have one address, and authors of Services write `externalIPs` freely. An address in the cluster
//! takes precedence over the same address of a load balancer, and both take precedence over the same external address.
//! If both addresses are of one kind, the address belongs to the Service that had it first. An address outside the
//! cluster does not belong to a Service if it belongs to a node, a pod or an API server ([`Metadata::identity`]), or to
//! a DNS server that policy names.
//!
//! [`Metadata::identity`]: crate::ipcache::metadata::Metadata::identity

use std::net::IpAddr;

use ipnet::IpNet;

use crate::{
    core::state::{State, services::addresses::dns_servers},
    ipcache::metadata::Claim,
    policy::document::PolicyDocument,
    users::release,
};

impl State {
    pub(crate) fn claim_service_address(&mut self, address: IpAddr) {
        let wanted = self.cluster.services.claim_of(address);
        let claimed = &mut self.cluster.services.addresses.claimed;
        let has = claimed.get(&address).cloned();
        if wanted == has {
            return;
        }
        let prefix = IpNet::from(address);
        match wanted.clone() {
            Some((owner, identity)) => {
                claimed.insert(address, (owner.clone(), identity));
                let claim = Claim::Identity(identity);
                self.ipcache.claim(prefix, owner, claim);
            }
            None => drop(claimed.remove(&address)),
        }
        let owner = wanted.map(|(owner, _)| owner);
        if let Some((old, _)) = has.filter(|(old, _)| Some(old) != owner.as_ref()) {
            self.ipcache.unclaim(prefix, &old);
        }
    }

    /// Follows a document that replaces another one: addresses of DNS servers in its rules belong
    /// to no Service.
    pub(crate) fn note_dns_servers(
        &mut self,
        old: Option<&PolicyDocument>,
        new: Option<&PolicyDocument>,
    ) {
        let of = |document: Option<&PolicyDocument>| document.map(dns_servers).unwrap_or_default();
        let (old, new) = (of(old), of(new));
        let known = &mut self.cluster.services.addresses.dns_servers;
        for address in new.difference(&old) {
            *known.entry(*address).or_default() += 1;
        }
        for address in old.difference(&new) {
            release(known, address);
        }
        for address in old.symmetric_difference(&new) {
            self.claim_service_address(*address);
        }
    }
}
