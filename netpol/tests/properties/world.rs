//! Random pods, namespaces and policies, and packets between them.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use netpol::{
    NetworkPolicy,
    cache::Object,
    name::PortName,
    packet::{Packet, PacketPorts},
    pod::{Namespace, Pod, PodId},
    policy::Protocol,
};
use serde_json::{Value, json};

use super::random::Random;

pub(crate) const NODES: [&str; 2] = ["one", "two"];
const NAMESPACES: [&str; 3] = ["shop", "bank", "unknown"];
const VALUES: [&str; 2] = ["a", "b"];
const NUMBERS: [u16; 6] = [1, 80, 81, 443, 8000, 65535];
const NAMES: [&str; 2] = ["http", "dns"];
/// Pods have addresses from 10.1.0.1 and fd00::1 on.
const BLOCKS: [(&str, &[&str]); 6] = [
    ("0.0.0.0/0", &["10.0.0.0/8", "192.0.2.0/24"]),
    ("10.1.0.0/29", &["10.1.0.2/31", "10.1.0.4/32"]),
    ("10.1.0.3/32", &[]),
    ("192.0.2.0/24", &["192.0.2.128/25", "192.0.2.7/32"]),
    ("::/0", &["fd00::/16"]),
    ("fd00::/125", &["fd00::2/127"]),
];
const OUTSIDE: [&str; 5] = [
    "192.0.2.7",
    "192.0.2.200",
    "198.51.100.1",
    "10.1.0.200",
    "2001:db8::1",
];

/// The families of addresses that pods have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Families {
    V4,
    Both,
}

/// Objects of a random cluster.
pub(crate) fn objects(random: &mut Random, families: Families) -> Vec<Object> {
    let mut objects: Vec<Object> = (1..=7).map(|n| pod(random, n, families)).collect();
    objects.extend(NAMESPACES[..2].iter().map(|name| {
        Object::Namespace(Arc::new(Namespace {
            name: (*name).into(),
            labels: [
                ("kubernetes.io/metadata.name".to_owned(), (*name).to_owned()),
                ("team".to_owned(), (*random.one_of(&VALUES)).to_owned()),
            ]
            .into(),
        }))
    }));
    objects.extend((0..4).map(|n| Object::Policy(Arc::new(policy(random, n, families)))));
    objects
}

fn pod(random: &mut Random, n: u8, families: Families) -> Object {
    let mut addresses: Vec<IpAddr> = vec![[10, 1, 0, n].into()];
    if families == Families::Both {
        addresses.push([0xfd00, 0, 0, 0, 0, 0, 0, u16::from(n)].into());
    }
    let ports = random.list(3, |random| {
        let name = PortName::new(random.one_of::<&str>(&NAMES)).unwrap();
        (
            (name, *random.one_of(&Protocol::ALL)),
            *random.one_of(&NUMBERS),
        )
    });
    let labels = [("app", &VALUES), ("tier", &VALUES)];
    let labels = labels.map(|(key, values)| (key.to_owned(), (*random.one_of(values)).to_owned()));
    Object::Pod(Arc::new(Pod {
        id: PodId::new(random.one_of::<&str>(&NAMESPACES), &format!("pod-{n}")),
        labels: labels.into_iter().filter(|_| random.chance(3, 4)).collect(),
        node: Some((*random.one_of(&NODES)).into()),
        addresses,
        created: None,
        ports: ports.into_iter().collect::<BTreeMap<_, _>>(),
    }))
}

fn policy(random: &mut Random, n: u8, families: Families) -> NetworkPolicy {
    let types = [
        json!(null),
        json!(["Ingress"]),
        json!(["Egress"]),
        json!(["Ingress", "Egress"]),
    ];
    let document = json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"namespace": random.one_of(&NAMESPACES), "name": format!("p{n}")},
        "spec": {
            "podSelector": selector(random, &["app", "tier"]),
            "policyTypes": random.one_of(&types),
            "ingress": rules(random, "from", families),
            "egress": rules(random, "to", families),
        },
    });
    netpol::read(&document).unwrap()
}

