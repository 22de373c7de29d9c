//! Expiry, leases, zombies and limits.

use std::time::Duration;

use super::*;

const EP: EndpointId = EndpointId(7);

fn cache(per_name: usize, zombies: usize) -> NameCache {
    NameCache::new(Limits {
        per_name,
        per_endpoint: 1_000_000,
        zombies,
        idle_grace: Duration::ZERO,
    })
}

fn secs(n: u64) -> BootTime {
    BootTime::START.plus_secs(n)
}

fn learn(
    cache: &mut NameCache,
    endpoint: EndpointId,
    address: &str,
    at: u64,
    ttl: u32,
    lease: u64,
) -> bool {
    cache.learn(&Answer {
        endpoint,
        name: &Fqdn::normalise("a.b"),
        labels: None,
        address: address.parse().unwrap(),
        seen: secs(at),
        ttl,
        expires: secs(at + u64::from(ttl)),
        lease_end: (lease > 0).then(|| secs(lease)),
        trusted_until: None,
    })
}

#[test]
fn a_pair_outlives_its_lease_by_the_margin() {
    let mut cache = cache(10, 0);
    assert!(learn(&mut cache, EP, "1.1.1.1", 0, 10, 70));
    assert!(!learn(&mut cache, EP, "1.1.1.1", 1, 5, 0));
    assert_eq!(cache.next_deadline(), Some(secs(10)));
    assert!(cache.expire(secs(10)).pairs.is_empty());
    assert_eq!((cache.live(), cache.pairs()), (0, 1));
    assert_eq!(cache.next_deadline(), Some(secs(75)));
    assert!(cache.expire(secs(74)).pairs.is_empty());
    assert_eq!(cache.expire(secs(75)).pairs.len(), 1);
    assert_eq!(cache.pairs(), 0);
}

#[test]
fn the_later_expiry_wins_in_any_order() {
    for order in [[(0, 100), (50, 10)], [(50, 10), (0, 100)]] {
        let mut cache = cache(10, 0);
        for (at, ttl) in order {
            learn(&mut cache, EP, "1.1.1.1", at, ttl, 0);
        }
        assert!(cache.expire(secs(99)).pairs.is_empty());
        assert_eq!(cache.expire(secs(100)).pairs.len(), 1);
    }
}

#[test]
fn an_expired_address_in_use_stays_until_its_connections_end() {
    let mut cache = cache(10, 100);
    let address: IpAddr = "1.1.1.1".parse().unwrap();
    learn(&mut cache, EP, "1.1.1.1", 0, 10, 0);
    assert!(cache.expire(secs(10)).pairs.is_empty());
    assert_eq!((cache.live(), cache.zombies()), (0, 1));
    for at in [20, 30, 40] {
        cache.mark_alive(EP, address, secs(at));
        assert!(cache.scanned(secs(at), secs(at)).pairs.is_empty());
    }
    assert_eq!(cache.scanned(secs(50), secs(50)).pairs.len(), 1);
    assert_eq!((cache.zombies(), cache.pairs()), (0, 0));
}

#[test]
fn an_answer_revives_a_zombie() {
    let mut cache = cache(10, 100);
    learn(&mut cache, EP, "1.1.1.1", 0, 10, 0);
    cache.expire(secs(10));
    assert!(!learn(&mut cache, EP, "1.1.1.1", 11, 10, 0));
    assert_eq!((cache.live(), cache.zombies(), cache.pairs()), (1, 0, 1));
    let pair = cache
        .name(&Fqdn::normalise("a.b"))
        .unwrap()
        .pairs
        .values()
        .next()
        .unwrap();
    assert_eq!(pair.owners, 1);
}

#[test]
fn a_pair_stays_while_any_endpoint_holds_it() {
    let mut cache = cache(10, 0);
    learn(&mut cache, EP, "1.1.1.1", 0, 10, 0);
    learn(&mut cache, EndpointId(8), "1.1.1.1", 0, 20, 0);
    assert!(cache.expire(secs(10)).pairs.is_empty());
    assert_eq!(cache.remove_endpoint(EndpointId(8), secs(11)).len(), 1);
}

#[test]
fn too_many_addresses_of_a_name_make_zombies_of_the_soonest() {
    let mut cache = cache(2, 100);
    for (n, address) in ["1.1.1.1", "2.2.2.2", "3.3.3.3"].iter().enumerate() {
        learn(
            &mut cache,
            EP,
            address,
            0,
            10 + u32::try_from(n).unwrap(),
            0,
        );
    }
    let names = cache.endpoint(EP).unwrap();
    assert_eq!(names.zombies.keys().next().unwrap().to_string(), "1.1.1.1");
    assert_eq!((cache.live(), cache.zombies(), cache.pairs()), (2, 1, 3));
    assert!(!learn(&mut cache, EP, "4.4.4.4", 0, 10, 70));
}

