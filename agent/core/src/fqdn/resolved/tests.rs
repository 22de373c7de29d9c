//! What keeps an address of a name that an EgressFirewall uses.

use std::time::Duration;

use super::*;

fn pairs() -> ResolvedPairs {
    let limits = Limits {
        per_name: 3,
        per_endpoint: 100,
        zombies: 100,
        idle_grace: Duration::ZERO,
    };
    ResolvedPairs::new(limits, 100)
}

fn at(seconds: u64) -> BootTime {
    BootTime::START.plus_secs(seconds)
}

fn name(text: &str) -> Fqdn {
    Fqdn::normalise(text)
}

fn address(n: u8) -> IpAddr {
    IpAddr::from([192, 0, 2, n])
}

impl ResolvedPairs {
    fn give(&mut self, text: &str, n: u8, until: u64, lease: Option<u64>) {
        let name = name(text);
        self.learn(
            (&name, address(n)),
            Openness::Open,
            at(until),
            lease.map(at),
        );
    }
}

#[test]
fn an_address_waits_for_its_lease_and_then_for_its_connections() {
    let mut pairs = pairs();
    pairs.give("www.example.com", 1, 100, Some(160));
    assert_eq!(pairs.next_deadline(), Some(at(165)));
    assert_eq!(pairs.expire(at(164)), []);
    assert_eq!(pairs.scanned(at(164)), [], "it is promised");
    assert_eq!(pairs.expire(at(165)), []);
    pairs.mark_alive(address(1), at(170));
    assert_eq!(pairs.scanned(at(170)), [], "a connection uses it");
    assert_eq!(
        pairs.scanned(at(180)),
        [(name("www.example.com"), address(1))]
    );
    assert_eq!((pairs.len(), pairs.addresses.len()), (0, 0));
}

#[test]
fn a_scan_that_began_before_the_end_does_not_count() {
    let mut pairs = pairs();
    pairs.give("www.example.com", 1, 100, None);
    pairs.expire(at(105));
    assert_eq!(pairs.scanned(at(105)), []);
    pairs.give("www.example.com", 1, 200, None);
    assert_eq!(pairs.scanned(at(106)), [], "an answer came again");
    pairs.expire(at(205));
    assert_eq!(pairs.scanned(at(206)).len(), 1);
}

#[test]
fn an_object_keeps_an_address_and_its_removal_waits_for_the_lease() {
    let mut pairs = pairs();
    let www = name("www.example.com");
    pairs.hold(&www, address(1), Openness::Open);
    pairs.hold(&www, address(1), Openness::Open);
    pairs.give("www.example.com", 1, 100, Some(160));
    pairs.expire(at(300));
    assert_eq!(pairs.scanned(at(301)), [], "two objects list it");
    pairs.release(&www, address(1), at(302));
    pairs.expire(at(302));
    assert_eq!(pairs.scanned(at(303)), [], "one object lists it");
    pairs.give("www.example.com", 1, 400, Some(460));
    pairs.release(&www, address(1), at(310));
    pairs.release(&www, address(1), at(310));
    pairs.expire(at(310));
    assert_eq!(pairs.scanned(at(311)), [], "it is promised");
    pairs.expire(at(465));
    assert_eq!(pairs.scanned(at(466)).len(), 1);
}

#[test]
fn beyond_the_limit_of_a_name_what_is_not_promised_goes() {
    let mut pairs = pairs();
    let www = name("www.example.com");
    for n in 1..=3 {
        assert_eq!(pairs.room(&www, address(n), Openness::Open), Room::Free);
        pairs.give("www.example.com", n, 100, Some(160));
    }
    assert_eq!(pairs.room(&www, address(1), Openness::Open), Room::Scarce);
    for n in 4..=6 {
        assert_eq!(pairs.room(&www, address(n), Openness::Open), Room::Scarce);
        pairs.give("www.example.com", n, 100 - u64::from(n), None);
    }
    assert_eq!(pairs.room(&www, address(7), Openness::Open), Room::Full);
    let gone = pairs.evict(&www, address(6), at(10));
    let gone: Vec<IpAddr> = gone.into_iter().map(|(_, address)| address).collect();
    assert_eq!(gone, [address(5), address(4)]);
    assert_eq!(pairs.evict(&www, address(6), at(10)), []);
    assert_eq!(pairs.len(), 4);
}

