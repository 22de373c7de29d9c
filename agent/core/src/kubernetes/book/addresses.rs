//! Whose an address is. Two live pods may claim one for a while: the younger holds it.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

/// Addresses, and the pods that claim each.
#[derive(Debug, Default)]
pub(super) struct Addresses {
    claims: BTreeMap<IpAddr, Vec<Claim>>,
    of: BTreeMap<Arc<str>, Arc<[IpAddr]>>,
    /// Addresses that several pods claim.
    shared: BTreeSet<IpAddr>,
}

#[derive(Debug)]
struct Claim {
    pod: Arc<str>,
    created: Option<u64>,
}

impl Addresses {
    /// Sets the addresses that a pod claims. Gives the other pods with the same addresses, now or
    /// before.
    pub(super) fn set(
        &mut self,
        pod: &Arc<str>,
        addresses: Arc<[IpAddr]>,
        created: Option<u64>,
    ) -> BTreeSet<Arc<str>> {
        let mut others = BTreeSet::new();
        for address in &*self.of.remove(pod).unwrap_or_default() {
            if let Some(claims) = self.claims.get_mut(address) {
                claims.retain(|claim| claim.pod != *pod);
                others.extend(claims.iter().map(|claim| Arc::clone(&claim.pod)));
                if claims.len() < 2 {
                    self.shared.remove(address);
                }
                if claims.is_empty() {
                    self.claims.remove(address);
                }
            }
        }
        for address in &*addresses {
            let claims = self.claims.entry(*address).or_default();
            others.extend(claims.iter().map(|claim| Arc::clone(&claim.pod)));
            let pod = Arc::clone(pod);
            // Nearly all have one.
            claims.reserve_exact(1);
            claims.push(Claim { pod, created });
            if claims.len() > 1 {
                self.shared.insert(*address);
            }
        }
        if !addresses.is_empty() {
            self.of.insert(Arc::clone(pod), addresses);
        }
        others
    }

    /// The pod whose address this is: of several the one that was made last, or the first by name.
    pub(super) fn holder(&self, address: IpAddr) -> Option<&Arc<str>> {
        let claims = self.claims.get(&address)?;
        let claims = claims.iter();
        let youngest = claims.max_by_key(|claim| (claim.created, Reverse(&claim.pod)));
        youngest.map(|claim| &claim.pod)
    }

    /// Addresses of several pods, in words.
    pub(super) fn conflicts(&self) -> impl Iterator<Item = (String, String)> {
        let shared = self.shared.iter();
        let shared = shared.filter_map(|address| Some((address, self.claims.get(address)?)));
        shared.map(|(address, claims)| {
            let holder = self.holder(*address).map(AsRef::as_ref).unwrap_or_default();
            let others = claims.iter().map(|claim| &*claim.pod);
            let others: Vec<&str> = others.filter(|pod| *pod != holder).collect();
            let warning = format!(
                "status.podIP: {address} is also the address of Pod/{}: {holder} counts (the younger, \
                 or the first by name); remove the document of the pod that is gone",
                others.join(", Pod/")
            );
            (format!("Pod/{holder}"), warning)
        })
    }
}