#[test]
fn a_revoked_lease_keeps_no_pair() {
    let mut cache = cache(10, 0);
    let (name, address) = (Fqdn::normalise("a.b"), "1.1.1.1".parse().unwrap());
    learn(&mut cache, EP, "1.1.1.1", 0, 10, 70);
    assert_eq!(cache.forget(EP, &name, address, secs(1)), None);
    assert_eq!(
        cache.revoked(&name, address, secs(2)),
        Some((name, address))
    );
}

#[test]
fn churn_leaves_no_heap_behind() {
    let mut cache = cache(1, 0);
    for n in 0..20_000u32 {
        let address = format!("10.{}.{}.{}", n >> 16 & 255, n >> 8 & 255, n & 255);
        learn(&mut cache, EP, &address, 0, 1_000_000 + n, 0);
    }
    assert!(cache.due.len() < 50_000, "{}", cache.due.len());
    assert_eq!((cache.live(), cache.pairs()), (1, 1));
    assert_eq!(cache.expire(secs(1)).pairs.len(), 19_999);
}

/// The address 10.0.0.0 plus `n`.
fn address(n: u32) -> String {
    IpAddr::from((0x0a00_0000 + n).to_be_bytes()).to_string()
}

#[test]
fn zombies_are_sorted_once_however_many_expire_together() {
    let mut cache = cache(10_000, 100);
    for n in 0..5000 {
        learn(&mut cache, EP, &address(n), 0, 10 + n % 7, 0);
    }
    assert_eq!(cache.expire(secs(20)).pairs.len(), 4900);
    assert_eq!((cache.zombies(), cache.sorts), (100, 1));
}

#[test]
fn addresses_that_change_one_by_one_seldom_cause_a_sort() {
    let mut cache = cache(1, 1600);
    for n in 0..11_600 {
        learn(&mut cache, EP, &address(n), 0, 1000, 0);
    }
    assert!((1..=100).contains(&cache.sorts), "{}", cache.sorts);
    assert!((1600..=1700).contains(&cache.zombies()));
    assert_eq!(cache.live(), 1);
    cache.expire(secs(2000));
    assert!(cache.zombies() <= 1700);
}

#[test]
fn pairs_of_an_endpoint_are_counted() {
    let counted = |cache: &NameCache| {
        let Some(names) = cache.endpoint(EP) else {
            return;
        };
        let live: usize = names.names.values().map(|all| all.len()).sum();
        let zombies: usize = names.zombies.values().map(|z| z.names.len()).sum();
        assert_eq!(names.held, live + zombies);
    };
    for zombies in [0, 3, 100] {
        let mut cache = cache(4, zombies);
        let name = Fqdn::normalise("a.b");
        for n in 0..200u32 {
            learn(&mut cache, EP, &address(n % 13), n.into(), 1 + n % 5, 0);
            counted(&cache);
            cache.expire(secs(u64::from(n) + 1));
            counted(&cache);
            if n % 11 == 0 {
                let address = address(n % 7).parse().unwrap();
                cache.forget(EP, &name, address, secs(n.into()));
                counted(&cache);
                cache.restore_zombie(EP, &name, address, None, secs(0), Trust::Untrusted);
                counted(&cache);
            }
            if n % 17 == 0 {
                cache.scanned(secs(u64::from(n) + 1), secs(u64::from(n) + 1));
                counted(&cache);
            }
        }
        cache.remove_endpoint(EP, secs(1000));
        cache.expire(secs(2000));
        assert_eq!((cache.live(), cache.zombies(), cache.pairs()), (0, 0, 0));
    }
}

#[test]
fn an_idle_grace_of_less_than_a_second_counts() {
    let mut cache = cache(10, 100);
    cache.limits.idle_grace = Duration::from_millis(500);
    learn(&mut cache, EP, "1.1.1.1", 0, 10, 0);
    cache.expire(secs(10));
    let early = BootTime::from_nanos(10_400_000_000);
    for _ in 0..3 {
        assert!(cache.scanned(early, early).pairs.is_empty());
    }
    let late = BootTime::from_nanos(10_600_000_000);
    assert_eq!(cache.scanned(late, late).pairs.len(), 1);
}
