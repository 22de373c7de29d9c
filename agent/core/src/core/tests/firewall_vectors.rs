//! The cases about EgressFirewalls of `tests/data/dnsnameresolver.json`: destinations that
//! OVN-Kubernetes accepts, and names that it looks up.

use serde_json::{Value, json};

use crate::{
    fqdn::firewall_names::FirewallNames,
    policy::{
        document::{PolicyDocument, PolicyError},
        parse::parse_documents,
        rule::Rule,
    },
    selector::selector::Selector,
};

fn read(egress: &Value) -> Result<PolicyDocument, PolicyError> {
    let document = json!({
        "apiVersion": "k8s.ovn.org/v1",
        "kind": "EgressFirewall",
        "metadata": {"name": "default", "namespace": "shop"},
        "spec": {"egress": egress},
    });
    parse_documents(&document.to_string(), "firewall.yaml").remove(0)
}

/// The case of a cluster without `DNSNameResolver`, which is always there with Holdfast.
const WITHOUT_RESOLVER: &str = "efdst-02";

#[test]
fn destinations_and_names_are_those_of_ovn_kubernetes() {
    let text = include_str!("../../../tests/data/dnsnameresolver.json");
    let document: Value = serde_json::from_str(text).unwrap();
    let cases = document["cases"].as_array().unwrap();
    let (mut destinations, mut names) = (0, 0);
    for case in cases {
        let (id, expect) = (case["id"].as_str().unwrap(), &case["expect"]);
        match case["group"].as_str().unwrap() {
            "egressfirewall_destination" => {
                destinations += 1;
                let to = &case["given"]["to"];
                let result = read(&json!([{"type": "Allow", "to": to}]));
                let refused = expect["error"].as_bool().unwrap() && id != WITHOUT_RESOLVER;
                assert_eq!(result.is_err(), refused, "{id}: {result:?}");
                if let Ok(document) = result {
                    let selectors = &document.rules()[0].tier[0].selectors;
                    let said = match (&to["dnsName"], &to["cidrSelector"]) {
                        (Value::String(name), _) => format!("dnsname:{name}"),
                        (_, Value::String(block)) => format!("cidr:{block}"),
                        _ if to["nodeSelector"]["matchLabels"] == json!({}) => {
                            "<every node>".to_owned()
                        }
                        _ => "node:".to_owned(),
                    };
                    let first = selectors[0].to_string();
                    assert!(first.starts_with(&said), "{id}: {first}");
                }
            }
            "egressfirewall_names" => {
                names += 1;
                let rules = case["given"]["rules"].as_array().unwrap().iter();
                let rules = rules
                    .map(|rule| json!({"type": rule["type"], "to": {"dnsName": rule["dnsName"]}}));
                let rules: Vec<Value> = rules.collect();
                let document = read(&json!(rules)).unwrap();
                let mut used = FirewallNames::default();
                for selector in document.rules().iter().flat_map(Rule::selectors) {
                    if let Selector::DnsName(name) = selector {
                        used.add(name);
                    }
                }
                let wanted: Vec<String> = used.wanted().iter().map(ToString::to_string).collect();
                assert_eq!(json!(wanted), *expect, "{id}");
            }
            _ => {}
        }
    }
    assert_eq!((destinations, names), (9, 2));
}
