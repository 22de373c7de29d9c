//! Nodes and API servers.

use super::read;
use crate::{
    ipcache::owners::Source,
    policy::document::{Body, PolicyDocument},
};

fn labels(document: &PolicyDocument, own: &str) -> Vec<String> {
    let (_, labels) = document.labels(Some(own), &|_| false);
    let texts = labels.iter();
    let texts = texts.map(|(prefix, labels)| format!("{prefix} {}", labels.texts().join(",")));
    texts.collect()
}

/// As `kubectl get ciliumnode -o yaml` writes it.
const NODE: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNode
metadata: {name: worker-2, labels: {zone: a}, resourceVersion: "7"}
spec:
  addresses:
  - {ip: 192.0.2.2, type: InternalIP}
  - {ip: "2001:db8::2", type: ExternalIP}
  - {ip: 10.2.0.1, type: CiliumInternalIP}
  alibaba-cloud: {}
  azure: {}
  bootid: 6c4b
  encryption: {}
  eni: {}
  health: {ipv4: 10.2.0.9, ipv6: ""}
  ingress: {ipv4: 10.2.0.8}
  ipam: {podCIDRs: [10.2.0.0/24], pools: {}}
status: {ipam: {}}
"#;

#[test]
fn nodes_are_remote_but_for_ones_own() {
    let node = read(NODE).unwrap();
    assert_eq!(node.key, "CiliumNode/worker-2");
    assert_eq!(
        labels(&node, "worker-1"),
        [
            "10.2.0.0/24 reserved:unmanaged",
            "10.2.0.1/32 reserved:remote-node",
            "10.2.0.8/32 reserved:ingress",
            "10.2.0.9/32 reserved:health",
            "192.0.2.2/32 reserved:remote-node",
            "2001:db8::2/128 reserved:remote-node",
        ]
    );
    assert!(labels(&node, "worker-2").contains(&"192.0.2.2/32 reserved:host".to_owned()));
    assert_eq!(node.labels(None, &|_| false).0, Source::CustomResource);
}

const SLICE: &str = r#"
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: kubernetes, namespace: default, labels: {kubernetes.io/service-name: kubernetes}}
addressType: IPv4
endpoints:
- addresses: [192.0.2.1]
  conditions: {ready: true}
- addresses: [192.0.2.9]
  conditions: {ready: false}
ports: [{name: https, port: 6443, protocol: TCP}]
"#;

#[test]
fn api_servers_are_the_endpoints_of_their_service() {
    let slice = read(SLICE).unwrap();
    assert_eq!(slice.key, "EndpointSlice/default/kubernetes");
    let api = |ip| format!("{ip}/32 reserved:kube-apiserver");
    assert_eq!(labels(&slice, ""), [api("192.0.2.1"), api("192.0.2.9")]);
    assert_eq!(slice.labels(None, &|_| false).0, Source::KubeApiserver);
}

#[test]
fn an_address_of_an_api_server_that_cannot_be_read_labels_nothing() {
    let slice = read(&SLICE.replace("[192.0.2.9]", "[api.test]")).unwrap();
    assert_eq!(labels(&slice, ""), ["192.0.2.1/32 reserved:kube-apiserver"]);
    assert!(slice.warnings[0].starts_with("endpoints[1].addresses[0]: "));
}

#[test]
fn slices_of_other_services_label_nothing() {
    for (from, to) in [
        ("service-name: kubernetes", "service-name: other"),
        ("namespace: default", "namespace: other"),
    ] {
        let slice = read(&SLICE.replace(from, to)).unwrap();
        assert_eq!(labels(&slice, ""), [] as [&str; 0]);
    }
}

#[test]
fn refused_with_the_field() {
    for (text, from, to, field) in [
        (NODE, "192.0.2.2", "node-2", "spec.addresses[0].ip"),
        (NODE, "192.0.2.2", "127.0.0.1", "spec.addresses[0].ip"),
        (NODE, "{ip: 192.0.2.2,", "{", "spec.addresses[0].ip"),
        (NODE, "ipam:", "ipams:", "spec.ipams"),
        (NODE, "10.2.0.9", "10.2.0", "spec.health.ipv4"),
        (NODE, "cilium.io/v2", "v1", "apiVersion"),
        (SLICE, "discovery.k8s.io/v1", "v1", "apiVersion"),
    ] {
        let error = read(&text.replace(from, to)).unwrap_err();
        assert_eq!(error.field, field, "{from} → {to}: {error}");
    }
}

#[test]
fn a_block_that_cannot_be_of_one_nodes_pods_is_named_and_not_used() {
    for (block, reason) in [
        ("0.0.0.0/0", "wider than a /8"),
        ("\"::/0\"", "wider than a /16"),
        ("127.0.0.0/8", "no addresses of pods"),
        ("192.0.2.0/24", "the node's own address 192.0.2.2"),
    ] {
        let addresses =
            "[{type: InternalIP, ip: 192.0.2.2}, {type: CiliumInternalIP, ip: 10.2.0.1}]";
        let cilium = format!(
            r"
apiVersion: cilium.io/v2
kind: CiliumNode
metadata: {{name: n}}
spec: {{addresses: {addresses}, ipam: {{podCIDRs: [10.2.0.0/24, {block}]}}}}
"
        );
        let node = format!(
            r"
apiVersion: v1
kind: Node
metadata: {{name: n}}
spec: {{podCIDR: {block}, podCIDRs: [10.2.0.0/24, {block}]}}
status: {{addresses: [{{type: InternalIP, address: 192.0.2.2}}]}}
"
        );
        for (text, field) in [
            (cilium, "spec.ipam.podCIDRs[1]"),
            (node, "spec.podCIDRs[1]"),
        ] {
            let document = read(&text).unwrap();
            assert_eq!(document.warnings.len(), 1, "{:?}", document.warnings);
            for part in [field, reason, "not used"] {
                assert!(
                    document.warnings[0].contains(part),
                    "{:?}",
                    document.warnings
                );
            }
            let Body::Node(node) = &document.body else {
                panic!("not a node");
            };
            assert_eq!(node.pod_blocks, ["10.2.0.0/24".parse().unwrap()].into());
            assert!(node.addresses.contains(&"192.0.2.2".parse().unwrap()));
        }
    }
}
