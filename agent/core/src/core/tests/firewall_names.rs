//! Names of EgressFirewalls: answers of trusted DNS servers label addresses before the answers go
//! out.

mod growth;
mod restart;
mod servers;

use std::{net::IpAddr, time::Duration};

use dns_policy::{mapping::Realised, name::Fqdn};

use super::{
    restart::again,
    scenario::{Node, mapping, spec},
};
use crate::{
    core::{CoreConfig, Effect, Event, event::CleanNames},
    name_objects::{MAX_OBJECTS, ResolvedName, WantedNames},
    source_event::SourceEvent,
};

/// DNS for any name, at a trusted and at another server; `*.cilium.io` by toFQDNs.
const DNS: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: dns}
spec:
  endpointSelector: {}
  egress:
  - toCIDR: [10.9.0.53/32, 10.9.0.54/32]
    toPorts:
    - ports: [{port: "53", protocol: ANY}]
      rules: {dns: [{matchPattern: "*"}]}
  - toFQDNs: [{matchPattern: "*.cilium.io"}]
---
"#;

fn firewall(rules: &[&str]) -> String {
    let rules: String = rules
        .iter()
        .map(|rule| format!("  - {{{rule}}}\n"))
        .collect();
    format!(
        r"
apiVersion: k8s.ovn.org/v1
kind: EgressFirewall
metadata: {{name: default, namespace: default}}
spec:
  egress:
{rules}"
    )
}

fn example() -> String {
    firewall(&[
        "type: Allow, to: {dnsName: '*.example.com'}",
        "type: Allow, to: {dnsName: www.example.com}",
        "type: Deny, to: {cidrSelector: 0.0.0.0/0}",
    ])
}

fn config() -> CoreConfig {
    CoreConfig {
        dns_servers: vec!["10.9.0.53:53".parse().unwrap()],
        restore_grace: Duration::from_secs(10),
        ..CoreConfig::default()
    }
}

fn node(policies: &str) -> Node {
    Node::synced(config(), &format!("{DNS}{policies}"))
}

/// Learns an answer of the server that does not count.
fn learn_untrusted(node: &mut Node, name: &str, address: &str) -> Realised {
    let mut answer = mapping(node, name, &[address]);
    answer.server = "10.9.0.54:53".parse().unwrap();
    let (_, result) = node.mapping(answer);
    assert_eq!(result.realised, Realised::Yes);
    if node
        .core
        .state
        .resolved
        .used()
        .matches(&Fqdn::normalise(name))
    {
        assert_eq!(
            result.lease_end, None,
            "a lease would cover a trusted answer"
        );
    }
    result.realised
}

/// Labels of names that an address has in the datapath.
#[track_caller]
fn labels(node: &Node, address: &str) -> Vec<String> {
    let Some(identity) = node.identity(address) else {
        return Vec::new();
    };
    let labels = node.core.state.policy.labels_of(identity).unwrap();
    let of_names = labels.texts().into_iter();
    of_names
        .filter(|label| label.starts_with("dnsname") || label.starts_with("fqdn"))
        .collect()
}

fn alive(node: &mut Node, addresses: &[&str]) {
    let address = |text: &str| text.parse::<IpAddr>().unwrap();
    let alive = addresses.iter().map(|a| (address("10.0.0.7"), address(a)));
    node.event(Event::Liveness {
        gc_start: node.now,
        alive: alive.collect(),
        complete: true,
    });
}

fn object(key: &str, name: &str, addresses: &[&str]) -> SourceEvent<ResolvedName> {
    SourceEvent::Apply(ResolvedName {
        key: key.to_owned(),
        name: Fqdn::normalise(name),
        addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
    })
}

