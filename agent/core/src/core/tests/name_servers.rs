//! Whose answers count for `toFQDNs`: `--tofqdns-servers`.

use dns_policy::mapping::{Mapping, Realised};
use shared_maps::EndpointId;

use super::{
    pods::Member,
    restart::again,
    scenario::{Node, mapping, spec},
    services::{pod, service, slice},
};
use crate::{
    core::{CoreConfig, Event, why::Target},
    endpoint::spec::EndpointSpec,
    fqdn::servers::NameServers,
    source_event::SourceEvent,
};

/// The tenant `a` runs a DNS server, and lets its pods ask it for a name that the policy of the
/// tenant `b` opens.
const TENANTS: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: dns, namespace: a}
spec:
  endpointSelector: {}
  egress:
  - toCIDR: [10.9.0.54/32]
    toPorts:
    - ports: [{port: "53", protocol: ANY}]
      rules: {dns: [{matchPattern: "*"}]}
---
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: web, namespace: b}
spec:
  endpointSelector: {}
  egress:
  - toCIDR: [10.9.0.53/32]
    toPorts:
    - ports: [{port: "53", protocol: ANY}]
      rules: {dns: [{matchPattern: "*"}]}
  - toFQDNs: [{matchName: api.example.com}]
"#;

const NAME: &str = "api.example.com";
const EVIL: &str = "6.6.6.6";
const GOOD: &str = "1.1.1.1";

fn config(name_servers: NameServers) -> CoreConfig {
    CoreConfig {
        dns_servers: vec!["10.9.0.53:53".parse().unwrap()],
        name_servers,
        ..CoreConfig::default()
    }
}

fn pod_of(namespace: &str, host: u8) -> EndpointSpec {
    let mut spec = spec(namespace, host, "app=web");
    let label = format!("k8s:io.kubernetes.pod.namespace={namespace}");
    spec.labels.push(label);
    spec
}

fn tenants(config: CoreConfig) -> Node {
    let mut node = Node::with(config, Default::default(), Default::default());
    sync(&mut node);
    node
}

fn sync(node: &mut Node) {
    node.begin();
    node.policy(TENANTS);
    node.endpoint(pod_of("a", 7));
    node.endpoint(pod_of("b", 8));
    node.sync();
}

/// The answer of a tenant's own server to its pod.
fn answer(node: &Node, tenant: &str, address: &str) -> Mapping {
    let mut answer = mapping(node, NAME, &[address]);
    let endpoints = node.core.snapshot().endpoints;
    let asks = endpoints.iter().find(|view| view.key == tenant).unwrap();
    answer.endpoint.id.0 = asks.id;
    answer.endpoint.ifindex = asks.ifindex;
    answer.endpoint.client = asks.ipv4.as_ref().unwrap().parse().unwrap();
    if tenant == "a" {
        answer.server = "10.9.0.54:53".parse().unwrap();
    }
    answer
}

fn is_open(node: &Node, address: &str) -> bool {
    node.identity(address).is_some()
}

#[test]
fn an_answer_of_another_tenants_server_opens_nothing_if_only_trusted_servers_count() {
    let mut node = tenants(config(NameServers::Trusted));
    let evil = answer(&node, "a", EVIL);
    let (steps, result) = node.mapping(evil.clone());
    assert!(steps.is_empty(), "{steps:?}");
    // The answer is released at once, and no lease covers another answer.
    assert_eq!((result.realised, result.lease_end), (Realised::Yes, None));
    let replayed = Mapping {
        replayed: true,
        ..evil.clone()
    };
    assert_eq!(node.mapping(replayed).1.realised, Realised::Yes);
    assert!(!is_open(&node, EVIL));
    assert_eq!(node.core.snapshot().names, []);
    assert_eq!(node.core.summary().counters.answers_untrusted, 2);
    // The tenant's own server is trusted: its answer alone opens the address that both servers
    // gave.
    let good = answer(&node, "b", GOOD);
    let (_, result) = node.mapping(good);
    assert!(result.lease_end.is_some());
    let mut same = evil;
    same.addresses = vec![GOOD.parse().unwrap()];
    node.mapping(same);
    assert!(is_open(&node, GOOD) && !is_open(&node, EVIL));
    node.now = node.now.plus_secs(400);
    node.event(Event::Tick);
    for _ in 0..3 {
        node.event(Event::Liveness {
            gc_start: node.now,
            alive: Vec::new(),
            complete: true,
        });
        node.now = node.now.plus_secs(30);
        node.event(Event::Tick);
    }
    assert!(!is_open(&node, GOOD), "the other answer keeps nothing");
}

#[test]
fn by_default_every_answer_counts_and_those_that_might_not_are_counted() {
    let mut node = tenants(config(NameServers::Any));
    let evil = answer(&node, "a", EVIL);
    let (_, result) = node.mapping(evil);
    assert!(result.lease_end.is_some());
    assert!(is_open(&node, EVIL));
    assert_eq!(node.core.summary().counters.answers_untrusted, 1);
    let good = answer(&node, "b", GOOD);
    node.mapping(good);
    assert_eq!(node.core.summary().counters.answers_untrusted, 1);
}