#[test]
fn addresses_that_no_answer_may_open_are_few() {
    let mut pairs = pairs();
    for n in 0..MAX_CLOSED {
        let name = name(&format!("n{n}.example.com"));
        let room = pairs.room(&name, address(1), Openness::Closed);
        assert_eq!(room, Room::Free);
        pairs.learn((&name, address(1)), Openness::Closed, at(1), None);
    }
    let one_more = name("more.example.com");
    assert_eq!(
        pairs.room(&one_more, address(1), Openness::Closed),
        Room::Full
    );
    assert_eq!(
        pairs.room(&one_more, address(1), Openness::Open),
        Room::Free
    );
    pairs.expire(at(6));
    assert_eq!(pairs.scanned(at(7)).len(), MAX_CLOSED);
    assert_eq!(
        pairs.room(&one_more, address(1), Openness::Closed),
        Room::Free
    );
}

#[test]
fn a_flood_of_names_does_not_close_what_connections_use() {
    let mut pairs = pairs();
    pairs.give("used.example.com", 1, 1, None);
    pairs.expire(at(6));
    pairs.mark_alive(address(1), at(10));
    assert_eq!(pairs.scanned(at(10)), []);
    for n in 0..=MAX_PENDING {
        pairs.give(&format!("n{n}.example.com"), 2, 11, None);
    }
    assert!(pairs.expire(at(17)).len() >= MAX_PENDING);
    assert!(pairs.has(&name("used.example.com"), address(1)));
    assert_eq!(pairs.len(), 1);
}

#[test]
fn a_pair_that_no_endpoint_holds_waits_for_its_connections_only() {
    let mut pairs = pairs();
    pairs.give("www.example.com", 1, 600_000, None);
    pairs.end_answers(&name("www.example.com"), address(1), at(10));
    pairs.expire(at(10));
    pairs.mark_alive(address(1), at(12));
    assert_eq!(pairs.scanned(at(12)), []);
    assert_eq!(pairs.scanned(at(20)).len(), 1);
}

/// Pods under a wildcard learn as many pairs as they like.
#[test]
fn answers_take_no_room_from_objects_of_the_store() {
    let mut pairs = pairs();
    pairs.most = 2;
    for n in 1..=3 {
        let random = name(&format!("n{n}.example.com"));
        pairs.learn(
            (&random, address(n)),
            Openness::Open,
            BootTime::from_nanos(1),
            None,
        );
    }
    let known = name("www.example.com");
    for n in 1..=2 {
        assert!(pairs.may_hold(&known, address(n), Openness::Open));
        pairs.hold(&known, address(n), Openness::Open);
        pairs.hold(&known, address(n), Openness::Open);
    }
    let learned = name("n1.example.com");
    assert!(!pairs.may_hold(&learned, address(1), Openness::Open));
    pairs.release(&known, address(1), BootTime::from_nanos(2));
    assert!(!pairs.may_hold(&learned, address(1), Openness::Open));
    pairs.release(&known, address(1), BootTime::from_nanos(2));
    assert!(pairs.may_hold(&learned, address(1), Openness::Open));
    pairs.hold(&learned, address(1), Openness::Open);
    pairs.forget(&known, address(2));
    assert!(pairs.may_hold(&learned, address(2), Openness::Open));
}

#[test]
fn objects_of_the_store_leave_room() {
    let mut pairs = pairs();
    pairs.most = 2;
    let names = ["a.example.com", "b.example.com", "c.example.com"].map(name);
    let mut held = 0;
    for name in &names {
        if pairs.may_hold(name, address(1), Openness::Open) {
            pairs.hold(name, address(1), Openness::Open);
            held += 1;
        }
    }
    assert_eq!(held, 2);
    assert!(
        pairs.may_hold(&names[0], address(1), Openness::Open),
        "it is there"
    );
    assert_eq!(
        pairs.room(&names[2], address(1), Openness::Open),
        Room::Free
    );
}
