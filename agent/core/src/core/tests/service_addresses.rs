//! Addresses that authors of Services write, and families with different backends.

use std::net::Ipv6Addr;

use shared_maps::{IdentityId, ipcache::IpcacheKey};

use super::{
    pods::Member,
    services::{VIP, db, egress, is_open, pod, service, set_policy, slice, to, warnings},
};
use crate::{
    core::{CoreConfig, Event},
    datapath::plan::Step,
    kubernetes::external_ips::ExternalIps,
    kubernetes::node_interfaces::NodeInterfaces,
};

const OUTSIDE: &str = "203.0.113.9";

/// A Service whose author writes this address, with the pod `evil-0` behind port 81.
fn evil(address: &str) -> String {
    let spec = format!("clusterIP: 10.96.0.66, externalIPs: [\"{address}\"]");
    pod("evil-0", "evil", "10.2.0.66")
        + &service("aa-evil", &spec, "{port: 81}")
        + &slice("aa-evil", &[("evil-0", "10.2.0.66")], "{port: 81}")
}

#[test]
fn an_external_address_that_is_anothers_is_refused_and_named() {
    let rules = format!(
        "[{}, {{toCIDR: [203.0.113.53/32], toPorts: [{{ports: [{{port: \"53\", protocol: UDP}}], rules: {{dns: [{{matchPattern: '*'}}]}}}}]}}]",
        to("db", 8080, "TCP")
    );
    let mut member = Member::new(&egress(&rules));
    // The author's Service comes first: its name sorts first, and its document is read first.
    for (address, who) in [
        (VIP, "Service default/db"),
        ("10.2.0.9", "Pod/default/db-0"),
        ("10.0.0.7", "endpoint/1"),
        ("192.0.2.1", "node"),
        ("192.0.2.2", "Node/other"),
        ("203.0.113.6", "an API server"),
        ("203.0.113.53", "a DNS server"),
    ] {
        member.put(&evil(address));
        member
            .node
            .event(Event::NodeAddresses(vec!["192.0.2.1".parse().unwrap()]));
        member.put(
            r"
---
apiVersion: v1
kind: Node
metadata: {name: other}
status: {addresses: [{type: InternalIP, address: 192.0.2.2}]}
",
        );
        member.put(
            r"
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: kubernetes
  namespace: default
  labels: {kubernetes.io/service-name: kubernetes}
addressType: IPv4
endpoints: [{addresses: [203.0.113.6]}]
ports: [{port: 6443}]
",
        );
        member.put(&(pod("db-0", "db", "10.2.0.9") + &db(&[("db-0", "10.2.0.9")])));
        let of_evil = member.node.identity("10.96.0.66");
        assert!(of_evil.unwrap().is_service());
        assert_ne!(member.node.identity(address), of_evil, "{address}");
        assert!(
            is_open(&member, VIP, 80) && is_open(&member, "10.2.0.9", 8080),
            "{address}"
        );
        let text = warnings(&member);
        let line = text
            .lines()
            .find(|line| line.contains("aa-evil") && line.contains(address));
        assert!(
            line.is_some_and(|line| line.contains(who)),
            "{address} {who}: {text}"
        );
        member.delete("Service/default/db");
        member.delete("Pod/default/db-0");
    }
    // Without the rule, the address is not that of a DNS server.
    set_policy(&mut member, "[{toCIDR: [203.0.113.53/32]}]");
    assert!(member.node.identity("203.0.113.53").unwrap().is_service());
    member.put(&evil(OUTSIDE));
    assert!(
        !warnings(&member).contains("externalIPs"),
        "{}",
        warnings(&member)
    );
}

