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
        r"
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toFQDNs: [{matchPattern: '*.cilium.io'}]
",
    WebToWwwOnPorts443To450 =>
        r"
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toFQDNs: [{matchName: www.cilium.io}]
    toPorts: [{ports: [{port: 443, endPort: 450, protocol: TCP}]}]
",
    ToBlockExceptPart =>
        r"
  endpointSelector: {}
  egress:
  - toCIDRSet: [{cidr: 1.1.0.0/16, except: [1.1.1.0/24]}]
",
    ToBlockExceptOneAddressOn443 =>
        r"
  endpointSelector: {}
  egress:
  - toCIDR: [1.1.1.0/25]
  egressDeny:
  - toCIDR: [1.1.1.2/32]
    toPorts: [{ports: [{port: 443, protocol: TCP}]}]
",
    WebNeverToBlock =>
        r"
  endpointSelector: {matchLabels: {app: web}}
  egressDeny:
  - toCIDR: [1.1.1.0/24]
  enableDefaultDeny: {egress: false}
",
    DnsByProxyAndToDb =>
        r"
  endpointSelector: {}
  egress:
  - toEntities: [world]
    toPorts: [{ports: [{port: 53}], rules: {dns: [{matchPattern: '*'}]}}]
  - toEndpoints: [{matchLabels: {app: db}}]
",
    DbFromWebOn443 =>
        r"
  endpointSelector: {matchLabels: {app: db}}
  ingress:
  - fromEndpoints: [{matchLabels: {app: web}}]
    toPorts: [{ports: [{port: 443, protocol: TCP}]}]
",
    ToAllExceptWorldOn443 =>
        r"
  endpointSelector: {}
  egress:
  - toEntities: [all]
  egressDeny:
  - toEntities: [world]
    toPorts: [{ports: [{port: 443, protocol: TCP}]}]
",
    ToPort443FromAll =>
        r"
  endpointSelector: {}
  egress:
  - toPorts: [{ports: [{port: 443, protocol: TCP}]}]
  ingress: [{}]
",
    WebToAnyNameAndUdp53 =>
        r"
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toFQDNs: [{matchPattern: '*'}]
  - toCIDR: [0.0.0.0/0]
    toPorts: [{ports: [{port: 53, protocol: UDP}]}]
",
    NeverFromBlock =>
        r"
  endpointSelector: {}
  ingressDeny:
  - fromCIDR: [1.1.1.0/24]
  enableDefaultDeny: {ingress: false}
",
    WebFromBlockExceptHalfAndPingsOfOne =>
        r"
  endpointSelector: {matchLabels: {app: web}}
  ingress:
  - fromCIDRSet: [{cidr: 1.1.0.0/16, except: [1.1.1.0/25]}]
  - fromCIDR: [1.1.1.2/32]
    icmps: [{fields: [{type: 8}]}]
",
    FromHostAndWorldExceptWorldOn443 =>
        r"
  endpointSelector: {}
  ingress:
  - fromEntities: [host, world]
  ingressDeny:
  - fromEntities: [world]
    toPorts: [{ports: [{port: 443, protocol: TCP}]}]
",
    FromClusterExceptPings =>
        r"
  endpointSelector: {}
  ingress:
  - fromEntities: [cluster]
  ingressDeny:
  - icmps: [{fields: [{type: EchoRequest, family: IPv4}]}]
",
    DbPingsAndToHostExceptClusterOn80 =>
        r"
  endpointSelector: {matchLabels: {app: db}}
  egress:
  - icmps: [{fields: [{type: 8}, {type: 128, family: IPv6}]}]
  - toEntities: [host]
  egressDeny:
  - toEntities: [cluster]
    toPorts: [{ports: [{port: 80, protocol: TCP}]}]
",
    NeverFromHostOn80NorBlockExceptPart =>
        r"
  endpointSelector: {}
  ingressDeny:
  - fromEntities: [host]
    toPorts: [{ports: [{port: 80, protocol: TCP}]}]
  - fromCIDRSet: [{cidr: 1.1.0.0/16, except: [1.1.1.0/24]}]
",
    WebFromAllByIcmp3 =>
        r"
  endpointSelector: {matchLabels: {app: web}}
  ingress:
  - fromEntities: [all]
    icmps: [{fields: [{type: 3}]}]
  enableDefaultDeny: {ingress: true, egress: true}
",
    AlsoFromRemoteNodes =>
        r"
  endpointSelector: {}
  ingress:
  - fromEntities: [remote-node, none]
  enableDefaultDeny: {ingress: false}
",
    WebAndApiToGroups =>
        r"
  endpointSelector: {matchExpressions: [{key: app, operator: In, values: [web, api]}]}
  egress:
  - toCIDRSet: [{cidrGroupRef: g0}, {cidrGroupRef: g1, except: [1.1.1.2/32]}]
