//! The order of rules is total, and a rule for a part of another rule's packets comes first.

use std::cmp::Ordering;

use netpol::{
    policy::Protocol,
    ports::Span,
    rule::{Action, Net, Rule, Traffic},
};

use super::random::Random;

const BLOCKS: [&str; 10] = [
    "0.0.0.0/0",
    "10.0.0.0/8",
    "10.1.0.0/16",
    "10.1.2.0/24",
    "10.1.2.3/32",
    "192.168.0.0/16",
    "::/0",
    "2001:db8::/32",
    "2001:db8:1::/48",
    "2001:db8:1::1/128",
];

fn net(random: &mut Random) -> Net {
    match random.chance(1, 5) {
        true => Net::Any,
        false => Net::Block(random.one_of(&BLOCKS).parse().unwrap()),
    }
}

fn span(random: &mut Random) -> Span {
    let ports = [0, 1, 79, 80, 81, 443, 65535];
    let (one, other) = (*random.one_of(&ports), *random.one_of(&ports));
    match random.chance(1, 4) {
        true => Span::ALL,
        false => Span::new(one.min(other), one.max(other)).unwrap(),
    }
}

fn rule(random: &mut Random) -> Rule {
    Rule {
        source: net(random),
        destination: net(random),
        traffic: match random.chance(1, 4) {
            true => Traffic::Any,
            false => Traffic::Ports {
                protocol: *random.one_of(&Protocol::ALL),
                source: span(random),
                destination: span(random),
            },
        },
        action: *random.one_of(&[Action::Deny, Action::Permit]),
    }
}

/// A random rule for a part of another rule's packets; `None` if none is found in a few tries.
fn part_of(random: &mut Random, whole: Rule) -> Option<Rule> {
    let parts = (0..20).map(|_| {
        let mut part = whole;
        for other in [rule(random), rule(random)] {
            match random.below(3) {
                0 => part.source = other.source,
                1 => part.destination = other.destination,
                _ => part.traffic = other.traffic,
            }
        }
        part
    });
    let parts: Vec<Rule> = parts.collect();
    parts
        .into_iter()
        .find(|part| whole.covers(part) && !part.covers(&whole))
}

#[test]
fn random_triples_are_in_one_order() {
    let mut random = Random::new(1);
    let mut equal = 0;
    for _ in 0..10_000 {
        let [a, b, c] = [(); 3].map(|()| rule(&mut random));
        assert_eq!(a.cmp(&b), b.cmp(&a).reverse(), "{a} | {b}");
        assert_eq!(a.cmp(&b) == Ordering::Equal, a == b, "{a} | {b}");
        if a <= b && b <= c {
            assert!(a <= c, "{a} | {b} | {c}");
        }
        equal += usize::from(a == b);
    }
    assert!(equal < 1_000);
}

#[test]
fn a_rule_about_a_part_comes_first() {
    let mut random = Random::new(2);
    let mut pairs = 0;
    while pairs < 10_000 {
        let whole = rule(&mut random);
        if let Some(part) = part_of(&mut random, whole) {
            assert!(part < whole, "{part} | {whole}");
            pairs += 1;
        }
    }
}