#[test]
fn external_addresses_are_the_services_or_what_they_are_otherwise() {
    let rules = "[{toEntities: [world]}]";
    for (external_ips, is_services) in [(ExternalIps::Judge, true), (ExternalIps::Refuse, false)] {
        let config = CoreConfig {
            external_ips,
            ..CoreConfig::default()
        };
        let mut member = Member::with(config, &egress(rules));
        member.put(&evil(OUTSIDE));
        assert_eq!(is_open(&member, OUTSIDE, 443), !is_services);
        assert_eq!(is_open(&member, OUTSIDE, 81), !is_services);
        let named = warnings(&member).contains("--k8s-external-ips=refuse");
        assert_eq!(named, !is_services, "{}", warnings(&member));
        member.delete("Service/default/aa-evil");
        assert!(is_open(&member, OUTSIDE, 443));
        assert!(!warnings(&member).contains("externalIPs"));
    }
}

#[test]
fn addresses_of_nodelocal_dns_are_the_dns_services() {
    const LOCAL: &str = "169.254.20.10";
    let interfaces = |addresses: &[&str]| {
        Event::NodeInterfaces(NodeInterfaces {
            local_dns: addresses.iter().map(|text| text.parse().unwrap()).collect(),
            has_ipvs: false,
        })
    };
    let dns = |namespace: &str| {
        let text = service("kube-dns", "clusterIP: 10.96.0.53", "{port: 80}")
            + &slice("kube-dns", &[("db-0", "10.2.0.9")], "{port: 8080}");
        let text = text.replace(
            "{name: kube-dns",
            &format!("{{namespace: {namespace}, name: kube-dns"),
        );
        pod("db-0", "db", "10.2.0.9") + &text
    };
    let mut member = Member::new(&egress(&format!("[{}]", to("db", 8080, "TCP"))));
    // NodeLocal DNSCache binds its own address and that of the Service.
    member.node.event(interfaces(&[LOCAL, "10.96.0.53"]));
    member.put(&dns("other"));
    assert!(!is_open(&member, LOCAL, 80));
    let text = warnings(&member);
    assert!(
        text.contains(&format!("--k8s-dns-alias={LOCAL}=")),
        "{text}"
    );
    assert!(!text.contains("--k8s-dns-alias=10.96.0.53"), "{text}");
    member.delete("Service/other/kube-dns");
    member.put(&dns("kube-system").replace("10.96.0.53", "10.96.0.54"));
    assert!(is_open(&member, LOCAL, 80) && is_open(&member, "10.96.0.54", 80));
    assert!(!warnings(&member).contains("--k8s-dns-alias"));
    member.node.event(interfaces(&["169.254.25.10"]));
    assert!(!is_open(&member, LOCAL, 80) && is_open(&member, "169.254.25.10", 80));
    // Another Service has the address.
    member.node.event(interfaces(&[]));
    member.put(&db(&[("db-0", "10.2.0.9")]));
    let id = member.node.identity(VIP);
    member.node.event(interfaces(&[VIP]));
    assert_eq!(member.node.identity(VIP), id);
    assert!(is_open(&member, "10.96.0.54", 80));
    member.node.event(Event::NodeInterfaces(NodeInterfaces {
        has_ipvs: true,
        ..NodeInterfaces::default()
    }));
    let text = warnings(&member);
    assert!(
        text.contains("kube-ipvs0") && text.contains("nftables"),
        "{text}"
    );
}

