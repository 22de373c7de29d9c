//! EgressFirewalls as tiers, what is refused, and the warnings.

use serde_json::{Value, json};

use crate::policy::{
    document::{PolicyDocument, PolicyError},
    parse::parse_documents,
    rule::{TierAction, TierRule},
};

fn document(egress: &Value) -> Value {
    json!({
        "apiVersion": "k8s.ovn.org/v1",
        "kind": "EgressFirewall",
        "metadata": {"name": "default", "namespace": "shop"},
        "spec": {"egress": egress},
    })
}

fn read(document: &Value) -> Result<PolicyDocument, PolicyError> {
    let text = document.to_string();
    parse_documents(&text, "firewall.yaml").remove(0)
}

#[track_caller]
fn tier(egress: &Value) -> (Vec<String>, Vec<String>) {
    let read = read(&document(egress)).unwrap();
    assert_eq!(read.key, "EgressFirewall/shop/default");
    let [rule] = read.rules() else {
        panic!("not one rule");
    };
    let subject = rule.subject.to_string();
    assert_eq!(subject, "k8s:io.kubernetes.pod.namespace=shop");
    assert!(!rule.egress.default_deny && rule.egress.peers.is_empty());
    assert!(!rule.ingress.default_deny && rule.ingress.peers.is_empty());
    let shown = rule.tier.iter().map(|rule| shown(rule)).collect();
    (shown, read.warnings)
}

/// A rule in the form `path action selector ports`.
fn shown(rule: &TierRule) -> String {
    let action = match rule.action {
        TierAction::Pass => "pass",
        TierAction::Deny => "deny",
    };
    let selectors: Vec<String> = rule.selectors.iter().map(ToString::to_string).collect();
    let ports: Vec<String> = rule.ports.iter().map(ToString::to_string).collect();
    let text = format!(
        "{} {action} {} {}",
        rule.path,
        selectors.join("|"),
        ports.join(",")
    );
    text.trim_end().to_owned()
}

/// The refusal of a list with one rule.
#[track_caller]
fn refusal(rule: &Value) -> String {
    read(&document(&json!([rule]))).unwrap_err().to_string()
}

fn allow(to: &Value) -> Value {
    json!({"type": "Allow", "to": to})
}

#[test]
fn an_openshift_firewall_is_read_in_order() {
    let (rules, warnings) = tier(&json!([
        {"type": "Allow", "to": {"dnsName": "WWW.Example.com."}, "ports": [
            {"protocol": "TCP", "port": 443}, {"protocol": "SCTP", "port": 7}]},
        {"type": "Allow", "to": {"dnsName": "*.example.com"}},
        {"type": "Allow", "to": {"nodeSelector": {
            "matchLabels": {"region": "east"},
            "matchExpressions": [{"key": "role", "operator": "Exists"}]}}, "ports": []},
        {"type": "Deny", "to": {"cidrSelector": "2001:db8::/32"}, "ports": null},
        {"type": "Deny", "to": {"cidrSelector": "0.0.0.0/0"}},
    ]));
    assert_eq!(
        rules,
        [
            "spec.egress[0] pass dnsname:www.example.com TCP 443,SCTP 7",
            "spec.egress[1] pass dnsname:*.example.com",
            "spec.egress[2] pass node:region=east,node:role",
            "spec.egress[3] deny cidr:2001:db8::/32",
            "spec.egress[4] deny cidr:0.0.0.0/0",
        ]
    );
    assert_eq!(warnings, [""; 0]);
    assert_eq!(tier(&json!([])).0, [""; 0]);
}

#[test]
fn authors_are_warned_of_host_bits_and_of_denied_names() {
    let (rules, warnings) = tier(&json!([
        {"type": "Deny", "to": {"cidrSelector": "10.1.2.3/8"}},
        {"type": "Deny", "to": {"dnsName": "bad.example.com"}},
    ]));
    assert_eq!(
        rules,
        [
            "spec.egress[0] deny cidr:10.0.0.0/8",
            "spec.egress[1] deny dnsname:bad.example.com",
        ]
    );
    let [bits, name] = warnings.as_slice() else {
        panic!("{warnings:?}");
    };
    assert!(bits.starts_with("spec.egress[0].to.cidrSelector: `10.1.2.3/8` has bits beyond"));
    assert!(bits.ends_with("write 10.0.0.0/8"), "{bits}");
    assert!(name.starts_with("spec.egress[1].to.dnsName: `bad.example.com` is denied by the"));
}

