//! Reads the data into values of the crate.

use std::collections::{BTreeMap, BTreeSet};

use netpol::{
    configurator::PodRules,
    contiv::Flow,
    packet::{Packet, PacketPorts},
    pod::PodId,
    policy::Protocol,
    ports::Span,
    rule::{Action, Net, Rule, Traffic},
};
use serde_json::Value;

/// The cases of a file, which must have this number of cases.
pub(crate) fn cases(text: &str, number: usize) -> Vec<Value> {
    let cases: Vec<Value> = serde_json::from_str(text).unwrap();
    assert_eq!(cases.len(), number);
    cases
}

pub(crate) fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().unwrap().iter()
}

/// The fields of a mapping; empty if it is absent.
pub(crate) fn fields(value: &Value) -> impl Iterator<Item = (&str, &Value)> {
    let map = value.as_object().into_iter().flatten();
    map.map(|(key, value)| (key.as_str(), value))
}

pub(crate) fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

pub(crate) fn number(value: &Value) -> usize {
    value.as_u64().unwrap().try_into().unwrap()
}

pub(crate) fn pod(text: &str) -> PodId {
    PodId::parse(text).unwrap()
}

pub(crate) fn pods(value: &Value) -> BTreeSet<PodId> {
    list(value).map(|id| pod(text(id))).collect()
}

/// The direction that local tables are for.
pub(crate) fn orientation(case: &Value) -> Flow {
    match text(&case["orientation"]) {
        "EGRESS" => Flow::Ingress,
        "INGRESS" => Flow::Egress,
        other => panic!("{other}"),
    }
}

pub(crate) fn protocol(text: &str) -> Option<Protocol> {
    let known = Protocol::parse(text);
    assert!(
        known.is_some() || ["ANY", "OTHER"].contains(&text),
        "{text}"
    );
    known
}

fn port(value: &Value) -> u16 {
    number(value).try_into().unwrap()
}

pub(crate) fn span(value: &Value) -> Span {
    match port(value) {
        0 => Span::ALL,
        port => Span::one(port),
    }
}

pub(crate) fn rule(value: &Value) -> Rule {
    let net = |side: &str| match text(&value[side]) {
        "" => Net::Any,
        block => Net::Block(block.parse().unwrap()),
    };
    Rule {
        source: net("src"),
        destination: net("dst"),
        traffic: match protocol(text(&value["proto"])) {
            None => Traffic::Any,
            Some(protocol) => Traffic::Ports {
                protocol,
                source: span(&value["sport"]),
                destination: span(&value["dport"]),
            },
        },
        action: match text(&value["action"]) {
            "PERMIT" => Action::Permit,
            "DENY" => Action::Deny,
            other => panic!("{other}"),
        },
    }
}

pub(crate) fn rules(value: &Value) -> Vec<Rule> {
    list(value).map(rule).collect()
}

/// The rules of a pod; `None` if it is removed.
pub(crate) fn pod_rules(value: &Value) -> Option<PodRules> {
    value["removed"].is_null().then(|| PodRules {
        addresses: vec![text(&value["ip"]).parse().unwrap()],
        ingress: rules(&value["egress"]),
        egress: rules(&value["ingress"]),
    })
}

pub(crate) fn all_pod_rules(value: &Value) -> BTreeMap<PodId, PodRules> {
    let pods = fields(value).map(|(id, rules)| (pod(id), pod_rules(rules).unwrap()));
    pods.collect()
}

/// A packet between these addresses.
pub(crate) fn packet(source: &str, destination: &str, value: &Value) -> Packet {
    let ports = protocol(text(&value["proto"])).map(|protocol| PacketPorts {
        protocol,
        source: port(&value["sport"]),
        destination: port(&value["dport"]),
    });
    Packet {
        source: source.parse().unwrap(),
        destination: destination.parse().unwrap(),
        ports,
    }
}
