//! Documents as rules over identities, and the warnings.
use serde_json::{Value, json};

use super::{blocks_without_pods, read};
use crate::{
    labels::Label,
    policy::{
        document::{Body, PolicyDocument},
        lint,
        parse::parse_value,
        rule::{Direction, Peers, Rule},
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

/// The rule of a spec, and the warnings.
#[track_caller]
fn compiled(spec: &Value) -> (Rule, Vec<String>) {
    let mut warnings = Vec::new();
    let body = read(&document(spec), &mut warnings).unwrap();
    let Body::NetworkPolicy { rules, .. } = body else {
        panic!("{body:?}");
    };
    let [rule] = rules.try_into().unwrap();
    (rule, warnings)
}

/// `open`, or each rule as `path selector|selector ports`.
fn shown(direction: &Direction) -> Vec<String> {
    if !direction.default_deny {
        assert!(direction.peers.is_empty());
        return vec!["open".to_owned()];
    }
    let shown = direction.peers.iter().map(|rule| {
        assert!(!rule.deny);
        let peers = match &rule.peers {
            Peers::Any => "everyone".to_owned(),
            Peers::Selectors(list) => {
                let texts: Vec<String> = list.iter().map(ToString::to_string).collect();
                texts.join(" | ")
            }
        };
        let ports: Vec<String> = rule.ports.iter().map(ToString::to_string).collect();
        format!("{}: {peers}: {}", rule.path, ports.join(", "))
    });
    shown.collect()
}

#[test]
fn policy_types_give_default_deny_also_without_a_rule() {
    let (rule, _) = compiled(&json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}));
    assert_eq!(
        rule.subject.to_string(),
        "k8s:io.kubernetes.pod.namespace=shop"
    );
    assert_eq!(shown(&rule.ingress), [""; 0]);
    assert_eq!(shown(&rule.egress), [""; 0]);
    let (rule, _) = compiled(&json!({"podSelector": {"matchLabels": {"app": "web"}}}));
    assert_eq!(
        rule.subject.to_string(),
        "k8s:app=web,k8s:io.kubernetes.pod.namespace=shop"
    );
    assert_eq!(shown(&rule.ingress), [""; 0]);
    assert_eq!(shown(&rule.egress), ["open"]);
}

#[test]
fn selectors_of_peers_are_labels_of_identities() {
    let namespaces = "k8s:io.cilium.k8s.namespace.labels.";
    let own = "k8s:io.kubernetes.pod.namespace";
    let expression = |key: &str, operator: &str, values: &[&str]| json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]});
    let team = json!({"matchLabels": {"team": "a"}});
    let table = [
        (json!({"podSelector": {}}), format!("{own}=shop")),
        (
            json!({"podSelector": expression("app", "In", &["a", "b"])}),
            format!("k8s:app in {{\"a\", \"b\"}},{own}=shop"),
        ),
        (
            json!({"podSelector": expression("app", "NotIn", &["a"])}),
            format!("k8s:app not in {{\"a\"}},{own}=shop"),
        ),
        (
            json!({"podSelector": expression("app", "Exists", &[])}),
            format!("k8s:app,{own}=shop"),
        ),
        (
            json!({"podSelector": expression("app", "DoesNotExist", &[])}),
            format!("!k8s:app,{own}=shop"),
        ),
        (json!({"namespaceSelector": {}}), own.to_owned()),
        (
            json!({"namespaceSelector": team}),
            format!("{namespaces}team=a"),
        ),
        (
            json!({"namespaceSelector": team, "podSelector": {"matchLabels": {"app": "web"}}}),
            format!("k8s:app=web,{namespaces}team=a"),
        ),
        (
            json!({"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "web"}}}),
            format!("k8s:app=web,{own}"),
        ),
        (
            json!({"namespaceSelector": expression("kubernetes.io/metadata.name", "NotIn", &["shop"])}),
            format!("{own} not in {{\"shop\"}}"),
        ),
        (
            json!({"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16", "10.2.0.0/16"]}}),
            "cidr:10.0.0.0/8 except 10.1.0.0/16 except 10.2.0.0/16".to_owned(),
        ),
    ];
    for (peer, wanted) in table {
        let (rule, _) = compiled(&json!({"ingress": [{"from": [peer]}]}));
        let wanted = format!("spec.ingress[0]: {wanted}: ");
        assert_eq!(shown(&rule.ingress), [wanted], "{peer}");
        let (rule, _) = compiled(&json!({"egress": [{}, {"to": [peer]}]}));
        let found = shown(&rule.egress);
        assert_eq!(found[0], "spec.egress[0]: everyone: ");
        assert!(found[1].starts_with("spec.egress[1]: "), "{peer}");
    }
}

