//! Random objects: single changes in any order lead to the table of the whole set, and the table
//! has the meaning of the documents.

use std::collections::{BTreeMap, BTreeSet};

use proptest::{collection::vec, option, prelude::*, sample::select};
use serde_json::{Value, json};

use super::{judge, lab::*};
use crate::{
    cache::{Key, Object},
    packet::{Packet, PacketPorts},
    pod::Pod,
    policy::Protocol,
    render::nft::Limits,
    verdict::World,
};

type Objects = BTreeMap<Key, Object>;

const NAMESPACES: [&str; 3] = ["a", "b", "c"];
const APPS: [&str; 2] = ["web", "db"];
const TEAMS: [&str; 2] = ["red", "blue"];
const OPERATORS: [&str; 4] = ["In", "NotIn", "Exists", "DoesNotExist"];

fn a_pod() -> impl Strategy<Value = Object> {
    let labels = (
        option::of(select(&APPS[..])),
        option::of(select(&TEAMS[..])),
    );
    let ports = option::of(select(&["http=80/TCP", "http=8080/TCP", "http=80/UDP"][..]));
    let addresses = (0u8..9, prop::bool::ANY);
    let place = (select(&NAMESPACES[..]), 0u8..3, prop::bool::ANY, 0u64..3);
    (place, labels, ports, addresses).prop_map(
        |((namespace, name, here, created), (app, team), port, (address, dual))| {
            let labels = [("app", app), ("team", team)];
            let labels = labels
                .iter()
                .filter_map(|(key, value)| Some((*key, (*value)?)));
            let mut addresses = Vec::new();
            if address > 0 {
                addresses.push(format!("10.0.0.{address}"));
                if dual {
                    addresses.push(format!("2001:db8::{address}"));
                }
            }
            let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
            let labels: Vec<(&str, &str)> = labels.collect();
            let pod = pod(&format!("{namespace}/pod-{name}"), &labels, &addresses);
            let pod = serving(pod, port.as_slice());
            let pod = if here { pod } else { elsewhere(pod) };
            let created = Some(created);
            object(Pod { created, ..pod })
        },
    )
}

fn a_namespace() -> impl Strategy<Value = Object> {
    let team = option::of(select(&TEAMS[..]));
    (select(&NAMESPACES[..]), team).prop_map(|(name, team)| {
        let labels: Vec<(&str, &str)> = team.map(|team| ("team", team)).into_iter().collect();
        namespace(name, &labels)
    })
}

fn selector() -> impl Strategy<Value = Value> {
    let key = select(&[("app", APPS), ("team", TEAMS)][..]);
    prop_oneof![
        Just(json!({})),
        key.clone()
            .prop_map(|(key, values)| json!({"matchLabels": {key: values[0]}})),
        (key, select(&OPERATORS[..])).prop_map(|((key, values), operator)| {
            let values = match operator {
                "In" | "NotIn" => &values[..],
                _ => &[],
            };
            json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]})
        }),
    ]
}

fn peer() -> impl Strategy<Value = Value> {
    let blocks = [
        json!({"cidr": "0.0.0.0/0", "except": ["10.0.0.4/30"]}),
        json!({"cidr": "10.0.0.0/30"}),
        json!({"cidr": "2001:db8::/32"}),
    ];
    prop_oneof![
        selector().prop_map(|pods| json!({"podSelector": pods})),
        selector().prop_map(|namespaces| json!({"namespaceSelector": namespaces})),
        (selector(), selector())
            .prop_map(|(a, b)| json!({"podSelector": a, "namespaceSelector": b})),
        select(blocks.to_vec()).prop_map(|block| json!({"ipBlock": block})),
    ]
}

fn port() -> impl Strategy<Value = Value> {
    let ports = [
        json!({"port": 80}),
        json!({"port": 80, "endPort": 90, "protocol": "UDP"}),
        json!({"port": "http"}),
        json!({"protocol": "SCTP"}),
    ];
    select(ports.to_vec())
}

fn rules(peers: &'static str) -> impl Strategy<Value = Vec<Value>> {
    let rule = (vec(peer(), 0..3), vec(port(), 0..3));
    vec(
        rule.prop_map(move |(list, ports)| json!({peers: list, "ports": ports})),
        0..3,
    )
}

fn a_policy() -> impl Strategy<Value = Object> {
    let types = [
        json!(["Ingress"]),
        json!(["Egress"]),
        json!(["Ingress", "Egress"]),
    ];
    let id = (select(&NAMESPACES[..]), 0u8..2);
    (
        id,
        selector(),
        select(types.to_vec()),
        rules("from"),
        rules("to"),
    )
        .prop_map(|((namespace, name), pods, types, ingress, egress)| {
            let spec = json!({
                "podSelector": pods,
                "policyTypes": types,
                "ingress": ingress,
                "egress": egress,
            });
            policy(&format!("{namespace}/policy-{name}"), &spec)
        })
}

