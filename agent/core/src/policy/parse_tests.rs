//! Documents that are read, and refusals with the field they name.

use std::sync::Arc;

use super::*;
use crate::{
    labels::LabelSet,
    policy::rule::{Direction, DnsNames, PeerRule, Peers, PortRule, Ports, Protocol},
    policy::{lint, model::EndpointPolicy, repository::Repository},
    selector::selector::{CidrSelector, Entity, Selector},
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
    let egress = &found[0].rules()[0].egress;
    assert!(egress.default_deny && !found[0].rules()[0].ingress.default_deny);
    assert_eq!(egress.peers.len(), 2);
    let dns = &egress.peers[0].ports[0];
    assert_eq!(
        (dns.protocol, &dns.ports),
        (Protocol::Any, &Ports::Range(53, 53))
    );
    assert!(matches!(&dns.dns, Some(DnsNames::Names(names)) if names.len() == 2));
    assert_eq!(egress.peers[1].ports[1].ports, Ports::Range(8000, 8100));
    assert_eq!(found[1].key, "CiliumClusterwideNetworkPolicy/deny");
    let egress = &found[1].rules()[0].egress;
    assert!(!egress.default_deny && egress.peers[0].deny);
    let Peers::Selectors(list) = &egress.peers[0].peers else {
        panic!("{egress:?}")
    };
    assert!(matches!(&list[0], Selector::Cidr(c) if c.except.len() == 1));
}

fn peer(deny: bool, peers: Peers, ports: &[(Protocol, u16, u16)]) -> Arc<PeerRule> {
    let ports = ports.iter().map(|(protocol, first, last)| PortRule {
        protocol: *protocol,
        ports: Ports::Range(*first, *last),
        dns: None,
    });
    Arc::new(PeerRule {
        path: "".into(),
        deny,
        peers,
        ports: ports.collect(),
    })
}

fn without_paths(direction: &Direction) -> Direction {
    let mut direction = direction.clone();
    for rule in &mut direction.peers {
        Arc::make_mut(rule).path = "".into();
    }
    direction
}

fn block(prefix: &str, except: &[&str]) -> Selector {
    Selector::Cidr(CidrSelector {
        prefix: prefix.parse().unwrap(),
        except: except.iter().map(|part| part.parse().unwrap()).collect(),
        nodes: false,
    })
}

#[test]
fn reads_ingress_denies_blocks_entities_and_icmp() {
    let document = with_spec(
        r#"
endpointSelector: {}
ingress:
- fromCIDR: [192.0.2.7, 2001:db8::/32]
- fromCIDRSet:
  - {cidr: 10.0.0.0/8, except: [10.1.0.0/16, 10.2.0.0/16]}
  toPorts: [{ports: [{port: "80", protocol: TCP}]}]
- fromEntities: [host, cluster, kube-apiserver]
- fromEntities: [host, all]
- icmps:
  - fields: [{type: 8}, {type: EchoRequest, family: IPv4}]
  - fields: [{type: PacketTooBig, family: IPv6}]
- fromCIDR: []
ingressDeny:
- fromEntities: [remote-node]
  icmps: [{fields: [{type: "3"}]}]
- fromCIDRSet: [{cidr: 203.0.113.9/24}]
- toPorts: [{ports: [{port: 6000, endPort: 6010, protocol: SCTP}]}]
egressDeny:
- toEntities: [world-ipv6]
enableDefaultDeny: {ingress: false}
"#,
    )
    .unwrap();
    let entity = |entities: &[Entity]| {
        Peers::Selectors(entities.iter().map(|e| Selector::Entity(*e)).collect())
    };
    let [rule] = document.rules() else {
        panic!("{document:?}")
    };
    let ingress = Direction {
        default_deny: false,
        peers: vec![
            peer(
                true,
                entity(&[Entity::RemoteNode]),
                &[(Protocol::Icmp, 3, 3)],
            ),
            peer(
                true,
                Peers::Selectors(vec![block("203.0.113.0/24", &[])]),
                &[],
            ),
            peer(true, Peers::Any, &[(Protocol::Sctp, 6000, 6010)]),
            peer(
                false,
                Peers::Selectors(vec![
                    block("192.0.2.7/32", &[]),
                    block("2001:db8::/32", &[]),
                ]),
                &[],
            ),
            peer(
                false,
                Peers::Selectors(vec![block("10.0.0.0/8", &["10.1.0.0/16", "10.2.0.0/16"])]),
                &[(Protocol::Tcp, 80, 80)],
            ),
            peer(
                false,
                entity(&[Entity::Host, Entity::Cluster, Entity::KubeApiserver]),
                &[],
            ),
            peer(false, Peers::Any, &[]),
            peer(
                false,
                Peers::Any,
                &[
                    (Protocol::Icmp, 8, 8),
                    (Protocol::Icmp, 8, 8),
                    (Protocol::Icmpv6, 2, 2),
                ],
            ),
            peer(false, Peers::Selectors(vec![]), &[]),
        ],
    };
    assert_eq!(without_paths(&rule.ingress), ingress);
    let egress = Direction {
        default_deny: true,
        peers: vec![peer(true, entity(&[Entity::WorldIpv6]), &[])],
    };
    assert_eq!(without_paths(&rule.egress), egress);
    let paths: Vec<&str> = rule.ingress.peers.iter().map(|rule| &*rule.path).collect();
    assert_eq!(paths[2..4], ["spec.ingressDeny[2]", "spec.ingress[0]"]);
}

