//! Which pairs are stored, and until when.

use dns_policy::{mapping::EndpointInstance, rule::Transport};
use shared_maps::EndpointId;

use super::*;

pub(crate) fn mapping(name: &str, addresses: &[u8], ttl: u32, seen: u64) -> Mapping {
    Mapping {
        endpoint: EndpointInstance {
            id: EndpointId(1),
            client: IpAddr::from([10, 0, 0, 1]),
            ifindex: 9,
        },
        name: Fqdn::normalise(name),
        addresses: addresses
            .iter()
            .map(|last| IpAddr::from([192, 0, 2, *last]))
            .collect(),
        ttl,
        seen_at: BootTime::START.plus_secs(seen),
        rcode: 0,
        server: ([10, 0, 0, 53], 53).into(),
        transport: Transport::Udp,
        replayed: false,
    }
}

fn key(mapping: &Mapping) -> Key {
    Key::of(mapping)
}

fn at(secs: u64) -> BootTime {
    BootTime::START.plus_secs(secs)
}

pub(crate) fn ack(seen: u64, until: u64) -> AgentAck {
    AgentAck {
        seen: at(seen),
        until: at(until),
    }
}

#[test]
fn two_answers_merge_to_the_later_one_and_the_longer_expiry() {
    let (long, short) = (mapping("a.", &[1], 600, 10), mapping("a.", &[1], 20, 100));
    for order in [[&long, &short], [&short, &long]] {
        let mut pairs = PairTable::new(10);
        order.into_iter().for_each(|mapping| pairs.keep(mapping, 0));
        let replay = pairs.replay(&key(&long), at(101));
        assert_eq!(replay.len(), 1);
        assert_eq!((replay[0].seen_at, replay[0].ttl), (at(100), 510));
        pairs.settle(&key(&long), &long.addresses, ack(10, 610));
        assert_eq!(pairs.keys(false).len(), 1, "the last one is on no disk");
        pairs.forget(&key(&long), &long.addresses, ack(10, 610));
        assert_eq!(pairs.len(), 1, "the last one was not refused");
        pairs.settle(&key(&long), &long.addresses, ack(100, 610));
        pairs.keep_leased(&mapping("a.", &[1], 5, 110), 0);
        assert_eq!(pairs.keys(false), [], "a promise covers it");
        pairs.keep(&mapping("a.", &[1], 5, 120), 0);
        assert_eq!(pairs.keys(false).len(), 1);
    }
}

#[test]
fn an_answer_is_sent_again_with_the_server_that_gave_it() {
    let mut pairs = PairTable::new(10);
    let trusted = mapping("a.", &[1], 20, 10);
    let mut other = mapping("a.", &[1, 2], 600, 20);
    other.server.set_ip([203, 0, 113, 66].into());
    for order in [[&trusted, &other], [&other, &trusted]] {
        order.into_iter().for_each(|mapping| pairs.keep(mapping, 0));
        for answer in [&trusted, &other] {
            let again = pairs.replay(&key(answer), at(21));
            let replayed = Mapping {
                replayed: true,
                ..answer.clone()
            };
            assert_eq!(again, [replayed]);
        }
    }
    assert_eq!(pairs.len(), 3);
    pairs.revoke(Some(&trusted.name), &trusted.addresses);
    assert_eq!(pairs.len(), 1, "the pairs of both servers go");
}

#[test]
fn durable_pairs_with_a_lease_are_not_sent_again() {
    let mut pairs = PairTable::new(10);
    let long = mapping("a.", &[1], 600, 10);
    pairs.keep(&long, 0);
    assert_eq!(pairs.take_unwritten(&long, false), Unwritten::Pair);
    pairs.settle(&key(&long), &long.addresses, ack(10, 610));
    for (seen, away) in [(100, false), (300, false), (500, true)] {
        let again = mapping("a.", &[1], 600 - u32::try_from(seen).unwrap(), seen);
        pairs.keep_leased(&again, 0);
        assert_eq!(
            pairs.take_unwritten(&again, away),
            Unwritten::Nothing,
            "{seen}"
        );
    }
    let both = mapping("a.", &[1, 2], 5, 510);
    pairs.keep_leased(&both, 0);
    assert_eq!(pairs.take_unwritten(&both, false), Unwritten::Pair);
    assert_eq!(
        pairs.undurable(&both),
        both.addresses[1..],
        "the other is durable"
    );
}

