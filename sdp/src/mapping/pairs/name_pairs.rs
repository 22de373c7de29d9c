//! The pairs of one name, as one endpoint learned them from one server.

use std::{collections::HashMap, net::IpAddr};

use dns_policy::{boot_time::BootTime, mapping::Mapping, rule::Transport};
use dns_wire::answer::MAX_ADDRESSES;
use foldhash::quality::RandomState;

use super::{key::Key, pair::Pair};
#[cfg(test)]
use crate::mapping::steps;

#[derive(Debug)]
pub(super) struct NamePairs {
    pub(super) transport: Transport,
    pub(super) pairs: HashMap<IpAddr, Pair, RandomState>,
}

impl NamePairs {
    /// Time of the first answer with a pair that no agent has ever made durable; `None` = there is no such pair.
    pub(super) fn new_since(&self) -> Option<BootTime> {
        let pairs = self.pairs.values().filter(|pair| pair.is_new());
        pairs.map(|pair| pair.seen_at).min()
    }

    /// The pairs as mappings: one for each answer time, TTL and end, with at most [`MAX_ADDRESSES`]
    /// addresses. Each comes with the number of seconds from `seen_at` for which it counts.
    pub(super) fn mappings<'p>(
        &self,
        key: &Key,
        pairs: impl Iterator<Item = (IpAddr, &'p Pair)>,
    ) -> Vec<(Mapping, u32)> {
        let mut found: Vec<(Mapping, u32)> = Vec::new();
        let mut open = HashMap::<_, usize, RandomState>::default();
        for (address, pair) in pairs {
            #[cfg(test)]
            steps::count();
            let lasts = pair.lasts();
            let at = open.entry((pair.seen_at, pair.ttl, lasts));
            let at = at.or_insert(found.len());
            match found.get_mut(*at) {
                Some((mapping, _)) if mapping.addresses.len() < MAX_ADDRESSES => {
                    mapping.addresses.push(address);
                }
                _ => {
                    *at = found.len();
                    let mapping = Mapping {
                        endpoint: key.asked.endpoint,
                        name: key.name.clone(),
                        addresses: vec![address],
                        ttl: pair.ttl,
                        seen_at: pair.seen_at,
                        rcode: 0,
                        server: key.asked.server,
                        transport: self.transport,
                        replayed: true,
                    };
                    found.push((mapping, lasts));
                }
            }
        }
        for (mapping, _) in &mut found {
            mapping.addresses.sort_unstable();
        }
        found
    }
}
