//! Leases, expiry, changes of policy, restarts of the agent and failover of proxies in any
//! order: real state machines on both sides, a scheduler that decides who goes on, maps in
//! memory. Changes of policy go in small parts, and events of proxies are handled between them.
//!
//! At every instant:
//! - an answer goes out only if its addresses have the labels that policy gives its name, or
//!   if the proxy counts it as released unplumbed;
//! - nothing is removed before lease end + 5 s, except leases that their holders returned.
//!
//! - where expired addresses are kept for connections: an address that a connection uses has its labels.
//!
//! All of this holds while writes to maps succeed. While they fail, policy that proxies have
//! (`docs/design/0004-rules-after-failures.md`) may be ahead of the maps.
//!
//! Once everything has come to rest, every answer that is still valid is plumbed, whatever was
//! killed in between; and when all has expired, nothing is left.

mod proxy;
mod world;

use agent_core::{
    core::testing::{cluster::ServicePort, policy::document},
    policy::{document::PolicyDocument, parse::parse_documents},
};
use proptest::{prelude::*, sample::select};
use shared_maps::EndpointId;

use self::world::{ADDRESSES, Addresses, Failure, Fate, World};

const WWW: &str = "www.cilium.io.";
const DEV: &str = "dev.cilium.io.";
const NAMES: [&str; 3] = [WWW, DEV, "ebpf.io."];
const SHORTEST: u32 = 1;
/// Longer than a lease may be.
const LONGEST: u32 = 86_400;
/// TTLs of answers, in seconds.
const TTLS: [u32; 5] = [SHORTEST, 20, 60, 600, LONGEST];
/// Number of proxies that run at the same time.
const PROXIES: usize = 2;

/// A policy that is always there, so that answers are accepted.
const DNS: &str = r"
  endpointSelector: {}
  egress:
  - toCIDR: [10.9.0.53/32]
    toPorts: [{ports: [{port: 53}], rules: {dns: [{matchPattern: '*'}]}}]
";

/// A policy for names, addresses or pods.
#[derive(Clone, Copy, Debug)]
enum Spec {
    WebToCiliumNames,
    WebToWwwOn443,
    ToAnyName,
    ToBlock,
    /// From here on: NetworkPolicies of Kubernetes.
    FromTeamAOn443,
    ToDbOn443AndBlock,
}

/// Ports of a Service: the pod of another node is behind the first ones.
const SERVICES: [&[ServicePort]; 2] = [
    &[(6, 443, 443, &["10.2.0.9"])],
    &[(6, 443, 443, &["1.1.1.1", "10.2.0.9"]), (17, 53, 53, &[])],
];

impl Spec {
    const ALL: [Self; 6] = [
        Self::WebToCiliumNames,
        Self::WebToWwwOn443,
        Self::ToAnyName,
        Self::ToBlock,
        Self::FromTeamAOn443,
        Self::ToDbOn443AndBlock,
    ];

