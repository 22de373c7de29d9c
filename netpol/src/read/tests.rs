//! Documents that are read, and documents that are refused.
use serde_json::{Value, json};

use super::read;
use crate::{
    field::Refusal,
    name::PortName,
    policy::{
        Direction, NetworkPolicy, Peer, Peers, Port, PortRange, Ports, Protocol, Rule, Warning,
    },
};

fn document(spec: &Value) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "web", "namespace": "shop"},
        "spec": spec,
    })
}

#[track_caller]
fn policy(spec: &Value) -> NetworkPolicy {
    read(&document(spec)).unwrap()
}

fn is_restricted(direction: &Direction) -> bool {
    matches!(direction, Direction::Restricted(_))
}

#[test]
fn a_policy_without_types_restricts_ingress_and_what_has_egress_rules() {
    // Columns: policyTypes, ingress, egress; whether ingress and egress are restricted; fields of
    // the warnings.
    type Row = (Value, Value, Value, [bool; 2], &'static [&'static str]);
    let table: [Row; 9] = [
        (json!(null), json!(null), json!(null), [true, false], &[]),
        (json!([]), json!([{}]), json!(null), [true, false], &[]),
        (json!(null), json!(null), json!([{}]), [true, true], &[]),
        (
            json!(null),
            json!(null),
            json!([]),
            [true, false],
            &["spec.egress"],
        ),
        (
            json!(["Ingress"]),
            json!(null),
            json!(null),
            [true, false],
            &[],
        ),
        (
            json!(["Egress"]),
            json!(null),
            json!(null),
            [false, true],
            &[],
        ),
        (
            json!(["Egress", "Ingress"]),
            json!(null),
            json!([]),
            [true, true],
            &[],
        ),
        (
            json!(["Egress"]),
            json!([{}]),
            json!([{}]),
            [false, true],
            &["spec.ingress"],
        ),
        (
            json!(["Ingress"]),
            json!([{}]),
            json!([{}]),
            [true, false],
            &["spec.egress"],
        ),
    ];
    for (types, ingress, egress, wanted, warned) in table {
        let spec = json!({"policyTypes": types, "ingress": ingress, "egress": egress});
        let policy = policy(&spec);
        let found = [&policy.ingress, &policy.egress].map(is_restricted);
        assert_eq!(found, wanted, "{spec}");
        let fields: Vec<&str> = policy.warnings.iter().map(|w| w.field.as_str()).collect();
        assert_eq!(fields, warned, "{spec}");
    }
}

#[test]
fn every_field_is_read() {
    let policy = policy(&json!({
        "podSelector": {"matchLabels": {"app": "web"}},
        "ingress": [{
            "from": [
                {"podSelector": {"matchExpressions": [
                    {"key": "app", "operator": "In", "values": ["api", "ui"]},
                    {"key": "old", "operator": "DoesNotExist"},
                ]}},
                {"namespaceSelector": {}},
                {"ipBlock": {"cidr": "192.0.2.0/24", "except": ["192.0.2.8/29"]}},
            ],
            "ports": [
                {"port": 80},
                {"protocol": "UDP", "port": 7000, "endPort": 7010},
                {"protocol": "SCTP"},
                {"port": "http"},
            ],
        }],
    }));
    assert_eq!((&*policy.namespace, &*policy.name), ("shop", "web"));
    let [Rule { path, peers, ports }] = policy.ingress.rules() else {
        panic!("{policy:?}");
    };
    assert_eq!(path, "spec.ingress[0]");
    let Peers::Of(peers) = peers else {
        panic!("{policy:?}");
    };
    assert!(matches!(&peers[0], Peer::Pods { pods, .. } if pods.requirements().len() == 2));
    assert!(matches!(&peers[1], Peer::Pods { pods, .. } if pods.selects_all()));
    let Peer::Block(block) = &peers[2] else {
        panic!("{policy:?}");
    };
    assert_eq!(block.path(), "spec.ingress[0].from[2].ipBlock");
    assert_eq!(block.prefix().to_string(), "192.0.2.0/24");
    assert_eq!(block.except().len(), 1);
    let of = |protocol, ports| Port { protocol, ports };
    let numbers = |first, last| PortRange::numbers(first, last).unwrap();
    let wanted = vec![
        of(Protocol::Tcp, numbers(80, 80)),
        of(Protocol::Udp, numbers(7000, 7010)),
        of(Protocol::Sctp, PortRange::All),
        of(
            Protocol::Tcp,
            PortRange::Named(PortName::new("http").unwrap()),
        ),
    ];
    assert_eq!(*ports, Ports::Of(wanted));
    assert_eq!(policy.blocks().count(), 1);
}

