//! Addresses of answers that get no label because of `--tofqdns-refuse-prefix`, for `why`.

use std::{
    collections::{BTreeSet, VecDeque},
    net::IpAddr,
};

use dns_policy::name::Fqdn;

/// Maximum number of pairs that are remembered; the oldest are forgotten.
const REMEMBERED: usize = 1024;

/// The latest pairs (name, address) that were refused.
#[derive(Debug, Default)]
pub(crate) struct RecentlyRefused {
    order: VecDeque<(Fqdn, IpAddr)>,
    known: BTreeSet<(Fqdn, IpAddr)>,
}

impl RecentlyRefused {
    /// Remembers a pair, and forgets the oldest one beyond [`REMEMBERED`].
    pub(crate) fn note(&mut self, name: &Fqdn, address: IpAddr) {
        if self.known.insert((name.clone(), address)) {
            self.order.push_back((name.clone(), address));
        }
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
    }

    /// The latest refused addresses of a name.
    pub(crate) fn of(&self, name: &Fqdn) -> Vec<IpAddr> {
        let pairs = self.order.iter().filter(|(known, _)| known == name);
        pairs.map(|(_, address)| *address).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_pairs_are_remembered_each_once() {
        let mut recent = RecentlyRefused::default();
        let address = |n: u16| IpAddr::from([169, 254, n.to_be_bytes()[0], n.to_be_bytes()[1]]);
        let name = |n: u16| Fqdn::normalise(&format!("n{n}."));
        for _ in 0..2 {
            for n in 0..1100 {
                recent.note(&name(n), address(n));
            }
        }
        assert_eq!(recent.order.len(), REMEMBERED);
        assert_eq!(recent.known.len(), REMEMBERED);
        assert_eq!(recent.of(&name(1099)), [address(1099)]);
        assert!(recent.of(&name(1)).is_empty());
    }
}
