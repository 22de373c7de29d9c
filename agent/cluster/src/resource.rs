//! The kinds of objects that are watched.

/// A kind of object, and where the API server has it.
#[derive(Debug)]
pub struct Resource {
    /// Its kind, as in documents.
    pub kind: &'static str,
    /// The kind's `apiVersion`, for example `networking.k8s.io/v1`.
    pub(crate) version: &'static str,
    /// Name of the kind in URL paths, for example `pods`.
    pub(crate) plural: &'static str,
    /// Which of its objects are watched; empty = all.
    pub(crate) selector: &'static str,
    /// Why the API server may not have the kind.
    pub(crate) absence: Absence,
}

/// What it means that the API server does not have a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Absence {
    /// Every cluster has the kind.
    Never,
    /// The API server lacks the kind until its CustomResourceDefinition is installed.
    Definition,
    /// Like [`Self::Definition`]; without the definition, the cluster just has no objects of the kind.
    Optional,
    /// Like [`Self::Definition`], and a missing right (403) counts as absence, too: no policy waits for the
    /// objects, because each agent gives numbers of its own without them.
    Numbers,
    /// The cluster is older than Kubernetes 1.33, and `--k8s-service-cidr` names the blocks instead.
    Release,
}

/// Kinds that agents and relays watch. Namespaces come before pods: then pods are complete at once.
pub const RESOURCES: &[Resource] = without_last(WITH_IDENTITIES);

/// Like [`RESOURCES`], for a cluster whose identities are objects (`--identity-allocation=cluster`).
pub(crate) const WITH_IDENTITIES: &[Resource] = match ALL.split_first() {
    Some((_world, others)) => others,
    None => &[],
};

/// Like [`RESOURCES`], for nodes with a part in the tunnel between nodes (`--high-scale-ipcache`).
const WITH_WORLD: &[Resource] = without_last(ALL);

/// Kinds to watch. `identities`: identities are objects. `world`: nodes have a part in the tunnel.
pub fn watched(identities: bool, world: bool) -> &'static [Resource] {
    match (identities, world) {
        (false, false) => RESOURCES,
        (true, false) => WITH_IDENTITIES,
        (false, true) => WITH_WORLD,
        (true, true) => ALL,
    }
}