",
    ToWorldExceptGroup =>
        r"
  endpointSelector: {}
  egress:
  - toEntities: [world]
  egressDeny:
  - toCIDRSet: [{cidrGroupRef: g0, except: [1.1.2.0/24]}]
",
    FromZoneAOn443ExceptGroup =>
        r"
  endpointSelector: {}
  ingress:
  - fromCIDRSet: [{cidrGroupSelector: {matchLabels: {zone: a}}}]
    toPorts: [{ports: [{port: 443, protocol: TCP}]}]
  ingressDeny:
  - fromCIDRSet: [{cidrGroupRef: g1}]
  enableDefaultDeny: {ingress: true}
",
    WebToGroupsByProxyAndToBlock =>
        r"
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toCIDRSet: [{cidrGroupSelector: {}}]
    toPorts: [{ports: [{port: 53}], rules: {dns: [{matchName: ebpf.io}]}}]
  - toCIDR: [1.1.0.0/16]
",
    ToOthersThanWebAndOtherNamespace =>
        r"
  endpointSelector: {}
  egress:
  - toEndpoints: [{matchExpressions: [{key: app, operator: NotIn, values: [web]}]}]
  - toEndpoints: [{matchLabels: {'k8s:io.kubernetes.pod.namespace': other}}]
    toPorts: [{ports: [{port: 1, endPort: 60000, protocol: TCP}]}]
",
    DbToAppsExceptPorts =>
        r"
  endpointSelector: {matchLabels: {'any:app': db}}
  egress:
  - toEndpoints:
    - matchExpressions:
      - {key: app, operator: Exists}
      - {key: gone, operator: DoesNotExist}
  egressDeny:
  - toPorts:
    - {ports: [{port: 440, endPort: 449, protocol: TCP}, {port: 53, protocol: UDP}]}
",
    ToWorldByFamilyFromSpecialPeers =>
        r"
  endpointSelector: {}
  egress:
  - toEntities: [world-ipv4, world-ipv6, kube-apiserver, health]
    toPorts: [{ports: [{port: 80, endPort: 443, protocol: TCP}]}]
  ingress:
  - fromEntities: [init, unmanaged, ingress]
",
    ToRemoteNodesAndApiServersFromCluster =>
        r"
  endpointSelector: {}
  egress:
  - toEntities: [remote-node]
    toPorts: [{ports: [{port: 443, protocol: TCP}]}]
  - toEntities: [kube-apiserver]
  ingress:
  - fromEntities: [cluster]
",
    WebToWorldAndClusterExceptNodesAndApiServers =>
        r"
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toEntities: [world, cluster]
  egressDeny:
  - toEntities: [remote-node]
  - toEntities: [kube-apiserver]
    toPorts: [{ports: [{port: 80, protocol: TCP}]}]
  ingressDeny:
  - fromEntities: [kube-apiserver]
",
    ToDbByNamedHttpFromAllByNamedHttp =>
        r"
  endpointSelector: {}
  ingress:
  - toPorts: [{ports: [{port: http, protocol: TCP}, {port: '8'}]}]
  egress:
  - toEndpoints: [{matchLabels: {app: db}}]
    toPorts: [{ports: [{port: http, protocol: TCP}]}]
",
    WebToNamedHttpExceptNamedDns =>
        r"
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toPorts: [{ports: [{port: http}, {port: '443', protocol: TCP}]}]
  egressDeny:
  - toEntities: [cluster]
    toPorts: [{ports: [{port: dns, protocol: UDP}]}]
  ingressDeny:
  - fromEndpoints: [{}]
    toPorts: [{ports: [{port: web, protocol: TCP}]}]
",
    ToDbByNamedDnsProxiedAndNamedWeb =>
        r"
  endpointSelector: {}
  egress:
  - toEndpoints: [{matchLabels: {app: db}}]
    toPorts: [{ports: [{port: dns}], rules: {dns: [{matchName: ebpf.io}]}}]
  - toEntities: [all]
    toPorts: [{ports: [{port: Web, protocol: TCP}, {port: http, protocol: UDP}]}]
",
    WebToTeamAFromTeamB =>
        r"
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toEndpoints: [{matchLabels: {'k8s:io.cilium.k8s.namespace.labels.team': a}}]
  ingress:
  - fromEndpoints: [{matchLabels: {'k8s:io.cilium.k8s.namespace.labels.team': b}}]
    toPorts: [{ports: [{port: 443, protocol: TCP}]}]
",
    ToAllFromAnyBlock =>
        r"
  endpointSelector: {}
  egress: [{}]
  ingress:
  - fromCIDR: [0.0.0.0/0]
  enableDefaultDeny: {egress: false, ingress: true}
",
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

/// Named ports that endpoints may have. One name means different ports.
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
