//! Checks that changes are small.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::lab::*;
use crate::{
    cache::Object,
    contiv::Flow,
    explain::Opening,
    links::NodeLinks,
    policy::Protocol,
    render::{
        change::{Change, Step},
        ruleset::TableFamily,
    },
};

const WEB: &[(&str, &str)] = &[("app", "web")];

fn both_directions() -> Value {
    let web = json!([{"podSelector": {"matchLabels": {"app": "web"}}}]);
    json!({
        "podSelector": {},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": web, "ports": [{"port": 80}]}],
        "egress": [{"to": web}, {"to": [{"namespaceSelector": {}}], "ports": [{"port": 53, "protocol": "UDP"}]}],
    })
}

fn numbered(n: u8) -> Object {
    let (id, address) = (format!("shop/web-{n}"), format!("10.0.0.{n}"));
    object(pod(&id, WEB, &[&address]))
}

#[test]
fn a_pod_like_others_is_an_element_of_each_map_and_group() {
    let pods = (1..=100).map(numbered);
    let mut lab = Lab::with(pods.chain([policy("shop/both", &both_directions())]));
    let size = lab.pipeline.size();
    assert_eq!((size.chains, size.groups, size.addresses), (2, 2, 200));
    let interfaces = |pods: u8| -> BTreeMap<_, _> {
        let pods = (1..=pods).map(|n| (format!("10.0.0.{n}").parse().unwrap(), u32::from(n)));
        pods.collect()
    };
    lab.pipeline.set_interfaces(interfaces(100));
    lab.commit();

    lab.pipeline.set_interfaces(interfaces(101));
    let commit = lab.put([numbered(101)]);
    let mut found: Vec<String> = commit
        .change
        .steps
        .iter()
        .map(|step| match step {
            Step::AddElements(set, elements) => {
                let set = set.split('_').next().unwrap();
                format!("{set} {}", elements.len())
            }
            Step::AddVerdicts(map, verdicts) => format!("{map} {}", verdicts.len()),
            other => panic!("{other:?}"),
        })
        .collect();
    found.sort();
    let wanted = [
        "behind4 1",
        "from4 1",
        "g4 1",
        "g4 1",
        "links 1",
        "routed4 1",
        "self4 1",
        "to4 1",
    ];
    assert_eq!(found, wanted);
    let address = "10.0.0.101".parse().unwrap();
    let closed = [(address, Flow::Ingress), (address, Flow::Egress)];
    assert_eq!(commit.closed, closed.into());

    let commit = lab.remove(&pod_key("shop/web-101"));
    assert_eq!(commit.change.elements(), 5, "{}", commit.change);
    assert_eq!(commit.ended, [address].into());
    // A pod of another node is only in the groups.
    let far = elsewhere(pod("shop/web-102", WEB, &["10.0.0.102"]));
    let commit = lab.put([object(far)]);
    assert_eq!(
        (commit.change.steps.len(), commit.change.elements()),
        (2, 2)
    );
}

#[test]
fn the_same_input_is_no_change() {
    let objects = || -> Vec<Object> {
        let pods = (1..=3).map(numbered);
        let others = [
            policy("shop/both", &both_directions()),
            namespace("shop", &[]),
        ];
        pods.chain(others).collect()
    };
    let mut lab = Lab::with(objects());
    assert!(lab.put(objects()).change.is_empty());
    lab.pipeline.replace(objects());
    assert!(lab.commit().change.is_empty());
    // A policy, a pod and a namespace go and come back before the commit.
    lab.pipeline.replace(Vec::new());
    lab.pipeline.replace(objects());
    assert!(lab.commit().change.is_empty());
    // No selector uses the labels that change.
    let labels = &[("app", "web"), ("version", "2")];
    let commit = lab.put([object(pod("shop/web-1", labels, &["10.0.0.1"]))]);
    assert!(commit.change.is_empty(), "{}", commit.change);
    // This is another policy with the same meaning.
    let commit = lab.put([policy("shop/twin", &both_directions())]);
    assert!(commit.change.is_empty(), "{}", commit.change);
    let restricting = lab.pipeline.pods().values().map(|pod| pod.policies.len());
    assert_eq!(restricting.collect::<Vec<_>>(), [2, 2, 2]);
    // When all objects are gone, the table is empty.
    lab.pipeline.replace(Vec::new());
    lab.commit();
    assert_eq!(lab.table, Lab::new().table);
}

#[test]
fn a_change_of_one_policy_makes_and_removes_one_chain() {
    let mut lab = Lab::with((1..=100).map(numbered));
    lab.put([policy("shop/both", &both_directions())]);
    let mut spec = both_directions();
    spec["ingress"][0]["ports"][0]["port"] = json!(81);
    let commit = lab.put([policy("shop/both", &spec)]);
    let chains = commit.change.steps.iter().filter_map(|step| match step {
        Step::AddChain(name, _) => Some(('+', &name[..2])),
        Step::DeleteChain(name) => Some(('-', &name[..2])),
        Step::AddSet(..) | Step::DeleteSet(_) => panic!("{step:?}"),
        _ => None,
    });
    assert_eq!(chains.collect::<Vec<_>>(), [('+', "i4"), ('-', "i4")]);
    assert_eq!(commit.closed.len(), 100);
    assert!(commit.closed.iter().all(|(_, flow)| *flow == Flow::Ingress));
}