    /// The document's `spec` as YAML.
    fn text(self) -> &'static str {
        match self {
            Self::WebToCiliumNames => {
                r"
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toFQDNs: [{matchPattern: '*.cilium.io'}]
"
            }
            Self::WebToWwwOn443 => {
                r"
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toFQDNs: [{matchName: www.cilium.io}]
    toPorts: [{ports: [{port: '443', protocol: TCP}]}]
"
            }
            Self::ToAnyName => {
                r"
  endpointSelector: {}
  egress:
  - toFQDNs: [{matchPattern: '*'}]
"
            }
            Self::ToBlock => {
                r"
  endpointSelector: {}
  egress:
  - toCIDR: [1.1.1.0/24]
"
            }
            Self::FromTeamAOn443 => {
                r"
  podSelector: {matchLabels: {app: web}}
  ingress:
  - from: [{namespaceSelector: {matchLabels: {team: a}}}]
    ports: [{port: 443}]
"
            }
            Self::ToDbOn443AndBlock => {
                r"
  podSelector: {}
  policyTypes: [Egress]
  egress:
  - to: [{podSelector: {matchLabels: {app: db}}}]
    ports: [{port: 443}]
  - to: [{ipBlock: {cidr: 1.1.1.0/24, except: [1.1.1.2/32]}}]
"
            }
        }
    }

    /// The policy as the document `p<slot>`.
    fn document(self, slot: usize) -> PolicyDocument {
        let name = format!("p{slot}");
        match self {
            Self::FromTeamAOn443 | Self::ToDbOn443AndBlock => {
                let text = format!(
                    "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: {name}, namespace: default}}\nspec: {}",
                    self.text()
                );
                parse_documents(&text, "test").remove(0).unwrap()
            }
            _ => document(&name, self.text()),
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Act {
    /// A server answers a pod: proxy, name, addresses, TTL in seconds.
    Answer(usize, &'static str, Addresses, u32),
    Send(usize),
    /// The agent takes everything that one proxy has sent.
    Run(usize),
    /// A proxy takes one message.
    Deliver(usize),
    Connect(usize),
    /// kill -9 of a proxy, and of its write to the journal.
    KillProxy(usize, LastWrite),
    /// The kernel reports to the agent which proxies' processes have ended.
    Reap,
    Drain(usize),
    Adopt(usize),
    KillAgent,
    StartAgent,
    Sync,
    Policy(usize, Option<Spec>),
    /// The next part of a change of policy.
    ContinueChange,
    Clean(&'static str),
    /// Another endpoint under the same policies is added.
    AddOther,
    RemoveOther,
    /// The other node's pod becomes app=web (true) or app=db (false), or is removed.
    ClusterPod(Option<bool>),
    /// The pod's namespace has this label `team` now, or is removed.
    Team(Option<&'static str>),
    /// The Service has these ports now, or is removed.
    Service(Option<&'static [ServicePort]>),
    /// These writes fail from now on.
    Fail(Failure),
    /// The pod opens a connection to an address from an answer.
    OpenConnection(&'static str),
    CloseConnections(&'static str),
    ConntrackScan(Scan),
    /// Milliseconds.
    Wait(u64),
    /// All parts do the work that they have.
    Settle,
}

/// The last write to the journal of a proxy that is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LastWrite {
    Whole,
    Torn,
}

/// How far a scan of the conntrack maps comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scan {
    Complete,
    Partial,
}

const KILLS: [LastWrite; 2] = [LastWrite::Whole, LastWrite::Torn];
const SCANS: [Scan; 2] = [Scan::Partial, Scan::Complete];

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let proxy = 0..PROXIES;
    let act = prop_oneof![
        10 => (proxy.clone(), select(&NAMES), Addresses::any(), select(&TTLS))
            .prop_map(|(p, n, a, t)| Act::Answer(p, n, a, t)),
        6 => proxy.clone().prop_map(Act::Send),
        6 => proxy.clone().prop_map(Act::Run),
        8 => proxy.clone().prop_map(Act::Deliver),
        3 => proxy.clone().prop_map(Act::Connect),
        2 => (proxy.clone(), select(&KILLS)).prop_map(|(p, write)| Act::KillProxy(p, write)),
        2 => Just(Act::Reap),
        1 => proxy.clone().prop_map(Act::Drain),
        2 => proxy.prop_map(Act::Adopt),
        2 => Just(Act::KillAgent),
        2 => Just(Act::StartAgent),
        3 => Just(Act::Sync),
        2 => (0usize..2, prop::option::of(select(&Spec::ALL))).prop_map(|(slot, s)| Act::Policy(slot, s)),
        3 => Just(Act::ContinueChange),
        2 => select(&NAMES).prop_map(Act::Clean),
        1 => Just(Act::RemoveOther),
        1 => Just(Act::AddOther),
        1 => prop::option::weighted(0.7, any::<bool>()).prop_map(Act::ClusterPod),
        1 => prop::option::weighted(0.7, select(&["a", "b"])).prop_map(Act::Team),
        1 => prop::option::weighted(0.7, select(&SERVICES)).prop_map(Act::Service),
        1 => select(&Failure::ALL).prop_map(Act::Fail),
        2 => select(&ADDRESSES).prop_map(Act::CloseConnections),
        2 => select(&ADDRESSES).prop_map(Act::OpenConnection),
        4 => select(&SCANS).prop_map(Act::ConntrackScan),
        2 => (1u64..300).prop_map(Act::Wait),
        3 => (300u64..100_000).prop_map(Act::Wait),
        3 => Just(Act::Settle),
    ];
    prop::collection::vec(act, 1..60)
}

/// Acts that matter for addresses in use, and few others.
fn uses() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        6 => (select(&NAMES), Addresses::any(), select(&TTLS)).prop_map(|(n, a, t)| Act::Answer(0, n, a, t)),
        6 => Just(Act::Settle),
        5 => select(&ADDRESSES).prop_map(Act::OpenConnection),
        1 => select(&ADDRESSES).prop_map(Act::CloseConnections),
        8 => Just(Act::ConntrackScan(Scan::Complete)),
        1 => Just(Act::ConntrackScan(Scan::Partial)),
        2 => (0usize..2, prop::option::of(select(&Spec::ALL))).prop_map(|(slot, s)| Act::Policy(slot, s)),
        2 => Just(Act::ContinueChange),
        5 => (300u64..100_000).prop_map(Act::Wait),
        1 => Just(Act::KillAgent),
        2 => Just(Act::StartAgent),
        2 => Just(Act::Sync),
        2 => Just(Act::Connect(0)),
        1 => select(&NAMES).prop_map(Act::Clean),
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
    fn no_answer_is_lost_when_any_program_fails(acts in acts()) {
        play(&acts);
    }

    #[test]
    fn a_cleaned_name_stays_closed_when_programs_are_killed(
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
    /// what a connection uses stays open, and is closed when nothing uses it.
    #[test]
    fn an_address_in_use_outlives_its_ttl(acts in uses()) {
        play_in(World::with_zombies(), &acts);
    }
}

#[test]
fn a_connection_keeps_its_address_through_a_change_of_selectors() {
    let acts = [
        Act::Answer(0, WWW, Addresses::of(&["1.1.1.1"]), SHORTEST),
        Act::Settle,
        Act::OpenConnection("1.1.1.1"),
        Act::Wait(90_000),
        Act::ConntrackScan(Scan::Complete),
        Act::ConntrackScan(Scan::Complete),
        Act::Policy(0, Some(Spec::ToAnyName)),
        Act::Wait(1000),
        Act::ConntrackScan(Scan::Partial),
        Act::Policy(0, Some(Spec::WebToCiliumNames)),
        Act::ConntrackScan(Scan::Complete),
        Act::ConntrackScan(Scan::Complete),
        Act::Wait(10_000),
    ];
    let mut world = World::with_zombies();
    for act in acts {
        world.act(act);
    }
    assert_eq!(world.uses().count(), 1);
    assert!(world.node.identity("1.1.1.1").is_some());
    for act in [
        Act::CloseConnections("1.1.1.1"),
        Act::ConntrackScan(Scan::Complete),
        Act::ConntrackScan(Scan::Complete),
        Act::Wait(1),
    ] {
        world.act(act);
    }
    assert_eq!(world.node.identity("1.1.1.1"), None);
    world.check_end();
}

#[test]
fn an_answer_is_released_once_its_addresses_are_plumbed() {
    let mut world = World::new();
    world.act(Act::Answer(0, WWW, Addresses::of(&["1.1.1.1"]), 60));
    assert!(matches!(world.answers[0].fate, Fate::Held(_)));
    world.act(Act::Settle);
    assert!(matches!(world.answers[0].fate, Fate::Released(_)));
    world.act(Act::Answer(0, WWW, Addresses::of(&["1.1.1.1"]), 60));
    assert!(matches!(world.answers[1].fate, Fate::Released(_)), "leased");
    assert_eq!(
        world.node.datapath.policy.keys().next(),
        Some(&EndpointId(1))
    );
    world.check_end();
}

#[test]
fn names_that_two_killed_proxies_learned_without_an_agent_are_not_lost() {
    let mut world = World::new();
    world.act(Act::KillAgent);
    world.act(Act::Wait(10));
    world.act(Act::Answer(0, WWW, Addresses::of(&["1.1.1.1"]), 600));
    assert!(
        matches!(world.answers[0].fate, Fate::Held(_)),
        "not written yet"
    );
    world.act(Act::Wait(1));
    assert!(matches!(world.answers[0].fate, Fate::Released(_)));
    world.act(Act::KillProxy(0, LastWrite::Torn));
    world.act(Act::Adopt(1));
    world.act(Act::KillProxy(1, LastWrite::Torn));
    world.check_end();
    assert_eq!(world.orphans.len(), 0);
}

#[test]
fn a_killed_proxys_lease_is_honoured_to_its_end() {
    play(&[
        Act::Answer(0, WWW, Addresses::of(&["1.1.1.2"]), SHORTEST),
        Act::Answer(1, WWW, Addresses::of(&["1.1.1.2", "2.2.2.2"]), 600),
        Act::Settle,
        Act::KillProxy(0, LastWrite::Whole),
        Act::Wait(61_000),
        Act::Clean(WWW),
    ]);
}

/// The lease is over with the process, however long the answer's TTL was.
#[test]
fn a_killed_proxys_lease_ends_when_its_process_has_ended() {
    let mut world = World::new();
    for act in [
        Act::Answer(0, WWW, Addresses::of(&["1.1.1.1"]), LONGEST),
        Act::Settle,
        Act::KillProxy(0, LastWrite::Whole),
        Act::Clean(WWW),
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
        Act::Answer(1, DEV, Addresses::of(&["1.1.1.1"]), 600),
        Act::Answer(1, DEV, Addresses::of(&["1.1.1.1"]), SHORTEST),
        Act::Wait(5552),
        Act::Wait(52448),
    ]);
}

#[test]
fn an_answer_waits_for_the_write_that_another_one_caused() {
    play(&[
        Act::KillAgent,
        Act::Wait(1),
        Act::Answer(0, DEV, Addresses::of(&ADDRESSES), 600),
        Act::Answer(0, DEV, Addresses::of(&["1.1.1.1"]), 20),
        Act::KillProxy(0, LastWrite::Torn),
    ]);
}

#[test]
fn a_cleaned_name_that_is_looked_up_again_is_open_also_with_a_shorter_ttl() {
    for killed in [false, true] {
        let mut acts = vec![
            Act::KillProxy(0, LastWrite::Whole),
            Act::Answer(0, WWW, Addresses::of(&["1.1.1.1"]), 600),
            Act::Wait(1000),
            Act::Clean(WWW),
            // Longer than a journal may be behind.
            Act::Wait(80_000),
            Act::Answer(0, WWW, Addresses::of(&["1.1.1.1"]), 60),
            Act::Wait(10),
        ];
        if killed {
            acts.extend([Act::KillProxy(0, LastWrite::Whole), Act::Adopt(1)]);
        }
        play(&acts);
    }
}

#[test]
fn a_name_looked_up_while_its_lease_is_revoked_is_not_lost_with_the_agent() {
    play(&[
        Act::Answer(0, WWW, Addresses::of(&["1.1.1.1"]), SHORTEST),
        Act::Settle,
        Act::Clean(WWW),
        Act::Answer(0, WWW, Addresses::of(&["1.1.1.1"]), 600),
        Act::Send(0),
        Act::KillAgent,
        Act::Settle,
    ]);
}