#[test]
fn empty_and_absent_lists_mean_everyone_and_every_port() {
    for rule in [
        json!({}),
        json!({"from": [], "ports": []}),
        json!({"from": null, "ports": null}),
    ] {
        let policy = policy(&json!({"ingress": [rule]}));
        let [rule] = policy.ingress.rules() else {
            panic!("{policy:?}");
        };
        assert_eq!((&rule.peers, &rule.ports), (&Peers::Any, &Ports::Any));
    }
}

#[test]
fn a_document_of_kubectl_may_have_a_status_and_more_metadata() {
    let mut document = document(&json!({"podSelector": {}, "policyTypes": ["Ingress"]}));
    document["status"] = json!({});
    document["metadata"]["uid"] = json!("1");
    document["metadata"]["managedFields"] = json!([{}]);
    assert!(read(&document).is_ok());
    document["metadata"]["namespace"] = Value::Null;
    assert_eq!(read(&document).unwrap().namespace, "default");
}

#[test]
fn host_bits_are_dropped_with_a_warning() {
    let block = json!({"cidr": "10.1.2.3/8", "except": ["10.9.9.9/16"]});
    let policy = policy(&json!({"egress": [{"to": [{"ipBlock": block}]}]}));
    let block = policy.blocks().next().unwrap();
    assert_eq!(block.prefix().to_string(), "10.0.0.0/8");
    assert_eq!(block.except().first().unwrap().to_string(), "10.9.0.0/16");
    let Warning { field, text } = &policy.warnings[0];
    assert_eq!(field, "spec.egress[0].to[0].ipBlock.cidr");
    assert_eq!(
        text,
        "10.1.2.3/8 has host bits and is read as 10.0.0.0/8; write 10.0.0.0/8"
    );
    assert_eq!(policy.warnings.len(), 2);
}

/// The refusal of a document with this spec.
#[track_caller]
fn refusal(spec: &Value) -> Refusal {
    read(&document(spec)).expect_err("it is refused")
}

#[test]
fn a_refusal_names_the_field_the_reason_and_the_remedy() {
    let to = json!([
        {"ipBlock": {"cidr": "10.0.0.0/8"}},
        {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["11.0.0.0/16"]}},
    ]);
    assert_eq!(
        refusal(&json!({"egress": [{"to": to}]})).to_string(),
        "spec.egress[0].to[1].ipBlock.except[0]: 11.0.0.0/16 is not inside 10.0.0.0/8; name a \
         part of the block, or remove it"
    );
}

