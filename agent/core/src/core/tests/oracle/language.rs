//! Policies in every corner of the language, and groups of blocks that they name.

use std::net::IpAddr;

use super::{
    super::random_network_policies::Vocabulary,
    pod::{DEFAULT, SHOP},
};
pub(in crate::core::tests) use crate::core::testing::cluster::ServicePort;
use crate::core::testing::pod::PortNames;

/// Address of the node itself.
pub(super) const NODE: &str = "10.0.0.1";

/// The policies that a history applies: an enum, so that a failure prints names.
macro_rules! policies {
    ($($name:ident => $spec:literal,)*) => {
        /// A policy: its name says which traffic it allows, and after "Except" or "Never" which
        /// traffic it denies. Without another subject it applies to all endpoints.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(in crate::core::tests) enum Spec {
            $($name,)*
        }

        impl Spec {
            pub(in crate::core::tests) const ALL: &[Self] = &[$(Self::$name,)*];

            /// The document's `spec` as YAML.
            pub(in crate::core::tests) fn text(self) -> &'static str {
                match self {
                    $(Self::$name => $spec,)*
                }
            }
        }
    };
}

policies! {
    WebToCiliumNames =>
        "endpointSelector: {matchLabels: {app: web}}\n  egress:\n  - toFQDNs: [{matchPattern: '*.cilium.io'}]",
    WebToWwwOnPorts443To450 =>
        "endpointSelector: {matchLabels: {app: web}}\n  egress:\n  - toFQDNs: [{matchName: www.cilium.io}]\n    toPorts: [{ports: [{port: 443, endPort: 450, protocol: TCP}]}]",
    ToBlockExceptPart =>
        "endpointSelector: {}\n  egress:\n  - toCIDRSet: [{cidr: 1.1.0.0/16, except: [1.1.1.0/24]}]",
    ToBlockExceptOneAddressOn443 =>
        "endpointSelector: {}\n  egress:\n  - toCIDR: [1.1.1.0/25]\n  egressDeny:\n  - toCIDR: [1.1.1.2/32]\n    toPorts: [{ports: [{port: 443, protocol: TCP}]}]",
    WebNeverToBlock =>
        "endpointSelector: {matchLabels: {app: web}}\n  egressDeny:\n  - toCIDR: [1.1.1.0/24]\n  enableDefaultDeny: {egress: false}",
    DnsByProxyAndToDb =>
        "endpointSelector: {}\n  egress:\n  - toEntities: [world]\n    toPorts: [{ports: [{port: 53}], rules: {dns: [{matchPattern: '*'}]}}]\n  - toEndpoints: [{matchLabels: {app: db}}]",
    DbFromWebOn443 =>
        "endpointSelector: {matchLabels: {app: db}}\n  ingress:\n  - fromEndpoints: [{matchLabels: {app: web}}]\n    toPorts: [{ports: [{port: 443, protocol: TCP}]}]",
    ToAllExceptWorldOn443 =>
        "endpointSelector: {}\n  egress:\n  - toEntities: [all]\n  egressDeny:\n  - toEntities: [world]\n    toPorts: [{ports: [{port: 443, protocol: TCP}]}]",
    ToPort443FromAll =>
        "endpointSelector: {}\n  egress:\n  - toPorts: [{ports: [{port: 443, protocol: TCP}]}]\n  ingress: [{}]",
    WebToAnyNameAndUdp53 =>
        "endpointSelector: {matchLabels: {app: web}}\n  egress:\n  - toFQDNs: [{matchPattern: '*'}]\n  - toCIDR: [0.0.0.0/0]\n    toPorts: [{ports: [{port: 53, protocol: UDP}]}]",
    NeverFromBlock =>
        "endpointSelector: {}\n  ingressDeny:\n  - fromCIDR: [1.1.1.0/24]\n  enableDefaultDeny: {ingress: false}",
    WebFromBlockExceptHalfAndPingsOfOne =>
        "endpointSelector: {matchLabels: {app: web}}\n  ingress:\n  - fromCIDRSet: [{cidr: 1.1.0.0/16, except: [1.1.1.0/25]}]\n  - fromCIDR: [1.1.1.2/32]\n    icmps: [{fields: [{type: 8}]}]",
    FromHostAndWorldExceptWorldOn443 =>
        "endpointSelector: {}\n  ingress:\n  - fromEntities: [host, world]\n  ingressDeny:\n  - fromEntities: [world]\n    toPorts: [{ports: [{port: 443, protocol: TCP}]}]",
    FromClusterExceptPings =>
        "endpointSelector: {}\n  ingress:\n  - fromEntities: [cluster]\n  ingressDeny:\n  - icmps: [{fields: [{type: EchoRequest, family: IPv4}]}]",
    DbPingsAndToHostExceptClusterOn80 =>
        "endpointSelector: {matchLabels: {app: db}}\n  egress:\n  - icmps: [{fields: [{type: 8}, {type: 128, family: IPv6}]}]\n  - toEntities: [host]\n  egressDeny:\n  - toEntities: [cluster]\n    toPorts: [{ports: [{port: 80, protocol: TCP}]}]",
    NeverFromHostOn80NorBlockExceptPart =>
        "endpointSelector: {}\n  ingressDeny:\n  - fromEntities: [host]\n    toPorts: [{ports: [{port: 80, protocol: TCP}]}]\n  - fromCIDRSet: [{cidr: 1.1.0.0/16, except: [1.1.1.0/24]}]",
    WebFromAllByIcmp3 =>
        "endpointSelector: {matchLabels: {app: web}}\n  ingress:\n  - fromEntities: [all]\n    icmps: [{fields: [{type: 3}]}]\n  enableDefaultDeny: {ingress: true, egress: true}",
    AlsoFromRemoteNodes =>
        "endpointSelector: {}\n  ingress:\n  - fromEntities: [remote-node, none]\n  enableDefaultDeny: {ingress: false}",
    WebAndApiToGroups =>
        "endpointSelector: {matchExpressions: [{key: app, operator: In, values: [web, api]}]}\n  egress:\n  - toCIDRSet: [{cidrGroupRef: g0}, {cidrGroupRef: g1, except: [1.1.1.2/32]}]",
    ToWorldExceptGroup =>
        "endpointSelector: {}\n  egress:\n  - toEntities: [world]\n  egressDeny:\n  - toCIDRSet: [{cidrGroupRef: g0, except: [1.1.2.0/24]}]",
    FromZoneAOn443ExceptGroup =>
        "endpointSelector: {}\n  ingress:\n  - fromCIDRSet: [{cidrGroupSelector: {matchLabels: {zone: a}}}]\n    toPorts: [{ports: [{port: 443, protocol: TCP}]}]\n  ingressDeny:\n  - fromCIDRSet: [{cidrGroupRef: g1}]\n  enableDefaultDeny: {ingress: true}",
    WebToGroupsByProxyAndToBlock =>
        "endpointSelector: {matchLabels: {app: web}}\n  egress:\n  - toCIDRSet: [{cidrGroupSelector: {}}]\n    toPorts: [{ports: [{port: 53}], rules: {dns: [{matchName: ebpf.io}]}}]\n  - toCIDR: [1.1.0.0/16]",
    ToOthersThanWebAndOtherNamespace =>
        "endpointSelector: {}\n  egress:\n  - toEndpoints: [{matchExpressions: [{key: app, operator: NotIn, values: [web]}]}]\n  - toEndpoints: [{matchLabels: {'k8s:io.kubernetes.pod.namespace': other}}]\n    toPorts: [{ports: [{port: 1, endPort: 60000, protocol: TCP}]}]",
    DbToAppsExceptPorts =>
        "endpointSelector: {matchLabels: {'any:app': db}}\n  egress:\n  - toEndpoints: [{matchExpressions: [{key: app, operator: Exists}, {key: gone, operator: DoesNotExist}]}]\n  egressDeny:\n  - toPorts: [{ports: [{port: 440, endPort: 449, protocol: TCP}, {port: 53, protocol: UDP}]}]",
    ToWorldByFamilyFromSpecialPeers =>
        "endpointSelector: {}\n  egress:\n  - toEntities: [world-ipv4, world-ipv6, kube-apiserver, health]\n    toPorts: [{ports: [{port: 80, endPort: 443, protocol: TCP}]}]\n  ingress:\n  - fromEntities: [init, unmanaged, ingress]",
    ToRemoteNodesAndApiServersFromCluster =>
        "endpointSelector: {}\n  egress:\n  - toEntities: [remote-node]\n    toPorts: [{ports: [{port: 443, protocol: TCP}]}]\n  - toEntities: [kube-apiserver]\n  ingress:\n  - fromEntities: [cluster]",
    WebToWorldAndClusterExceptNodesAndApiServers =>
        "endpointSelector: {matchLabels: {app: web}}\n  egress:\n  - toEntities: [world, cluster]\n  egressDeny:\n  - toEntities: [remote-node]\n  - toEntities: [kube-apiserver]\n    toPorts: [{ports: [{port: 80, protocol: TCP}]}]\n  ingressDeny:\n  - fromEntities: [kube-apiserver]",
    ToDbByNamedHttpFromAllByNamedHttp =>
        "endpointSelector: {}\n  ingress:\n  - toPorts: [{ports: [{port: http, protocol: TCP}, {port: '8'}]}]\n  egress:\n  - toEndpoints: [{matchLabels: {app: db}}]\n    toPorts: [{ports: [{port: http, protocol: TCP}]}]",
    WebToNamedHttpExceptNamedDns =>
        "endpointSelector: {matchLabels: {app: web}}\n  egress:\n  - toPorts: [{ports: [{port: http}, {port: '443', protocol: TCP}]}]\n  egressDeny:\n  - toEntities: [cluster]\n    toPorts: [{ports: [{port: dns, protocol: UDP}]}]\n  ingressDeny:\n  - fromEndpoints: [{}]\n    toPorts: [{ports: [{port: web, protocol: TCP}]}]",
    ToDbByNamedDnsProxiedAndNamedWeb =>
        "endpointSelector: {}\n  egress:\n  - toEndpoints: [{matchLabels: {app: db}}]\n    toPorts: [{ports: [{port: dns}], rules: {dns: [{matchName: ebpf.io}]}}]\n  - toEntities: [all]\n    toPorts: [{ports: [{port: Web, protocol: TCP}, {port: http, protocol: UDP}]}]",
    WebToTeamAFromTeamB =>
        "endpointSelector: {matchLabels: {app: web}}\n  egress:\n  - toEndpoints: [{matchLabels: {'k8s:io.cilium.k8s.namespace.labels.team': a}}]\n  ingress:\n  - fromEndpoints: [{matchLabels: {'k8s:io.cilium.k8s.namespace.labels.team': b}}]\n    toPorts: [{ports: [{port: 443, protocol: TCP}]}]",
    ToAllFromAnyBlock =>
        "endpointSelector: {}\n  egress: [{}]\n  ingress:\n  - fromCIDR: [0.0.0.0/0]\n  enableDefaultDeny: {egress: false, ingress: true}",
}