const fn without_last(all: &'static [Resource]) -> &'static [Resource] {
    match all.split_last() {
        Some((_last, others)) => others,
        None => &[],
    }
}

const ALL: &[Resource] = &[
    CILIUM_WORLD_CIDRS,
    NAMESPACE,
    POD,
    SERVICE,
    SERVICE_CIDR,
    ENDPOINT_SLICE,
    NETWORK_POLICY,
    CILIUM_NETWORK_POLICY,
    CILIUM_CLUSTERWIDE_NETWORK_POLICY,
    CILIUM_CIDR_GROUP,
    CILIUM_NODE,
    EGRESS_FIREWALL,
    DNS_NAME_RESOLVER,
    CILIUM_IDENTITY,
];

/// Kinds that `netpol run` watches: NetworkPolicies with the objects that they select, and the
/// policies that it does not enforce. The definitions of the latter may be absent.
pub const OF_NETWORK_POLICIES: &[Resource] = &[
    NAMESPACE,
    POD,
    NETWORK_POLICY,
    CILIUM_NETWORK_POLICY.optional(),
    CILIUM_CLUSTERWIDE_NETWORK_POLICY.optional(),
    EGRESS_FIREWALL,
];

const NAMESPACE: Resource = Resource {
    kind: "Namespace",
    version: "v1",
    plural: "namespaces",
    selector: "",
    absence: Absence::Never,
};

const POD: Resource = Resource {
    kind: "Pod",
    version: "v1",
    plural: "pods",
    selector: "",
    absence: Absence::Never,
};

const SERVICE: Resource = Resource {
    kind: "Service",
    version: "v1",
    plural: "services",
    selector: "!service.kubernetes.io/headless,!service.kubernetes.io/service-proxy-name",
    absence: Absence::Never,
};

const SERVICE_CIDR: Resource = Resource {
    kind: "ServiceCIDR",
    version: "networking.k8s.io/v1",
    plural: "servicecidrs",
    selector: "",
    absence: Absence::Release,
};

const ENDPOINT_SLICE: Resource = Resource {
    kind: "EndpointSlice",
    version: "discovery.k8s.io/v1",
    plural: "endpointslices",
    selector: "!service.kubernetes.io/headless",
    absence: Absence::Never,
};

const NETWORK_POLICY: Resource = Resource {
    kind: "NetworkPolicy",
    version: "networking.k8s.io/v1",
    plural: "networkpolicies",
    selector: "",
    absence: Absence::Never,
};

const CILIUM_NETWORK_POLICY: Resource = Resource {
    kind: "CiliumNetworkPolicy",
    version: "cilium.io/v2",
    plural: "ciliumnetworkpolicies",
    selector: "",
    absence: Absence::Definition,
};

const CILIUM_CLUSTERWIDE_NETWORK_POLICY: Resource = Resource {
    kind: "CiliumClusterwideNetworkPolicy",
    version: "cilium.io/v2",
    plural: "ciliumclusterwidenetworkpolicies",
    selector: "",
    absence: Absence::Definition,
};

const CILIUM_CIDR_GROUP: Resource = Resource {
    kind: "CiliumCIDRGroup",
    version: "cilium.io/v2",
    plural: "ciliumcidrgroups",
    selector: "",
    absence: Absence::Definition,
};

const CILIUM_NODE: Resource = Resource {
    kind: "CiliumNode",
    version: "cilium.io/v2",
    plural: "ciliumnodes",
    selector: "",
    absence: Absence::Definition,
};

const EGRESS_FIREWALL: Resource = Resource {
    kind: "EgressFirewall",
    version: "k8s.ovn.org/v1",
    plural: "egressfirewalls",
    selector: "",
    absence: Absence::Optional,
};

const DNS_NAME_RESOLVER: Resource = Resource {
    kind: "DNSNameResolver",
    version: "network.openshift.io/v1alpha1",
    plural: "dnsnameresolvers",
    selector: "",
    absence: Absence::Optional,
};

const CILIUM_WORLD_CIDRS: Resource = Resource {
    kind: "CiliumWorldCIDRs",
    version: "cilium.io/v2alpha1",
    plural: "ciliumworldcidrs",
    selector: "",
    absence: Absence::Optional,
};

const CILIUM_IDENTITY: Resource = Resource {
    kind: "CiliumIdentity",
    version: "cilium.io/v2",
    plural: "ciliumidentities",
    selector: "",
    absence: Absence::Numbers,
};

impl Resource {
    /// The same kind, whose definition the cluster may lack.
    const fn optional(self) -> Self {
        Self {
            absence: Absence::Optional,
            ..self
        }
    }

    /// URL path of all objects of the kind.
    pub(crate) fn path(&self) -> String {
        match self.version.contains('/') {
            true => format!("/apis/{}/{}", self.version, self.plural),
            false => format!("/api/{}/{}", self.version, self.plural),
        }
    }

    /// Which values of the chart install the kind's definition, as text for people.
    pub(crate) fn installed_by(&self) -> &'static str {
        match self.kind {
            "CiliumIdentity" => "chart values identities.mode=cluster and crds.install",
            "CiliumWorldCIDRs" => "chart values highScale.mode and crds.install",
            _ => "chart value crds.install",
        }
    }

    /// Which role of the chart has the right to read the kind, as text for people.
    pub(crate) fn role(&self) -> &'static str {
        match self.kind {
            "CiliumIdentity" => {
                "the ClusterRole holdfast-identities-reader (chart value identities.mode=cluster)"
            }
            "CiliumWorldCIDRs" => {
                "the ClusterRole holdfast-high-scale-reader (chart value highScale.mode)"
            }
            _ => "the agent's ClusterRole, as the chart has it",
        }
    }

    /// The kind's name in roles: `pods`, or `ciliumnodes.cilium.io`.
    pub(crate) fn qualified(&self) -> String {
        match self.version.split_once('/') {
            Some((group, _)) => format!("{}.{group}", self.plural),
            None => self.plural.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mode_adds_one_kind_and_no_other() {
        let kinds = |all: &[Resource]| all.iter().map(|one| one.kind).collect::<Vec<_>>();
        for (identities, world, expected) in [
            (false, false, vec![]),
            (true, false, vec!["CiliumIdentity"]),
            (false, true, vec!["CiliumWorldCIDRs"]),
            (true, true, vec!["CiliumWorldCIDRs", "CiliumIdentity"]),
        ] {
            let mut added = kinds(watched(identities, world));
            let count = added.len();
            added.retain(|kind| !kinds(RESOURCES).contains(kind));
            assert_eq!(added, expected);
            assert_eq!(RESOURCES.len() + expected.len(), count);
        }
    }
}
