//! Round trip, and files of other writers.

use std::collections::BTreeSet;

use dns_policy::rule::{NameRule, NameRules, PortRules, SelectorRule, Servers, Transport};

use super::*;

fn file() -> EndpointFile {
    let rule = |servers, names| SelectorRule {
        selector: "k8s:app=dns".into(),
        servers,
        names,
    };
    let names = ["Sub.ubuntu.com", "a.b"].map(|n| NameRule::Name(n.into()));
    let patterns = ["*.cilium.io", "**.x.org", "a*b"].map(|n| NameRule::Pattern(n.into()));
    let names = names.into_iter().chain(patterns).collect();
    let ids = BTreeSet::from([IdentityId(300)]);
    let rules = vec![
        rule(Servers::Identities(ids), NameRules::Names(names)),
        rule(Servers::Any, NameRules::All),
    ];
    EndpointFile {
        id: EndpointId(7),
        key: "cli/ns1/eth0".into(),
        identity: IdentityId(256),
        labels: LabelSet::parse(&["k8s:app=web", "k8s:io.kubernetes.pod.namespace=shop"]).unwrap(),
        ipv4: Some("10.0.0.7".parse().unwrap()),
        ipv6: Some("fd00::7".parse().unwrap()),
        interface: PodInterface {
            ifindex: 12,
            ifname: "lxc7".into(),
            mac: [2, 0, 0, 0, 0, 7],
            node_mac: [2, 0, 0, 0, 0, 8],
            on_bridge: false,
            link: Default::default(),
        },
        netns: "/run/netns/ns1".into(),
        pod: None,
        history: vec![HistoryEntry {
            name: Fqdn::normalise("a.b"),
            lookup: 1_700_000_000_000_000_001,
            expires: 1_700_000_060_000_000_001,
            ttl: 60,
            addresses: vec!["1.1.1.1".parse().unwrap(), "2001:db8::1".parse().unwrap()],
            trusted_until: 1_700_000_120_000_000_001,
        }],
        zombies: vec![ZombieEntry {
            address: "2.2.2.2".parse().unwrap(),
            names: vec![Fqdn::normalise("a.b")],
            trusted: vec![Fqdn::normalise("a.b")],
            alive_at: 0,
            delete_pending_at: 1_700_000_000_000_000_000,
        }],
        rules: Some(RulesInFile {
            boot_id: "b".into(),
            start: 3,
            revision: 9,
            rules: EndpointRules {
                ports: vec![PortRules {
                    port: 53,
                    transport: Transport::Udp,
                    rules,
                }],
            },
        }),
    }
}

#[test]
fn written_versions_are_read_back() {
    let servers = [(IdentityId(300), vec!["10.0.0.53/32".parse().unwrap()])].into();
    let text = render(&file(), &servers, 10);
    assert_eq!(parse(&text).unwrap(), file());
}

/// The proxy reads a file only up to the learned names.
#[test]
fn learned_names_come_last() {
    let servers = [(IdentityId(300), vec!["10.0.0.53/32".parse().unwrap()])].into();
    let text = render(&file(), &servers, 10);
    let last: Vec<_> = ["DNSHistory", "DNSZombies"]
        .map(|key| text.find(key))
        .into();
    assert!(last.iter().all(|at| *at > text.find("HoldfastKey")));
}

#[test]
fn ciliums_key_holds_addresses_and_expressions() {
    let servers = [(IdentityId(300), vec!["10.0.0.53/32".parse().unwrap()])].into();
    let text = render(&file(), &servers, 10);
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let rules = &json["DNSRulesV2"]["17891381"];
    assert_eq!(rules[0]["IPs"]["10.0.0.53"], serde_json::json!({}));
    let re = rules[0]["Re"].as_str().unwrap();
    assert!(
        re.starts_with("^(?:sub[.]ubuntu[.]com[.]|a[.]b[.]|[-a-zA-Z0-9_]*[.]cilium[.]io[.]|"),
        "{re}"
    );
    assert_eq!(rules[1]["Re"], "(?:)");
    assert_eq!(rules[1]["IPs"], serde_json::Value::Null);
    assert_eq!(json["SecLabel"]["id"], 256);
    assert_eq!(
        (&json["K8sNamespace"], &json["K8sPodName"]),
        (&"shop".into(), &"eth0".into())
    );
    let of_pod = EndpointFile {
        pod: Some("shop/web-1".to_owned()),
        ..file()
    };
    let of_pod: serde_json::Value = serde_json::from_str(&render(&of_pod, &servers, 10)).unwrap();
    assert_eq!(of_pod["K8sPodName"], "web-1");
    // Without our key the same rules come from Cilium's key.
    let mut without = json.clone();
    without.as_object_mut().unwrap().remove("HoldfastDNSRules");
    let rules = parse(&without.to_string()).unwrap().rules.unwrap().rules;
    let NameRules::Names(names) = &rules.ports[0].rules[0].names else {
        panic!("{rules:?}")
    };
    assert_eq!(names.len(), 5);
    assert!(matches!(&rules.ports[0].rules[0].servers, Servers::Prefixes(p) if p.len() == 1));
}

#[test]
fn a_server_without_a_prefix_is_not_any_server() {
    let text = render(&file(), &ServerAddresses::new(), 10);
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["DNSRulesV2"]["17891381"].as_array().unwrap().len(), 1);
}

#[test]
fn refuses_a_newer_version_and_garbage() {
    let mut json: serde_json::Value =
        serde_json::from_str(&render(&file(), &ServerAddresses::new(), 10)).unwrap();
    json["HoldfastDNSRules"]["version"] = 2.into();
    assert!(matches!(parse(&json.to_string()), Err(FileError::Newer(2))));
    json["HoldfastDNSRules"]["version"] = 1.into();
    json["IPv4"] = "ten".into();
    assert!(
        parse(&json.to_string())
            .unwrap_err()
            .to_string()
            .contains("IPv4")
    );
    assert!(parse("{").is_err());
}