/// Names, labels, blocks and ports that random NetworkPolicies use.
pub(super) const VOCABULARY: &Vocabulary = &Vocabulary {
    namespaces: &[DEFAULT, DEFAULT, SHOP],
    of_pods: &[("app", &["web", "db"]), ("gone", &["never"])],
    of_namespaces: &[
        ("team", &["a", "b"]),
        ("team", &["b", "a"]),
        ("kubernetes.io/metadata.name", &[DEFAULT, SHOP]),
    ],
    blocks: &[
        ("1.1.0.0/16", &["1.1.1.0/24", "1.1.9.9/32"]),
        ("1.1.1.0/25", &["1.1.1.2/32"]),
        ("0.0.0.0/0", &["1.1.1.0/24", "2.2.2.2/32"]),
        ("9.9.9.9/32", &[]),
        ("10.0.0.0/24", &["10.0.0.8/32"]),
    ],
    ports: &[53, 80, 443, 450],
    port_names: &["http", "dns", "web", "none"],
};

/// What endpoints may have. One name means different ports.
pub(super) const PORT_NAMES: &[PortNames] = &[
    &[],
    &[("http", 6, 80), ("dns", 17, 53)],
    &[("http", 6, 443), ("dns", 6, 450)],
    &[("http", 17, 53), ("dns", 17, 53), ("web", 6, 450)],
];