#[test]
fn every_refusal_has_the_document_the_field_and_a_remedy() {
    let star = refusal(&allow(&json!({"dnsName": "*.com"})));
    assert_eq!(
        star,
        "firewall.yaml (EgressFirewall/shop/default): spec.egress[0].to.dnsName: `*.com` has one \
         label after the star; name a domain of at least two"
    );
    for (rule, field, remedy) in [
        (
            json!({"type": "allow", "to": {"dnsName": "a.b"}}),
            "spec.egress[0].type: is `allow`",
            "Allow or Deny",
        ),
        (
            json!({"type": "Deny\n", "to": {"dnsName": "a.b"}}),
            "spec.egress[0].type",
            "Allow or Deny",
        ),
        (
            json!({"to": {"dnsName": "a.b"}}),
            "spec.egress[0].type: is missing",
            "Allow",
        ),
        (
            json!({"type": "Allow"}),
            "spec.egress[0].to: is missing",
            "dnsName",
        ),
        (
            allow(&json!({})),
            "spec.egress[0].to: has not exactly one",
            "each destination is a rule",
        ),
        (
            allow(&json!({"dnsName": "a.b", "cidrSelector": "10.0.0.0/8"})),
            "spec.egress[0].to: has not exactly one",
            "each destination is a rule",
        ),
        (
            allow(&json!({"nodeSelector": {}, "cidrSelector": "10.0.0.0/8"})),
            "spec.egress[0].to: has not exactly one",
            "each destination is a rule",
        ),
        (
            allow(&json!({"podSelector": {}})),
            "spec.egress[0].to.podSelector",
            "nodeSelector",
        ),
        (
            allow(&json!({"cidrSelector": "10.0.0.1"})),
            "spec.egress[0].to.cidrSelector",
            "192.0.2.1/32",
        ),
        (
            allow(&json!({"cidrSelector": "10.0.0.0/33"})),
            "spec.egress[0].to.cidrSelector",
            "192.0.2.1/32",
        ),
        (
            allow(&json!({"nodeSelector": {"matchExpressions": [{"key": "a", "operator": "in"}]}})),
            "spec.egress[0].to.nodeSelector.matchExpressions[0].operator",
            "In, NotIn",
        ),
    ] {
        let error = refusal(&rule);
        assert!(error.contains(&format!(": {field}")), "{error}");
        assert!(error.contains(remedy), "{error}");
    }
}

#[test]
fn ports_are_numbers_and_protocols_are_spelt_whole() {
    let port = |port: Value| {
        refusal(&json!({"type": "Allow", "to": {"cidrSelector": "10.0.0.0/8"}, "ports": [port]}))
    };
    for (given, field) in [
        (json!({"protocol": "TCP", "port": 0}), "port: is 0"),
        (json!({"protocol": "TCP", "port": 65536}), "port: is 65536"),
        (json!({"protocol": "TCP", "port": -1}), "port: is -1"),
        (json!({"protocol": "TCP", "port": "80"}), "port: is \"80\""),
        (json!({"protocol": "TCP"}), "port: is missing"),
        (
            json!({"protocol": "TCPX", "port": 1}),
            "protocol: is `TCPX`",
        ),
        (json!({"protocol": "tcp", "port": 1}), "protocol: is `tcp`"),
        (json!({"port": 1}), "protocol: is missing"),
        (
            json!({"protocol": "TCP", "port": 1, "endPort": 2}),
            "endPort",
        ),
    ] {
        let error = port(given);
        let field = format!("spec.egress[0].ports[0].{field}");
        assert!(error.contains(&field), "{error}");
    }
}

