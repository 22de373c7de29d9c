//! Ordered lists in the datapath: while one takes the place of another, every packet meets the old
//! verdict or the new one.

use std::{collections::BTreeMap, net::IpAddr};

use dns_policy::{boot_time::BootTime, name::Fqdn};
use shared_maps::{EndpointId, policy::EGRESS};

use super::{
    oracle::{Fate, Question, fate},
    restart::again,
    scenario::{Node, spec},
};
use crate::{
    core::{Core, CoreConfig, Event, Restored, why::Target},
    datapath::{
        memory::MemoryDatapath,
        plan::{Datapath as _, Step},
    },
    policy::trace::{FlowDirection, Verdict},
    source_event::SourceEvent,
};

/// The key of the list of the pods' namespace.
const KEY: &str = "EgressFirewall/default/default";

/// A source of choices: the same for the same seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from((self.0 >> 11) % (end as u64)).unwrap()
    }

    fn pick<'a>(&mut self, from: &[&'a str]) -> &'a str {
        from[self.below(from.len())]
    }
}

const BLOCKS: &[&str] = &["1.1.1.0/24", "1.1.0.0/16", "0.0.0.0/0", "1.1.1.1/32"];
const ADDRESSES: &[&str] = &["1.1.1.1", "1.1.1.2", "1.1.2.1", "9.9.9.9", "10.0.0.8"];
/// A port of no rule, the edges of the rules' ports, DNS; a protocol that no list names.
const PACKETS: &[(u8, u16)] = &[
    (6, 80),
    (6, 443),
    (6, 444),
    (6, 450),
    (6, 451),
    (6, 53),
    (17, 53),
    (17, 443),
    (132, 443),
    (1, 8),
];

fn list(rules: &[String]) -> String {
    format!(
        r"
apiVersion: k8s.ovn.org/v1
kind: EgressFirewall
metadata: {{name: default, namespace: default}}
spec: {{egress: [{}]}}
",
        rules.join(", ")
    )
}

fn any_list(dice: &mut Dice) -> String {
    let mut to = destinations(dice);
    to.truncate(dice.below(6));
    list_of(dice, &to)
}

fn destinations(dice: &mut Dice) -> Vec<String> {
    let mut to = || match dice.below(8) {
        0 => "dnsName: www.example.com".to_owned(),
        _ => format!("cidrSelector: {}", dice.pick(BLOCKS)),
    };
    (0..5).map(|_| to()).collect()
}

/// A list with these destinations.
fn list_of(dice: &mut Dice, to: &[String]) -> String {
    let mut rule = |to: &String| {
        let ports = match dice.below(5) {
            0 | 1 => String::new(),
            2 => ", ports: [{protocol: TCP, port: 443}]".to_owned(),
            3 => ", ports: [{protocol: UDP, port: 53}, {protocol: TCP, port: 53}]".to_owned(),
            _ => {
                let ports = (443..=450).map(|port| format!("{{protocol: TCP, port: {port}}}"));
                let ports: Vec<String> = ports.collect();
                format!(", ports: [{}]", ports.join(", "))
            }
        };
        let kind = dice.pick(&["Allow", "Deny"]);
        format!("{{type: {kind}, to: {{{to}}}{ports}}}")
    };
    let rules: Vec<String> = to.iter().map(&mut rule).collect();
    list(&rules)
}