fn objects() -> impl Strategy<Value = Objects> {
    let parts = (
        vec(a_pod(), 0..9),
        vec(a_namespace(), 0..4),
        vec(a_policy(), 0..6),
    );
    parts.prop_map(|(pods, namespaces, policies)| {
        let all = pods.into_iter().chain(namespaces).chain(policies);
        all.map(|object| (object.key(), object)).collect()
    })
}

/// A packet between two addresses, which pods may or may not have.
fn a_packet() -> impl Strategy<Value = Packet> {
    let protocol = select(
        &[
            None,
            Some(Protocol::Tcp),
            Some(Protocol::Udp),
            Some(Protocol::Sctp),
        ][..],
    );
    let port = (protocol, select(&[80, 85, 8080][..]));
    (0u8..9, 0u8..9, prop::bool::ANY, port).prop_map(|(from, to, six, (protocol, number))| {
        let address = |n: u8| match six {
            true => format!("2001:db8::{n}").parse().unwrap(),
            false => format!("10.0.0.{n}").parse().unwrap(),
        };
        Packet {
            source: address(from),
            destination: address(to),
            ports: protocol.map(|protocol| PacketPorts {
                protocol,
                source: 1024,
                destination: number,
            }),
        }
    })
}

/// The objects for the evaluation of documents.
fn world(lab: &Lab, objects: &Objects) -> World {
    let objects: Vec<Object> = objects.values().cloned().collect();
    World {
        set_aside: lab.pipeline.set_aside().keys().cloned().collect(),
        ..World::new(&objects)
    }
}

/// Random limits: some so low that policies exceed them, and some unlimited. The last rule of each
/// chain always fits.
fn a_limit() -> impl Strategy<Value = Limits> {
    let close = (36usize..60, 0usize..40);
    prop_oneof![
        Just(Limits::default()),
        close.prop_map(|(rows, addresses)| Limits { addresses, rows }),
    ]
}

proptest! {
    #[test]
    fn the_table_says_what_the_documents_say(
        objects in objects(),
        limits in a_limit(),
        packets in vec(a_packet(), 100),
    ) {
        let mut lab = Lab::within(limits);
        lab.put(objects.values().cloned());
        let world = world(&lab, &objects);
        let is_here = |pod: &Pod| pod.node.as_deref() == Some(HERE);
        for packet in packets {
            let read = world.judge(&packet, is_here);
            let judged = judge::Packet {
                interface: 1,
                source: packet.source,
                destination: packet.destination,
                ports: packet.ports.map(|ports| (ports.protocol, ports.destination)),
            };
            let passes = judge::passes(&lab.table, &judged);
            prop_assert_eq!(passes, read.passes, "{:?} {:?}\n{}", packet, read.by, lab.table);
        }
    }

    #[test]
    fn single_changes_in_any_order_are_the_whole_set(
        before in objects(),
        after in objects(),
        limits in a_limit(),
        turns in vec((any::<u16>(), prop::bool::weighted(0.3)), 40),
    ) {
        let list = |objects: &Objects| objects.values().cloned().collect::<Vec<_>>();
        let with = |objects: &Objects| {
            let mut lab = Lab::within(limits);
            lab.put(list(objects));
            lab
        };
        let mut whole = Lab::within(limits);
        whole.pipeline.replace(list(&after));
        whole.commit();

        let mut replaced = with(&before);
        replaced.pipeline.replace(list(&after));
        replaced.commit();
        prop_assert_eq!(&replaced.table, &whole.table);

        let mut changed = with(&before);
        let keys: BTreeSet<&Key> = before.keys().chain(after.keys()).collect();
        let mut keys: Vec<_> = keys.into_iter().zip(turns).collect();
        keys.sort_by_key(|(_, (turn, _))| *turn);
        for (key, (_, commits)) in keys {
            match after.get(key) {
                Some(object) => changed.pipeline.put(object.clone()),
                None => changed.pipeline.remove(key),
            }
            if commits {
                changed.commit();
            }
        }
        changed.commit();
        prop_assert_eq!(&changed.table, &whole.table);
        prop_assert_eq!(changed.pipeline.pods(), whole.pipeline.pods());
        prop_assert_eq!(changed.pipeline.size(), whole.pipeline.size());
        prop_assert_eq!(changed.pipeline.set_aside(), whole.pipeline.set_aside());

        changed.pipeline.replace(Vec::new());
        changed.commit();
        prop_assert_eq!(&changed.table, &Lab::new().table);
    }
}