#[test]
fn an_answer_is_released_once_its_addresses_have_the_labels_of_its_name() {
    let mut node = node(&example());
    let (steps, result) = node.learn("SUB1.example.com", &["1.1.1.1", "1.1.1.2"]);
    assert!(!steps.is_empty());
    assert_eq!(result.realised, Realised::Yes);
    assert!(result.lease_end.is_some());
    for address in ["1.1.1.1", "1.1.1.2"] {
        assert_eq!(labels(&node, address), ["dnsname:*.example.com"]);
    }
    node.learn("www.example.com", &["1.1.1.1"]);
    assert_eq!(
        labels(&node, "1.1.1.1"),
        ["dnsname:*.example.com", "dnsname:www.example.com"]
    );
    for (name, address) in [
        ("sub2.sub1.example.com", "2.2.2.1"),
        ("example.com", "2.2.2.2"),
        ("example.org", "2.2.2.3"),
    ] {
        node.learn(name, &[address]);
        assert_eq!(labels(&node, address), [""; 0], "{name}");
    }
    let observations = node.core.summary().counters.observations;
    assert_eq!((observations.taken, observations.unmatched), (2, 3));
}

#[test]
fn a_new_address_of_a_known_name_is_one_write_and_nothing_else() {
    let mut node = node(&example());
    node.learn("sub1.example.com", &["1.1.1.1"]);
    let (steps, _) = node.learn("sub1.example.com", &["1.1.1.2"]);
    assert_eq!(steps.len(), 1, "{steps:?}");
}

#[test]
fn a_server_that_is_not_trusted_labels_nothing_and_is_counted() {
    let mut node = node(&example());
    learn_untrusted(&mut node, "www.example.com", "6.6.6.6");
    assert_eq!(labels(&node, "6.6.6.6"), [""; 0]);
    assert_eq!(node.core.summary().counters.observations.untrusted, 1);
    let observed = |effect: &Effect| matches!(effect, Effect::Observed(_));
    assert!(!node.effects.iter().any(observed));
    // The answer counts for toFQDNs, whose DNS rules allow the server.
    learn_untrusted(&mut node, "www.cilium.io", "6.6.6.7");
    assert_eq!(labels(&node, "6.6.6.7"), ["fqdn:*.cilium.io"]);
}

#[test]
fn a_server_that_is_not_trusted_does_not_keep_an_address() {
    let mut node = node(&example());
    node.learn("www.example.com", &["1.1.1.1"]);
    let learned = node.now;
    node.now = learned.plus_secs(100);
    learn_untrusted(&mut node, "www.example.com", "1.1.1.1");
    node.tick(learned.plus_secs(125));
    node.now = learned.plus_secs(126);
    alive(&mut node, &[]);
    assert_eq!(labels(&node, "1.1.1.1"), [""; 0]);
}

#[test]
fn the_resolver_gets_what_counts_and_what_firewalls_use() {
    let mut node = node(&example());
    node.learn("sub1.example.com", &["1.1.1.1", "2001:db8::1"]);
    let observed: Vec<_> = node
        .effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::Observed(observation) => Some(observation.clone()),
            _ => None,
        })
        .collect();
    let [v4, v6] = observed.as_slice() else {
        panic!("{observed:?}");
    };
    assert_eq!(v4.name, Fqdn::normalise("sub1.example.com"));
    assert_eq!(v4.addresses, ["1.1.1.1".parse::<IpAddr>().unwrap()]);
    assert_eq!(v6.addresses, ["2001:db8::1".parse::<IpAddr>().unwrap()]);
    assert_eq!(v4.ttl, Duration::from_secs(60));
    node.policy(&firewall(&["type: Deny, to: {dnsName: a.b}"]));
    node.tick(node.now);
    let published = node.core.state.resolved.used().wanted();
    let texts: Vec<&str> = published.iter().map(Fqdn::as_str).collect();
    assert_eq!(texts, ["a.b."]);
}

/// The names that the resolver got last.
fn wanted(node: &Node) -> Option<WantedNames> {
    node.effects.iter().rev().find_map(|effect| match effect {
        Effect::Resolver { names, .. } => Some((**names).clone()),
        _ => None,
    })
}

#[test]
fn the_resolver_removes_no_object_before_every_document_is_read() {
    let mut node = again(&node(&example()), config(), &[107]);
    node.begin();
    node.event(Event::PoliciesUncertain(true));
    assert!(wanted(&node).is_none_or(|wanted| !wanted.is_complete));
    node.policy(&format!(
        "{DNS}{}",
        firewall(&["type: Deny, to: {dnsName: a.b}"])
    ));
    assert!(wanted(&node).is_none_or(|wanted| !wanted.is_complete));
    node.endpoint(spec("web", 7, "app=web"));
    node.sync();
    let some = wanted(&node).unwrap();
    assert_eq!((some.names.len(), some.is_complete), (1, false));
    node.event(Event::PoliciesUncertain(false));
    assert!(wanted(&node).unwrap().is_complete);
}