#[test]
fn reads_groups_of_blocks_and_rules_about_them() {
    let group = |metadata: &str, spec: &str| {
        one(&format!(
            "apiVersion: cilium.io/v2alpha1\nkind: CiliumCIDRGroup\nmetadata: {metadata}\nspec: {spec}"
        ))
    };
    let found = group(
        "{name: partners, labels: {zone: a}}",
        "{externalCIDRs: [192.0.2.7, 10.0.0.0/8, 'fd00::/8']}",
    )
    .unwrap();
    assert_eq!(found.key, "CiliumCIDRGroup/partners");
    let blocks = found.group().unwrap().clone();
    assert_eq!(
        blocks.labels.texts(),
        [
            "cidrgroup:holdfast.cidrgrouplabel/partners/zone:a",
            "cidrgroup:io.cilium.policy.cidrgroupname/partners",
        ]
    );
    assert_eq!(blocks.prefixes.len(), 3);
    let error = group("{name: g}", "{externalCIDRs: [ten]}").unwrap_err();
    assert_eq!(error.field, "spec.externalCIDRs[0]");
    let error = group("{name: g}", "{cidrs: []}").unwrap_err();
    assert_eq!(error.field, "spec.cidrs");
    let error = group("{name: g, labels: {a: 1}}", "{}").unwrap_err();
    assert_eq!(error.field, "metadata.labels.a");

    let rules = with_spec(
        "endpointSelector: {}\negress:\n- toCIDRSet:\n  - {cidrGroupRef: partners, except: [10.1.0.0/16]}\n  - cidrGroupSelector: {matchLabels: {zone: a}}",
    )
    .unwrap();
    let selectors: Vec<String> = rules.rules()[0]
        .selectors()
        .map(ToString::to_string)
        .collect();
    assert_eq!(
        selectors,
        ["cidrgroup:partners except 10.1.0.0/16", "cidrgroup:zone=a"]
    );
    assert_eq!(
        lint::groups(&rules).into_iter().collect::<Vec<_>>(),
        ["partners"]
    );
    refused(
        "endpointSelector: {}\negress:\n- toCIDRSet: [{cidr: 10.0.0.0/8, cidrGroupRef: g}]",
        "spec.egress[0].toCIDRSet[0]",
    );
    refused(
        "endpointSelector: {}\negress:\n- toCIDRSet: [{except: [10.0.0.0/8]}]",
        "spec.egress[0].toCIDRSet[0]",
    );
}

