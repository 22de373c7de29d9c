//! Objects that are refused, with the field that is named and a remedy.

use std::net::IpAddr;

use super::{read, refused};
use crate::policy::document::Body;

const POD: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: web-0, namespace: shop, labels: {app: web}, creationTimestamp: "2026-11-22T10:00:00Z"}
spec:
  containers:
  - name: main
    ports:
    - {name: http, containerPort: 8080}
    - {name: dns, containerPort: 53, protocol: UDP}
status: {phase: Running, podIP: 10.2.0.9, podIPs: [{ip: 10.2.0.9}]}
"#;

#[test]
fn pods() {
    for (from, to, field) in [
        ("podIP: 10.2.0.9", "podIP: 10.2.0", "status.podIP"),
        ("podIP: 10.2.0.9", "podIP: 127.0.0.1", "status.podIP"),
        ("{ip: 10.2.0.9}", "{ip: web}", "status.podIPs[0].ip"),
        ("{ip: 10.2.0.9}", "{}", "status.podIPs[0].ip"),
        (
            "podIPs: [{ip: 10.2.0.9}]",
            "podIPs: 10.2.0.9",
            "status.podIPs",
        ),
        ("app: web", "-app: web", "metadata.labels.-app"),
        ("app: web", "a/b/c: web", "metadata.labels.a/b/c"),
        ("app: web", "A.io/b: web", "metadata.labels.A.io/b"),
        ("app: web", "app: we b", "metadata.labels.app"),
        ("app: web", "app: 7", "metadata.labels.app"),
        ("name: web-0", "name: Web_0", "metadata.name"),
        ("name: web-0", "name: a/b", "metadata.name"),
        ("namespace: shop", "namespace: a.b", "metadata.namespace"),
        ("2026-11-22T10", "yesterday", "metadata.creationTimestamp"),
        (
            "containerPort: 8080",
            "containerPort: 0",
            "spec.containers[0].ports[0].containerPort",
        ),
        (
            "containerPort: 8080",
            "containerPort: 70000",
            "spec.containers[0].ports[0].containerPort",
        ),
        (
            "name: dns",
            "name: http",
            "spec.containers[0].ports[1].name",
        ),
        (
            "name: dns",
            "name: \"80\"",
            "spec.containers[0].ports[1].name",
        ),
        (
            "protocol: UDP",
            "protocol: udp",
            "spec.containers[0].ports[1].protocol",
        ),
        ("kind: Pod", "kind: Pods", "kind"),
        ("apiVersion: v1", "apiVersion: v2", "apiVersion"),
        ("status:", "stauts:", "stauts"),
    ] {
        refused(POD, from, to, field);
    }
    let long = format!("app: {}", "x".repeat(64));
    refused(POD, "app: web", &long, "metadata.labels.app");
}

#[test]
fn namespaces() {
    let text = "apiVersion: v1\nkind: Namespace\nmetadata: {name: shop, labels: {team: a}}\n";
    assert!(read(text).is_ok());
    refused(text, "name: shop", "name: Shop", "metadata.name");
    refused(text, "team: a", "team: [a]", "metadata.labels.team");
}

#[test]
fn services_and_slices() {
    let service = r"
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.0.9, externalIPs: [192.0.2.9], ports: [{port: 80}]}
";
    assert!(read(service).is_ok());
    for (from, to, field) in [
        ("10.96.0.9", "web", "spec.clusterIP"),
        ("192.0.2.9", "127.0.0.1", "spec.externalIPs[0]"),
        ("port: 80", "port: 0", "spec.ports[0].port"),
        (
            "port: 80",
            "port: 80, protocol: ICMP",
            "spec.ports[0].protocol",
        ),
    ] {
        refused(service, from, to, field);
    }
    let slice = r"
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
endpoints: [{addresses: [10.2.0.9], conditions: {ready: true}}]
ports: [{port: 8080}]
";
    assert!(read(slice).is_ok());
    for (from, to, field) in [
        ("ready: true", "ready: 1", "endpoints[0].conditions.ready"),
        ("addressType: IPv4", "addressType: IPv5", "addressType"),
    ] {
        refused(slice, from, to, field);
    }
    for odd in ["0", "65536", "-1"] {
        let slice = read(&slice.replace("port: 8080", &format!("port: {odd}"))).unwrap();
        assert!(slice.warnings[0].starts_with("ports[0].port: "));
    }
    // Packets may go to such a backend: the slice counts, and closes its Service.
    for odd in ["127.0.0.1", "\"2001:db8::9\"", "web"] {
        let slice = read(&slice.replace("10.2.0.9", odd)).unwrap();
        let warned = &slice.warnings[0];
        assert!(
            warned.starts_with("endpoints[0].addresses[0]: "),
            "{warned}"
        );
        let Body::Slice(slice) = slice.body else {
            panic!("no slice");
        };
        assert_eq!(slice.backends[0].addresses, [IpAddr::from([0, 0, 0, 0])]);
    }
}

