//! Policies in every corner of the language, and groups of blocks that they name.

use std::net::IpAddr;

/// The node itself.
pub(super) const NODE: &str = "10.0.0.1";

/// Rules of a policy.
pub(in crate::core::tests) const SPECS: &[&str] = &[
    "endpointSelector: {matchLabels: {app: web}}\n  egress:\n  - toFQDNs: [{matchPattern: '*.cilium.io'}]",
    "endpointSelector: {matchLabels: {app: web}}\n  egress:\n  - toFQDNs: [{matchName: www.cilium.io}]\n    toPorts: [{ports: [{port: 443, endPort: 450, protocol: TCP}]}]",
    "endpointSelector: {}\n  egress:\n  - toCIDRSet: [{cidr: 1.1.0.0/16, except: [1.1.1.0/24]}]",
    "endpointSelector: {}\n  egress:\n  - toCIDR: [1.1.1.0/25]\n  egressDeny:\n  - toCIDR: [1.1.1.2/32]\n    toPorts: [{ports: [{port: 443, protocol: TCP}]}]",
    "endpointSelector: {matchLabels: {app: web}}\n  egressDeny:\n  - toCIDR: [1.1.1.0/24]\n  enableDefaultDeny: {egress: false}",
    "endpointSelector: {}\n  egress:\n  - toEntities: [world]\n    toPorts: [{ports: [{port: 53}], rules: {dns: [{matchPattern: '*'}]}}]\n  - toEndpoints: [{matchLabels: {app: db}}]",
    "endpointSelector: {matchLabels: {app: db}}\n  ingress:\n  - fromEndpoints: [{matchLabels: {app: web}}]\n    toPorts: [{ports: [{port: 443, protocol: TCP}]}]",
    "endpointSelector: {}\n  egress:\n  - toEntities: [all]\n  egressDeny:\n  - toEntities: [world]\n    toPorts: [{ports: [{port: 443, protocol: TCP}]}]",
    "endpointSelector: {}\n  egress:\n  - toPorts: [{ports: [{port: 443, protocol: TCP}]}]\n  ingress: [{}]",
    "endpointSelector: {matchLabels: {app: web}}\n  egress:\n  - toFQDNs: [{matchPattern: '*'}]\n  - toCIDR: [0.0.0.0/0]\n    toPorts: [{ports: [{port: 53, protocol: UDP}]}]",
    "endpointSelector: {}\n  ingressDeny:\n  - fromCIDR: [1.1.1.0/24]\n  enableDefaultDeny: {ingress: false}",
    "endpointSelector: {matchLabels: {app: web}}\n  ingress:\n  - fromCIDRSet: [{cidr: 1.1.0.0/16, except: [1.1.1.0/25]}]\n  - fromCIDR: [1.1.1.2/32]\n    icmps: [{fields: [{type: 8}]}]",
    "endpointSelector: {}\n  ingress:\n  - fromEntities: [host, world]\n  ingressDeny:\n  - fromEntities: [world]\n    toPorts: [{ports: [{port: 443, protocol: TCP}]}]",
    "endpointSelector: {}\n  ingress:\n  - fromEntities: [cluster]\n  ingressDeny:\n  - icmps: [{fields: [{type: EchoRequest, family: IPv4}]}]",
    "endpointSelector: {matchLabels: {app: db}}\n  egress:\n  - icmps: [{fields: [{type: 8}, {type: 128, family: IPv6}]}]\n  - toEntities: [host]\n  egressDeny:\n  - toEntities: [cluster]\n    toPorts: [{ports: [{port: 80, protocol: TCP}]}]",
    "endpointSelector: {}\n  ingressDeny:\n  - fromEntities: [host]\n    toPorts: [{ports: [{port: 80, protocol: TCP}]}]\n  - fromCIDRSet: [{cidr: 1.1.0.0/16, except: [1.1.1.0/24]}]",
    "endpointSelector: {matchLabels: {app: web}}\n  ingress:\n  - fromEntities: [all]\n    icmps: [{fields: [{type: 3}]}]\n  enableDefaultDeny: {ingress: true, egress: true}",
    "endpointSelector: {}\n  ingress:\n  - fromEntities: [remote-node, none]\n  enableDefaultDeny: {ingress: false}",
    "endpointSelector: {matchExpressions: [{key: app, operator: In, values: [web, api]}]}\n  egress:\n  - toCIDRSet: [{cidrGroupRef: g0}, {cidrGroupRef: g1, except: [1.1.1.2/32]}]",
    "endpointSelector: {}\n  egress:\n  - toEntities: [world]\n  egressDeny:\n  - toCIDRSet: [{cidrGroupRef: g0, except: [1.1.2.0/24]}]",
    "endpointSelector: {}\n  ingress:\n  - fromCIDRSet: [{cidrGroupSelector: {matchLabels: {zone: a}}}]\n    toPorts: [{ports: [{port: 443, protocol: TCP}]}]\n  ingressDeny:\n  - fromCIDRSet: [{cidrGroupRef: g1}]\n  enableDefaultDeny: {ingress: true}",
    "endpointSelector: {matchLabels: {app: web}}\n  egress:\n  - toCIDRSet: [{cidrGroupSelector: {}}]\n    toPorts: [{ports: [{port: 53}], rules: {dns: [{matchName: ebpf.io}]}}]\n  - toCIDR: [1.1.0.0/16]",
    "endpointSelector: {}\n  egress:\n  - toEndpoints: [{matchExpressions: [{key: app, operator: NotIn, values: [web]}]}]\n  - toEndpoints: [{matchLabels: {'k8s:io.kubernetes.pod.namespace': other}}]\n    toPorts: [{ports: [{port: 1, endPort: 60000, protocol: TCP}]}]",
    "endpointSelector: {matchLabels: {'any:app': db}}\n  egress:\n  - toEndpoints: [{matchExpressions: [{key: app, operator: Exists}, {key: gone, operator: DoesNotExist}]}]\n  egressDeny:\n  - toPorts: [{ports: [{port: 440, endPort: 449, protocol: TCP}, {port: 53, protocol: UDP}]}]",
    "endpointSelector: {}\n  egress:\n  - toEntities: [world-ipv4, world-ipv6, kube-apiserver, health]\n    toPorts: [{ports: [{port: 80, endPort: 443, protocol: TCP}]}]\n  ingress:\n  - fromEntities: [init, unmanaged, ingress]",
    "endpointSelector: {}\n  egress:\n  - toEntities: [remote-node]\n    toPorts: [{ports: [{port: 443, protocol: TCP}]}]\n  - toEntities: [kube-apiserver]\n  ingress:\n  - fromEntities: [cluster]",
    "endpointSelector: {matchLabels: {app: web}}\n  egress:\n  - toEntities: [world, cluster]\n  egressDeny:\n  - toEntities: [remote-node]\n  - toEntities: [kube-apiserver]\n    toPorts: [{ports: [{port: 80, protocol: TCP}]}]\n  ingressDeny:\n  - fromEntities: [kube-apiserver]",
    "endpointSelector: {}\n  ingress:\n  - toPorts: [{ports: [{port: http, protocol: TCP}, {port: '8'}]}]\n  egress:\n  - toEndpoints: [{matchLabels: {app: db}}]\n    toPorts: [{ports: [{port: http, protocol: TCP}]}]",
    "endpointSelector: {matchLabels: {app: web}}\n  egress:\n  - toPorts: [{ports: [{port: http}, {port: '443', protocol: TCP}]}]\n  egressDeny:\n  - toEntities: [cluster]\n    toPorts: [{ports: [{port: dns, protocol: UDP}]}]\n  ingressDeny:\n  - fromEndpoints: [{}]\n    toPorts: [{ports: [{port: web, protocol: TCP}]}]",
    "endpointSelector: {}\n  egress:\n  - toEndpoints: [{matchLabels: {app: db}}]\n    toPorts: [{ports: [{port: dns}], rules: {dns: [{matchName: ebpf.io}]}}]\n  - toEntities: [all]\n    toPorts: [{ports: [{port: Web, protocol: TCP}, {port: http, protocol: UDP}]}]",
    "endpointSelector: {}\n  egress: [{}]\n  ingress:\n  - fromCIDR: [0.0.0.0/0]\n  enableDefaultDeny: {egress: false, ingress: true}",
];