/// Without leases, every answer is sent unchanged, even if it is valid for a shorter time.
#[test]
fn a_shorter_durable_answer_leaves_nothing_to_send() {
    let long = mapping("a.", &[1], 600, 10);
    let shorter = [mapping("a.", &[1], 20, 100), mapping("a.", &[1], 18, 101)];
    let addresses = &long.addresses;
    let mut pairs = PairTable::new(10);
    pairs.keep(&long, 0);
    pairs.settle(&key(&long), addresses, ack(10, 610));
    pairs.keep(&shorter[0], 0);
    assert_eq!(pairs.keys(false).len(), 1);
    pairs.settle(&key(&long), addresses, ack(100, 120));
    assert_eq!(pairs.keys(false), []);
    assert_eq!(pairs.replay(&key(&long), at(609)).len(), 1);
    pairs.expire(at(611));
    assert!(pairs.is_empty());

    // Both are in flight at once, in the order in which the journal receives them.
    let mut ledger = PairTable::new(10);
    shorter.iter().for_each(|mapping| ledger.keep(mapping, 0));
    ledger.drop_settled(&key(&long), addresses, ack(100, 120));
    assert_eq!(ledger.len(), 1);
    ledger.drop_settled(&key(&long), addresses, ack(101, 119));
    assert!(ledger.is_empty());
}

/// The agent refuses a pair that was learned while it was away, because the name was cleaned. After
/// another look-up the proxy sends the later answer, and only that answer opens the pair.
#[test]
fn a_refused_pair_that_is_looked_up_again_is_sent_again() {
    let (long, short) = (mapping("a.", &[1], 600, 10), mapping("a.", &[1], 20, 100));
    for durable_before in [false, true] {
        let mut pairs = PairTable::new(10);
        pairs.keep(&long, 0);
        if durable_before {
            pairs.settle(&key(&long), &long.addresses, ack(10, 610));
        }
        pairs.keep(&short, 0);
        pairs.forget(&key(&long), &long.addresses, ack(10, 610));
        assert_eq!(pairs.unsettled(&key(&long))[0].seen_at, at(100));
        pairs.settle(&key(&long), &long.addresses, ack(99, 700));
        assert_eq!(pairs.keys(false).len(), 1, "the last one is on no disk");
    }
}

#[test]
fn the_same_pair_is_kept_once_and_replayed_as_seen() {
    let mut pairs = PairTable::new(100);
    pairs.keep(&mapping("a.", &[1, 2], 60, 10), 0);
    let later = mapping("a.", &[2], 60, 20);
    pairs.keep(&later, 0);
    assert_eq!(pairs.len(), 2);
    let mut replay = pairs.replay(&key(&later), at(30));
    replay.sort_by_key(|m| m.seen_at);
    assert_eq!(replay.len(), 2);
    assert_eq!(
        (replay[0].seen_at, &replay[0].addresses[..]),
        (at(10), &mapping("", &[1], 0, 0).addresses[..])
    );
    assert_eq!(
        (replay[1].seen_at, replay[1].ttl, replay[1].replayed),
        (at(20), 60, true)
    );
}

#[test]
fn names_that_no_agent_has_are_sent_first_and_the_latest_of_them_before_the_others() {
    let mut pairs = PairTable::new(100);
    let all: Vec<_> = (1..=40)
        .map(|n| mapping(&format!("n{n}."), &[1], 600, n))
        .collect();
    for one in &all {
        pairs.keep(one, 0);
    }
    let mut wanted = Vec::new();
    for (n, one) in (1..).zip(&all) {
        if n % 4 == 0 {
            wanted.insert(0, key(one));
        } else {
            pairs.settle(&key(one), &one.addresses, ack(n, n + 600));
        }
    }
    let keys = pairs.keys(true);
    assert_eq!(keys.len(), 40);
    assert_eq!(keys[..10], wanted);
    assert_eq!(pairs.keys(false), wanted);
}

