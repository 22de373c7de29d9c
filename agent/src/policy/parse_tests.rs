//! Documents that are read, and refusals with the field they name.

use super::*;
use crate::{
    policy::rule::{DnsNames, Peers, Protocol},
    selector::selector::Selector,
};

fn one(text: &str) -> Result<PolicyDocument, PolicyError> {
    let mut found = parse_documents(text, "test.yaml");
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

fn with_spec(spec: &str) -> Result<PolicyDocument, PolicyError> {
    let spec = spec.replace('\n', "\n  ");
    one(&format!(
        "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {{name: p}}\nspec:\n  {spec}"
    ))
}

#[track_caller]
fn refused(spec: &str, field: &str) {
    let error = with_spec(spec).unwrap_err();
    assert_eq!(error.field, field, "{error}");
    assert_eq!(error.key.as_deref(), Some("CiliumNetworkPolicy/default/p"));
    assert!(!error.remedy.is_empty());
}

#[test]
fn reads_the_usual_policy() {
    let text = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata:
  name: allow-cilium-io
  namespace: shop
  labels: {team: x}
spec:
  description: names only
  endpointSelector:
    matchLabels: {app: web}
  egress:
  - toEndpoints:
    - matchLabels:
        k8s:io.kubernetes.pod.namespace: kube-system
        k8s-app: kube-dns
    toPorts:
    - ports:
      - {port: "53", protocol: ANY}
      rules:
        dns:
        - matchPattern: "*.cilium.io"
        - matchName: cilium.io
  - toFQDNs:
    - matchName: cilium.io
    - matchPattern: "*.cilium.io"
    toPorts:
    - ports:
      - {port: "443", protocol: TCP}
      - {port: 8000, endPort: 8100, protocol: TCP}
---
# nothing here
---
{"apiVersion":"cilium.io/v2","kind":"CiliumClusterwideNetworkPolicy","metadata":{"name":"deny"},
 "spec":{"endpointSelector":{},"egressDeny":[{"toCIDRSet":[{"cidr":"10.0.0.0/8","except":["10.1.0.0/16"]}]}],
 "enableDefaultDeny":{"egress":false}}}
"#;
    let found: Vec<_> = parse_documents(text, "f")
        .into_iter()
        .collect::<Result<_, _>>()
        .unwrap();
    assert_eq!(found.len(), 2);
    assert_eq!(found[0].key, "CiliumNetworkPolicy/shop/allow-cilium-io");
    assert!(found[0].warnings.is_empty(), "{:?}", found[0].warnings);
    let egress = &found[0].rules[0].egress;
    assert!(egress.default_deny && !found[0].rules[0].ingress.default_deny);
    assert_eq!(egress.peers.len(), 2);
    let dns = &egress.peers[0].ports[0];
    assert_eq!((dns.protocol, dns.first), (Protocol::Any, 53));
    assert!(matches!(&dns.dns, Some(DnsNames::Names(names)) if names.len() == 2));
    assert_eq!(
        (
            egress.peers[1].ports[1].first,
            egress.peers[1].ports[1].last
        ),
        (8000, 8100)
    );
    assert_eq!(found[1].key, "CiliumClusterwideNetworkPolicy/deny");
    let egress = &found[1].rules[0].egress;
    assert!(!egress.default_deny && egress.peers[0].deny);
    let Peers::Selectors(list) = &egress.peers[0].peers else {
        panic!("{egress:?}")
    };
    assert!(matches!(&list[0], Selector::Cidr(c) if c.except.len() == 1));
}

#[test]
fn refuses_with_the_field_and_what_to_do() {
    refused("egress: []", "spec.endpointSelector");
    refused(
        "endpointSelector: {}\nnodeSelector: {}",
        "spec.nodeSelector",
    );
    refused("endpointSelector: {}\negres: []", "spec.egres");
    refused("endpointSelector: {}\negress: {}", "spec.egress");
    refused(
        "endpointSelector: {}\negress:\n- toFQDNs:\n  - {matchName: a.b, matchPattern: \"*.b\"}",
        "spec.egress[0].toFQDNs[0]",
    );
    refused(
        "endpointSelector: {}\negress:\n- toFQDNs:\n  - matchPattern: \"[a-z]*.cilium.io\"",
        "spec.egress[0].toFQDNs[0].matchPattern",
    );
    refused(
        "endpointSelector: {}\negress:\n- toFQDNs: [{}]",
        "spec.egress[0].toFQDNs[0]",
    );
    refused(
        "endpointSelector: {}\negress:\n- toCIDR: [10.0.0.0/8]\n  toFQDNs: [{matchName: a.b}]",
        "spec.egress[0].toFQDNs",
    );
    refused(
        "endpointSelector: {}\negress:\n- toServices: []",
        "spec.egress[0].toServices",
    );
    refused(
        "endpointSelector: {}\negress:\n- toCIDR: [10.0.0.0/99]",
        "spec.egress[0].toCIDR[0]",
    );
    refused(
        "endpointSelector: {}\negress:\n- toCIDRSet:\n  - {cidr: 10.0.0.0/8, except: [11.0.0.0/8]}",
        "spec.egress[0].toCIDRSet[0].except[0]",
    );
    refused(
        "endpointSelector: {}\negress:\n- toPorts:\n  - ports: [{port: http, protocol: TCP}]",
        "spec.egress[0].toPorts[0].ports[0].port",
    );
    refused(
        "endpointSelector: {}\negress:\n- toPorts:\n  - ports: [{port: 90, endPort: 80}]",
        "spec.egress[0].toPorts[0].ports[0].endPort",
    );
    refused(
        "endpointSelector: {}\negress:\n- toPorts:\n  - ports: [{port: 80}]\n    rules: {http: []}",
        "spec.egress[0].toPorts[0].rules.http",
    );
    refused(
        "endpointSelector: {}\ningress:\n- toPorts:\n  - ports: [{port: 53}]\n    rules: {dns: []}",
        "spec.ingress[0].toPorts[0].rules.dns",
    );
    refused(
        "endpointSelector: {}\negress:\n- toEntities: [mars]",
        "spec.egress[0].toEntities[0]",
    );
    refused(
        "endpointSelector: {}\negressDeny:\n- toFQDNs: [{matchName: a.b}]",
        "spec.egressDeny[0].toFQDNs[0]",
    );
    refused(
        "endpointSelector: {matchExpressions: [{key: a, operator: Near}]}",
        "spec.endpointSelector.matchExpressions[0].operator",
    );
    refused(
        "endpointSelector: {matchLabels: {a: 1}}",
        "spec.endpointSelector.matchLabels.a",
    );
    refused(
        "endpointSelector: {}\nenableDefaultDeny: {egress: maybe}",
        "spec.enableDefaultDeny.egress",
    );
}

#[test]
fn refuses_whole_documents() {
    assert_eq!(one("just text").unwrap_err().field, "document");
    assert_eq!(
        one("kind: Pod\napiVersion: v1").unwrap_err().field,
        "apiVersion"
    );
    let error = one("apiVersion: cilium.io/v2\nkind: X\nmetadata: {name: a}").unwrap_err();
    assert_eq!(error.field, "kind");
    assert!(
        error.to_string().starts_with("test.yaml: kind: "),
        "{error}"
    );
    assert!(one("a: [").unwrap_err().reason.contains("YAML"));
    assert!(
        one("apiVersion: a\napiVersion: b")
            .unwrap_err()
            .reason
            .contains("YAML")
    );
}

#[test]
fn warns_of_names_nobody_learns_and_of_servers_anyone_may_be() {
    let document =
        with_spec("endpointSelector: {}\negress:\n- toFQDNs: [{matchName: a.b}]").unwrap();
    assert!(
        document.warnings[0].contains("without any DNS rule"),
        "{:?}",
        document.warnings
    );
    let document = with_spec(
        "endpointSelector: {}\negress:\n- toPorts:\n  - ports: [{port: 53}]\n    rules: {dns: [{matchPattern: \"*\"}]}",
    )
    .unwrap();
    assert!(
        document.warnings[0].contains("any server"),
        "{:?}",
        document.warnings
    );
}

#[test]
fn an_empty_rule_denies_and_allows_nothing() {
    let document = with_spec("endpointSelector: {}\negress:\n- {}").unwrap();
    assert!(document.rules[0].egress.default_deny);
    assert!(document.rules[0].egress.peers.is_empty());
}