/// Rules of a policy beside the list, which [`rules`] takes by number.
const RULES: &[&str] = &[
    "egress: [{toCIDR: [1.1.1.0/24]}]",
    "egress: [{toEntities: [world], toPorts: [{ports: [{port: '443', protocol: TCP}]}]}]",
    "egress: [{}]\n  egressDeny: [{toPorts: [{ports: [{port: '443', protocol: TCP}]}]}]",
    r"
  egress: [{toCIDR: [1.1.0.0/16], icmps: [{fields: [{type: 8}]}]}]
  egressDeny: [{toCIDR: [1.1.1.1/32], toPorts: [{ports: [{port: '80'}]}]}]
",
    r"
  egress: [{toPorts: [{ports: [{port: '53'}], rules: {dns: [{matchPattern: '*'}]}}]}]
  enableDefaultDeny: {egress: false}
",
    r"
  egress:
  - toEntities: [world]
    toPorts: [{ports: [{port: '53'}], rules: {dns: [{matchName: a.test}]}}]
  enableDefaultDeny: {egress: false}
",
    "egressDeny: [{toCIDR: [1.1.1.0/24]}]\n  enableDefaultDeny: {egress: false}",
    "egressDeny: [{toPorts: [{ports: [{port: '443'}]}]}]\n  enableDefaultDeny: {egress: false}",
];

fn rules(number: usize) -> String {
    format!(
        r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {{name: rules}}
spec:
  endpointSelector: {{matchLabels: {{app: web}}}}
  {}
",
        RULES[number]
    )
}

/// A synced node with a pod of app web and one of app db.
fn node() -> Node {
    node_with(CoreConfig::default())
}

fn node_with(config: CoreConfig) -> Node {
    let mut node = Node::with(config, Restored::default(), MemoryDatapath::default());
    node.begin();
    node.endpoint(spec("web", 7, "app=web"));
    node.endpoint(spec("db", 8, "app=db"));
    node.sync();
    node
}

fn delete(node: &mut Node, key: &str) -> Vec<Step> {
    node.event(Event::Policies(SourceEvent::Delete(key.to_owned())))
}

fn sent(endpoint: EndpointId, remote: IpAddr, protocol: u8, port: u16) -> Question {
    Question {
        endpoint,
        remote,
        direction: EGRESS,
        protocol,
        port,
    }
}