/// Refused specs. Each has the field below `spec.`, and a part of the reason and the remedy.
fn refused_specs() -> Vec<(Value, &'static str, &'static str)> {
    let peer = |peer: Value| json!({"ingress": [{"from": [peer]}]});
    let port = |port: Value| json!({"egress": [{"ports": [{"port": 1}, port]}]});
    let block = |block: Value| peer(json!({"ipBlock": block}));
    let select = |selector: Value| json!({"podSelector": selector});
    let express = |e: Value| select(json!({"matchExpressions": [e]}));
    let from = "ingress[0].from[0]";
    let at_block = "ingress[0].from[0].ipBlock";
    let at_port = "egress[0].ports[1].port";
    let at_end = "egress[0].ports[1].endPort";
    let at_expression = "podSelector.matchExpressions[0]";
    let join = |base: &str, rest: &str| -> &'static str { format!("{base}{rest}").leak() };
    vec![
        (json!([]), "", "is a list, not a mapping"),
        (
            json!({"podSelektor": {}}),
            "podSelektor",
            "unknown field; did you mean podSelector? The fields here are podSelector",
        ),
        (
            json!({"ingress": {}}),
            "ingress",
            "is a mapping, not a list",
        ),
        (
            json!({"ingress": [1]}),
            "ingress[0]",
            "is a number, not a mapping",
        ),
        (
            json!({"ingress": [{"to": []}]}),
            "ingress[0].to",
            "the fields here are from, ports",
        ),
        (
            json!({"policyTypes": ["ingress"]}),
            "policyTypes[0]",
            "use Ingress or Egress",
        ),
        (
            json!({"policyTypes": ["Ingress", "Egress", "Ingress"]}),
            "policyTypes",
            "has 3 elements",
        ),
        (peer(json!({})), from, "names no peer; add podSelector"),
        (peer(json!({"podSelector": null})), from, "names no peer"),
        (
            peer(json!({"ipBlock": {"cidr": "10.0.0.0/8"}, "podSelector": {}})),
            at_block,
            "stands beside podSelector; put each into an element of its own",
        ),
        (
            peer(json!({"ipBlock": {"cidr": "10.0.0.0/8"}, "namespaceSelector": {}})),
            at_block,
            "stands beside namespaceSelector",
        ),
        (
            peer(json!({"ipBlocks": []})),
            join(from, ".ipBlocks"),
            "unknown field",
        ),
        (
            block(json!({})),
            join(at_block, ".cidr"),
            "is missing; add it",
        ),
        (
            block(json!({"cidr": "10.0.0.1"})),
            join(at_block, ".cidr"),
            "write 10.0.0.1/32",
        ),
        (
            block(json!({"cidr": "2001:db8::1"})),
            join(at_block, ".cidr"),
            "write 2001:db8::1/128",
        ),
        (
            block(json!({"cidr": "10.0.0.0/33"})),
            join(at_block, ".cidr"),
            "`10.0.0.0/33` is not a block",
        ),
        (
            block(json!({"cidr": 10})),
            join(at_block, ".cidr"),
            "is a number, not a text",
        ),
        (
            block(json!({"cidr": "10.0.0.0/8", "except": "10.1.0.0/16"})),
            join(at_block, ".except"),
            "is a text, not a list",
        ),
        (
            block(json!({"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16", "10.0.0.0/7"]})),
            join(at_block, ".except[1]"),
            "10.0.0.0/7 is not inside 10.0.0.0/8",
        ),
        (
            block(json!({"cidr": "10.0.0.0/8", "except": ["10.0.0.0/8"]})),
            join(at_block, ".except[0]"),
            "is the whole block; name a smaller part",
        ),
        (
            block(json!({"cidr": "10.0.0.0/8", "except": ["2001:db8::/32"]})),
            join(at_block, ".except[0]"),
            "is not inside",
        ),
        (
            port(json!({"protocol": "ICMP"})),
            "egress[0].ports[1].protocol",
            "`ICMP` is not supported; use TCP, UDP or SCTP",
        ),
        (
            port(json!({"protocol": "tcp"})),
            "egress[0].ports[1].protocol",
            "`tcp` is not supported",
        ),
        (
            port(json!({"port": 0})),
            at_port,
            "0 is not a port; write a number from 1 to 65535",
        ),
        (port(json!({"port": 65536})), at_port, "65536 is not a port"),
        (port(json!({"port": -1})), at_port, "-1 is not a port"),
        (
            port(json!({"port": true})),
            at_port,
            "is true or false, not a port",
        ),
        (
            port(json!({"port": "80"})),
            at_port,
            "write 80 without quotes",
        ),
        (port(json!({"port": "HTTP"})), at_port, "lower-case"),
        (
            port(json!({"port": "http", "endPort": 90})),
            at_end,
            "stands beside a port name",
        ),
        (port(json!({"endPort": 90})), at_end, "stands without port"),
        (
            port(json!({"port": 90, "endPort": 80})),
            at_end,
            "80 is below port 90",
        ),
        (
            port(json!({"port": 90, "endPort": 70000})),
            at_end,
            "70000 is not a port",
        ),
        (
            port(json!({"ports": 90})),
            "egress[0].ports[1].ports",
            "unknown field",
        ),
        (
            select(json!({"matchLabel": {}})),
            "podSelector.matchLabel",
            "unknown field",
        ),
        (
            select(json!({"matchLabels": []})),
            "podSelector.matchLabels",
            "is a list, not a mapping",
        ),
        (
            select(json!({"matchLabels": {"app": 1}})),
            "podSelector.matchLabels.app",
            "is a number, not a text; put it in quotes",
        ),
        (
            select(json!({"matchLabels": {"k8s:app": "web"}})),
            "podSelector.matchLabels.k8s:app",
            "`k8s:app` is not the key of a label",
        ),
        (
            select(json!({"matchLabels": {"app": "a b"}})),
            "podSelector.matchLabels.app",
            "`a b` is not the value of a label",
        ),
        (
            express(json!({"operator": "Exists"})),
            join(at_expression, ".key"),
            "is missing",
        ),
        (
            express(json!({"key": "app"})),
            join(at_expression, ".operator"),
            "is missing",
        ),
        (
            express(json!({"key": "app", "operator": "Is"})),
            join(at_expression, ".operator"),
            "use In, NotIn, Exists or DoesNotExist",
        ),
        (
            express(json!({"key": "app", "operator": "In"})),
            join(at_expression, ".values"),
            "is empty beside operator In",
        ),
        (
            express(json!({"key": "app", "operator": "NotIn", "values": []})),
            join(at_expression, ".values"),
            "is empty beside operator NotIn",
        ),
        (
            express(json!({"key": "app", "operator": "Exists", "values": ["a"]})),
            join(at_expression, ".values"),
            "is set beside operator Exists; remove it",
        ),
    ]
}

