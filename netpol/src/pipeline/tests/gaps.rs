//! Cases in which the pipeline of Contiv/VPP differs from what Kubernetes requires.

use serde_json::json;

use super::lab::*;

const WEB: &[(&str, &str)] = &[("app", "web")];
const DB: &[(&str, &str)] = &[("app", "db")];

#[test]
fn a_named_port_that_no_container_has_means_nothing() {
    let ingress = policy(
        "shop/in",
        &json!({
            "podSelector": {"matchLabels": {"app": "db"}},
            "ingress": [{"ports": [{"port": "sql"}]}],
        }),
    );
    let egress = policy(
        "shop/out",
        &json!({
            "podSelector": {"matchLabels": {"app": "web"}},
            "policyTypes": ["Egress"],
            "egress": [{"ports": [{"port": "sql"}]}],
        }),
    );
    let web = object(pod("shop/web", WEB, &["10.0.0.1"]));
    let db = || pod("shop/db", DB, &["10.0.0.2"]);
    let outside = "192.0.2.1";
    let mut lab = Lab::with([ingress, egress, web, object(db())]);
    assert!(!lab.passes(outside, "10.0.0.2 5432/TCP"));
    assert!(!lab.passes(outside, "10.0.0.2"));
    assert!(!lab.passes("10.0.0.1", "10.0.0.2 5432/TCP"));

    lab.put([object(serving(db(), &["sql=5432/TCP"]))]);
    assert!(lab.passes(outside, "10.0.0.2 5432/TCP"));
    assert!(!lab.passes(outside, "10.0.0.2 5433/TCP"));
    assert!(lab.passes("10.0.0.1", "10.0.0.2 5432/TCP"));
    // Only pods have names for ports.
    assert!(!lab.passes("10.0.0.1", "192.0.2.1 5432/TCP"));
}

#[test]
fn the_protocol_of_the_container_port_has_to_agree() {
    let spec =
        json!({"podSelector": {}, "ingress": [{"ports": [{"port": "dns", "protocol": "UDP"}]}]});
    let dns = serving(pod("shop/dns", &[], &["10.0.0.1"]), &["dns=53/TCP"]);
    let lab = Lab::with([policy("shop/in", &spec), object(dns)]);
    assert!(!lab.passes("192.0.2.1", "10.0.0.1 53/UDP"));
    assert!(!lab.passes("192.0.2.1", "10.0.0.1 53/TCP"));
}

#[test]
fn a_named_port_has_the_number_of_each_pod() {
    let ingress = json!({"podSelector": {}, "ingress": [{"ports": [{"port": "http"}]}]});
    let one = serving(pod("shop/one", WEB, &["10.0.0.1"]), &["http=80/TCP"]);
    let other = serving(pod("shop/other", WEB, &["10.0.0.2"]), &["http=8080/TCP"]);
    let egress = json!({
        "podSelector": {},
        "policyTypes": ["Egress"],
        "egress": [
            {"to": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "web"}}}],
             "ports": [{"port": "http"}]},
            {"to": [{"ipBlock": {"cidr": "10.0.0.0/31"}}], "ports": [{"port": "admin"}]},
        ],
    });
    let client = pod("tools/client", &[], &["10.0.1.1"]);
    let mut lab = Lab::with([
        policy("shop/in", &ingress),
        policy("tools/out", &egress),
        object(one.clone()),
        object(other),
        object(client),
    ]);
    for (to, wanted) in [
        ("10.0.0.1 80/TCP", true),
        ("10.0.0.1 8080/TCP", false),
        ("10.0.0.2 80/TCP", false),
        ("10.0.0.2 8080/TCP", true),
    ] {
        assert_eq!(lab.passes("192.0.2.1", to), wanted, "{to}");
        assert_eq!(lab.passes("10.0.1.1", to), wanted, "{to}");
    }
    // With a block, a name means the port of the pods in the block.
    lab.remove(&policy_key("shop/in"));
    let ports = ["http=80/TCP", "admin=9/TCP"];
    let commit = lab.put([object(serving(one, &ports))]);
    assert_eq!(commit.change.elements(), 1, "{}", commit.change);
    assert!(lab.passes("10.0.1.1", "10.0.0.1 9/TCP"));
    assert!(!lab.passes("10.0.1.1", "10.0.0.0 9/TCP"));
}

