//! Tests of the pool. One of them runs random histories.

use std::time::Duration;

use proptest::prelude::*;
use shared_maps::EndpointId;

use super::*;

/// A number for each connection.
type Number = usize;

fn pod(id: u16) -> Holder {
    Holder::Endpoint {
        id: EndpointId(id),
        ifindex: 100 + u32::from(id),
    }
}

fn target(server: u8) -> Target {
    Target {
        identity: IdentityId(1000),
        server: ([192, 0, 2, server], 53).into(),
    }
}

fn pool(limit: usize) -> Pool<Number> {
    Pool::new(limit)
}

const NEW: Taken<Number> = Taken::New { closes: None };

fn later(seconds: u64) -> Instant {
    Instant::now() + Duration::from_secs(seconds)
}

#[test]
fn a_connection_goes_to_its_pod_server_and_identity_only() {
    let mut pool = pool(64);
    assert_eq!(pool.take(pod(1), target(1)), NEW);
    pool.give_back(pod(1), target(1), (7, 0), later(5));
    let relabelled = Target {
        identity: IdentityId(1001),
        ..target(1)
    };
    assert_eq!(pool.take(pod(2), target(1)), NEW);
    assert_eq!(pool.take(pod(1), target(2)), NEW);
    assert_eq!(pool.take(pod(1), relabelled), NEW);
    assert_eq!(pool.take_alone(pod(1)), NEW);
    assert_eq!(pool.take(pod(1), target(1)), Taken::Idle(7));
    assert_eq!(pool.take(pod(1), target(1)), NEW);
}

#[test]
fn the_connection_that_was_used_last_is_used_first() {
    let mut pool = pool(64);
    for number in 0..3 {
        assert_eq!(pool.take(pod(1), target(1)), NEW);
        let _ = number;
    }
    for number in 0..3 {
        pool.give_back(pod(1), target(1), (number, 0), later(5));
    }
    assert_eq!(pool.take(pod(1), target(1)), Taken::Idle(2));
    assert_eq!(pool.take(pod(1), target(1)), Taken::Idle(1));
}

#[test]
fn unanswered_queries_delay_no_other_query_before_the_limit() {
    let mut pool = pool(4096);
    for number in 0..MAX_TO_SERVER {
        assert_eq!(pool.take(pod(1), target(1)), NEW);
        let unanswered = if number == 5 { 1 } else { 2 };
        pool.give_back(pod(1), target(1), (number, unanswered), later(5));
    }
    assert_eq!(pool.take(pod(1), target(1)), Taken::Idle(5));
    // The limit applies to each server.
    assert_eq!(pool.take(pod(1), target(2)), NEW);
    for _ in 1..MAX_TO_SERVER {
        assert!(matches!(pool.take(pod(1), target(1)), Taken::Idle(_)));
    }
    assert_eq!(pool.take(pod(1), target(1)), Taken::Full);
    pool.closed(pod(1), Some(target(1)));
    assert_eq!(pool.take(pod(1), target(1)), NEW);
}

#[test]
fn a_pod_at_its_share_closes_its_own_idle_connection_and_no_other() {
    let mut pool = pool(8);
    assert_eq!(pool.take(pod(2), target(1)), NEW);
    pool.give_back(pod(2), target(1), (20, 0), later(5));
    // One is taken, so the other pod's share is four of the seven.
    for number in 0..4 {
        let server = u8::try_from(number).unwrap();
        assert_eq!(pool.take(pod(1), target(server)), NEW);
        pool.give_back(pod(1), target(server), (number, 0), later(5));
    }
    assert_eq!(pool.take_alone(pod(1)), Taken::New { closes: Some(0) });
    for closes in 1..4 {
        let taken = pool.take(pod(1), target(9));
        let closes = Some(closes);
        assert_eq!(taken, Taken::New { closes });
    }
    assert_eq!(pool.take(pod(1), target(9)), Taken::Full);
    assert_eq!(pool.take_alone(pod(1)), Taken::Full);
    assert_eq!(pool.take(pod(2), target(1)), Taken::Idle(20));
    assert_eq!(pool.take(pod(2), target(1)), NEW);
}

#[test]
fn idle_connections_end_when_their_time_is_over_or_they_are_of_no_use() {
    let mut pool = pool(64);
    let now = Instant::now();
    for number in 0..3 {
        assert_eq!(pool.take(pod(1), target(1)), NEW);
        let _ = number;
    }
    let second = Duration::from_secs(1);
    pool.give_back(pod(1), target(1), (0, 0), now + second);
    pool.give_back(pod(1), target(1), (1, 0), now + 3 * second);
    pool.give_back(pod(1), target(1), (2, 4), now + 3 * second);
    let over = pool.expire(now + second, |number| (*number != 1).then_some(0));
    assert_eq!(over, [0, 1]);
    // Its four queries are answered.
    assert_eq!(pool.take(pod(1), target(1)), Taken::Idle(2));
    pool.give_back(pod(1), target(1), (2, 0), now + 3 * second);
    assert_eq!(pool.clear(), [2]);
    assert_eq!((pool.quota.used(), pool.pods.len()), (0, 0));
}

proptest! {
    /// Whatever happens, the counts match a list of all connections, no limit is exceeded, and a
    /// pod without connections gets one.
    #[test]
    fn counts_agree_with_a_list(
        events in prop::collection::vec((0_u8..5, 1_u16..4, 0_u8..3, 0_usize..3), 0..200),
    ) {
        let mut pool = pool(16);
        let mut next = 0;
        let mut in_use: Vec<(Holder, Option<Target>, Number)> = Vec::new();
        let mut idle: Vec<Number> = Vec::new();
        let now = Instant::now();
        for (event, of, server, choice) in events {
            let (holder, to) = (pod(of), target(server));
            match event {
                0 | 1 => {
                    let alone = event == 1;
                    let taken = if alone {
                        pool.take_alone(holder)
                    } else {
                        pool.take(holder, to)
                    };
                    let number = match taken {
                        Taken::Idle(number) => {
                            prop_assert!(idle.contains(&number));
                            idle.retain(|other| *other != number);
                            number
                        }
                        Taken::New { closes } => {
                            if let Some(closed) = closes {
                                prop_assert!(idle.contains(&closed));
                                idle.retain(|other| *other != closed);
                            }
                            next += 1;
                            next
                        }
                        Taken::Full => continue,
                    };
                    in_use.push((holder, (!alone).then_some(to), number));
                }
                2 | 3 if !in_use.is_empty() => {
                    let (holder, to, number) = in_use.remove(choice % in_use.len());
                    match to {
                        Some(to) if event == 2 => {
                            pool.give_back(holder, to, (number, choice), now);
                            idle.push(number);
                        }
                        to => pool.closed(holder, to),
                    }
                }
                4 => {
                    for number in pool.expire(now - Duration::from_secs(1), |n| (*n % 2 == 0).then_some(0)) {
                        idle.retain(|other| *other != number);
                    }
                    prop_assert!(idle.iter().all(|number| number % 2 == 0));
                }
                _ => {}
            }
            prop_assert_eq!(pool.quota.used(), in_use.len() + idle.len());
            let open: usize = pool.pods.values().map(|pod| pod.open).sum();
            prop_assert_eq!(open, pool.quota.used());
            prop_assert!(pool.quota.used() <= 16);
        }
        prop_assert_ne!(pool.take(pod(9), target(1)), Taken::Full);
    }
}