#[test]
fn bad_specs_are_refused_with_field_and_remedy() {
    for (spec, field, text) in refused_specs() {
        let refusal = refusal(&spec);
        let wanted = match field {
            "" => "spec".to_owned(),
            field => format!("spec.{field}"),
        };
        assert_eq!(refusal.field, wanted, "{spec}");
        let found = format!("{}; {}", refusal.reason, refusal.remedy);
        assert!(found.contains(text), "{spec}: {found}");
        assert!(!refusal.remedy.is_empty(), "{spec}");
    }
}

#[test]
fn bad_heads_are_refused() {
    let change = |field: &str, value: Value| {
        let mut document = document(&json!({}));
        document[field] = value;
        read(&document).expect_err(field)
    };
    let is = |refusal: Refusal, field: &str, text: &str| {
        assert_eq!(refusal.field, field);
        assert!(refusal.to_string().contains(text), "{refusal}");
    };
    let version = change("apiVersion", json!("extensions/v1beta1"));
    is(
        version,
        "apiVersion",
        "write apiVersion: networking.k8s.io/v1",
    );
    is(change("kind", Value::Null), "kind", "is missing");
    is(change("spec", Value::Null), "spec", "is missing");
    is(change("data", json!(1)), "data", "unknown field");
    is(change("metadata", json!({})), "metadata.name", "is missing");
    is(
        change("metadata", json!({"name": "A_b"})),
        "metadata.name",
        "lower-case",
    );
    let namespace = change("metadata", json!({"name": "a", "namespace": "a.b"}));
    is(
        namespace,
        "metadata.namespace",
        "not the name of a namespace",
    );
    is(read(&json!([])).unwrap_err(), "document", "not a mapping");
}