#[test]
fn identities_and_endpoints_of_cilium() {
    let identity = r#"
apiVersion: cilium.io/v2
kind: CiliumIdentity
metadata: {name: "4242"}
security-labels: {"k8s:app": web}
"#;
    assert!(read(identity).is_ok());
    for name in ["\"255\"", "\"61440\"", "\"04242\"", "web", "\"16777217\""] {
        refused(identity, "\"4242\"", name, "metadata.name");
    }
    refused(identity, "{\"k8s:app\": web}", "{}", "security-labels");
    refused(
        identity,
        "app\": web",
        "app\": 1",
        "security-labels.k8s:app",
    );
    let endpoint = r#"
apiVersion: cilium.io/v2
kind: CiliumEndpoint
metadata: {name: web-0}
status:
  identity: {id: 4242, labels: ["k8s:app=web"]}
  networking: {addressing: [{ipv4: 10.2.0.9}]}
"#;
    assert!(read(endpoint).is_ok());
    refused(
        endpoint,
        "10.2.0.9",
        "10.2",
        "status.networking.addressing[0].ipv4",
    );
    refused(endpoint, "k8s:app=web", ":", "status.identity.labels[0]");
    // No document makes a pod a node, or a part of the world.
    for label in [
        "reserved:host",
        "reserved:world",
        "reserved:unmanaged",
        "reserved:kube-apiserver",
        "cidr:10.0.0.0/8",
        "fqdn:www.good.test",
        "service:shop/web",
        "node:zone",
    ] {
        refused(endpoint, "k8s:app=web", label, "status.identity.labels[0]");
        let field = format!("security-labels.{label}");
        refused(
            identity,
            "\"k8s:app\": web",
            &format!("\"{label}\": ''"),
            &field,
        );
    }
}

const WORLD: &str = r"
apiVersion: cilium.io/v2alpha1
kind: CiliumWorldCIDRs
metadata: {name: outside}
spec: {cidrs: [10.0.0.0/8, 8.8.8.0/24]}
";

#[test]
fn high_scale_blocks_outside_of_the_cluster() {
    let list = "[10.0.0.0/8, 8.8.8.0/24]";
    let many: Vec<String> = (0..16_385_u32)
        .map(|number| format!("10.0.{}.{}/32", number >> 8, number & 0xff))
        .collect();
    let too_many = format!("[{}]", many.join(", "));
    for (from, to, field) in [
        (list, "[300.0.0.0/8]", "spec.cidrs[0]"),
        (list, "[10.0.0.0/33]", "spec.cidrs[0]"),
        // The definition in the cluster refuses it too.
        (list, "[10.0.0.0/8, 192.0.2.7]", "spec.cidrs[1]"),
        (list, "[192.0.2.0/24, \"2001:db8::/32\"]", "spec.cidrs[1]"),
        (list, "[192.0.2.0/24, 7]", "spec.cidrs[1]"),
        (list, "10.0.0.0/8", "spec.cidrs"),
        (list, &*too_many, "spec.cidrs"),
        ("cidrs:", "cidr:", "spec.cidr"),
        ("spec: {cidrs: [10.0.0.0/8, 8.8.8.0/24]}", "", "spec"),
    ] {
        refused(WORLD, from, to, field);
    }
    for (cidrs, count) in [(list, 2), ("[]", 0), ("[10.0.0.0/8, 10.1.2.3/8]", 1)] {
        let Body::World(world) = read(&WORLD.replace(list, cidrs)).unwrap().body else {
            panic!("{cidrs}");
        };
        assert_eq!(world.blocks.len(), count, "{cidrs}");
    }
}