#[test]
fn pairs_that_are_not_durable_outlive_their_ttl_for_a_while() {
    let mut pairs = PairTable::new(100);
    let (a, b) = (mapping("a.", &[1], 10, 0), mapping("b.", &[1], 10, 0));
    pairs.keep(&a, 0);
    pairs.keep(&b, 0);
    pairs.settle(&key(&b), &b.addresses, ack(0, 10));
    assert_eq!(pairs.keys(false), [key(&a)]);
    assert_eq!(pairs.keys(true).len(), 2);
    pairs.expire(at(11));
    assert_eq!(pairs.keys(true), [key(&a)]);
    pairs.expire(at(11 + UNSETTLED_SECS));
    assert!(pairs.is_empty());
}

#[test]
fn min_ttl_is_a_floor() {
    let mut pairs = PairTable::new(100);
    let a = mapping("a.", &[1], 1, 0);
    pairs.keep(&a, 3600);
    pairs.settle(&key(&a), &a.addresses, ack(0, 3600));
    pairs.expire(at(3599));
    assert_eq!(pairs.len(), 1);
}

#[test]
fn the_first_to_end_is_removed_first_when_full() {
    let mut pairs = PairTable::new(160);
    for n in 0..200u32 {
        pairs.keep(&mapping(&format!("n{n}."), &[1], 1000 - n, 0), 0);
    }
    assert!(pairs.len() <= 160);
    assert_eq!(pairs.dropped() + u64::try_from(pairs.len()).unwrap(), 200);
    let first = key(&mapping("n0.", &[1], 0, 0));
    assert!(pairs.keys(true).contains(&first), "the longest-lived stays");
}

#[test]
fn a_revocation_removes_its_names_from_every_endpoint() {
    let mut pairs = PairTable::new(100);
    let (a, b) = (mapping("a.", &[1, 2], 60, 0), mapping("b.", &[1], 60, 0));
    let mut of_another = a.clone();
    of_another.endpoint.id = EndpointId(2);
    for mapping in [&a, &b, &of_another] {
        pairs.keep(mapping, 0);
    }
    let first = a.addresses.get(..1).unwrap();
    pairs.revoke(Some(&a.name), first);
    assert_eq!(pairs.len(), 3);
    for endpoint in [&a, &of_another] {
        let replay = pairs.replay(&key(endpoint), at(1));
        assert_eq!(replay.len(), 1);
        assert_eq!(replay[0].addresses, &a.addresses[1..]);
    }
    pairs.revoke(Some(&a.name), &[]);
    assert_eq!(pairs.keys(true), [key(&b)]);
    pairs.revoke(None, &[]);
    assert!(pairs.is_empty());
}

#[test]
fn a_refused_pair_is_tried_a_bounded_number_of_times() {
    let mut pairs = PairTable::new(10);
    let a = mapping("a.", &[1], 60, 0);
    pairs.keep(&a, 0);
    let tries = (0..1000)
        .take_while(|_| pairs.retry(&key(&a), &a.addresses))
        .count();
    assert_eq!(tries, usize::from(TRIES) - 1);
    assert!(pairs.is_empty());
}

fn of(endpoint: u16, mapping: Mapping) -> Mapping {
    let endpoint = EndpointInstance {
        id: EndpointId(endpoint),
        client: IpAddr::from([10, 0, 0, endpoint.to_be_bytes()[1]]),
        ifindex: 100 + u32::from(endpoint),
    };
    Mapping {
        endpoint,
        ..mapping
    }
}

fn many(name: &str, first: u32, count: u32, ttl: u32) -> Mapping {
    let address = |n: u32| IpAddr::from((0x0b00_0000 + first + n).to_be_bytes());
    Mapping {
        addresses: (0..count).map(address).collect(),
        ..mapping(name, &[], ttl, 0)
    }
}

