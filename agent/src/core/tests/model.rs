//! Leases, expiry, changes of policy, restarts of the agent and failover of proxies in any
//! order: real state machines on both sides, a scheduler that decides who goes on, maps in
//! memory. Changes of policy go in small parts, and events of proxies are handled between them.
//!
//! At every instant:
//! - an answer goes out only if its addresses have the labels that policy gives its name, or
//!   if the proxy counts it as released unplumbed;
//! - nothing is removed before lease end + 5 s, except leases that their holders returned.
//!
//! - where expired addresses are kept for connections: what one uses has its labels.
//!
//! All as long as maps take what is written: while they do not, policy that proxies have
//! (`docs/design/0004-rules-after-failures.md`) may be ahead of them.
//!
//! Once everything has come to rest, every answer that is still valid is plumbed, whatever was
//! killed in between; and when all has expired, nothing is left.

mod proxy;
mod world;

use proptest::prelude::*;
use shared_maps::EndpointId;

use self::world::{Fate, World};

const NAMES: [&str; 3] = ["www.cilium.io.", "dev.cilium.io.", "ebpf.io."];
/// The last is longer than a lease may be.
const TTLS: [u32; 5] = [1, 20, 60, 600, 86_400];
const SPECS: [&str; 4] = [
    "endpointSelector: {matchLabels: {app: web}}\n  egress:\n  - toFQDNs: [{matchPattern: '*.cilium.io'}]",
    "endpointSelector: {matchLabels: {app: web}}\n  egress:\n  - toFQDNs: [{matchName: www.cilium.io}]\n    toPorts: [{ports: [{port: '443', protocol: TCP}]}]",
    "endpointSelector: {}\n  egress:\n  - toFQDNs: [{matchPattern: '*'}]",
    "endpointSelector: {}\n  egress:\n  - toCIDR: [1.1.1.0/24]",
];
/// Proxies at once.
const PROXIES: usize = 2;

#[derive(Clone, Copy, Debug)]
enum Act {
    /// A server answers a pod: proxy, name, addresses (a set of bits), TTL.
    Answer(usize, usize, u8, usize),
    Send(usize),
    /// The agent takes everything that one proxy has sent.
    Run(usize),
    /// A proxy takes one message.
    Deliver(usize),
    Connect(usize),
    /// kill -9, perhaps within a write.
    KillProxy(usize, bool),
    /// The kernel reports to the agent which proxies' processes have ended.
    Reap,
    Drain(usize),
    Adopt(usize),
    KillAgent,
    StartAgent,
    Sync,
    Policy(usize, Option<usize>),
    /// The next part of a change of policy.
    ContinueChange,
    Clean(usize),
    /// Another endpoint under the same policies comes or goes.
    Other(bool),
    /// Writes to the ipcache fail from now on, or to policy maps, or none does.
    Fail(usize),
    /// The pod opens a connection to an address from an answer, or ends it.
    Use(usize, bool),
    /// The conntrack maps are scanned, to their end or not.
    ConntrackScan(bool),
    /// Milliseconds.
    Wait(u64),
    /// Everybody does what there is to do.
    Settle,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let proxy = 0..PROXIES;
    let act = prop_oneof![
        10 => (proxy.clone(), 0..NAMES.len(), 1u8..16, 0..TTLS.len())
            .prop_map(|(p, n, a, t)| Act::Answer(p, n, a, t)),
        6 => proxy.clone().prop_map(Act::Send),
        6 => proxy.clone().prop_map(Act::Run),
        8 => proxy.clone().prop_map(Act::Deliver),
        3 => proxy.clone().prop_map(Act::Connect),
        2 => (proxy.clone(), any::<bool>()).prop_map(|(p, torn)| Act::KillProxy(p, torn)),
        2 => Just(Act::Reap),
        1 => proxy.clone().prop_map(Act::Drain),
        2 => proxy.prop_map(Act::Adopt),
        2 => Just(Act::KillAgent),
        2 => Just(Act::StartAgent),
        3 => Just(Act::Sync),
        2 => (0usize..2, prop::option::of(0..SPECS.len())).prop_map(|(slot, s)| Act::Policy(slot, s)),
        3 => Just(Act::ContinueChange),
        2 => (0..NAMES.len()).prop_map(Act::Clean),
        2 => any::<bool>().prop_map(Act::Other),
        1 => (0..world::FAILURES.len()).prop_map(Act::Fail),
        4 => (0usize..4, any::<bool>()).prop_map(|(a, on)| Act::Use(a, on)),
        4 => any::<bool>().prop_map(Act::ConntrackScan),
        2 => (1u64..300).prop_map(Act::Wait),
        3 => (300u64..100_000).prop_map(Act::Wait),
        3 => Just(Act::Settle),
    ];
    prop::collection::vec(act, 1..60)
}

