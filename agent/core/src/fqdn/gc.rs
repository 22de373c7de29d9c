//! When an expired address that connections may still use is released.

use std::{
    collections::{BTreeSet, HashSet},
    net::IpAddr,
    time::Duration,
};

use dns_policy::{boot_time::BootTime, name::Fqdn};
use foldhash::HashMap;

/// An expired address of one endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Zombie {
    /// Names it was learned under.
    pub names: BTreeSet<Fqdn>,
    /// Until when conntrack vouched for it, if it ever did.
    pub alive_at: Option<BootTime>,
    /// Since when it is expired.
    pub delete_pending: BootTime,
    /// How many complete conntrack scans there were before it became a zombie.
    pub born: u64,
}

/// Complete scans over the conntrack maps.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ConntrackScans {
    /// Complete scans since the agent started.
    pub count: u64,
    /// When the last one began.
    pub last: BootTime,
}

/// Whether no connection uses the address: two complete scans since it expired, the last of
/// which began after it was alive and after its grace.
pub(crate) fn is_dead(zombie: &Zombie, scans: ConntrackScans, idle_grace: Duration) -> bool {
    scans.count >= zombie.born + 2
        && scans.last > zombie.delete_pending.plus(idle_grace)
        && zombie.alive_at.is_none_or(|alive_at| scans.last > alive_at)
}

/// Addresses to release. A dead address stays while another address of one of its names is alive
/// (clients move between addresses of a name), up to `per_name` addresses of that name.
pub(crate) fn dead(
    zombies: &HashMap<IpAddr, Zombie>,
    scans: ConntrackScans,
    idle_grace: Duration,
    per_name: usize,
) -> Vec<IpAddr> {
    let mut alive_names: HashMap<&Fqdn, usize> = HashMap::default();
    let mut dead = Vec::new();
    for (address, zombie) in zombies {
        if is_dead(zombie, scans, idle_grace) {
            dead.push((zombie.alive_at, zombie.delete_pending, *address, zombie));
        } else if zombie.alive_at.is_some() {
            for name in &zombie.names {
                *alive_names.entry(name).or_default() += 1;
            }
        }
    }
    dead.sort_by(|one, other| {
        other
            .0
            .cmp(&one.0)
            .then(other.1.cmp(&one.1))
            .then(one.2.cmp(&other.2))
    });
    let mut gone = Vec::new();
    for (_, _, address, zombie) in dead {
        let room = |name: &Fqdn| alive_names.get(name).is_some_and(|n| *n < per_name);
        if zombie.names.iter().any(room) {
            for name in &zombie.names {
                if let Some(count) = alive_names.get_mut(name) {
                    *count += 1;
                }
            }
        } else {
            gone.push(address);
        }
    }
    gone
}

/// The least valuable zombies beyond `limit`: alive longest ago, expired longest ago, with
/// fewest names.
pub(crate) fn beyond_limit(zombies: &HashMap<IpAddr, Zombie>, limit: usize) -> HashSet<IpAddr> {
    let excess = zombies.len().saturating_sub(limit);
    if excess == 0 {
        return HashSet::new();
    }
    let mut order: Vec<_> = zombies
        .iter()
        .map(|(address, z)| (z.alive_at, z.delete_pending, z.names.len(), *address))
        .collect();
    order.sort_unstable();
    order
        .into_iter()
        .take(excess)
        .map(|(_, _, _, address)| address)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zombie(name: &str, alive_at: u64, delete_pending: u64) -> Zombie {
        Zombie {
            names: [Fqdn::normalise(name)].into(),
            alive_at: (alive_at > 0).then_some(BootTime::from_nanos(alive_at)),
            delete_pending: BootTime::from_nanos(delete_pending),
            born: 0,
        }
    }

    #[test]
    fn a_zombie_ends_after_two_scans_that_found_no_connection() {
        let z = zombie("a", 0, 100);
        assert!(!is_dead(
            &z,
            ConntrackScans {
                count: 1,
                last: BootTime::from_nanos(200)
            },
            Duration::ZERO
        ));
        assert!(is_dead(
            &z,
            ConntrackScans {
                count: 2,
                last: BootTime::from_nanos(200)
            },
            Duration::ZERO
        ));
        assert!(!is_dead(
            &z,
            ConntrackScans {
                count: 2,
                last: BootTime::from_nanos(100)
            },
            Duration::ZERO
        ));
        let alive = zombie("a", 300, 100);
        assert!(!is_dead(
            &alive,
            ConntrackScans {
                count: 9,
                last: BootTime::from_nanos(300)
            },
            Duration::ZERO
        ));
        assert!(is_dead(
            &alive,
            ConntrackScans {
                count: 9,
                last: BootTime::from_nanos(301)
            },
            Duration::ZERO
        ));
    }

    #[test]
    fn a_zombie_stays_while_its_name_has_a_live_address() {
        let one: IpAddr = "1.1.1.1".parse().unwrap();
        let other: IpAddr = "2.2.2.2".parse().unwrap();
        let scans = ConntrackScans {
            count: 9,
            last: BootTime::from_nanos(500),
        };
        let zombies =
            HashMap::from_iter([(one, zombie("a", 0, 100)), (other, zombie("a", 900, 100))]);
        assert!(dead(&zombies, scans, Duration::ZERO, 10).is_empty());
        assert_eq!(dead(&zombies, scans, Duration::ZERO, 1), [one]);
        let zombies =
            HashMap::from_iter([(one, zombie("a", 0, 100)), (other, zombie("b", 900, 100))]);
        assert_eq!(dead(&zombies, scans, Duration::ZERO, 10), [one]);
    }

    #[test]
    fn the_least_valuable_are_removed_over_the_limit() {
        let one: IpAddr = "1.1.1.1".parse().unwrap();
        let other: IpAddr = "2.2.2.2".parse().unwrap();
        let zombies =
            HashMap::from_iter([(one, zombie("a", 5, 100)), (other, zombie("b", 0, 200))]);
        assert_eq!(beyond_limit(&zombies, 1), HashSet::from([other]));
        assert!(beyond_limit(&zombies, 2).is_empty());
    }
}
