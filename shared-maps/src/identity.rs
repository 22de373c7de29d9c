//! Numeric identities, their scopes and the reserved numbers.

/// Numeric security identity (NID), host byte order.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IdentityId(pub u32);

/// Number of an endpoint on this node. Another endpoint can get it after this one is removed.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointId(pub u16);

/// Scope byte (bits 31..24) of node-local CIDR and FQDN identities.
pub(crate) const SCOPE_LOCAL: u32 = 0x0100_0000;
/// Scope byte of remote-node identities.
pub const SCOPE_REMOTE_NODE: u32 = 0x0200_0000;
/// Scope byte of Services: the addresses that the node translates to backends. Only
/// holdfast-agent uses it.
pub(crate) const SCOPE_SERVICE: u32 = 0x0300_0000;
/// Mask of the scope byte.
pub const SCOPE_MASK: u32 = 0xff00_0000;

impl IdentityId {
    /// No identity; as a policy key, "any".
    pub const UNKNOWN: Self = Self(0);
    /// The node itself, with all of its addresses.
    pub const HOST: Self = Self(1);
    /// All addresses outside of the cluster, on a node with one family.
    pub const WORLD: Self = Self(2);
    /// Endpoints that are not managed.
    pub const UNMANAGED: Self = Self(3);
    /// Endpoints with which Cilium checks the health of nodes.
    pub const HEALTH: Self = Self(4);
    /// Endpoints whose labels are not known yet.
    pub const INIT: Self = Self(5);
    /// Other nodes of the cluster.
    pub const REMOTE_NODE: Self = Self(6);
    /// Addresses of the Kubernetes API server.
    pub const KUBE_APISERVER: Self = Self(7);
    /// Ingress proxies, which Cilium runs on the nodes.
    pub const INGRESS: Self = Self(8);
    /// IPv4 addresses outside of the cluster, on a node with both families.
    pub const WORLD_IPV4: Self = Self(9);
    /// IPv6 addresses outside of the cluster, on a node with both families.
    pub const WORLD_IPV6: Self = Self(10);

    /// Lowest number an endpoint (pod) identity may have.
    pub const ENDPOINT_MIN: Self = Self(256);
    /// Highest number an endpoint (pod) identity may have on a node-local allocator.
    pub const ENDPOINT_MAX: Self = Self(65535);
    /// Lowest identity that the node allocates for prefixes and names.
    pub const LOCAL_MIN: Self = Self(SCOPE_LOCAL + 1);
    /// Highest identity that the node allocates for prefixes and names.
    pub const LOCAL_MAX: Self = Self(SCOPE_LOCAL + 0x00ff_ffff);

    /// Whether the number is of the node-local CIDR/FQDN scope.
    #[inline(always)]
    pub const fn is_local_scope(self) -> bool {
        self.0 & SCOPE_MASK == SCOPE_LOCAL
    }

    /// Lowest identity of a Service.
    pub const SERVICE_MIN: Self = Self(SCOPE_SERVICE + 1);
    /// Highest identity of a Service.
    pub const SERVICE_MAX: Self = Self(SCOPE_SERVICE + 0x00ff_ffff);

    /// Whether the number is of the scope of Services.
    #[inline(always)]
    pub const fn is_service(self) -> bool {
        self.0 & SCOPE_MASK == SCOPE_SERVICE
    }

    /// Whether the number is one of the three world identities.
    #[inline(always)]
    pub const fn is_world(self) -> bool {
        matches!(self, Self::WORLD | Self::WORLD_IPV4 | Self::WORLD_IPV6)
    }

    /// Whether the number may be an endpoint (pod) identity.
    #[inline(always)]
    pub const fn is_endpoint(self) -> bool {
        self.0 >= Self::ENDPOINT_MIN.0 && self.0 <= Self::ENDPOINT_MAX.0
    }

    /// The world identity of an address of `family` without an ipcache entry.
    ///
    /// `dual_stack` says whether the node has both IPv4 and IPv6 enabled.
    #[inline(always)]
    pub const fn world_of(family: u8, dual_stack: bool) -> Self {
        if !dual_stack {
            Self::WORLD
        } else if family == crate::FAMILY_IPV6 {
            Self::WORLD_IPV6
        } else {
            Self::WORLD_IPV4
        }
    }
}

impl core::fmt::Display for IdentityId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.0.fmt(f)
    }
}

impl core::fmt::Display for EndpointId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.0.fmt(f)
    }
}
