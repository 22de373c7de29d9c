//! The pod that has an address. Two live pods may claim one address for a while: the younger pod
//! then holds it.
//!
//! The holder decides which groups of peers have the address. What the address may send and receive
//! on this node is decided by every pod of the node that claims it.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    fmt::Display,
    net::IpAddr,
    sync::Arc,
};

/// Addresses, and the pods that claim each address. `K` identifies a pod, displayed as
/// `namespace/name`.
#[derive(Debug)]
pub struct Addresses<K> {
    claims: BTreeMap<IpAddr, Vec<Claim<K>>>,
    of: BTreeMap<K, Arc<[IpAddr]>>,
    /// Addresses that several pods claim.
    shared: BTreeSet<IpAddr>,
}

#[derive(Debug)]
struct Claim<K> {
    pod: K,
    created: Option<u64>,
}

impl<K> Default for Addresses<K> {
    fn default() -> Self {
        Self {
            claims: BTreeMap::new(),
            of: BTreeMap::new(),
            shared: BTreeSet::new(),
        }
    }
}

impl<K: Ord + Clone + Display> Addresses<K> {
    /// Sets the addresses that a pod claims. Returns the other pods that claim one of these
    /// addresses, or an address that the pod claimed before.
    pub fn set(&mut self, pod: &K, addresses: Arc<[IpAddr]>, created: Option<u64>) -> BTreeSet<K> {
        let mut others = BTreeSet::new();
        for address in &*self.of.remove(pod).unwrap_or_default() {
            if let Some(claims) = self.claims.get_mut(address) {
                claims.retain(|claim| claim.pod != *pod);
                others.extend(claims.iter().map(|claim| claim.pod.clone()));
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
            others.extend(claims.iter().map(|claim| claim.pod.clone()));
            let pod = pod.clone();
            // Nearly every address has only one claim.
            claims.reserve_exact(1);
            claims.push(Claim { pod, created });
            if claims.len() > 1 {
                self.shared.insert(*address);
            }
        }
        if !addresses.is_empty() {
            self.of.insert(pod.clone(), addresses);
        }
        others
    }

    /// Number of addresses that pods claim.
    pub(crate) fn len(&self) -> usize {
        self.claims.len()
    }

    /// The pod that has this address. If several pods claim it, the youngest has it. Among pods
    /// of one age, it is the first by name.
    pub fn holder(&self, address: IpAddr) -> Option<&K> {
        let claims = self.claims.get(&address)?;
        let claims = claims.iter();
        let youngest = claims.max_by_key(|claim| (claim.created, Reverse(&claim.pod)));
        youngest.map(|claim| &claim.pod)
    }

    /// The pods that claim an address, in no order.
    pub fn claimants(&self, address: IpAddr) -> impl Iterator<Item = &K> {
        let claims = self.claims.get(&address).into_iter().flatten();
        claims.map(|claim| &claim.pod)
    }

    /// Addresses that several pods claim, each with its holder and the other pods.
    pub fn shared(&self) -> impl Iterator<Item = (IpAddr, &K, Vec<&K>)> {
        let shared = self.shared.iter();
        shared.filter_map(|address| {
            let holder = self.holder(*address)?;
            let others = self.claimants(*address).filter(|pod| *pod != holder);
            Some((*address, holder, others.collect()))
        })
    }

    /// A warning for each address that several pods claim, with the key of a document.
    pub fn conflicts(&self) -> impl Iterator<Item = (String, String)> {
        let shared = self.shared();
        shared.map(|(address, holder, others)| warning(address, holder, &others))
    }
}

/// The warning that several pods claim an address, with the key of a document.
pub(crate) fn warning<K: Display>(address: IpAddr, holder: &K, others: &[&K]) -> (String, String) {
    let others: Vec<String> = others.iter().map(ToString::to_string).collect();
    let warning = format!(
        "status.podIP: {address} is also the address of Pod/{}: {holder} counts (the younger, \
                 or the first by name); remove the document of the pod that is gone",
        others.join(", Pod/")
    );
    (format!("Pod/{holder}"), warning)
}