#[test]
fn names_are_those_that_the_definition_accepts() {
    let long_label = "a".repeat(63);
    let long_name = format!("{0}.{0}.{0}.{1}", long_label, "a".repeat(61));
    assert_eq!(long_name.len(), 253);
    for good in [
        "www.example.com",
        "example.com.",
        "*.example.com",
        "*.a-b.c0.",
        "1.2",
        "xn--bcher-kva.example",
        &format!("{long_label}.com"),
        &long_name,
        &format!("{long_name}."),
    ] {
        tier(&json!([allow(&json!({"dnsName": good}))]));
    }
    for (bad, reason) in [
        ("com", "has one label"),
        ("com.", "has one label"),
        ("*.com", "has one label after the star"),
        ("*.com.", "has one label after the star"),
        ("*", "star elsewhere"),
        ("a.*.b", "star elsewhere"),
        ("*a.example.com", "star elsewhere"),
        ("*.*.example.com", "star elsewhere"),
        ("**.example.com", "star elsewhere"),
        ("", "is not a DNS name"),
        (".", "is not a DNS name"),
        ("*.", "star elsewhere"),
        ("a..b", "is not a DNS name"),
        ("www.example.com..", "is not a DNS name"),
        ("www.example.com\n", "is not a DNS name"),
        ("-a.b", "is not a DNS name"),
        ("a-.b", "is not a DNS name"),
        ("a_b.c", "is not a DNS name"),
        ("a b.c", "is not a DNS name"),
        ("bücher.example", "is not a DNS name"),
        (
            "192.0.2.1",
            "is an address and not a name; write cidrSelector: 192.0.2.1/32",
        ),
        ("192.0.2.1.", "cidrSelector: 192.0.2.1/32"),
        ("2001:db8::1", "cidrSelector: 2001:db8::1/128"),
        (&format!("a{long_label}.com"), "more than 63"),
        (&format!("a{long_name}"), "longer than 253"),
    ] {
        let error = refusal(&allow(&json!({"dnsName": bad})));
        assert!(error.contains("spec.egress[0].to.dnsName: `"), "{error}");
        assert!(error.contains(reason), "{bad}: {error}");
        assert!(!error.contains('\n'), "{error}");
    }
}

#[test]
fn a_namespace_has_one_firewall_of_at_most_8000_rules() {
    let mut named = document(&json!([]));
    named["metadata"]["name"] = json!("other");
    let error = read(&named).unwrap_err().to_string();
    assert!(error.contains("metadata.name: is `other`; name it `default`"));
    let rule = allow(&json!({"cidrSelector": "10.0.0.0/8"}));
    let (rules, _) = tier(&Value::Array(vec![rule.clone(); 8000]));
    assert_eq!(rules.len(), 8000);
    let many = document(&Value::Array(vec![rule; 8001]));
    let error = read(&many).unwrap_err().to_string();
    assert!(
        error.contains("spec.egress: has 8001 rules; write at most 8000"),
        "{error}"
    );
    let mut without = document(&json!([]));
    without["spec"] = json!({});
    let error = read(&without).unwrap_err().to_string();
    assert!(error.contains("spec.egress: is missing"), "{error}");
    without["spec"] = json!({"egress": [], "ingress": []});
    let error = read(&without).unwrap_err().to_string();
    assert!(
        error.contains("spec.ingress: is an unknown field"),
        "{error}"
    );
    without.as_object_mut().unwrap().remove("spec");
    let error = read(&without).unwrap_err().to_string();
    assert!(
        error.contains("spec: is missing; add spec.egress"),
        "{error}"
    );
}

#[test]
fn a_rule_after_one_that_covers_all_its_packets_is_warned_about() {
    let all = |block: &str| json!({"type": "Deny", "to": {"cidrSelector": block}});
    let name = || allow(&json!({"dnsName": "www.example.com"}));
    let block = |block: &str| allow(&json!({"cidrSelector": block}));
    let warnings = |rules: Value| tier(&rules).1;
    assert!(
        warnings(json!([
            name(),
            block("10.0.0.0/8"),
            all("0.0.0.0/0"),
            all("::/0")
        ]))
        .is_empty()
    );
    // A name may have IPv6 addresses, and a block of IPv6 consists of them.
    assert!(warnings(json!([all("0.0.0.0/0"), name(), block("fd00::/8")])).is_empty());
    assert_eq!(
        warnings(json!([all("0.0.0.0/0"), block("10.0.0.0/8"), name()])),
        [
            "spec.egress[1]: has no effect: rules before it cover all its addresses; put it before them"
        ]
    );
    assert_eq!(
        warnings(json!([
            all("0.0.0.0/0"),
            all("::/0"),
            name(),
            block("10.0.0.0/8")
        ])),
        [
            "spec.egress[2]: has no effect, like 1 later rule: rules before it cover all its \
             addresses; put it before them"
        ]
    );
    let some_ports = json!({"type": "Deny", "to": {"cidrSelector": "0.0.0.0/0"},
        "ports": [{"protocol": "TCP", "port": 25}]});
    assert!(warnings(json!([some_ports, block("10.0.0.0/8")])).is_empty());
}