#[test]
fn status_and_why_name_the_server_that_does_not_count_and_the_remedy() {
    let mut node = tenants(config(NameServers::Trusted));
    let evil = answer(&node, "a", EVIL);
    node.mapping(evil);
    let said = node.core.policy_warnings().join("\n");
    for says in [
        "DNS server 10.9.0.54:53 is not trusted",
        "api.example.com, asked by a;",
        "let the pods ask a trusted server (10.9.0.53:53), or add 10.9.0.54:53 to --dns-server",
    ] {
        assert!(said.contains(says), "{said}");
    }
    let of = |tenant: &str, target: &Target| {
        let endpoints = node.core.snapshot().endpoints;
        let id = endpoints.iter().find(|view| view.key == tenant).unwrap().id;
        node.core
            .findings(EndpointId(id), target)
            .unwrap()
            .untrusted
    };
    for target in [
        Target::Name(dns_policy::name::Fqdn::normalise(NAME)),
        Target::Address(EVIL.parse().unwrap()),
    ] {
        let found = of("b", &target);
        assert_eq!(found.len(), 1, "{target:?}");
        assert_eq!(found[0].servers, ["10.9.0.54:53".parse().unwrap()]);
        // No rule of this tenant opens the name.
        assert_eq!(of("a", &target), []);
    }
    node.event(Event::Endpoints(SourceEvent::Delete("a".to_owned())));
    let said = node.core.policy_warnings().join("\n");
    assert!(!said.contains("is not trusted"), "{said}");
}

#[test]
fn many_names_of_one_server_hide_no_other_server() {
    let mut node = tenants(config(NameServers::Trusted));
    node.policy(&TENANTS.replace(
        "matchName: api.example.com",
        "matchPattern: '*.example.com'",
    ));
    let wide = TENANTS.replace("10.9.0.54/32", "10.9.1.0/24");
    node.policy(&wide.replace(
        "matchName: api.example.com",
        "matchPattern: '*.example.com'",
    ));
    let mut one = answer(&node, "a", EVIL);
    one.server = "10.9.1.1:53".parse().unwrap();
    node.mapping(one.clone());
    one.server = "10.9.1.2:53".parse().unwrap();
    for n in 0..1000 {
        one.name = dns_policy::name::Fqdn::normalise(&format!("n{n}.example.com"));
        node.mapping(one.clone());
    }
    let said = node.core.policy_warnings().join("\n");
    for server in ["10.9.1.1:53", "10.9.1.2:53"] {
        assert!(said.contains(&format!("{server} is not trusted")), "{said}");
    }
}

/// The earlier run let every answer count, or was of a release without this setting.
#[test]
fn a_restart_with_trusted_servers_closes_what_other_servers_opened() {
    let mut node = tenants(config(NameServers::Any));
    for (tenant, address) in [("a", EVIL), ("b", GOOD)] {
        let one = answer(&node, tenant, address);
        node.mapping(one);
    }
    node.tick(node.now.plus_secs(6));
    let mut node = again(&node, config(NameServers::Trusted), &[107, 108]);
    sync(&mut node);
    assert!(is_open(&node, GOOD), "names stay open through a restart");
    node.tick(node.now.plus_secs(25));
    assert!(is_open(&node, GOOD));
    node.tick(node.now.plus_secs(6));
    assert!(
        !is_open(&node, EVIL),
        "at the end of the grace at the latest"
    );
    let names = node.core.snapshot().names;
    assert!(names.iter().all(|view| view.address == GOOD), "{names:?}");
    // A later run does not take the closed address from the files either.
    node.tick(node.now.plus_secs(60));
    for file in node.datapath.files.values() {
        let (_, learned) = file.split_once("\"DNSHistory\"").unwrap();
        assert!(!learned.contains(EVIL), "{file}");
    }
}

/// Expired addresses that only connections keep.
#[test]
fn a_restart_with_trusted_servers_keeps_connections_of_trusted_answers_alone() {
    let mut node = tenants(config(NameServers::Any));
    for (tenant, address) in [("a", EVIL), ("b", GOOD)] {
        let one = answer(&node, tenant, address);
        node.mapping(one);
    }
    node.tick(node.now.plus_secs(300));
    node.tick(node.now.plus_secs(30));
    let mut node = again(&node, config(NameServers::Trusted), &[107, 108]);
    sync(&mut node);
    node.tick(node.now.plus_secs(31));
    assert!(is_open(&node, GOOD) && !is_open(&node, EVIL));
}

/// The wall clock went on by more than the uptime while the agent was away: every time in a file is
/// before the boot.
#[test]
fn a_clock_that_jumps_leaves_an_answer_trusted() {
    const YEAR: u64 = 31_536_000_000_000_000;
    let at = |boot_unix_ns| CoreConfig {
        boot_unix_ns,
        ..config(NameServers::Trusted)
    };
    let mut node = tenants(at(YEAR));
    let one = answer(&node, "b", GOOD);
    node.mapping(one);
    node.tick(node.now.plus_secs(6));
    for boot in [2 * YEAR, 3 * YEAR] {
        node = again(&node, at(boot), &[107, 108]);
        sync(&mut node);
        let names = node.core.snapshot().names;
        assert!(names.iter().any(|view| view.address == GOOD), "{names:?}");
        node.tick(node.now.plus_secs(6));
    }
}

#[test]
fn servers_by_address_count_beside_the_dns_service_if_cluster_is_given() {
    let dns = service(
        "dns",
        "clusterIP: 10.96.0.10",
        "{name: dns, port: 53, protocol: UDP}",
    ) + &slice(
        "dns",
        &[("dns-0", "10.2.0.9")],
        "{name: dns, port: 53, protocol: UDP}",
    ) + &pod("dns-0", "dns", "10.2.0.9");
    let trusted = |with_dns_service| {
        let config = CoreConfig {
            dns_service: "default/dns".to_owned(),
            with_dns_service,
            ..config(NameServers::Trusted)
        };
        let mut member = Member::with(config, TENANTS);
        member.put(&dns);
        member.node.core.summary().firewalls.trusted_dns
    };
    assert_eq!(trusted(false), ["10.9.0.53:53"]);
    assert_eq!(
        trusted(true),
        ["10.2.0.9:53", "10.9.0.53:53", "10.96.0.10:53"]
    );
}