#[test]
fn peers_of_one_rule_are_a_union() {
    let from = json!([{"podSelector": {"matchLabels": {"app": "api"}}}, {"ipBlock": {"cidr": "192.0.2.0/24"}}]);
    let (rule, _) = compiled(&json!({"ingress": [{"from": from, "ports": [{"port": 80}]}]}));
    let wanted = "spec.ingress[0]: k8s:app=api,k8s:io.kubernetes.pod.namespace=shop | \
                  cidr:192.0.2.0/24: TCP 80";
    assert_eq!(shown(&rule.ingress), [wanted]);
}

#[test]
fn ports_of_every_form() {
    let ports = json!([
        {}, {"port": 80}, {"port": 8000, "endPort": 8010, "protocol": "UDP"},
        {"protocol": "SCTP"}, {"port": "http"},
    ]);
    let (rule, _) = compiled(&json!({"ingress": [{"ports": ports}], "egress": [{"ports": ports}]}));
    let all = "TCP any port, TCP 80, UDP 8000-8010, SCTP any port";
    assert_eq!(
        shown(&rule.ingress),
        [format!("spec.ingress[0]: everyone: {all}, TCP http")]
    );
    // Only endpoints have names for their ports.
    assert_eq!(
        shown(&rule.egress),
        [
            "spec.egress[0]: <every endpoint>: TCP http".to_owned(),
            format!("spec.egress[0]: everyone: {all}"),
        ]
    );
}

#[test]
fn remarks_on_fields_without_effect_become_warnings() {
    let (_, warnings) = compiled(&json!({"policyTypes": ["Egress"], "ingress": [{}]}));
    assert_eq!(warnings.len(), 1);
    assert!(warnings[0].starts_with("spec.ingress: has no effect"));
}

#[test]
fn validate_names_the_pods_that_a_block_covers_and_does_not_mean() {
    let block = json!([{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}]);
    let policy = document(&json!({"egress": [{}, {"to": block}]}));
    let pod = |name: &str, address: &str| {
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "shop"},
            "status": {"podIP": address},
        })
    };
    let remark = |pods: &[Value]| {
        let values = [&policy].into_iter().chain(pods);
        let documents = values.map(|value| parse_value(value, "test").unwrap());
        let documents: Vec<PolicyDocument> = documents.collect();
        blocks_without_pods(&documents[0], &documents.iter().collect::<Vec<_>>())
    };
    let text = remark(&[]).unwrap();
    assert!(
        text.starts_with("spec.egress[1] (10.0.0.0/8): an ipBlock does not mean pods or nodes"),
        "{text}"
    );
    let pods = [
        pod("a", "10.2.0.1"),
        pod("b", "10.1.0.1"),
        pod("c", "10.3.0.1"),
    ];
    let text = remark(&pods).unwrap();
    assert!(
        text.starts_with("spec.egress[1]: 10.0.0.0/8 covers the pod shop/a and 1 more; an ipBlock"),
        "{text}"
    );
    // The pods are known, and the block covers none of them.
    assert_eq!(remark(&[pod("b", "10.1.0.1")]), None);
}

#[test]
fn validate_names_labels_that_no_pod_has_in_its_identity() {
    let spec = json!({
        "podSelector": {"matchLabels": {"app": "web", "statefulset.kubernetes.io/pod-name": "web-0"}},
        "ingress": [{"from": [
            {"podSelector": {"matchExpressions": [
                {"key": "pod-template-hash", "operator": "Exists"},
                {"key": "pod-template-generation", "operator": "DoesNotExist"},
            ]}},
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "shop"}}},
            {"namespaceSelector": {"matchLabels": {"topology.kubernetes.io/zone": "a"}}},
        ]}],
    });
    let document = parse_value(&document(&spec), "test").unwrap();
    let gives = |label: &Label| !label.key().contains("pod-");
    let found = lint::labels_of_no_identity(&document, gives);
    assert_eq!(found.len(), 2, "{found:#?}");
    assert!(found[0].contains("the label pod-template-hash,"));
    assert!(found[1].contains("the label statefulset.kubernetes.io/pod-name,"));
}
