//! Which agents a relay serves when there are more than it may serve.
//!
//! No address can take all places: it gets another place only while it has fewer places than are
//! free, as in [`limits::quota`]. No certificate can take all places either: when all are taken, an
//! agent whose certificate has fewer gets a place from the certificate that has the most.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use limits::quota::Quota;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

/// Digest of an agent's certificate; the same for all peers without one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Certificate(pub(super) u64);

/// The address and the certificate for which an agent's place is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Who {
    pub(super) address: IpAddr,
    pub(super) certificate: Certificate,
}

/// Why an agent gets no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoPlace {
    /// All places are taken, and none can be taken from another certificate.
    Full,
    /// The address has its share.
    Share {
        /// Places that the address has.
        held: usize,
    },
}

/// All places. All clones share one state.
#[derive(Clone, Debug)]
pub(super) struct Places(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    by_address: Quota<IpAddr>,
    by_certificate: Quota<Certificate>,
    /// Taken places by number. A younger place has a greater number.
    taken: BTreeMap<u64, Taken>,
    next: u64,
}

#[derive(Debug)]
struct Taken {
    who: Who,
    lost: CancellationToken,
}

/// A place, which is held until this value is dropped.
#[derive(Debug)]
pub(super) struct Place {
    places: Places,
    key: u64,
    lost: CancellationToken,
}

impl Places {
    /// `limit` places, at least one.
    pub(super) fn new(limit: usize) -> Self {
        let limit = limit.max(1);
        Self(Arc::new(Mutex::new(State {
            by_address: Quota::new(limit),
            by_certificate: Quota::new(limit),
            taken: BTreeMap::new(),
            next: 0,
        })))
    }

    /// A place for one more agent.
    pub(super) fn admit(&self, who: Who) -> Result<Place, NoPlace> {
        let mut state = self.0.lock();
        if !state.by_address.allows(who.address, 1) {
            state.make_room(who)?;
        }
        let key = state.next;
        state.next += 1;
        let lost = CancellationToken::new();
        state.by_address.add(who.address, 1);
        state.by_certificate.add(who.certificate, 1);
        let taken = Taken {
            who,
            lost: lost.clone(),
        };
        state.taken.insert(key, taken);
        Ok(Place {
            places: self.clone(),
            key,
            lost,
        })
    }

    pub(super) fn taken(&self) -> usize {
        self.0.lock().by_address.used()
    }

    pub(super) fn limit(&self) -> usize {
        self.0.lock().by_address.limit()
    }
}

impl State {
    /// Takes a place from the certificate with the most places, for the first agent of an address.
    fn make_room(&mut self, who: Who) -> Result<(), NoPlace> {
        let held = self.by_address.held_by(who.address);
        if self.by_address.used() < self.by_address.limit() {
            return Err(NoPlace::Share { held });
        }
        let largest = self.by_certificate.largest();
        let own = self.by_certificate.held_by(who.certificate);
        // After the move, the certificate that lost the place must not have fewer places than that of
        // `who`: the two would take places from each other for ever.
        let largest = largest.filter(|(_, most)| held == 0 && *most >= own + 2);
        let (certificate, _) = largest.ok_or(NoPlace::Full)?;
        // The certificate loses a place of the address with the most places, and of these the newest one.
        let of_it = self.taken.iter();
        let of_it = of_it.filter(|(_, taken)| taken.who.certificate == certificate);
        let newest = of_it.max_by_key(|(key, taken)| {
            let held = self.by_address.held_by(taken.who.address);
            (held, **key)
        });
        let key = newest.map(|(key, _)| *key).ok_or(NoPlace::Full)?;
        self.remove(key);
        Ok(())
    }

    fn remove(&mut self, key: u64) {
        if let Some(taken) = self.taken.remove(&key) {
            self.by_address.give_back(taken.who.address, 1);
            self.by_certificate.give_back(taken.who.certificate, 1);
            taken.lost.cancel();
        }
    }
}

impl Place {
    /// Cancelled when another agent gets the place.
    pub(super) fn lost(&self) -> &CancellationToken {
        &self.lost
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.0.lock().remove(self.key);
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn who(address: u32, certificate: u64) -> Who {
        Who {
            address: Ipv4Addr::from_bits(address).into(),
            certificate: Certificate(certificate),
        }
    }

    fn lost(places: &[Place]) -> usize {
        places
            .iter()
            .filter(|one| one.lost().is_cancelled())
            .count()
    }

    #[test]
    fn one_address_gets_at_most_half_and_every_other_one_finds_a_place() {
        let places = Places::new(100);
        let mut greedy = Vec::new();
        while let Ok(place) = places.admit(who(1, 7)) {
            greedy.push(place);
        }
        assert_eq!(greedy.len(), 50);
        let refused = places.admit(who(1, 7)).unwrap_err();
        assert_eq!(refused, NoPlace::Share { held: 50 });
        // All have the same certificate, as the chart makes it.
        let others: Vec<_> = (2..52)
            .map(|address| places.admit(who(address, 7)).unwrap())
            .collect();
        assert_eq!((places.taken(), lost(&greedy)), (100, 0));
        assert_eq!(places.admit(who(99, 7)).unwrap_err(), NoPlace::Full);
        drop(greedy);
        assert_eq!(places.taken(), others.len());
    }

    #[test]
    fn a_certificate_at_many_addresses_gives_way_to_another_certificate() {
        let places = Places::new(10);
        let honest: Vec<_> = (0..3)
            .map(|n| places.admit(who(n, u64::from(n))).unwrap())
            .collect();
        let stolen: Vec<_> = (100..107)
            .map(|address| places.admit(who(address, 99)).unwrap())
            .collect();
        let fourth = places.admit(who(3, 3)).unwrap();
        assert_eq!((lost(&honest), lost(&stolen)), (0, 1));
        assert!(stolen[6].lost().is_cancelled());
        // One more agent with the stolen certificate gets no place from certificates that have one each.
        assert_eq!(places.admit(who(107, 99)).unwrap_err(), NoPlace::Full);
        assert_eq!((places.taken(), lost(&[fourth])), (10, 0));
    }

    #[test]
    fn where_every_agent_has_one_place_one_more_is_refused() {
        let places = Places::new(3);
        let open: Vec<_> = (0..3)
            .map(|n| places.admit(who(n, u64::from(n))).unwrap())
            .collect();
        assert_eq!(places.admit(who(3, 3)).unwrap_err(), NoPlace::Full);
        // Nor does a second agent of an address displace others.
        assert_eq!(places.admit(who(0, 3)).unwrap_err(), NoPlace::Full);
        assert_eq!(lost(&open), 0);
        drop(open);
        assert_eq!(places.taken(), 0);
    }

    #[test]
    fn a_relay_of_one_agent_serves_one() {
        let places = Places::new(1);
        let first = places.admit(who(1, 1)).unwrap();
        assert_eq!(places.admit(who(1, 1)).unwrap_err(), NoPlace::Full);
        drop(first);
        assert!(places.admit(who(1, 1)).is_ok());
    }
}
