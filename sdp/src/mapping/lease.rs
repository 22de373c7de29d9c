//! Which pairs (name, address) the agent has promised to keep plumbed, and until when.

use std::{collections::HashMap, net::IpAddr};

use super::BootTime;
use crate::name::Fqdn;

/// Most pairs with a lease; what does not fit is simply not leased, so its answers wait.
const LIMIT: usize = 262_144;

/// Leases of one agent epoch.
#[derive(Debug, Default)]
pub struct LeaseTable {
    names: HashMap<Fqdn, Vec<Lease>>,
    pairs: usize,
}

#[derive(Clone, Copy, Debug)]
struct Lease {
    address: IpAddr,
    end: BootTime,
    revision: u64,
}

impl LeaseTable {
    /// Notes the agent's promise, made under policy `revision`.
    pub fn grant(&mut self, name: &Fqdn, addresses: &[IpAddr], end: BootTime, revision: u64) {
        if self.pairs + addresses.len() > LIMIT {
            return;
        }
        let leases = self.names.entry(name.clone()).or_default();
        for address in addresses {
            match leases.iter_mut().find(|lease| lease.address == *address) {
                // The later revision is the one that counts; within one, the later end.
                Some(lease) if lease.revision > revision => {}
                Some(lease) => {
                    let end = if lease.revision == revision {
                        lease.end.max(end)
                    } else {
                        end
                    };
                    *lease = Lease {
                        address: *address,
                        end,
                        revision,
                    };
                }
                None => {
                    leases.push(Lease {
                        address: *address,
                        end,
                        revision,
                    });
                    self.pairs += 1;
                }
            }
        }
    }

    /// Whether each address has a lease for this name that holds until `until`
    /// and was granted under `revision` or a later one.
    pub fn covers(
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
            leases.iter().any(|lease| {
                lease.address == *address && lease.end >= until && lease.revision >= revision
            })
        })
    }

    /// Takes leases back: without a name all, without addresses all of the name.
    pub fn revoke(&mut self, name: Option<&Fqdn>, addresses: &[IpAddr]) {
        let Some(name) = name else {
            self.clear();
            return;
        };
        let Some(leases) = self.names.get_mut(name) else {
            return;
        };
        let before = leases.len();
        leases.retain(|lease| !addresses.is_empty() && !addresses.contains(&lease.address));
        self.pairs -= before - leases.len();
        if leases.is_empty() {
            self.names.remove(name);
        }
    }

    /// Voids all: another epoch, or no stream on which a revocation could come.
    pub fn clear(&mut self) {
        self.names.clear();
        self.pairs = 0;
    }

    /// Drops what has ended.
    pub fn expire(&mut self, now: BootTime) {
        self.names.retain(|_, leases| {
            leases.retain(|lease| lease.end > now);
            !leases.is_empty()
        });
        self.pairs = self.names.values().map(Vec::len).sum();
    }

    /// Number of pairs with a lease.
    pub fn len(&self) -> usize {
        self.pairs
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.pairs == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
    const B: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));

    #[test]
    fn a_lease_holds_for_its_name_time_and_revision_only() {
        let (name, other) = (Fqdn::normalise("a."), Fqdn::normalise("b."));
        let mut leases = LeaseTable::default();
        leases.grant(&name, &[A], BootTime(100), 5);
        assert!(leases.covers(&name, &[A], BootTime(100), 5));
        assert!(leases.covers(&name, &[A], BootTime(100), 4));
        assert!(!leases.covers(&name, &[A], BootTime(101), 5));
        assert!(!leases.covers(&name, &[A], BootTime(100), 6));
        assert!(!leases.covers(&name, &[A, B], BootTime(1), 5));
        assert!(!leases.covers(&other, &[A], BootTime(1), 5));
        leases.grant(&name, &[A], BootTime(90), 6);
        assert!(leases.covers(&name, &[A], BootTime(90), 6));
        assert!(
            !leases.covers(&name, &[A], BootTime(100), 5),
            "the later revision counts"
        );
    }

    #[test]
    fn revocation_takes_what_it_names() {
        let (name, other) = (Fqdn::normalise("a."), Fqdn::normalise("b."));
        let mut leases = LeaseTable::default();
        leases.grant(&name, &[A, B], BootTime(100), 1);
        leases.grant(&other, &[A], BootTime(100), 1);
        leases.revoke(Some(&name), &[A]);
        assert!(!leases.covers(&name, &[A], BootTime(1), 1));
        assert!(leases.covers(&name, &[B], BootTime(1), 1));
        leases.revoke(Some(&name), &[]);
        assert_eq!(leases.len(), 1);
        leases.revoke(None, &[]);
        assert!(leases.is_empty());
    }

    #[test]
    fn expiry_drops_what_has_ended() {
        let name = Fqdn::normalise("a.");
        let mut leases = LeaseTable::default();
        leases.grant(&name, &[A], BootTime(100), 1);
        leases.grant(&name, &[B], BootTime(200), 1);
        leases.expire(BootTime(100));
        assert_eq!(leases.len(), 1);
        assert!(leases.covers(&name, &[B], BootTime(200), 1));
    }
}
