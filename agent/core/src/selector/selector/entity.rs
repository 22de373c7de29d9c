//! Roles that policies may name instead of labels.

use super::Subject;

shared_maps::words! {
    /// A role that identities may have.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Entity {
        /// Everything outside of the cluster.
        World => "world",
        WorldIpv4 => "world-ipv4",
        WorldIpv6 => "world-ipv6",
        /// This node, at any of its addresses.
        Host => "host",
        RemoteNode => "remote-node",
        /// Identities that are neither the world nor those of addresses outside.
        Cluster => "cluster",
        KubeApiserver => "kube-apiserver",
        /// Health endpoints of the nodes.
        Health => "health",
        /// Endpoints without labels yet.
        Init => "init",
        /// Addresses in the cluster of which nothing else is known.
        Unmanaged => "unmanaged",
        /// Addresses that ingress proxies of nodes send from.
        Ingress => "ingress",
        /// Selects no identity.
        None => "none",
    }
}

impl Entity {
    /// Reads an entity's name. `all` is not among the names: validation turns it into a rule without
    /// selectors, which is about every peer.
    pub fn parse(text: &str) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        all.find(|entity| entity.as_str() == text)
    }

    pub(super) fn matches(self, subject: &Subject) -> bool {
        match self {
            Self::World => subject.is_world(),
            Self::Cluster => !subject.is_world() && !subject.id.is_local_scope(),
            Self::None => false,
            Self::WorldIpv4 | Self::WorldIpv6 => {
                subject.labels.has_reserved(self.as_str()) || subject.labels.has_reserved("world")
            }
            role => subject.labels.has_reserved(role.as_str()),
        }
    }
}
