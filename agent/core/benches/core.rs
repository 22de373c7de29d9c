//! Benchmarks of single parts of the core: names among 2,001 selectors, selectors and identities,
//! the trie.

use std::{hint::black_box, net::Ipv4Addr};

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use dns_policy::{name::Fqdn, rule::NameRule};
use holdfast_agent_core::{
    fqdn::names::NameSelectors,
    ipcache::trie::PrefixMap,
    labels::LabelSet,
    selector::{cache::SelectorCache, selector::Selector},
};
use ipnet::IpNet;
use shared_maps::IdentityId;

/// Number of pairs of selectors: one by name and one by pattern.
const PAIRS: u32 = 1000;
/// Number of selectors, and of identities.
const MANY: u32 = 10_000;
/// Number of prefixes in the trie.
const PREFIXES: u32 = 1_000_000;

/// `K.example.com` and `*.K.example.com` for each K, and `*.example.com`.
fn names(c: &mut Criterion) {
    let mut selectors = NameSelectors::default();
    for k in 0..PAIRS {
        selectors.add(&NameRule::Name(format!("{k}.example.com")));
        selectors.add(&NameRule::Pattern(format!("*.{k}.example.com")));
    }
    selectors.add(&NameRule::Pattern("*.example.com".to_owned()));
    for name in ["500.example.com", "example.500.example.com"] {
        let name = Fqdn::normalise(name);
        c.bench_function(&format!("names: labels of {name}"), |b| {
            b.iter(|| black_box(&selectors).labels_of(black_box(&name)));
        });
    }
}

fn labels(number: u32) -> LabelSet {
    let texts = [
        format!("fqdn:n{number}.example.com"),
        "reserved:world".to_owned(),
    ];
    LabelSet::parse(&texts).expect("literal labels")
}

fn selectors(c: &mut Criterion) {
    let mut cache = SelectorCache::default();
    for number in 0..MANY {
        let name = format!("n{number}.example.com");
        cache.register(&Selector::Fqdn(NameRule::Name(name)));
        cache.add_identity(IdentityId(IdentityId::LOCAL_MIN.0 + number), labels(number));
    }
    let id = IdentityId(IdentityId::LOCAL_MIN.0 + MANY);
    c.bench_function("selectors: an identity added and removed", |b| {
        b.iter(|| {
            cache.add_identity(id, labels(MANY / 2));
            cache.remove_identity(id)
        });
    });
    let known = Selector::Fqdn(NameRule::Pattern("*.example.com".to_owned()));
    c.bench_function("selectors: a selector added and removed", |b| {
        b.iter(|| {
            cache.register(&known);
            cache.unregister(&known)
        });
    });
}

fn prefix(number: u32) -> IpNet {
    IpNet::from(std::net::IpAddr::V4(Ipv4Addr::from_bits(
        0x0a00_0000 + number,
    )))
}

fn trie(c: &mut Criterion) {
    let mut map = PrefixMap::<u32>::default();
    for number in 0..PREFIXES {
        *map.entry(prefix(number)) = number;
    }
    let mut next = 0_u32;
    let mut other = || {
        // Each look-up is far from the one before.
        next = (next + 514_229) % PREFIXES;
        prefix(next)
    };
    c.bench_function("trie: look-up among a million", |b| {
        b.iter_batched(
            &mut other,
            |prefix| map.get(prefix).copied(),
            BatchSize::SmallInput,
        );
    });
    let mut next = PREFIXES;
    let mut fresh = || {
        next += 1;
        prefix(next)
    };
    c.bench_function("trie: insert into a million", |b| {
        b.iter_batched(
            &mut fresh,
            |prefix| *map.entry(prefix) = 1,
            BatchSize::SmallInput,
        );
    });
}

criterion_group!(benches, names, selectors, trie);
criterion_main!(benches);
