//! Roles that policies may name instead of labels.

use super::Subject;

/// A role that identities may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Entity {
    /// Everything outside.
    World,
    /// Everything outside, IPv4.
    WorldIpv4,
    /// Everything outside, IPv6.
    WorldIpv6,
    /// The node itself.
    Host,
    /// Other nodes.
    RemoteNode,
    /// Everything inside.
    Cluster,
    /// The Kubernetes API server.
    KubeApiserver,
    /// Health endpoints.
    Health,
    /// Endpoints without labels yet.
    Init,
    /// Endpoints not managed.
    Unmanaged,
    /// Ingress proxies.
    Ingress,
    /// Nothing.
    None,
}

impl Entity {
    /// Reads an entity's name. `all` is no entity: it selects by not asking.
    pub fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "world" => Self::World,
            "world-ipv4" => Self::WorldIpv4,
            "world-ipv6" => Self::WorldIpv6,
            "host" => Self::Host,
            "remote-node" => Self::RemoteNode,
            "cluster" => Self::Cluster,
            "kube-apiserver" => Self::KubeApiserver,
            "health" => Self::Health,
            "init" => Self::Init,
            "unmanaged" => Self::Unmanaged,
            "ingress" => Self::Ingress,
            "none" => Self::None,
            _ => return None,
        })
    }

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::World => "world",
            Self::WorldIpv4 => "world-ipv4",
            Self::WorldIpv6 => "world-ipv6",
            Self::Host => "host",
            Self::RemoteNode => "remote-node",
            Self::Cluster => "cluster",
            Self::KubeApiserver => "kube-apiserver",
            Self::Health => "health",
            Self::Init => "init",
            Self::Unmanaged => "unmanaged",
            Self::Ingress => "ingress",
            Self::None => "none",
        }
    }

    pub(super) fn matches(self, subject: &Subject) -> bool {
        match self {
            Self::World => subject.is_world(),
            Self::Cluster => !subject.is_world() && !subject.id.is_local_scope(),
            Self::None => false,
            Self::WorldIpv4 | Self::WorldIpv6 => {
                subject.labels.has_reserved(self.name()) || subject.labels.has_reserved("world")
            }
            role => subject.labels.has_reserved(role.name()),
        }
    }
}