#[test]
fn both_selectors_of_a_peer_have_to_select() {
    let spec = json!({"podSelector": {"matchLabels": {"app": "db"}}, "ingress": [{"from": [
        {"namespaceSelector": {"matchLabels": {"team": "a"}}, "podSelector": {"matchLabels": {"app": "web"}}},
    ]}]});
    let lab = Lab::with([
        policy("shop/in", &spec),
        namespace("a", &[("team", "a")]),
        namespace("b", &[("team", "b")]),
        object(pod("shop/db", DB, &["10.0.0.1"])),
        object(elsewhere(pod("a/web", WEB, &["10.0.1.1"]))),
        object(elsewhere(pod("a/db", DB, &["10.0.1.2"]))),
        object(elsewhere(pod("b/web", WEB, &["10.0.2.1"]))),
        object(elsewhere(pod("shop/web", WEB, &["10.0.3.1"]))),
    ]);
    assert!(lab.passes("10.0.1.1", "10.0.0.1 80/TCP"));
    for from in ["10.0.1.2", "10.0.2.1", "10.0.3.1", "192.0.2.1"] {
        assert!(!lab.passes(from, "10.0.0.1 80/TCP"), "{from}");
    }
}

#[test]
fn sctp_is_not_tcp() {
    let spec = json!({"podSelector": {}, "ingress": [
        {"ports": [{"port": 80, "protocol": "SCTP"}, {"port": 90, "endPort": 99, "protocol": "SCTP"}]},
    ]});
    let lab = Lab::with([
        policy("shop/in", &spec),
        object(pod("shop/web", WEB, &["10.0.0.1"])),
    ]);
    assert!(lab.passes("192.0.2.1", "10.0.0.1 80/SCTP"));
    assert!(lab.passes("192.0.2.1", "10.0.0.1 95/SCTP"));
    assert!(!lab.passes("192.0.2.1", "10.0.0.1 80/TCP"));
    assert!(!lab.passes("192.0.2.1", "10.0.0.1 80/UDP"));
}

#[test]
fn a_pod_follows_its_own_labels() {
    let spec = json!({"podSelector": {"matchLabels": {"app": "db"}}});
    let mut lab = Lab::with([
        policy("shop/closed", &spec),
        object(pod("shop/one", WEB, &["10.0.0.1"])),
    ]);
    assert!(lab.passes("192.0.2.1", "10.0.0.1 80/TCP"));
    lab.put([object(pod("shop/one", DB, &["10.0.0.1"]))]);
    assert!(!lab.passes("192.0.2.1", "10.0.0.1 80/TCP"));
    let commit = lab.put([object(pod("shop/one", WEB, &["10.0.0.1"]))]);
    assert!(lab.passes("192.0.2.1", "10.0.0.1 80/TCP"));
    assert!(commit.closed.is_empty());
}

#[test]
fn a_namespace_may_come_after_its_pods_and_change() {
    let spec = json!({"podSelector": {}, "ingress": [
        {"from": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}]},
    ]});
    let mut lab = Lab::with([
        policy("shop/in", &spec),
        object(pod("shop/db", DB, &["10.0.0.1"])),
        object(elsewhere(pod("a/web", WEB, &["10.0.1.1"]))),
    ]);
    assert!(!lab.passes("10.0.1.1", "10.0.0.1 80/TCP"));
    lab.put([namespace("a", &[("team", "a")])]);
    assert!(lab.passes("10.0.1.1", "10.0.0.1 80/TCP"));
    lab.put([namespace("a", &[("team", "b")])]);
    assert!(!lab.passes("10.0.1.1", "10.0.0.1 80/TCP"));
}

