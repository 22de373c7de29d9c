//! Which DNS servers count, and what `why` finds about the others.

use super::*;
use crate::{
    core::{
        Restored,
        tests::{
            oracle::Fate,
            pods::Member,
            services::{UDP, at, egress, pod, service, slice, to},
        },
        why::Target,
    },
    datapath::memory::MemoryDatapath,
    fqdn::pre_cache::PreCached,
};

/// Answers that do not count, as `why` finds them.
fn untrusted(node: &Node, target: &Target) -> Vec<(String, String, Vec<String>)> {
    let found = node.core.findings(node.id(), target).unwrap();
    let texts = found.untrusted.iter().map(|answer| {
        let servers = answer.servers.iter().map(ToString::to_string);
        let (name, address) = (answer.name.to_string(), answer.address.to_string());
        (name, address, servers.collect())
    });
    texts.collect()
}

#[test]
fn why_finds_the_server_whose_answer_does_not_count() {
    let mut node = node(&example());
    let address = |text: &str| Target::Address(text.parse().unwrap());
    learn_untrusted(&mut node, "www.example.com", "6.6.6.6");
    let expected = [(
        "www.example.com.".to_owned(),
        "6.6.6.6".to_owned(),
        vec!["10.9.0.54:53".to_owned()],
    )];
    assert_eq!(untrusted(&node, &address("6.6.6.6")), expected);
    let name = Target::Name(Fqdn::normalise("www.example.com"));
    assert_eq!(untrusted(&node, &name), expected);
    // Names of other policies do not count, nor do addresses that a trusted server gave too.
    learn_untrusted(&mut node, "www.cilium.io", "6.6.6.7");
    assert_eq!(untrusted(&node, &address("6.6.6.7")), []);
    node.learn("www.example.com", &["6.6.6.6"]);
    assert_eq!(untrusted(&node, &address("6.6.6.6")), []);
    // The latest 64 are remembered.
    for n in 0..70 {
        learn_untrusted(&mut node, &format!("n{n}.example.com"), "6.6.6.8");
    }
    let servers = |n: usize| {
        let name = Fqdn::normalise(&format!("n{n}.example.com"));
        node.core.state.resolved.untrusted_servers(&name).len()
    };
    assert_eq!((0..70).map(servers).sum::<usize>(), 64);
    assert_eq!((servers(5), servers(6)), (0, 1));
}

const DNS_SERVICE: &str = r#"
apiVersion: v1
kind: Service
metadata: {name: kube-dns, namespace: kube-system}
spec:
  clusterIP: 10.96.0.10
  externalIPs: [192.0.2.10]
  ports:
  - {name: dns, port: 53, protocol: UDP, targetPort: 5353}
  - {name: dns-tcp, port: 53, protocol: TCP, targetPort: 5353}
  - {name: metrics, port: 9153, protocol: TCP}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: kube-dns-1, namespace: kube-system, labels: {kubernetes.io/service-name: kube-dns}}
addressType: IPv4
ports:
- {name: dns, port: 5353, protocol: UDP}
- {name: dns-tcp, port: 5353, protocol: TCP}
endpoints:
- {addresses: [192.0.2.53], conditions: {ready: true}}
- {addresses: [192.0.2.54], conditions: {ready: false, serving: false}}
---
apiVersion: v1
kind: Service
metadata: {name: kube-dns, namespace: default}
spec: {clusterIP: 10.96.0.66, ports: [{port: 53, protocol: UDP}]}
"#;

#[test]
fn without_a_flag_the_dns_service_and_its_pods_are_trusted_and_nothing_else() {
    let config = CoreConfig {
        service_aliases: vec![(
            "169.254.20.10".parse().unwrap(),
            "kube-system/kube-dns".to_owned(),
        )],
        ..CoreConfig::default()
    };
    let mut member = Member::with(config, &example());
    let trusted = |member: &Member| member.node.core.summary().firewalls.trusted_dns;
    assert_eq!(trusted(&member), [""; 0]);
    member.put(DNS_SERVICE);
    assert_eq!(
        trusted(&member),
        [
            "10.96.0.10:53",
            "169.254.20.10:53",
            "192.0.2.53:5353",
            "192.0.2.54:5353"
        ]
    );
    let backends = member.node.effects.iter().find_map(|effect| match effect {
        Effect::Resolver { servers, .. } => Some(servers.backends.clone()),
        _ => None,
    });
    let backends = backends.map(|all| all.iter().map(ToString::to_string).collect::<Vec<_>>());
    assert_eq!(backends.unwrap(), ["192.0.2.53:5353"]);
    member.delete("Service/kube-system/kube-dns");
    assert_eq!(trusted(&member), [""; 0]);
}