#[test]
fn a_firewall_that_comes_later_means_what_trusted_servers_said_before() {
    let mut node = node("");
    node.learn("sub1.example.com", &["1.1.1.1"]);
    node.learn("www.example.com", &["1.1.1.2"]);
    learn_untrusted(&mut node, "sub1.example.com", "6.6.6.6");
    assert_eq!(labels(&node, "1.1.1.1"), [""; 0]);
    node.policy(&example());
    assert_eq!(labels(&node, "1.1.1.1"), ["dnsname:*.example.com"]);
    assert_eq!(labels(&node, "6.6.6.6"), [""; 0]);
    node.policy(&firewall(&["type: Allow, to: {dnsName: www.example.com}"]));
    assert_eq!(labels(&node, "1.1.1.1"), [""; 0]);
    assert_eq!(labels(&node, "1.1.1.2"), ["dnsname:www.example.com"]);
    node.event(Event::Policies(SourceEvent::Delete(
        "EgressFirewall/default/default".to_owned(),
    )));
    assert_eq!(labels(&node, "1.1.1.2"), [""; 0]);
    assert_eq!(node.core.summary().firewalls.addresses, 0);
}

#[test]
fn an_address_stays_until_its_lease_and_its_connections_ended() {
    let mut node = node(&example());
    node.learn("www.example.com", &["1.1.1.1", "1.1.1.2"]);
    let learned = node.now;
    node.tick(learned.plus_secs(124));
    alive(&mut node, &[]);
    assert!(!labels(&node, "1.1.1.1").is_empty(), "it is promised");
    node.tick(learned.plus_secs(125));
    for after in [126, 500] {
        node.now = learned.plus_secs(after);
        alive(&mut node, &["1.1.1.1"]);
        assert!(!labels(&node, "1.1.1.1").is_empty(), "a download goes on");
        assert!(labels(&node, "1.1.1.2").is_empty());
    }
    node.now = learned.plus_secs(600);
    alive(&mut node, &[]);
    assert!(labels(&node, "1.1.1.1").is_empty());
}

#[test]
fn an_address_in_a_refused_prefix_is_never_opened_and_may_be_denied() {
    const METADATA: &str = "169.254.169.254";
    let mut node = node(&example());
    let (_, result) = node.learn("www.example.com", &[METADATA]);
    assert_eq!(result.realised, Realised::Yes);
    assert_eq!(node.identity(METADATA), None);
    node.policy(&firewall(&[
        "type: Deny, to: {dnsName: metadata.example.com}",
        "type: Allow, to: {dnsName: '*.example.com'}",
    ]));
    node.learn("www.example.com", &[METADATA]);
    assert_eq!(node.identity(METADATA), None);
    let (_, result) = node.learn("metadata.example.com", &[METADATA]);
    assert_eq!(result.realised, Realised::Yes);
    assert_eq!(
        labels(&node, METADATA),
        ["dnsname-closed:metadata.example.com"]
    );
}

#[test]
fn a_pod_that_goes_leaves_what_others_were_promised() {
    let mut node = node(&example());
    node.endpoint(spec("other", 8, "app=web"));
    node.learn("www.example.com", &["1.1.1.1"]);
    let learned = node.now;
    node.event(Event::Endpoints(SourceEvent::Delete("web".to_owned())));
    node.tick(learned.plus_secs(124));
    assert!(!labels(&node, "1.1.1.1").is_empty());
}

#[test]
fn cleaned_names_close() {
    let mut node = node(&example());
    node.learn("www.example.com", &["1.1.1.1"]);
    let learned = node.now;
    node.tick(learned.plus_secs(200));
    // An object of the store does not count as an answer.
    node.event(Event::Resolved(vec![object(
        "ns/dns-1",
        "*.example.com.",
        &["1.1.1.2"],
    )]));
    node.event(Event::CleanNames(CleanNames {
        pattern: Some("*.example.com".to_owned()),
        endpoint: None,
    }));
    assert_eq!(labels(&node, "1.1.1.1"), [""; 0]);
    assert_eq!(labels(&node, "1.1.1.2"), ["dnsname:*.example.com"]);
}

