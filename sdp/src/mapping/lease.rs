//! Which pairs (name, address) the agent has promised to keep plumbed, and until when.

use std::{
    collections::{HashMap, hash_map::Entry},
    net::IpAddr,
    time::Duration,
};

use dns_policy::{boot_time::BootTime, mapping::LONGEST_LEASE, name::Fqdn};
use foldhash::quality::RandomState;
use limits::quota::Holder;

use super::holdings::{Holdings, Serial};
#[cfg(test)]
use super::steps;

/// A lease for [`LONGEST_LEASE`] minus this margin is enough for an answer with any TTL. So a new
/// lease of maximum duration releases answers with a long TTL for the time of the margin.
pub(crate) const MARGIN: Duration = Duration::from_secs(60);
/// If the TTL of an answer is longer than any lease, the lease is renewed when it ends less than
/// this after [`Needed::until`].
const RENEWED: Duration = Duration::from_secs(30);

/// Until when a lease must hold for an answer to be released under it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Needed {
    /// Earliest end that the lease may have.
    pub until: BootTime,
    /// A lease that ends before this time is renewed. `None`: a lease can last as long as the
    /// answer.
    pub renewed: Option<BootTime>,
}

/// Time until which a lease must last: as long as the client may use the answer, but not longer
/// than leases can last.
pub(crate) fn needed(from: BootTime, lasts: Duration) -> Needed {
    let most = LONGEST_LEASE - MARGIN;
    let until = from.plus(lasts.min(most));
    Needed {
        until,
        renewed: (lasts > most).then(|| until.plus(RENEWED)),
    }
}

/// Maximum number of pairs with a lease. If a lease is dropped, nothing is lost: the next answer
/// waits for the agent again.
pub(crate) const LIMIT: usize = 262_144;

/// Number of leases that are dropped at once, all of the holder with the most leases.
const DROPPED_AT_ONCE: usize = 32;

type Names = HashMap<Fqdn, HashMap<IpAddr, Lease, RandomState>, RandomState>;

/// Leases of one agent epoch. When the table is full, the endpoint for which the most leases were
/// granted loses the leases that end soonest.
#[derive(Debug)]
pub(crate) struct LeaseTable {
    names: Names,
    holdings: Holdings<(Fqdn, IpAddr)>,
}

#[derive(Clone, Copy, Debug)]
struct Lease {
    end: BootTime,
    revision: u64,
    /// The endpoint for which the lease was granted first. The lease counts for all endpoints.
    holder: Holder,
    serial: Serial,
}

impl Default for LeaseTable {
    fn default() -> Self {
        Self::new(LIMIT)
    }
}

impl LeaseTable {
    /// A table of at most `limit` leases.
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            names: HashMap::default(),
            holdings: Holdings::new(limit),
        }
    }

    /// Notes the leases that the agent granted to `holder` under policy `revision`.
    pub(crate) fn grant(
        &mut self,
        holder: Holder,
        name: &Fqdn,
        addresses: &[IpAddr],
        end: BootTime,
        revision: u64,
    ) {
        if addresses.is_empty() {
            return;
        }
        let leases = self.names.entry(name.clone()).or_default();
        for address in addresses {
            #[cfg(test)]
            steps::count();
            match leases.entry(*address) {
                Entry::Occupied(mut found) => {
                    let lease = found.get_mut();
                    // The later revision counts. Within one revision, the later end counts.
                    if lease.revision < revision {
                        lease.end = end;
                        lease.revision = revision;
                    } else if lease.revision == revision {
                        lease.end = lease.end.max(end);
                    }
                }
                Entry::Vacant(place) => {
                    let serial = self.holdings.enter(holder, end, (name.clone(), *address));
                    place.insert(Lease {
                        end,
                        revision,
                        holder,
                        serial,
                    });
                }
            }
        }
        let names = &self.names;
        self.holdings
            .tidy(holder, |key, serial| end_of(names, key, serial));
        self.shrink();
    }

    fn shrink(&mut self) {
        while self.holdings.excess() > 0 {
            let names = &self.names;
            let most = self.holdings.excess().min(DROPPED_AT_ONCE);
            let end_of = |key: &_, serial| end_of(names, key, serial);
            let dropped = self.holdings.of_largest(most, end_of);
            if dropped.is_empty() {
                return;
            }
            self.remove(&dropped);
        }
    }

    /// Whether each address has a lease for this name that holds until `until`
    /// and was granted under `revision` or a later one.
    pub(crate) fn covers(
        &self,
        name: &Fqdn,
        addresses: &[IpAddr],
        until: BootTime,
        revision: u64,
    ) -> bool {
        let Some(leases) = self.names.get(name) else {
            return false;
        };
        addresses.iter().all(|address| {
            #[cfg(test)]
            steps::count();
            let lease = leases.get(address);
            lease.is_some_and(|lease| lease.end >= until && lease.revision >= revision)
        })
    }

    /// Removes leases. No name stands for all names, and no addresses for all addresses of the
    /// name.
    pub(crate) fn revoke(&mut self, name: Option<&Fqdn>, addresses: &[IpAddr]) {
        let Some(name) = name else {
            self.clear();
            return;
        };
        let pairs: Vec<_> = if addresses.is_empty() {
            let leases = self.names.get(name);
            let all = leases.into_iter().flat_map(HashMap::keys);
            all.map(|address| (name.clone(), *address)).collect()
        } else {
            let named = addresses.iter();
            named.map(|address| (name.clone(), *address)).collect()
        };
        self.remove(&pairs);
    }

    /// Removes all leases: the agent has another epoch, or no stream is open by which a revocation
    /// could arrive.
    pub(crate) fn clear(&mut self) {
        self.names.clear();
        self.holdings.clear();
    }

    pub(crate) fn expire(&mut self, now: BootTime) {
        let names = &self.names;
        let ended = self
            .holdings
            .ended(now, |key, serial| end_of(names, key, serial));
        self.remove(&ended);
    }

    fn remove(&mut self, pairs: &[(Fqdn, IpAddr)]) {
        for (name, address) in pairs {
            let Some(leases) = self.names.get_mut(name) else {
                continue;
            };
            if let Some(lease) = leases.remove(address) {
                self.holdings.leave(lease.holder);
            }
            if leases.is_empty() {
                self.names.remove(name);
            }
        }
    }

    /// Number of pairs with a lease.
    pub(crate) fn len(&self) -> usize {
        self.holdings.len()
    }
}