/// What decides over addresses in use, and little else.
fn uses() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        6 => (0..NAMES.len(), 1u8..16, 0..TTLS.len()).prop_map(|(n, a, t)| Act::Answer(0, n, a, t)),
        6 => Just(Act::Settle),
        5 => (0usize..4).prop_map(|a| Act::Use(a, true)),
        1 => (0usize..4).prop_map(|a| Act::Use(a, false)),
        8 => Just(Act::ConntrackScan(true)),
        1 => Just(Act::ConntrackScan(false)),
        2 => (0usize..2, prop::option::of(0..SPECS.len())).prop_map(|(slot, s)| Act::Policy(slot, s)),
        2 => Just(Act::ContinueChange),
        5 => (300u64..100_000).prop_map(Act::Wait),
        1 => Just(Act::KillAgent),
        2 => Just(Act::StartAgent),
        2 => Just(Act::Sync),
        2 => Just(Act::Connect(0)),
        1 => (0..NAMES.len()).prop_map(Act::Clean),
    ];
    prop::collection::vec(act, 40..120)
}

fn play(acts: &[Act]) {
    play_in(World::new(), acts);
}

fn play_in(mut world: World, acts: &[Act]) {
    for act in acts {
        world.act(*act);
    }
    world.check_end();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, max_shrink_iters: 2000, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_lost_whoever_fails(acts in acts()) {
        play(&acts);
    }

    #[test]
    fn what_was_cleaned_stays_closed_whoever_dies(
        acts in acts(),
        zombies in any::<bool>(),
        proxy_dies in any::<bool>(),
    ) {
        let mut world = if zombies { World::with_zombies() } else { World::new() };
        for act in &acts {
            world.act(*act);
        }
        world.check_cleaned(proxy_dies);
    }

}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, max_shrink_iters: 2000, ..ProptestConfig::default() })]

    /// Expiry, passes over conntrack, look-ups, changes of selectors and restarts in any order:
    /// what a connection uses stays open, and goes when nothing uses it.
    #[test]
    fn what_is_in_use_outlives_its_ttl(acts in uses()) {
        play_in(World::with_zombies(), &acts);
    }
}

#[test]
fn a_connection_keeps_its_address_through_a_change_of_selectors() {
    let acts = [
        Act::Answer(0, 0, 1, 0),
        Act::Settle,
        Act::Use(0, true),
        Act::Wait(90_000),
        Act::ConntrackScan(true),
        Act::ConntrackScan(true),
        Act::Policy(0, Some(2)),
        Act::Wait(1000),
        Act::ConntrackScan(false),
        Act::Policy(0, Some(0)),
        Act::ConntrackScan(true),
        Act::ConntrackScan(true),
        Act::Wait(10_000),
    ];
    let mut world = World::with_zombies();
    for act in acts {
        world.act(act);
    }
    assert_eq!(world.uses().count(), 1);
    assert!(world.node.identity("1.1.1.1").is_some());
    for act in [
        Act::Use(0, false),
        Act::ConntrackScan(true),
        Act::ConntrackScan(true),
        Act::Wait(1),
    ] {
        world.act(act);
    }
    assert_eq!(world.node.identity("1.1.1.1"), None);
    world.check_end();
}

