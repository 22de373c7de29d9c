//! What documents say of a packet, and the JSON that programs read.

use super::*;
use crate::policy::parse::parse_documents;

const POLICY: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: web, namespace: shop}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toEndpoints: [{matchLabels: {k8s-app: kube-dns, "k8s:io.kubernetes.pod.namespace": kube-system}}]
    toPorts: [{ports: [{port: "53"}], rules: {dns: [{matchPattern: "*.example.com"}]}}]
  - toFQDNs: [{matchPattern: "*.example.com"}, {matchName: example.org}]
    toPorts: [{ports: [{port: "443", protocol: TCP}]}]
  - toCIDRSet: [{cidr: 10.0.0.0/8, except: [10.1.0.0/16]}]
  - toEndpoints: [{matchLabels: {app: db}}]
  - toEntities: [kube-apiserver]
  egressDeny:
  - toEntities: [world]
    toPorts: [{ports: [{port: "25", protocol: TCP}]}]
---
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: db, namespace: shop}
spec:
  endpointSelector: {matchLabels: {app: db}}
  ingress:
  - fromEndpoints: [{matchLabels: {app: web}}]
    toPorts: [{ports: [{port: "5432", protocol: TCP}]}]
"#;

fn ask(from: &str, to: &str, port: &str) -> Trace {
    ask_by(POLICY, from, to, port)
}

/// Asks as the command does, with its texts.
fn ask_by(policy: &str, from: &str, to: &str, port: &str) -> Trace {
    let mut repository = Repository::default();
    for document in parse_documents(policy, "test") {
        repository.insert(document.unwrap().into());
    }
    let Peer::Labels(from) = Peer::parse(from).unwrap() else {
        panic!("{from} are no labels")
    };
    let to = Peer::parse(to).unwrap().into();
    trace(&repository, &from, &to, port.parse().unwrap(), None)
}

const WEB: &str = "k8s:app=web,k8s:io.kubernetes.pod.namespace=shop";
const DB: &str = "k8s:app=db,k8s:io.kubernetes.pod.namespace=shop";
const DNS: &str = "k8s:k8s-app=kube-dns,k8s:io.kubernetes.pod.namespace=kube-system";

/// The step that decides: the first that does not pass, else the last.
fn decides(trace: &Trace) -> &Step {
    let dropped = trace.steps.iter().find(|step| !step.passes);
    dropped.or(trace.steps.last()).unwrap()
}

#[test]
fn each_kind_of_receiver_is_judged() {
    for (to, port, step, verdict, rule) in [
        (
            "www.example.com",
            "443",
            "egress",
            "allowed",
            "spec.egress[1]",
        ),
        ("www.example.com", "80", "egress", "no-rule", ""),
        (
            "www.example.com",
            "25",
            "egress",
            "denied",
            "spec.egressDeny[0]",
        ),
        ("example.org", "443", "dns", "no-rule", ""),
        ("other.net", "443", "dns", "no-rule", ""),
        ("10.2.3.4", "443", "egress", "allowed", "spec.egress[2]"),
        ("10.2.3.4", "25", "egress", "denied", "spec.egressDeny[0]"),
        ("10.1.3.4", "443", "egress", "no-rule", ""),
        ("192.0.2.1", "443", "egress", "no-rule", ""),
        (
            "2001:db8::1",
            "25",
            "egress",
            "denied",
            "spec.egressDeny[0]",
        ),
        (DNS, "53/UDP", "ingress", "not-restricted", ""),
        (DNS, "54/UDP", "egress", "no-rule", ""),
        (DB, "5432", "ingress", "allowed", "spec.ingress[0]"),
        (DB, "80", "ingress", "no-rule", ""),
        (
            "reserved:kube-apiserver",
            "443",
            "egress",
            "allowed",
            "spec.egress[4]",
        ),
        ("reserved:host", "443", "egress", "no-rule", ""),
    ] {
        let trace = ask(WEB, to, port);
        let by = decides(&trace);
        let rules: Vec<&str> = by.rules.iter().map(|rule| rule.rule.as_str()).collect();
        let found = (by.step.as_str(), by.verdict.as_str(), rules.join(","));
        assert_eq!(found, (step, verdict, rule.to_owned()), "{to} {port}");
        assert_eq!(trace.allowed, by.passes);
    }
    assert_eq!(
        decides(&ask(WEB, "www.example.com", "80"))
            .other_ports
            .len(),
        2
    );
    let nobody = ask("k8s:app=other", "192.0.2.1", "443");
    assert_eq!((nobody.allowed, nobody.steps.len()), (true, 1));
    assert_eq!(nobody.from[1], "k8s:io.kubernetes.pod.namespace=default");
    let proxied = ask(WEB, DNS, "53/TCP");
    assert_eq!(proxied.steps[0].verdict, "proxied");
}

#[test]
fn port_names_are_those_of_the_receiver() {
    let policy = POLICY.replace("5432", "pg");
    let ask = |to: &str, port| ask_by(&policy, WEB, to, port);
    let trace = ask(
        &format!("{DB},gen:io.cilium.k8s.named-ports=pg.TCP.5433"),
        "5433",
    );
    assert_eq!(decides(&trace).verdict, "allowed");
    assert_eq!(decides(&trace).rules[0].ports, ["TCP pg (5433)"]);
    let trace = ask(DB, "5432");
    assert_eq!(decides(&trace).verdict, "no-rule");
    let unknown = "TCP pg (port name pg is not known)";
    assert_eq!(decides(&trace).other_ports[0].ports, [unknown]);
}

/// The fields are documented in docs/src/policy.md; new ones may be added.
#[test]
fn the_json_matches_the_golden_file() {
    let trace = ask(WEB, "www.example.com", "443/TCP");
    let golden = include_str!("../../../tests/data/trace.json");
    let golden: serde_json::Value = serde_json::from_str(golden).unwrap();
    let found = serde_json::to_value(&trace).unwrap();
    assert_eq!(
        found,
        golden,
        "{}",
        serde_json::to_string_pretty(&found).unwrap()
    );
}

#[test]
fn rules_of_network_policies_are_named_by_their_fields() {
    let policy = r#"
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: db, namespace: shop}
spec:
  podSelector: {matchLabels: {app: db}}
  ingress:
  - from: [{ipBlock: {cidr: 10.0.0.0/8}}]
  - from: [{podSelector: {matchLabels: {app: web}}}]
    ports: [{port: 5432}]
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web, namespace: shop}
spec:
  podSelector: {matchLabels: {app: web}}
  egress:
  - to: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: shop}}}]
"#;
    let trace = ask_by(policy, WEB, DB, "5432");
    assert!(trace.allowed, "{trace:#?}");
    let rules = trace.steps.iter().flat_map(|step| &step.rules);
    let texts: Vec<String> = rules.map(ToString::to_string).collect();
    assert_eq!(
        texts,
        [
            "NetworkPolicy/shop/web spec.egress[0] (k8s:io.kubernetes.pod.namespace=shop; every \
             port)",
            "NetworkPolicy/shop/db spec.ingress[1] (k8s:app=web,\
             k8s:io.kubernetes.pod.namespace=shop; TCP 5432)",
        ]
    );
    let trace = ask_by(policy, WEB, DB, "22");
    assert_eq!(decides(&trace).step, "ingress");
    let others: Vec<&str> = decides(&trace)
        .other_ports
        .iter()
        .map(|r| &*r.rule)
        .collect();
    assert_eq!(others, ["spec.ingress[1]"]);
    let other = "k8s:app=web,k8s:io.kubernetes.pod.namespace=other";
    assert!(!ask_by(policy, other, DB, "5432").allowed);
}