/// Fields that other agents know and this one does not are refused by name, never ignored.
#[test]
fn refuses_what_is_not_supported_by_name() {
    let sections = [
        ("egress", "toServices"),
        ("egress", "toGroups"),
        ("egress", "toNodes"),
        ("egress", "toRequires"),
        ("egress", "authentication"),
        ("ingress", "fromGroups"),
        ("ingress", "fromNodes"),
        ("ingress", "fromRequires"),
        ("ingress", "authentication"),
        ("egressDeny", "toServices"),
        ("ingressDeny", "fromNodes"),
    ];
    let field = |spec: String, path: String| {
        let error = with_spec(&spec).unwrap_err();
        assert_eq!(error.field, path);
        assert!(error.reason.ends_with("is not supported"), "{error}");
    };
    for (section, name) in sections {
        field(
            format!("endpointSelector: {{}}\n{section}:\n- {{{name}: []}}"),
            format!("spec.{section}[0].{name}"),
        );
    }
    for name in [
        "terminatingTLS",
        "originatingTLS",
        "serverNames",
        "listener",
    ] {
        field(
            format!(
                "endpointSelector: {{}}\negress:\n- toPorts: [{{ports: [{{port: 80}}], {name}: {{}}}}]"
            ),
            format!("spec.egress[0].toPorts[0].{name}"),
        );
    }
    for name in ["http", "kafka", "l7", "l7proto"] {
        for section in ["egress", "ingress"] {
            field(
                format!(
                    "endpointSelector: {{}}\n{section}:\n- toPorts: [{{ports: [{{port: 80}}], rules: {{{name}: []}}}}]"
                ),
                format!("spec.{section}[0].toPorts[0].rules.{name}"),
            );
        }
    }
    for kind in [
        "AdminNetworkPolicy",
        "CiliumEgressGatewayPolicy",
        "CiliumLocalRedirectPolicy",
    ] {
        let text = format!("apiVersion: cilium.io/v2\nkind: {kind}\nmetadata: {{name: a}}");
        let error = one(&text).unwrap_err();
        assert_eq!(error.reason, format!("`{kind}` is not supported"));
    }
    // A List that was cut off in its last item.
    let torn = "apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n";
    let error = one(torn).unwrap_err();
    assert!(error.reason.contains("ends early"), "{error}");
    let protocols =
        "endpointSelector: {}\negress:\n- toPorts: [{ports: [{port: 1, protocol: VRRP}]}]";
    field(
        protocols.to_owned(),
        "spec.egress[0].toPorts[0].ports[0].protocol".to_owned(),
    );
}

#[test]
fn default_deny_follows_the_rules_unless_it_is_set() {
    let both = |spec: &str| {
        let document = with_spec(&format!("endpointSelector: {{}}\n{spec}")).unwrap();
        let rule = &document.rules()[0];
        (rule.ingress.default_deny, rule.egress.default_deny)
    };
    assert_eq!(both("ingress:\n- {}"), (true, false));
    assert_eq!(both("ingressDeny:\n- fromEntities: [world]"), (true, false));
    assert_eq!(both("enableDefaultDeny: {ingress: true}"), (true, false));
    assert_eq!(
        both("ingress:\n- {}\negress:\n- {}\nenableDefaultDeny: {ingress: false}"),
        (false, true)
    );
    assert_eq!(
        both("ingress:\n- {}\negress:\n- {}\nenableDefaultDeny: {egress: false}"),
        (true, false)
    );
}