/// While the agent is away: 64 answers of 1,024 addresses, with room for 20,000 pairs.
#[test]
fn large_answers_of_one_endpoint_do_not_evict_pairs_of_another() {
    let mut pairs = PairTable::new(20_000);
    let names: Vec<_> = (0..30)
        .map(|n| mapping(&format!("b{n}."), &[1], 30, 0))
        .collect();
    for mapping in &names {
        pairs.keep(&of(2, mapping.clone()), 0);
    }
    for n in 0..64 {
        pairs.keep(&of(1, many(&format!("a{n}."), 0, 1024, 3600)), 0);
        assert!(pairs.len() <= 20_000);
    }
    let there = |mapping: &&Mapping| {
        !pairs
            .replay(&key(&of(2, (*mapping).clone())), at(1))
            .is_empty()
    };
    assert_eq!(names.iter().filter(there).count(), 30);
    assert_eq!(pairs.dropped(), 64 * 1024 + 30 - 20_000);
}

#[test]
fn a_name_with_changing_addresses_keeps_those_that_last_longest() {
    let mut pairs = PairTable::new(100_000);
    for n in 0..20 {
        pairs.keep(&many("a.", n * 1000, 1000, 60 + n), 0);
        assert!(pairs.len() <= PER_NAME);
    }
    let last = many("a.", 19_000, 1000, 60);
    let found = pairs.of(&key(&last), &last.addresses);
    let found: usize = found
        .iter()
        .map(|(mapping, _)| mapping.addresses.len())
        .sum();
    assert_eq!(found, 1000);
}

#[test]
fn no_repeated_mapping_has_more_addresses_than_the_agent_accepts() {
    let mut pairs = PairTable::new(10_000);
    let all = many("a.", 0, 3000, 60);
    pairs.keep(&all, 0);
    let sent = pairs.replay(&key(&all), at(1));
    assert_eq!(sent.len(), 3);
    let mut addresses: Vec<_> = sent
        .into_iter()
        .flat_map(|mapping| mapping.addresses)
        .collect();
    addresses.sort_unstable();
    assert_eq!(addresses, all.addresses);
}

proptest::proptest! {
    /// Endpoints keep and lose pairs in any order: the table's counts stay correct, and for lack of
    /// room the endpoint with the most pairs loses some.
    #[test]
    fn pairs_are_removed_from_the_endpoint_with_most(
        events in proptest::collection::vec((1_u16..4, 0_u32..40, 1_u32..30, 0_u8..8), 1..120),
    ) {
        let mut pairs = PairTable::new(100);
        let counts = |pairs: &PairTable| {
            let mut counts = [0; 4];
            for (_, by, name) in pairs.all() {
                counts[usize::from(by.endpoint.id.0)] += name.pairs.len();
            }
            counts
        };
        for (now, (endpoint, name, addresses, act)) in (0_u64..).zip(events) {
            let mapping = of(endpoint, many(&format!("n{name}."), 0, addresses, 10 + name));
            let mapping = Mapping { seen_at: at(now), ..mapping };
            let key = key(&mapping);
            match act {
                0 => pairs.revoke(Some(&mapping.name), &mapping.addresses[..1]),
                1 => pairs.settle(&key, &mapping.addresses, ack(now, now + 100)),
                2 => pairs.drop_settled(&key, &mapping.addresses, ack(now, now + 100)),
                3 => pairs.expire(at(now)),
                _ => {
                    let before = counts(&pairs);
                    let dropped = pairs.dropped();
                    pairs.keep(&mapping, 0);
                    let after = counts(&pairs);
                    let most = after.iter().max().unwrap();
                    for other in (1..4).filter(|other| *other != usize::from(endpoint)) {
                        let lost = before[other] - after[other];
                        proptest::prop_assert!(lost == 0 || after[other] + EVICTED_AT_ONCE >= *most);
                    }
                    proptest::prop_assert!(pairs.len() <= 100);
                    proptest::prop_assert!(dropped == pairs.dropped() || pairs.len() == 100);
                }
            }
            proptest::prop_assert_eq!(counts(&pairs).iter().sum::<usize>(), pairs.len());
        }
        pairs.expire(at(1000));
        proptest::prop_assert!(pairs.is_empty());
    }
}
