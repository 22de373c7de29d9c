//! Pods and namespaces, as NetworkPolicies see them.

use std::{collections::BTreeMap, fmt, net::IpAddr, sync::Arc};

use crate::{name::PortName, policy::Protocol};

/// The key of a pod, displayed as `namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodId {
    /// The namespace that the pod is in.
    pub namespace: Arc<str>,
    /// Name of the pod within its namespace.
    pub name: Arc<str>,
}

/// Numbers of ports by their names and protocols.
pub type NamedPorts = BTreeMap<(PortName, Protocol), u16>;

/// A pod, with the properties that selectors and rules need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Namespace and name.
    pub id: PodId,
    /// Labels as the object has them.
    pub labels: BTreeMap<String, String>,
    /// The node that runs the pod; `None` until it has been scheduled.
    pub node: Option<Arc<str>>,
    /// Addresses of the pod. It has none before it gets the first, if it uses its node's network
    /// (`hostNetwork`), and once it has ended.
    pub addresses: Vec<IpAddr>,
    /// When the pod was made, nanoseconds since 1970. Of two pods with one address, the younger has
    /// it.
    pub created: Option<u64>,
    /// Numbers of the container ports that have names.
    pub ports: NamedPorts,
}

/// A namespace, with the properties that selectors need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Name of the object.
    pub name: Arc<str>,
    /// Labels of the namespace, including the label with its name (`kubernetes.io/metadata.name`).
    pub labels: BTreeMap<String, String>,
}

impl PodId {
    /// The key of the pod with this name in this namespace.
    pub fn new(namespace: &str, name: &str) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
        }
    }

    /// Reads `namespace/name`.
    pub fn parse(text: &str) -> Option<Self> {
        let (namespace, name) = text.split_once('/')?;
        let good = !namespace.is_empty() && !name.is_empty() && !name.contains('/');
        good.then(|| Self::new(namespace, name))
    }
}

impl fmt::Display for PodId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl Pod {
    /// The number of the container port with this name and protocol.
    pub fn port(&self, name: &PortName, protocol: Protocol) -> Option<u16> {
        self.ports.get(&(name.clone(), protocol)).copied()
    }
}