/// A Service that an agent reads earlier writes the address of the cache into `spec.externalIPs`.
#[test]
fn an_external_address_takes_no_address_of_nodelocal_dns_from_the_dns_service() {
    const LOCAL: &str = "169.254.20.10";
    let config = CoreConfig {
        dns_service: "kube-system/kube-dns".to_owned(),
        ..CoreConfig::default()
    };
    let mut member = Member::with(config, &egress(&format!("[{}]", to("db", 8080, "TCP"))));
    member.node.event(Event::NodeInterfaces(NodeInterfaces {
        local_dns: [LOCAL.parse().unwrap()].into(),
        has_ipvs: false,
    }));
    let external = format!("clusterIP: 10.96.0.66, externalIPs: [{LOCAL}]");
    member.put(&service("evil", &external, "{port: 53}"));
    let dns = service("kube-dns", "clusterIP: 10.96.0.53", "{port: 53}")
        + &slice("kube-dns", &[("db-0", "10.2.0.9")], "{port: 8080}");
    let dns = dns.replace("{name: kube-dns", "{namespace: kube-system, name: kube-dns");
    member.put(&(pod("db-0", "db", "10.2.0.9") + &dns));
    assert!(is_open(&member, LOCAL, 53) && is_open(&member, "10.96.0.53", 53));
    let trusted = member.node.core.summary().firewalls.trusted_dns;
    assert!(trusted.contains(&format!("{LOCAL}:53")), "{trusted:?}");
}

#[test]
fn many_new_services_write_one_checkpoint() {
    let mut member = Member::new(&egress(&format!("[{}]", to("db", 8080, "TCP"))));
    let all: Vec<String> = (0..40)
        .map(|n| {
            service(
                &format!("s{n}"),
                &format!("clusterIP: 10.96.1.{n}"),
                "{port: 80}",
            )
        })
        .collect();
    let steps = member.put(&all.concat());
    let written = steps
        .iter()
        .filter(|step| matches!(step, Step::Checkpoint(_)));
    assert_eq!(written.count(), 1);
}

/// Identity of fd96::10 in the ipcache.
fn identity_of_six(member: &Member) -> Option<IdentityId> {
    let six: Ipv6Addr = "fd96::10".parse().unwrap();
    let entry = member
        .node
        .datapath
        .ipcache
        .get(&IpcacheKey::v6(six.octets(), 128));
    entry.map(|entry| IdentityId(entry.sec_identity))
}

#[test]
fn each_family_of_a_service_is_judged_by_its_own_backends() {
    let mut member = Member::new(&egress(&format!("[{}]", to("db", 8080, "TCP"))));
    let both = "clusterIPs: [10.96.0.10, \"fd96::10\"]";
    let pods = pod("db-0", "db", "10.2.0.9") + &pod("old-0", "old", "fd02::9");
    let four = slice("db", &[("db-0", "10.2.0.9")], "{port: 8080}");
    let six = slice("db", &[("old-0", "fd02::9")], "{port: 8080}");
    member.put(&(pods + &service("db", both, "{port: 80}") + &four + &six));
    assert!(is_open(&member, VIP, 80));
    assert!(!is_open(&member, "fd96::10", 80));
    assert!(
        !warnings(&member).contains("is closed to"),
        "{}",
        warnings(&member)
    );
    assert_ne!(member.node.identity(VIP), identity_of_six(&member));
    // Another pod behind the IPv6 address alone.
    member.put(
        &(pod("db-1", "db", "fd02::10")
            + &slice(
                "db",
                &[("old-0", "fd02::9"), ("db-1", "fd02::10")],
                "{port: 8080}",
            )),
    );
    assert!(is_open(&member, VIP, 80) && !is_open(&member, "fd96::10", 80));
    let text = warnings(&member);
    assert!(
        text.contains("fd02::9") && text.contains("app=old"),
        "{text}"
    );
    assert_eq!(member.node.core.summary().services_mixed, 1);
    member.put(&slice("db", &[("db-1", "fd02::10")], "{port: 8080}"));
    assert!(is_open(&member, VIP, 80) && is_open(&member, "fd96::10", 80));
    // The Service gives its IPv6 address up: nothing of it remains.
    let id = identity_of_six(&member).unwrap();
    member.put(&service("db", &format!("clusterIP: {VIP}"), "{port: 80}"));
    assert_eq!(identity_of_six(&member), None);
    let mut entries = member.node.datapath.policy[&member.node.id()].keys();
    assert!(entries.all(|key| IdentityId(key.sec_label) != id));
    assert!(is_open(&member, VIP, 80));
}