/// Named ports that an endpoint may have: name, protocol, port. One name means different ports.
pub(in crate::core::tests) const NAMED: &[&[(&str, u8, u16)]] = &[
    &[],
    &[("http", 6, 80), ("dns", 17, 53)],
    &[("http", 6, 443), ("dns", 6, 450)],
    &[("http", 17, 53), ("dns", 17, 53), ("web", 6, 450)],
];

/// Addresses of a node, or of the API servers.
pub(super) const CLUSTER: &[&str] = &["", "9.9.9.9,1.1.1.2", "1.1.2.1,1.1.1.2", "2.2.2.2,10.0.0.9"];

/// Labels and blocks of a group.
pub(super) const GROUPS: &[(&str, &str)] = &[
    ("{}", "[]"),
    ("{zone: a}", "[1.1.1.0/24]"),
    ("{zone: b}", "[1.1.1.0/24, 2.2.2.2/32]"),
    ("{zone: a}", "[1.1.0.0/16, 1.1.1.2/32, 10.0.0.0/24]"),
    ("{}", "[0.0.0.0/0, '::/0']"),
];

pub(super) const NAMES: &[&str] = &["www.cilium.io", "dev.cilium.io", "ebpf.io"];

pub(super) const ADDRESSES: &[&str] = &[
    "1.1.1.1",
    "1.1.1.2",
    "1.1.1.200",
    "1.1.2.1",
    "2.2.2.2",
    "10.0.0.9",
];

pub(super) const PORTS: &[(u8, u16)] = &[(6, 443), (6, 450), (6, 80), (17, 53), (1, 8), (1, 3)];

/// Addresses of the other side of packets.
pub(super) fn remotes() -> impl Iterator<Item = IpAddr> {
    let local = [
        "10.0.0.7",
        "10.0.0.8",
        "10.9.0.53",
        "9.9.9.9",
        "1.1.9.9",
        NODE,
    ];
    ADDRESSES
        .iter()
        .chain(&local.map(|a| a))
        .map(|a| a.parse().unwrap())
        .collect::<Vec<_>>()
        .into_iter()
}
