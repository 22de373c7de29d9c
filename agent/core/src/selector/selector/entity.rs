//! Roles that policies may name instead of labels.

use super::Subject;

/// A role that identities may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Entity {
    /// Everything outside of the cluster.
    World,
    WorldIpv4,
    WorldIpv6,
    /// This node, at any of its addresses.
    Host,
    RemoteNode,
    /// Identities that are neither the world nor those of addresses outside.
    Cluster,
    KubeApiserver,
    /// Health endpoints of the nodes.
    Health,
    /// Endpoints without labels yet.
    Init,
    /// Addresses in the cluster of which nothing else is known.
    Unmanaged,
    /// Addresses that ingress proxies of nodes send from.
    Ingress,
    /// It selects no identity at all.
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

    /// The name, as policies spell it.
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