#[test]
fn refuses_with_the_field_and_what_to_do() {
    refused("egress: []", "spec.endpointSelector");
    refused(
        "endpointSelector: {}\nnodeSelector: {}",
        "spec.nodeSelector",
    );
    refused("endpointSelector: {}\negres: []", "spec.egres");
    refused("endpointSelector: {}\nlog: {value: x}", "spec.log");
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
        "endpointSelector: {}\negress:\n- toCIDRSet:\n  - {cidr: 10.0.0.0/8, except: [10.1.0.0/16, 9.0.0.0/8]}",
        "spec.egress[0].toCIDRSet[0].except[1]",
    );
    refused(
        "endpointSelector: {}\negress:\n- toPorts:\n  - ports: [{port: http_, protocol: TCP}]",
        "spec.egress[0].toPorts[0].ports[0].port",
    );
    refused(
        "endpointSelector: {}\ningress:\n- toPorts:\n  - ports: [{port: echo, protocol: ICMP}]",
        "spec.ingress[0].toPorts[0].ports[0].port",
    );
    refused(
        "endpointSelector: {}\ningress:\n- toPorts:\n  - ports: [{port: http, endPort: 80}]",
        "spec.ingress[0].toPorts[0].ports[0].endPort",
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
    refused(
        "endpointSelector: {}\nenableDefaultDeny: {ingress: 1}",
        "spec.enableDefaultDeny.ingress",
    );
    refused(
        "endpointSelector: {}\ningressDeny:\n- fromFQDNs: [{matchName: a.b}]",
        "spec.ingressDeny[0].fromFQDNs",
    );
    refused(
        "endpointSelector: {}\ningress:\n- fromCIDRSet: [{cidr: 10.0.0.0/8}, {cidr: ten}]",
        "spec.ingress[0].fromCIDRSet[1].cidr",
    );
    refused(
        "endpointSelector: {}\ningress:\n- fromEntities: [host]\n  fromCIDR: [10.0.0.0/8]",
        "spec.ingress[0].fromEntities",
    );
    refused(
        "endpointSelector: {}\ningress:\n- icmps: [{fields: [{type: 256}]}]",
        "spec.ingress[0].icmps[0].fields[0].type",
    );
    refused(
        "endpointSelector: {}\ningress:\n- icmps: [{fields: [{type: EchoRequest, family: IPv5}]}]",
        "spec.ingress[0].icmps[0].fields[0].family",
    );
    refused(
        "endpointSelector: {}\negress:\n- icmps: [{fields: [{type: 8}]}]\n  toPorts: [{ports: [{port: 80}]}]",
        "spec.egress[0].icmps",
    );
    refused(
        "endpointSelector: {}\ningressDeny:\n- icmps: [{fields: []}]",
        "spec.ingressDeny[0].icmps",
    );
}

#[test]
fn refuses_whole_documents() {
    assert_eq!(one("just text").unwrap_err().field, "document");
    let other = one("kind: Deployment\napiVersion: apps/v1").unwrap_err();
    assert_eq!(other.field, "kind");
    assert!(other.remedy.contains("CiliumNetworkPolicy"), "{other}");
    let older = one("kind: Pod\napiVersion: v1beta1").unwrap_err();
    assert_eq!(older.field, "apiVersion");
    let error =
        one("apiVersion: cilium.io/v2\nkind: NetworkPolicy\nmetadata: {name: a}").unwrap_err();
    assert!(
        error.remedy.contains("apiVersion: networking.k8s.io/v1"),
        "{error}"
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

#[path = "parse_tests/warnings.rs"]
mod warnings;

#[test]
fn a_network_policy_is_a_document_with_its_namespace_in_its_key() {
    let text = r"
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web, namespace: shop}
spec: {podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 192.0.2.0/24}}]}]}
";
    let document = one(text).unwrap();
    assert_eq!(document.key, "NetworkPolicy/shop/web");
    assert_eq!(document.rules().len(), 1);
    assert!(document.warnings.is_empty());
    let error = one(&text.replace("192.0.2.0/24", "192.0.2.0")).unwrap_err();
    assert_eq!(error.key.as_deref(), Some("NetworkPolicy/shop/web"));
    assert_eq!(error.field, "spec.ingress[0].from[0].ipBlock.cidr");
    assert_eq!(error.remedy, "write 192.0.2.0/32 for this address");
}