#[test]
fn objects_of_the_store_open_names_before_anyone_asks() {
    let mut node = node(&example());
    node.event(Event::Resolved(vec![
        SourceEvent::Init,
        object(
            "ns/dns-1",
            "*.example.com.",
            &["1.1.1.1", "10.0.0.7", "127.0.0.1"],
        ),
        object("ns/dns-2", "other.example.org.", &["1.1.1.2"]),
        SourceEvent::InitDone,
    ]));
    assert_eq!(labels(&node, "1.1.1.1"), ["dnsname:*.example.com"]);
    assert_eq!(labels(&node, "1.1.1.2"), [""; 0], "no firewall uses it");
    assert_eq!(labels(&node, "10.0.0.7"), [""; 0], "a pod's");
    node.policy(&firewall(&[
        "type: Allow, to: {dnsName: other.example.org}",
    ]));
    assert_eq!(labels(&node, "1.1.1.1"), [""; 0]);
    assert_eq!(labels(&node, "1.1.1.2"), ["dnsname:other.example.org"]);
    // Another version of the object has another address; a connection keeps the former one.
    node.event(Event::Resolved(vec![object(
        "ns/dns-2",
        "other.example.org.",
        &["1.1.1.3"],
    )]));
    assert_eq!(labels(&node, "1.1.1.3"), ["dnsname:other.example.org"]);
    node.tick(node.now.plus_secs(1));
    node.now = node.now.plus_secs(1);
    alive(&mut node, &["1.1.1.2"]);
    assert_eq!(labels(&node, "1.1.1.2"), ["dnsname:other.example.org"]);
    node.now = node.now.plus_secs(100);
    alive(&mut node, &[]);
    assert_eq!(labels(&node, "1.1.1.2"), [""; 0]);
    // A removed object keeps nothing.
    node.event(Event::Resolved(vec![
        SourceEvent::Init,
        SourceEvent::InitDone,
    ]));
    node.tick(node.now.plus_secs(1));
    node.now = node.now.plus_secs(1);
    alive(&mut node, &[]);
    assert_eq!(node.core.summary().firewalls.addresses, 0);
}

#[test]
fn objects_beyond_the_limit_are_counted_and_not_read() {
    let mut node = node(&example());
    let left_out = |node: &Node| node.core.summary().firewalls.objects_left_out;
    let one = |n: usize| object(&format!("ns/dns-{n}"), &format!("n{n}.test."), &[]);
    let all = (0..MAX_OBJECTS).map(one);
    node.event(Event::Resolved(all.collect()));
    assert_eq!(left_out(&node), 0);
    let late = object("ns/late", "www.example.com.", &["1.1.1.1"]);
    for _ in 0..2 {
        node.event(Event::Resolved(vec![one(MAX_OBJECTS), late.clone()]));
        assert_eq!(left_out(&node), 2);
    }
    assert_eq!(labels(&node, "1.1.1.1"), [""; 0]);
    // A removed object leaves room.
    let gone = SourceEvent::Delete("ns/dns-1".to_owned());
    node.event(Event::Resolved(vec![gone, late]));
    assert_eq!(left_out(&node), 1);
    assert!(!labels(&node, "1.1.1.1").is_empty());
    let gone = SourceEvent::Delete(format!("ns/dns-{MAX_OBJECTS}"));
    node.event(Event::Resolved(vec![gone]));
    assert_eq!(left_out(&node), 0);
}

#[test]
fn an_endpoint_names_the_firewall_that_restricts_it() {
    let mut node = Node::synced(config(), &example());
    let view = |node: &Node| node.core.snapshot().endpoints.remove(0);
    assert!(!view(&node).egress_enforced);
    assert_eq!(view(&node).firewalls, ["EgressFirewall/default/default"]);
    node.event(Event::Policies(SourceEvent::Delete(
        "EgressFirewall/default/default".to_owned(),
    )));
    assert_eq!(view(&node).firewalls, [""; 0]);
}