fn end_of(names: &Names, (name, address): &(Fqdn, IpAddr), serial: Serial) -> Option<BootTime> {
    let lease = names.get(name)?.get(address)?;
    (lease.serial == serial).then_some(lease.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_outlasts_a_short_answer_and_is_renewed_for_a_long_one() {
        let minute = Duration::from_secs(60);
        let short = needed(BootTime::START, minute);
        assert_eq!(
            (short.until, short.renewed),
            (BootTime::START.plus_secs(60), None)
        );
        for lasts in [3541, 86_400, 604_800] {
            let long = needed(BootTime::START, Duration::from_secs(lasts));
            assert_eq!(long.until, BootTime::START.plus(LONGEST_LEASE - MARGIN));
            assert_eq!(long.renewed, Some(BootTime::START.plus_secs(3570)));
        }
    }

    const A: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
    const POD: Holder = Holder::Endpoint {
        id: shared_maps::EndpointId(1),
        ifindex: 9,
    };
    const B: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));

    #[test]
    fn a_lease_holds_for_its_name_time_and_revision_only() {
        let (name, other) = (Fqdn::normalise("a."), Fqdn::normalise("b."));
        let mut leases = LeaseTable::default();
        leases.grant(POD, &name, &[A], BootTime::from_nanos(100), 5);
        assert!(leases.covers(&name, &[A], BootTime::from_nanos(100), 5));
        assert!(leases.covers(&name, &[A], BootTime::from_nanos(100), 4));
        assert!(!leases.covers(&name, &[A], BootTime::from_nanos(101), 5));
        assert!(!leases.covers(&name, &[A], BootTime::from_nanos(100), 6));
        assert!(!leases.covers(&name, &[A, B], BootTime::from_nanos(1), 5));
        assert!(!leases.covers(&other, &[A], BootTime::from_nanos(1), 5));
        leases.grant(POD, &name, &[A], BootTime::from_nanos(90), 6);
        assert!(leases.covers(&name, &[A], BootTime::from_nanos(90), 6));
        assert!(
            !leases.covers(&name, &[A], BootTime::from_nanos(100), 5),
            "the later revision counts"
        );
    }

    #[test]
    fn a_revocation_removes_the_names_that_it_lists() {
        let (name, other) = (Fqdn::normalise("a."), Fqdn::normalise("b."));
        let mut leases = LeaseTable::default();
        leases.grant(POD, &name, &[A, B], BootTime::from_nanos(100), 1);
        leases.grant(POD, &other, &[A], BootTime::from_nanos(100), 1);
        leases.revoke(Some(&name), &[A]);
        assert!(!leases.covers(&name, &[A], BootTime::from_nanos(1), 1));
        assert!(leases.covers(&name, &[B], BootTime::from_nanos(1), 1));
        leases.revoke(Some(&name), &[]);
        assert_eq!(leases.len(), 1);
        leases.revoke(None, &[]);
        assert_eq!(leases.len(), 0);
    }

    #[test]
    fn expiry_drops_what_has_ended() {
        let name = Fqdn::normalise("a.");
        let mut leases = LeaseTable::default();
        leases.grant(POD, &name, &[A], BootTime::from_nanos(100), 1);
        leases.grant(POD, &name, &[B], BootTime::from_nanos(200), 1);
        leases.expire(BootTime::from_nanos(100));
        assert_eq!(leases.len(), 1);
        assert!(leases.covers(&name, &[B], BootTime::from_nanos(200), 1));
    }

    #[test]
    fn when_the_table_is_full_the_endpoint_with_most_leases_loses_some() {
        let other = Holder::Endpoint {
            id: shared_maps::EndpointId(2),
            ifindex: 10,
        };
        let name = |pod: &str, n: u32| Fqdn::normalise(&format!("{pod}{n}."));
        let mut leases = LeaseTable::new(100);
        for n in 0..10 {
            leases.grant(POD, &name("a", n), &[A], BootTime::from_nanos(100), 1);
        }
        for n in 0..1000_u32 {
            let end = BootTime::from_nanos(1000 + u64::from(n));
            leases.grant(other, &name("b", n), &[A, B], end, 1);
            assert!(leases.len() <= 100);
        }
        let is_leased = |name: &Fqdn| leases.covers(name, &[A], BootTime::from_nanos(100), 1);
        assert!((0..10).all(|n| is_leased(&name("a", n))));
        assert!(is_leased(&name("b", 999)), "the latest to end stays");
        assert!(!is_leased(&name("b", 0)));
    }
}