/// As OpenShift has it: pods ask the Service at port 53, and its pods listen at port 5353.
#[test]
fn answers_of_a_dns_service_count_although_its_pods_listen_at_another_port() {
    const VIP: &str = "10.96.0.10";
    let config = CoreConfig {
        dns_service: "default/dns".to_owned(),
        ..CoreConfig::default()
    };
    let dns = service(
        "dns",
        &format!("clusterIP: {VIP}"),
        "{name: dns, port: 53, protocol: UDP, targetPort: dns}",
    ) + &slice(
        "dns",
        &[("dns-0", "10.2.0.9")],
        "{name: dns, port: 5353, protocol: UDP}",
    ) + &pod("dns-0", "dns", "10.2.0.9");
    let asked = |member: &mut Member, server: &str| {
        let mut answer = mapping(&member.node, "www.example.com", &["1.1.1.1"]);
        answer.server = server.parse().unwrap();
        member.node.mapping(answer).1.realised
    };
    // With the firewall alone, and beside a policy with the port of the backends.
    let policy = egress(&format!(
        "[{}, {{toEntities: [world]}}]",
        to("dns", 5353, "UDP")
    ));
    for policy in ["", &policy] {
        let mut member = Member::with(config.clone(), &format!("{}---\n{policy}", example()));
        member.put(&dns);
        let trusted = member.node.core.summary().firewalls.trusted_dns;
        assert_eq!(trusted, ["10.2.0.9:5353", "10.96.0.10:53"]);
        assert_eq!(at(&member.node, VIP, UDP, 53), Fate::Proxied);
        // If a pod asks a backend itself, the answer is not seen and opens nothing.
        assert_eq!(at(&member.node, "10.2.0.9", UDP, 5353), Fate::Passed);
        assert_ne!(asked(&mut member, "10.2.0.9:5353"), Realised::Yes);
        assert_eq!(labels(&member.node, "1.1.1.1"), [""; 0]);
        assert_eq!(asked(&mut member, "10.96.0.10:53"), Realised::Yes);
        let both = ["dnsname:*.example.com", "dnsname:www.example.com"];
        assert_eq!(labels(&member.node, "1.1.1.1"), both);
    }
}

/// A pair that no trusted server gave, and that no endpoint holds any more, opens nothing for a
/// firewall that is added later: neither a pair under the lease of another server's answer, nor one
/// that `--tofqdns-pre-cache` has, nor one that only a connection keeps.
#[test]
fn what_no_trusted_server_gave_opens_nothing_for_a_firewall_that_comes_later() {
    let known = PreCached {
        name: Fqdn::normalise("known.example.com"),
        lookup: 0,
        expires: 5_000_000_000_000,
        addresses: vec!["6.6.6.7".parse().unwrap()],
    };
    let restored = Restored {
        pre_cache: vec![known],
        ..Restored::default()
    };
    let mut node = Node::with(config(), restored, MemoryDatapath::default());
    node.begin();
    node.policy(DNS);
    node.endpoint(spec("web", 7, "app=web"));
    node.sync();
    // No firewall uses the name: the answer of any server gets a lease.
    let mut answer = mapping(&node, "www.example.com", &["6.6.6.6"]);
    answer.server = "10.9.0.54:53".parse().unwrap();
    assert!(node.mapping(answer).1.lease_end.is_some());
    node.learn("sub1.example.com", &["1.1.1.1"]);
    node.event(Event::Endpoints(SourceEvent::Delete("web".to_owned())));
    node.endpoint(spec("other", 8, "app=web"));
    let pairs = |node: &Node, name: &str| {
        let entry = node.core.state.learned.names.name(&Fqdn::normalise(name));
        entry.map_or(0, |entry| entry.pairs.len())
    };
    for name in ["www.example.com", "known.example.com", "sub1.example.com"] {
        assert_eq!(
            pairs(&node, name),
            1,
            "{name}: a lease or the file keeps it"
        );
    }
    node.policy(&example());
    assert_eq!(labels(&node, "1.1.1.1"), ["dnsname:*.example.com"]);
    for untrusted in ["6.6.6.6", "6.6.6.7"] {
        assert_eq!(labels(&node, untrusted), [""; 0], "{untrusted}");
    }
}

/// The same holds for expired pairs that only connections keep, before and after a restart.
#[test]
fn a_connection_to_an_address_of_an_untrusted_answer_opens_nothing_for_a_firewall_that_comes_later()
{
    let mut node = node("");
    learn_untrusted(&mut node, "www.example.com", "6.6.6.6");
    node.learn("sub1.example.com", &["1.1.1.1"]);
    let learned = node.now;
    node.tick(learned.plus_secs(70));
    for after in [130, 170, 210] {
        node.tick(learned.plus_secs(after));
        alive(&mut node, &["6.6.6.6", "1.1.1.1"]);
    }
    assert_eq!(node.core.summary().names_zombies, 2);
    let mut restarted = again(&node, config(), &[107]);
    restarted.begin();
    restarted.policy(DNS);
    restarted.endpoint(spec("web", 7, "app=web"));
    restarted.sync();
    for node in [&mut node, &mut restarted] {
        node.policy(&example());
        assert_eq!(labels(node, "6.6.6.6"), [""; 0]);
        assert_eq!(labels(node, "1.1.1.1"), ["dnsname:*.example.com"]);
    }
}