#[test]
fn the_circuit_breaker_takes_no_name_that_a_firewall_denies() {
    let rules = firewall(&[
        "type: Deny, to: {dnsName: bad.example.com}",
        "type: Allow, to: {dnsName: one.example.com}",
        "type: Allow, to: {dnsName: two.example.com}",
    ]);
    let config = CoreConfig {
        max_fqdn_identities: Some(0),
        ..config()
    };
    let mut node = Node::synced(config, &format!("{DNS}{rules}"));
    node.learn("one.example.com", &["1.1.1.1"]);
    node.learn("two.example.com", &["1.1.1.1"]);
    assert_eq!(labels(&node, "1.1.1.1"), ["dnsname:one.example.com"]);
    node.learn("bad.example.com", &["1.1.1.1"]);
    assert_eq!(
        labels(&node, "1.1.1.1"),
        ["dnsname:bad.example.com", "dnsname:one.example.com"]
    );
}

#[test]
fn one_name_has_a_limited_number_of_addresses() {
    let config = CoreConfig {
        max_ips_per_name: 3,
        lease_slack: Duration::ZERO,
        ..config()
    };
    let mut node = Node::synced(config, &format!("{DNS}{}", example()));
    for n in 1..100 {
        node.learn("www.example.com", &[&format!("1.1.1.{n}")]);
    }
    assert!(node.core.summary().firewalls.addresses <= 6);
    assert!(!labels(&node, "1.1.1.1").is_empty(), "it is promised");
}

#[test]
fn many_names_of_one_wildcard_are_one_identity() {
    let mut node = node(&example());
    for n in 0..200 {
        let address = format!("1.1.{}.{}", n / 100, n % 100 + 1);
        node.learn(&format!("n{n}.example.com"), &[&address]);
    }
    let identities = node.core.snapshot().identities;
    let of_names = identities.iter().filter(|identity| {
        let mut labels = identity.labels.iter();
        labels.any(|label| label.starts_with("dnsname:"))
    });
    assert_eq!(of_names.count(), 1);
}

#[test]
fn pods_that_come_and_go_fill_nothing() {
    let config = CoreConfig {
        ipcache_max: 64,
        ..config()
    };
    let mut node = Node::synced(config, &format!("{DNS}{}", example()));
    for round in 0..10 {
        for n in 0..20 {
            let name = format!("n{n}r{round}.example.com");
            let mut answer = mapping(&node, &name, &[&format!("1.1.{round}.{n}")]);
            answer.ttl = 604_800;
            node.mapping(answer);
        }
        node.event(Event::Endpoints(SourceEvent::Delete("web".to_owned())));
        node.now = node.now.plus_secs(1);
        node.tick(node.now);
        node.now = node.now.plus_secs(1);
        alive(&mut node, &[]);
        node.endpoint(spec("web", 7, "app=web"));
    }
    // Pairs under a lease stay; leases are given while there is room.
    let kept = node.core.summary().firewalls.addresses;
    assert!(kept <= 64, "{kept}");
}

/// The answer of another server keeps the address for toFQDNs.
#[test]
fn a_firewall_that_comes_later_does_not_revive_an_answer_that_ended() {
    let mut node = node("");
    node.learn("www.example.com", &["1.1.1.1"]);
    let learned = node.now;
    for after in [100, 150, 200, 250] {
        node.tick(learned.plus_secs(after));
        learn_untrusted(&mut node, "www.example.com", "1.1.1.1");
        node.now = node.now.plus_secs(1);
        alive(&mut node, &[]);
    }
    node.policy(&example());
    assert_eq!(labels(&node, "1.1.1.1"), [""; 0]);
}

#[test]
fn the_lease_of_another_server_does_not_keep_an_address_for_a_firewall_that_comes_later() {
    let mut node = node("");
    node.learn("www.example.com", &["1.1.1.1"]);
    let learned = node.now;
    let mut answer = mapping(&node, "www.example.com", &["1.1.1.1"]);
    answer.server = "10.9.0.54:53".parse().unwrap();
    answer.ttl = 3600;
    node.mapping(answer);
    node.policy(&example());
    assert!(!labels(&node, "1.1.1.1").is_empty());
    node.tick(learned.plus_secs(130));
    node.now = learned.plus_secs(131);
    alive(&mut node, &[]);
    assert_eq!(labels(&node, "1.1.1.1"), [""; 0]);
}