type Fates = BTreeMap<(EndpointId, &'static str, u8, u16), Fate>;

fn fates(datapath: &MemoryDatapath) -> Fates {
    let mut found = Fates::new();
    for endpoint in datapath.policy.keys() {
        for address in ADDRESSES {
            for (protocol, port) in PACKETS {
                let remote: IpAddr = address.parse().unwrap();
                let packet = (*endpoint, *address, *protocol, *port);
                let fate = fate(datapath, sent(*endpoint, remote, *protocol, *port));
                found.extend(fate.map(|fate| (packet, fate)));
            }
        }
    }
    found
}

/// Carries the steps out again, and looks at every state on the way.
fn each_state(
    before: &MemoryDatapath,
    steps: &[Step],
    mut see: impl FnMut(&MemoryDatapath, &Step),
) {
    let mut state = before.clone();
    for step in steps {
        state.apply(step).unwrap();
        see(&state, step);
    }
}

/// Checks that every packet meets the old verdict or the new one. Returns how many packets have
/// another verdict at the end.
fn old_or_new(before: &MemoryDatapath, node: &Node, steps: &[Step], what: &str) -> usize {
    let (old, new) = (fates(before), fates(&node.datapath));
    each_state(before, steps, |state, step| {
        for (packet, is) in fates(state) {
            let ends = [old[&packet], new[&packet]];
            assert!(
                ends.contains(&is),
                "{packet:?}: {is:?} of {ends:?} at {step:?}: {what}"
            );
        }
    });
    old.iter()
        .filter(|(packet, was)| new[*packet] != **was)
        .count()
}

#[test]
fn every_state_between_two_lists_is_the_old_or_the_new_one_for_each_packet() {
    let mut dice = Dice(3);
    let mut changed = 0;
    for _ in 0..30 {
        let mut node = node();
        if dice.below(3) > 0 {
            node.policy(&rules(dice.below(RULES.len())));
        }
        for _ in 0..8 {
            let before = node.datapath.clone();
            let text = any_list(&mut dice);
            let steps = match dice.below(5) {
                0 => delete(&mut node, KEY),
                _ => node.policy(&text),
            };
            changed += old_or_new(&before, &node, &steps, &text);
        }
    }
    assert!(changed > 2_000, "{changed}");
}

/// Maps that have room for few entries, beside those that have room for all: no state opens more than
/// the state before or the new policy does. Where no problem is reported, both maps give the same
/// verdicts.
#[test]
fn a_map_without_room_opens_nothing() {
    let mut dice = Dice(5);
    let (mut full, mut equal) = (0, 0);
    for _ in 0..60 {
        let mut large = node();
        let mut small = node_with(CoreConfig {
            policy_map_max: 4 + dice.below(40),
            ..CoreConfig::default()
        });
        for _ in 0..8 {
            let rules = dice.below(RULES.len());
            let list = any_list(&mut dice);
            let text = match dice.below(4) {
                0 => self::rules(rules),
                _ => list,
            };
            let before = small.datapath.clone();
            large.policy(&text);
            let steps = small.policy(&text);
            let (old, new) = (fates(&before), fates(&large.datapath));
            each_state(&before, &steps, |state, step| {
                for (packet, is) in fates(state) {
                    let most = old[&packet].max(new[&packet]);
                    assert!(is <= most, "{packet:?}: {is:?} at {step:?}: {text}");
                }
            });
            match small.core.summary().endpoint_problems.is_empty() {
                true => {
                    assert_eq!(fates(&small.datapath), new, "{text}");
                    equal += 1;
                }
                false => full += 1,
            }
        }
    }
    assert!(full > 20 && equal > 100, "{full} {equal}");
}

/// Checks that in each state the fate of a packet is one of the fates at both ends, or between them.
/// Returns the fates at both ends.
#[track_caller]
fn between_both_ends(
    before: &MemoryDatapath,
    node: &Node,
    steps: &[Step],
    text: &str,
) -> (Fates, Fates) {
    let (old, new) = (fates(before), fates(&node.datapath));
    each_state(before, steps, |state, step| {
        for (packet, is) in fates(state) {
            let (was, will) = (old[&packet], new[&packet]);
            let range = was.min(will)..=was.max(will);
            assert!(
                range.contains(&is),
                "{packet:?}: {was:?}, {is:?}, {will:?} at {step:?}: {text}"
            );
        }
    });
    (old, new)
}

/// The other rules are part of each table: they change under a list.
#[test]
fn every_state_between_other_rules_under_a_list_is_no_more_open_than_both_ends() {
    let mut dice = Dice(5);
    for _ in 0..30 {
        let mut node = node();
        node.policy(&any_list(&mut dice));
        for _ in 0..8 {
            let before = node.datapath.clone();
            let text = rules(dice.below(RULES.len()));
            let steps = match dice.below(5) {
                0 => delete(&mut node, "CiliumNetworkPolicy/default/rules"),
                _ => node.policy(&text),
            };
            between_both_ends(&before, &node, &steps, &text);
        }
    }
}

/// A pod that gets other labels gets a list and other rules at once.
#[test]
fn a_list_and_other_rules_that_come_in_one_step_open_nothing_on_the_way() {
    let mut dice = Dice(9);
    let mut changed = 0;
    for _ in 0..60 {
        let mut node = node();
        let text = any_list(&mut dice);
        node.policy(&text);
        node.policy(&rules(dice.below(RULES.len())));
        for label in ["app=other", "app=web"] {
            let mut web = spec("web", 7, label);
            web.labels.push(match label {
                // No list is about this namespace.
                "app=other" => "k8s:io.kubernetes.pod.namespace=other".to_owned(),
                _ => "k8s:io.kubernetes.pod.namespace=default".to_owned(),
            });
            let before = node.datapath.clone();
            let steps = node.endpoint(web);
            let (old, new) = between_both_ends(&before, &node, &steps, &text);
            changed += old
                .iter()
                .filter(|(packet, was)| new[*packet] != **was)
                .count();
        }
    }
    assert!(changed > 500, "{changed}");
}

/// An entry allows one identity packets that are denied to every other peer. A table replaces this entry, and from then
/// on every peer may send these packets.
#[test]
fn an_entry_that_a_table_replaces_goes_before_everyone_may_send_more() {
    let rules = |namespace: &str, spec: &str| {
        format!(
            r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {{name: rules, namespace: {namespace}}}
spec:
  endpointSelector: {{}}
  {spec}
"
        )
    };
    let port = "toPorts: [{ports: [{port: '443', protocol: TCP}]}]";
    let mut node = node();
    node.policy(&rules(
        "other",
        &format!("egress: [{{toCIDR: [1.1.1.0/24], {port}}}]\n  egressDeny: [{{{port}}}]"),
    ));
    node.policy(&rules("default", &format!("egress: [{{{port}}}]")));
    node.policy(&list(&[
        "{type: Deny, to: {cidrSelector: 1.1.1.0/24}}".to_owned()
    ]));
    let mut web = spec("web", 7, "app=web");
    web.labels
        .push("k8s:io.kubernetes.pod.namespace=other".to_owned());
    node.endpoint(web);
    let before = node.datapath.clone();
    let steps = node.endpoint(spec("web", 7, "app=web"));
    let at = |datapath: &MemoryDatapath| {
        let sent = sent(EndpointId(1), "1.1.1.2".parse().unwrap(), 6, 443);
        fate(datapath, sent).unwrap()
    };
    let other = |datapath: &MemoryDatapath| {
        let sent = sent(EndpointId(1), "9.9.9.9".parse().unwrap(), 6, 443);
        fate(datapath, sent).unwrap()
    };
    assert_eq!(other(&before), Fate::Dropped);
    assert_eq!(
        other(&node.datapath),
        Fate::Passed,
        "everyone is allowed it now"
    );
    each_state(&before, &steps, |state, step| {
        assert_eq!(at(state), Fate::Dropped, "{step:?}");
    });
}

/// The agent is killed between two steps of a change: the next run plans from what the maps have.
#[test]
fn an_agent_that_is_killed_between_two_lists_goes_on_from_the_maps() {
    let mut dice = Dice(17);
    for round in 0..12 {
        let (first, second) = (any_list(&mut dice), any_list(&mut dice));
        let mut node = node();
        node.policy(&rules(round % RULES.len()));
        node.policy(&first);
        let before = node.datapath.clone();
        let steps = node.policy(&second);
        let (old, new) = (fates(&before), fates(&node.datapath));
        for cut in 0..steps.len() {
            let mut datapath = before.clone();
            for step in steps.iter().take(cut) {
                datapath.apply(step).unwrap();
            }
            let cut = Node {
                core: Core::new(CoreConfig::default(), Restored::default()),
                datapath: datapath.clone(),
                now: node.now,
                effects: Vec::new(),
            };
            let mut again = again(&cut, CoreConfig::default(), &[107, 108]);
            again.begin();
            again.policy(&rules(round % RULES.len()));
            again.policy(&second);
            again.endpoint(spec("web", 7, "app=web"));
            again.endpoint(spec("db", 8, "app=db"));
            let mut steps = again.sync();
            steps.extend(again.tick(again.now.plus_secs(31)));
            each_state(&datapath, &steps, |state, step| {
                for (packet, is) in fates(state) {
                    let ends = [old[&packet], new[&packet]];
                    assert!(
                        ends.contains(&is),
                        "{packet:?}: {is:?} of {ends:?} at {step:?}"
                    );
                }
            });
            assert_eq!(fates(&again.datapath), new);
        }
    }
}

/// Steps fail: each packet meets the old verdict or the new one, and the next try completes the change.
#[test]
fn writes_of_a_table_that_fail_leave_the_old_verdict() {
    let fails: &[fn(&Step) -> bool] = &[
        |step| matches!(step, Step::SetPolicy(_, key, _) if key.protocol == 6),
        |step| matches!(step, Step::SetPolicy(_, key, _) if key.protocol == 0),
        |step| matches!(step, Step::SetPolicy(_, _, value) if value.is_deny()),
        |step| matches!(step, Step::SetPolicy(_, _, value) if !value.is_deny()),
    ];
    let mut dice = Dice(23);
    for round in 0..80 {
        // Both lists have the same destinations: no prefix gets another identity.
        let to = destinations(&mut dice);
        let (first, second) = (list_of(&mut dice, &to), list_of(&mut dice, &to));
        let mut right = node();
        right.policy(&first);
        let old = fates(&right.datapath);
        right.policy(&second);
        let new = fates(&right.datapath);
        let mut node = node();
        node.policy(&first);
        node.datapath.fail = Some(fails[round % fails.len()]);
        let before = node.datapath.log.len();
        let start = MemoryDatapath {
            fail: None,
            ..node.datapath.clone()
        };
        node.policy(&second);
        let done: Vec<Step> = node.datapath.log[before..].to_vec();
        each_state(&start, &done, |state, step| {
            for (packet, is) in fates(state) {
                let ends = [old[&packet], new[&packet]];
                assert!(
                    ends.contains(&is),
                    "{packet:?}: {is:?} of {ends:?} at {step:?}: {first} {second}"
                );
            }
        });
        node.datapath.fail = None;
        for _ in 0..3 {
            let next = node.core.next_deadline().unwrap_or(BootTime::START);
            node.tick(next.max(node.now.plus_secs(2)));
        }
        assert_eq!(fates(&node.datapath), new);
    }
}

/// The example of the documentation, packet by packet.
#[test]
fn a_list_is_read_from_top_to_bottom() {
    let mut node = node();
    node.policy(&list(&[
        "{type: Deny, to: {cidrSelector: 1.1.1.1/32}}".to_owned(),
        "{type: Allow, to: {cidrSelector: 1.1.1.0/24}, ports: [{protocol: TCP, port: 443}]}"
            .to_owned(),
        "{type: Deny, to: {cidrSelector: 0.0.0.0/0}}".to_owned(),
    ]));
    let fate = |address: &str, protocol, port| {
        let sent = sent(node.id(), address.parse().unwrap(), protocol, port);
        fate(&node.datapath, sent).unwrap()
    };
    assert_eq!(fate("1.1.1.1", 6, 443), Fate::Dropped, "denied first");
    assert_eq!(
        fate("1.1.1.2", 6, 443),
        Fate::Passed,
        "the allow comes before the last deny"
    );
    assert_eq!(fate("1.1.1.2", 6, 80), Fate::Dropped);
    assert_eq!(fate("1.1.1.2", 1, 8), Fate::Dropped);
    assert_eq!(fate("9.9.9.9", 6, 443), Fate::Dropped);
    assert_eq!(
        fate("10.0.0.8", 6, 443),
        Fate::Passed,
        "a pod is not outside"
    );
}

#[test]
fn a_name_without_an_address_is_judged_as_the_world_by_a_list() {
    let passes = |rules: &[&str]| {
        let mut node = node();
        let rules: Vec<String> = rules.iter().map(|rule| (*rule).to_owned()).collect();
        node.policy(&list(&rules));
        let target = Target::Name(Fqdn::normalise("other.org"));
        let web = EndpointId(node.core.snapshot().endpoints[0].id);
        let found = node.core.findings(web, &target).unwrap();
        assert!(found.has_tier && found.addresses.is_empty() && !found.worlds.is_empty());
        found.worlds.iter().all(|world| {
            let port = "80/TCP".parse().unwrap();
            let peer = node
                .core
                .peer(web, FlowDirection::Egress, *world, Some(port));
            peer.verdict.is_some_and(Verdict::passes)
        })
    };
    let allow = "{type: Allow, to: {dnsName: www.example.com}}";
    assert!(passes(&[allow]));
    assert!(!passes(&[
        allow,
        "{type: Deny, to: {cidrSelector: 0.0.0.0/0}}"
    ]));
}
