//! Every rendering of random policies judges every packet as a direct evaluation of the documents does.

use std::collections::{BTreeMap, BTreeSet};

use netpol::{
    node::{Node, Surroundings},
    packet::Packet,
    render::{
        nft::Limits,
        vpp::{acl, sessions},
    },
    rule::{Net, Rule},
    verdict::World,
};

use super::{
    random::Random,
    world::{Families, NODES, objects, packet},
};

const SETS: u64 = 1_000;
const PACKETS: usize = 1_000;

/// For each rendering, the number of packets that it judged, and the number that it dropped.
type Tally = BTreeMap<&'static str, (usize, usize)>;

#[test]
fn parity_of_renderings() {
    let threads = [(0, Families::V4), (1, Families::Both)].map(|(part, families)| {
        std::thread::spawn(move || {
            let mut tally = Tally::new();
            for set in (0..SETS).filter(|set| set % 2 == part) {
                check_set(set, families, &mut tally);
            }
            tally
        })
    });
    let mut all = Tally::new();
    for (judge, (judged, dropped)) in threads.into_iter().flat_map(|t| t.join().unwrap()) {
        let (all, all_dropped) = all.entry(judge).or_default();
        *all += judged;
        *all_dropped += dropped;
    }
    let (_, aside) = all["set aside"];
    assert!(aside > 100, "{aside} policies were set aside");
    // Session rules exist only for IPv4, TCP and UDP.
    for (judge, least) in [
        ("reading", 1_000_000),
        ("rules", 1_000_000),
        ("nft", 1_000_000),
        ("tables", 1_000_000),
        ("acl", 1_000_000),
        ("sessions", 250_000),
    ] {
        let (judged, dropped) = all[judge];
        assert!(judged >= least, "{judge}: {judged}");
        let (few, most) = (judged / 10, judged * 9 / 10);
        assert!(
            (few..most).contains(&dropped),
            "{judge}: {dropped} of {judged} dropped"
        );
    }
}

fn check_set(set: u64, families: Families, tally: &mut Tally) {
    let mut random = Random::new(set);
    let objects = objects(&mut random, families);
    let mut world = World::new(&objects);
    let around = Surroundings {
        node_interfaces: ["uplink".to_owned()].into(),
        ..Surroundings::default()
    };
    // In every fourth set, some policies do not fit.
    let limits = match set % 8 {
        0 | 1 => Limits {
            rows: 12,
            addresses: 10,
        },
        _ => Limits::default(),
    };
    let node = |name| Node::within(limits, name, &objects, &around).unwrap();
    let nodes = NODES.map(|name| (name, node(name)));
    for (name, node) in &nodes {
        world.set_aside = node.set_aside.keys().cloned().collect();
        let (_, aside) = tally.entry("set aside").or_default();
        *aside += world.set_aside.len();
        for _ in 0..PACKETS / NODES.len() {
            let packet = packet(&mut random, families);
            check_packet((set, name), node, &world, &packet, tally);
        }
    }
    nodes.iter().for_each(|(_, node)| check_exports(node));
}

/// Checks a packet on a node, which judges for its own pods.
fn check_packet(
    place: (u64, &str),
    node: &Node,
    world: &World,
    packet: &Packet,
    tally: &mut Tally,
) {
    let read = world.judge(packet, |pod| pod.node.as_deref() == Some(place.1));
    let mut count = |judge, passes: bool| {
        let (judged, dropped) = tally.entry(judge).or_default();
        *judged += 1;
        *dropped += usize::from(!passes);
    };
    count("reading", read.passes);
    for (judge, verdict) in node.judge(packet) {
        count(judge, verdict.passes);
        assert_eq!(
            verdict.passes, read.passes,
            "{place:?} {packet:?}\n{judge}: {:?}\nreading: {:?}",
            verdict.by, read.by
        );
    }
}

/// Checks that exports can be read back.
fn check_exports(node: &Node) {
    let document = acl::to_json(&node.acls);
    let acls = acl::from_json(&document).unwrap();
    assert_eq!(acls, node.acls);
    assert_eq!(acl::import(&acls), node.tables);
    let Ok(rules) = &node.sessions else { return };
    let document = sessions::to_json(rules);
    assert_eq!(sessions::from_json(&document).unwrap(), *rules);
    let imported = sessions::import(rules);
    let addresses = node
        .pods
        .iter()
        .map(|(id, pod)| (id.clone(), pod.addresses.clone()));
    let again = sessions::export(&imported, &addresses.collect()).unwrap();
    let sorted = |rules: &[sessions::SessionRule]| {
        let mut rules = rules.to_vec();
        rules.sort_unstable_by_key(ToString::to_string);
        rules
    };
    let (again, rules) = (sorted(&again), sorted(rules));
    let mut pairs = again.iter().zip(&rules);
    let differs = pairs.find(|(one, other)| one != other);
    assert!(
        differs.is_none() && again.len() == rules.len(),
        "{differs:?}"
    );
    let local = imported.local.iter();
    for (pod, rules) in local.flat_map(|(rules, pods)| pods.iter().map(move |pod| (pod, rules))) {
        let written = node.session_tables.local_of(pod).unwrap().iter();
        let written: BTreeSet<Rule> = written.copied().map(as_session_rules_have_it).collect();
        for rule in rules.iter().filter(|rule| **rule != Rule::PERMIT_ALL) {
            assert!(written.contains(rule), "{pod}: {rule}");
        }
    }
}

/// The rule as session rules express it: all IPv4 addresses mean everyone, because session rules
/// have no other family.
fn as_session_rules_have_it(mut rule: Rule) -> Rule {
    if rule.destination == Net::Block("0.0.0.0/0".parse().unwrap()) {
        rule.destination = Net::Any;
    }
    rule
}