#[test]
fn an_answer_goes_once_it_is_plumbed() {
    let mut world = World::new();
    world.act(Act::Answer(0, 0, 1, 2));
    assert!(matches!(world.answers[0].fate, Fate::Held(_)));
    world.act(Act::Settle);
    assert!(matches!(world.answers[0].fate, Fate::Released(_)));
    world.act(Act::Answer(0, 0, 1, 2));
    assert!(matches!(world.answers[1].fate, Fate::Released(_)), "leased");
    assert_eq!(
        world.node.datapath.policy.keys().next(),
        Some(&EndpointId(1))
    );
    world.check_end();
}

#[test]
fn what_two_dead_proxies_learned_without_an_agent_is_not_lost() {
    let mut world = World::new();
    world.act(Act::KillAgent);
    world.act(Act::Wait(10));
    world.act(Act::Answer(0, 0, 1, 3));
    assert!(
        matches!(world.answers[0].fate, Fate::Held(_)),
        "not written yet"
    );
    world.act(Act::Wait(1));
    assert!(matches!(world.answers[0].fate, Fate::Released(_)));
    world.act(Act::KillProxy(0, true));
    world.act(Act::Adopt(1));
    world.act(Act::KillProxy(1, true));
    world.check_end();
    assert_eq!(world.orphans.len(), 0);
}

#[test]
fn the_lease_of_a_dead_proxy_is_honoured_to_its_end_and_what_comes_after() {
    play(&[
        Act::Answer(0, 0, 2, 0),
        Act::Answer(1, 0, 6, 3),
        Act::Settle,
        Act::KillProxy(0, false),
        Act::Wait(61_000),
        Act::Clean(0),
    ]);
}

/// It is over with the process, however long its TTL was.
#[test]
fn the_lease_of_a_dead_proxy_ends_when_its_process_is_known_to_have_ended() {
    let mut world = World::new();
    for act in [
        Act::Answer(0, 0, 1, 4),
        Act::Settle,
        Act::KillProxy(0, false),
        Act::Clean(0),
        Act::Wait(100),
    ] {
        world.act(act);
    }
    assert!(world.node.identity("1.1.1.1").is_some(), "it may live");
    world.act(Act::Reap);
    // The other proxy gives its leases back.
    world.act(Act::Settle);
    assert_eq!(world.node.identity("1.1.1.1"), None);
}

#[test]
fn a_shorter_answer_does_not_hide_a_longer_one() {
    play(&[
        Act::Answer(1, 1, 1, 3),
        Act::Answer(1, 1, 1, 0),
        Act::Wait(5552),
        Act::Wait(52448),
    ]);
}

#[test]
fn an_answer_waits_for_the_write_that_another_one_caused() {
    play(&[
        Act::KillAgent,
        Act::Wait(1),
        Act::Answer(0, 1, 15, 3),
        Act::Answer(0, 1, 1, 1),
        Act::KillProxy(0, true),
    ]);
}

#[test]
fn what_was_cleaned_and_asked_again_is_open_although_it_lasts_less_long() {
    for killed in [false, true] {
        let mut acts = vec![
            Act::KillProxy(0, false),
            Act::Answer(0, 0, 1, 3),
            Act::Wait(1000),
            Act::Clean(0),
            // Longer than a journal may be behind.
            Act::Wait(80_000),
            Act::Answer(0, 0, 1, 2),
            Act::Wait(10),
        ];
        if killed {
            acts.extend([Act::KillProxy(0, false), Act::Adopt(1)]);
        }
        play(&acts);
    }
}

#[test]
fn what_is_asked_while_its_lease_is_revoked_is_not_lost_with_the_agent() {
    play(&[
        Act::Answer(0, 0, 1, 0),
        Act::Settle,
        Act::Clean(0),
        Act::Answer(0, 0, 1, 3),
        Act::Send(0),
        Act::KillAgent,
        Act::Settle,
    ]);
}