/// Addresses of a node, or of the API servers.
pub(in crate::core::tests) type Addresses = &'static [&'static str];

pub(super) const CLUSTER: &[Addresses] = &[
    &[],
    &["9.9.9.9", "1.1.1.2"],
    &["1.1.2.1", "1.1.1.2"],
    &["2.2.2.2", "10.0.0.9"],
];

/// A CiliumCIDRGroup: its labels and its blocks, as YAML.
#[derive(Clone, Copy, Debug)]
pub(in crate::core::tests) struct Group {
    pub(super) labels: &'static str,
    pub(super) blocks: &'static str,
}

impl Group {
    pub(super) const ALL: &[Self] = &[
        Self::new("{}", "[]"),
        Self::new("{zone: a}", "[1.1.1.0/24]"),
        Self::ZONE_B,
        Self::new("{zone: a}", "[1.1.0.0/16, 1.1.1.2/32, 10.0.0.0/24]"),
        Self::new("{}", "[0.0.0.0/0, '::/0']"),
    ];

    /// Labelled `zone: b`, with the blocks 1.1.1.0/24 and 2.2.2.2/32.
    pub(in crate::core::tests) const ZONE_B: Self =
        Self::new("{zone: b}", "[1.1.1.0/24, 2.2.2.2/32]");

    const fn new(labels: &'static str, blocks: &'static str) -> Self {
        Self { labels, blocks }
    }
}

pub(super) const NAMES: &[&str] = &["www.cilium.io", "dev.cilium.io", "ebpf.io"];

pub(super) const ADDRESSES: &[&str] = &[
    "1.1.1.1",
    "1.1.1.2",
    "1.1.1.200",
    "1.1.2.1",
    "2.2.2.2",
    "10.0.0.9",
];

/// Ports that the Service may have.
pub(super) const SERVICES: &[&[ServicePort]] = &[
    &[(6, 443, 450, &["1.1.1.1", "10.0.0.8"])],
    &[
        (6, 443, 443, &["10.0.0.8"]),
        (17, 53, 53, &["10.0.0.8", "10.0.0.9"]),
    ],
    &[(6, 80, 443, &["1.1.1.2", NODE]), (6, 450, 80, &["2.2.2.2"])],
    &[(6, 80, 80, &[]), (6, 443, 443, &["1.1.1.2"])],
    &[(17, 53, 53, &["10.9.0.53"]), (6, 443, 53, &["10.9.0.53"])],
    &[
        (6, 80, 80, &["10.0.0.9", "1.1.1.200"]),
        (6, 443, 443, &["10.0.0.9"]),
    ],
];

/// Values of the namespace's label `team`.
pub(super) const TEAMS: &[&str] = &["a", "b"];

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