fn selector(random: &mut Random, keys: &[&str]) -> Value {
    let expressions = random.list(1, |random| {
        let operator = *random.one_of(&["In", "NotIn", "Exists", "DoesNotExist"]);
        let values = match operator {
            "In" | "NotIn" => vec![*random.one_of(&VALUES)],
            _ => Vec::new(),
        };
        json!({"key": random.one_of(keys), "operator": operator, "values": values})
    });
    match random.chance(1, 4) {
        true => json!({"matchLabels": {*random.one_of(keys): random.one_of(&VALUES)}}),
        false => json!({"matchExpressions": expressions}),
    }
}

fn rules(random: &mut Random, peers: &str, families: Families) -> Value {
    let rules = random.list(3, |random| {
        let list = random.list(2, |random| peer(random, families));
        let ports = random.list(3, |random| port(random, families));
        json!({peers: list, "ports": ports})
    });
    Value::from(rules)
}

fn peer(random: &mut Random, families: Families) -> Value {
    let namespaces = ["team", "kubernetes.io/metadata.name"];
    match random.below(4) {
        0 => json!({"podSelector": selector(random, &["app", "tier"])}),
        1 => json!({"namespaceSelector": selector(random, &namespaces)}),
        2 => json!({
            "podSelector": selector(random, &["app", "tier"]),
            "namespaceSelector": selector(random, &namespaces),
        }),
        _ => {
            let known = match families {
                Families::V4 => &BLOCKS[..4],
                Families::Both => &BLOCKS,
            };
            let (cidr, except) = random.one_of(known);
            let except = &except[..random.below(except.len() + 1)];
            json!({"ipBlock": {"cidr": cidr, "except": except}})
        }
    }
}

/// A port. With one family of addresses, it is one that session rules can have.
fn port(random: &mut Random, families: Families) -> Value {
    let protocols: &[&str] = match families {
        Families::V4 => &["TCP", "UDP"],
        Families::Both => &["TCP", "UDP", "SCTP"],
    };
    let protocol = *random.one_of(protocols);
    match random.below(5) {
        0 => json!({"protocol": protocol}),
        1 => json!({"protocol": protocol, "port": random.one_of(&NAMES)}),
        2 if families == Families::Both => {
            let first = *random.one_of(&NUMBERS);
            json!({"protocol": protocol, "port": first, "endPort": first.saturating_add(2000)})
        }
        2 => json!({"protocol": protocol, "port": 79, "endPort": random.one_of(&[80, 81, 90])}),
        _ => json!({"protocol": protocol, "port": random.one_of(&NUMBERS)}),
    }
}

/// A packet, of which mostly at least one side is a pod.
pub(crate) fn packet(random: &mut Random, families: Families) -> Packet {
    loop {
        let [source, destination] = [(); 2].map(|()| address(random, families));
        if source.is_ipv4() != destination.is_ipv4() {
            continue;
        }
        let ports = [1, 79, 80, 81, 443, 444, 8000, 8001, 65535];
        let ports = random.chance(9, 10).then(|| PacketPorts {
            protocol: *random.one_of(&Protocol::ALL),
            source: *random.one_of(&ports),
            destination: *random.one_of(&ports),
        });
        return Packet {
            source,
            destination,
            ports,
        };
    }
}

fn address(random: &mut Random, families: Families) -> IpAddr {
    let n = u8::try_from(1 + random.below(7)).unwrap();
    match random.below(6) {
        0 => random.one_of(&OUTSIDE).parse().unwrap(),
        1 | 2 if families == Families::Both => [0xfd00, 0, 0, 0, 0, 0, 0, u16::from(n)].into(),
        _ => [10, 1, 0, n].into(),
    }
}