#[test]
fn absent_labels_are_known_only_of_namespaces_with_an_object() {
    let expression = |key: &str, operator: &str, values: &[&str]| json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]});
    let name = "kubernetes.io/metadata.name";
    // Columns: a selector; whether it selects a namespace without an object, one with team=a, and
    // one without labels.
    let table = [
        (json!({}), [true, true, true]),
        (json!({"matchLabels": {"team": "a"}}), [false, true, false]),
        (expression("team", "In", &["a", "b"]), [false, true, false]),
        (expression("team", "NotIn", &["a"]), [false, false, true]),
        (expression("team", "NotIn", &["b"]), [false, true, true]),
        (expression("team", "Exists", &[]), [false, true, false]),
        (
            expression("team", "DoesNotExist", &[]),
            [false, false, true],
        ),
        (json!({"matchLabels": {name: "a"}}), [true, true, true]),
        (expression(name, "In", &["b"]), [false, false, false]),
        (expression(name, "NotIn", &["a"]), [false, false, false]),
        (expression(name, "NotIn", &["b"]), [true, true, true]),
        (expression(name, "Exists", &[]), [true, true, true]),
        (expression(name, "DoesNotExist", &[]), [false, false, false]),
    ];
    for (selector, wanted) in table {
        let spec =
            json!({"podSelector": {}, "ingress": [{"from": [{"namespaceSelector": selector}]}]});
        let mut lab = Lab::with([
            policy("shop/in", &spec),
            object(pod("shop/db", DB, &["10.0.0.1"])),
            object(elsewhere(pod("a/web", WEB, &["10.0.1.1"]))),
        ]);
        let mut found = vec![lab.passes("10.0.1.1", "10.0.0.1")];
        lab.put([namespace("a", &[("team", "a")])]);
        found.push(lab.passes("10.0.1.1", "10.0.0.1"));
        lab.put([namespace("a", &[])]);
        found.push(lab.passes("10.0.1.1", "10.0.0.1"));
        assert_eq!(found, wanted, "{selector}");
    }
}

#[test]
fn requirements_on_absent_labels_of_pods() {
    let expression = |operator: &str, values: &[&str]| json!({"matchExpressions": [{"key": "app", "operator": operator, "values": values}]});
    // Columns: a selector; whether it selects app=web, app=db, and no labels, as peers and as
    // restricted pods.
    let table = [
        (expression("NotIn", &["web"]), [false, true, true]),
        (expression("DoesNotExist", &[]), [false, false, true]),
        (expression("Exists", &[]), [true, true, false]),
        (expression("In", &["web", "none"]), [true, false, false]),
    ];
    for (selector, wanted) in table {
        let from = json!({"podSelector": {}, "ingress": [{"from": [{"podSelector": selector}]}]});
        let closed = json!({"podSelector": selector});
        let lab = Lab::with([
            policy("shop/in", &from),
            policy("other/closed", &closed),
            object(pod("shop/target", &[], &["10.0.0.1"])),
            object(elsewhere(pod("shop/web", WEB, &["10.0.1.0"]))),
            object(elsewhere(pod("shop/db", DB, &["10.0.1.1"]))),
            object(elsewhere(pod("shop/bare", &[], &["10.0.1.2"]))),
            object(pod("other/web", WEB, &["10.0.2.0"])),
            object(pod("other/db", DB, &["10.0.2.1"])),
            object(pod("other/bare", &[], &["10.0.2.2"])),
        ]);
        for (n, wanted) in wanted.into_iter().enumerate() {
            let found = lab.passes(&format!("10.0.1.{n}"), "10.0.0.1 80/TCP");
            assert_eq!(found, wanted, "peer {n}, {selector}");
            let found = lab.passes("192.0.2.1", &format!("10.0.2.{n} 80/TCP"));
            assert_eq!(found, !wanted, "restricted {n}, {selector}");
        }
    }
}