#[test]
fn a_direction_that_everyone_may_use_has_no_chain() {
    let everyone = [
        json!({"podSelector": {}, "ingress": [{}]}),
        json!({"podSelector": {}, "ingress": [{"from": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}]}),
    ];
    for spec in everyone {
        let lab = Lab::with([policy("shop/open", &spec), numbered(1)]);
        assert_eq!(lab.pipeline.size().chains, 0, "{spec}");
        let pod = lab.pipeline.pods().values().next().unwrap();
        assert!(pod.is_restricted(Flow::Ingress) && !pod.is_restricted(Flow::Egress));
    }
    // A block of IPv4 addresses opens nothing for IPv6.
    let spec =
        json!({"podSelector": {}, "ingress": [{"from": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}]});
    let dual = pod("shop/web", WEB, &["10.0.0.1", "2001:db8::1"]);
    let lab = Lab::with([policy("shop/open", &spec), object(dual)]);
    assert!(lab.passes("192.0.2.1", "10.0.0.1 80/TCP"));
    assert!(!lab.passes("2001:db8::2", "2001:db8::1 80/TCP"));
}

#[test]
fn a_pod_reaches_itself_and_a_false_source_nobody() {
    let mut lab = Lab::with([
        policy(
            "shop/closed",
            &json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}),
        ),
        numbered(1),
    ]);
    assert!(lab.passes("10.0.0.1", "10.0.0.1 80/TCP"));
    assert!(!lab.passes("10.0.0.1", "10.0.0.2 80/TCP"));
    assert!(lab.passes("10.0.0.2", "10.0.0.3 80/TCP"));
    lab.pipeline
        .set_interfaces([("10.0.0.1".parse().unwrap(), 1)].into());
    lab.commit();
    assert!(!lab.passes("10.0.0.2", "10.0.0.3 80/TCP"));
    lab.pipeline.set_interfaces(BTreeMap::new());
    lab.commit();
    assert!(lab.passes("10.0.0.2", "10.0.0.3 80/TCP"));
}

#[test]
fn link_local_addresses_bypass_no_policy_of_pods_on_a_bridge() {
    let mut lab = Lab::with([numbered(1)]);
    let sources = ["fe80::1", "2001:db8::1"];
    let passing = |lab: &Lab| {
        let from = sources.into_iter();
        from.filter(|from| lab.passes(from, "fe80::2 80/TCP"))
            .count()
    };
    let on = |bridge| NodeLinks {
        bridges: [bridge].into(),
        ..NodeLinks::default()
    };
    lab.pipeline.set_links(on(1));
    let commit = lab.commit();
    assert_eq!(passing(&lab), 2, "no pod is restricted");
    assert!(commit.frames.is_empty(), "{}", commit.frames);
    let closed = json!({"podSelector": {}, "policyTypes": ["Ingress"]});
    let commit = lab.put([policy("shop/closed", &closed)]);
    assert_eq!(passing(&lab), 0);
    assert_eq!(commit.frames.steps.first(), Some(&Step::AddTable));
    lab.pipeline.set_links(on(2));
    lab.commit();
    assert_eq!(passing(&lab), 2, "of a bridge without pods");
    lab.pipeline.set_links(on(1));
    let commit = lab.remove(&policy_key("shop/closed"));
    assert_eq!(passing(&lab), 2);
    let frames = lab.pipeline.frames();
    assert!(frames.is_empty(), "{frames}");
    assert_eq!(
        commit.frames,
        Change::deletion(TableFamily::Bridge, &frames.name)
    );
}

#[test]
fn only_an_ingress_policy_of_a_pod_on_a_bridge_stops_datagrams_to_all() {
    let mut lab = Lab::with([numbered(1), numbered(2)]);
    lab.pipeline.set_links(NodeLinks {
        bridges: [1].into(),
        bridged: ["10.0.0.1".parse().unwrap()].into(),
        ..NodeLinks::default()
    });
    let closed = |direction: &str| json!({"podSelector": {}, "policyTypes": [direction]});
    let is_quiet = |lab: &Lab| {
        let frames = lab.pipeline.frames().to_string();
        frames.contains("counter name to_all drop")
    };
    lab.put([policy("shop/egress", &closed("Egress"))]);
    assert!(!is_quiet(&lab));
    let commit = lab.put([policy("shop/ingress", &closed("Ingress"))]);
    assert!(is_quiet(&lab));
    let is_of_leaving = |step: &Step| match step {
        Step::FlushChain(chain) | Step::AddRule(chain, _) => chain == "leaving",
        _ => false,
    };
    assert!(
        commit.frames.steps.iter().all(is_of_leaving),
        "{}",
        commit.frames
    );
    // The other pod is routed.
    lab.remove(&pod_key("shop/web-1"));
    assert!(!is_quiet(&lab));
}

/// A pod that was made at this time. It has the address 10.0.0.1, and its name as label `app`.
fn made(name: &str, created: u64) -> crate::pod::Pod {
    let pod = pod(&format!("shop/{name}"), &[("app", name)], &["10.0.0.1"]);
    crate::pod::Pod {
        created: Some(created),
        ..pod
    }
}

fn of_app(name: &str, ingress: &Value) -> Object {
    let pods = json!({"matchLabels": {"app": name}});
    policy(
        &format!("shop/{name}"),
        &json!({"podSelector": pods, "ingress": ingress}),
    )
}

#[test]
fn a_younger_pod_of_another_node_takes_no_policy_from_an_address() {
    let mut lab = Lab::with([of_app("old", &json!([])), object(made("old", 1))]);
    let from_old = json!({"podSelector": {"matchLabels": {"app": "server"}}, "ingress": [
        {"from": [{"podSelector": {"matchLabels": {"app": "old"}}}]},
    ]});
    let server = pod("shop/server", &[("app", "server")], &["10.0.0.9"]);
    lab.put([policy("shop/server", &from_old), object(server)]);
    assert!(lab.passes("10.0.0.1", "10.0.0.9 80/TCP"));
    let commit = lab.put([object(elsewhere(made("thief", 2)))]);
    assert!(!lab.passes("192.0.2.1", "10.0.0.1 80/TCP"));
    assert!(commit.ended.is_empty() && commit.closed.is_empty());
    let addresses = lab.pipeline.pods().values().map(|pod| pod.addresses.len());
    assert_eq!(addresses.sum::<usize>(), 2, "its interface is guarded");
    // As a peer, the address stands for the younger pod.
    assert!(!lab.passes("10.0.0.1", "10.0.0.9 80/TCP"));
    let conflicts: Vec<String> = lab.pipeline.cache().conflicts().collect();
    assert!(
        conflicts[0].contains("shop/thief and shop/old"),
        "{conflicts:?}"
    );
    assert!(
        conflicts[0].contains("the policies of shop/old;"),
        "{conflicts:?}"
    );
}

#[test]
fn an_address_of_two_pods_of_this_node_has_the_policies_of_both() {
    let port = |port: u16| json!([{"ports": [{"port": 80}, {"port": port}]}]);
    let [old, new] = [("old", 81), ("new", 82)].map(|(name, n)| of_app(name, &port(n)));
    let mut lab = Lab::with([old, new, object(made("old", 1))]);
    let open =
        |lab: &Lab| [80, 81, 82].map(|n| lab.passes("192.0.2.1", &format!("10.0.0.1 {n}/TCP")));
    assert_eq!(open(&lab), [true, true, false]);
    let size = lab.pipeline.size();
    let commit = lab.put([object(made("new", 2))]);
    assert_eq!(open(&lab), [true, false, false]);
    let address = "10.0.0.1".parse().unwrap();
    assert_eq!(commit.ended, [address].into(), "entries of the former pod");
    assert_eq!(commit.closed, [(address, Flow::Ingress)].into());
    assert_eq!(lab.pipeline.size().rows, size.rows + 2);
    let opening = |n| Opening {
        from: "192.0.2.1".parse().unwrap(),
        to: address,
        port: Some((Protocol::Tcp, n)),
    };
    let sides = lab.pipeline.explain(&opening(81));
    let sides = sides.iter().map(|side| side.allowed_by.is_some());
    assert_eq!(sides.collect::<Vec<_>>(), [false, true]);
    // A pod without policies does not lift the policies of the others.
    lab.put([object(made("third", 3))]);
    assert_eq!(open(&lab), [true, false, false]);
    lab.remove(&policy_key("shop/old"));
    assert_eq!(open(&lab), [true, false, true]);
    let commit = lab.remove(&pod_key("shop/new"));
    assert_eq!(open(&lab), [true; 3]);
    assert_eq!(commit.ended, [address].into());
}

#[test]
fn a_pod_without_an_address_waits() {
    let mut lab = Lab::with([policy("shop/both", &both_directions())]);
    let commit = lab.put([object(pod("shop/web-1", WEB, &[]))]);
    assert!(commit.change.is_empty());
    assert!(lab.pipeline.pods().is_empty());
    lab.put([numbered(1)]);
    assert!(!lab.passes("192.0.2.1", "10.0.0.1 80/TCP"));
    // The pod uses its node's network, which has no policies.
    let commit = lab.put([object(pod("shop/web-1", WEB, &[]))]);
    assert_eq!(commit.ended.len(), 1);
    assert!(lab.passes("192.0.2.1", "10.0.0.1 80/TCP"));
}
