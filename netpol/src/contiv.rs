//! A NetworkPolicy in the form that renderings use: matches, whose peers are groups of pods and
//! blocks of addresses. Each policy is computed once, and is the same for every pod that it
//! restricts.

use std::{collections::BTreeSet, fmt, sync::Arc};

use crate::{
    policy::{Block, Ports},
    selector::Selector,
};

/// The key of a NetworkPolicy, displayed as `namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PolicyId {
    /// The namespace whose pods the policy may select.
    pub namespace: Arc<str>,
    /// Name of the policy within its namespace.
    pub name: Arc<str>,
}

/// What a policy does to the pods that it selects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContivPolicy {
    /// Namespace and name.
    pub id: PolicyId,
    /// Directions that the policy restricts.
    pub restricts: PolicyType,
    /// Traffic that the policy allows, in the order of its rules. All other traffic of these
    /// directions is closed.
    pub matches: Vec<Match>,
}

/// The directions that a policy restricts, seen from its pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PolicyType {
    /// What the pods may receive.
    Ingress,
    /// What the pods may send.
    Egress,
    /// Both directions.
    All,
}

/// A direction of traffic, seen from the restricted pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Flow {
    /// To the pod.
    Ingress,
    /// From the pod.
    Egress,
}

/// Traffic that a policy allows: with one of the peers, on one of the ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Match {
    /// Direction in which the connection is opened.
    pub flow: Flow,
    /// Field of the rule in its policy, for example `spec.ingress[0]`.
    pub path: String,
    /// Peers that may send the traffic (ingress) or receive it (egress).
    pub peers: MatchPeers,
    /// Ports at the receiver. A named port means the number that the receiving pod gives it: the
    /// restricted pod in ingress, the peer in egress. If that pod does not have the name, the port
    /// means nothing.
    pub ports: Ports,
}

/// The other side of a match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MatchPeers {
    /// Every address.
    Everyone,
    /// Members of any of the groups, and addresses of any of the blocks. Without members and
    /// blocks, there is no peer.
    Of {
        /// Pods that selectors select.
        groups: BTreeSet<PodSet>,
        /// Blocks of addresses, without their `except`.
        blocks: Vec<Block>,
    },
}

/// The pods that a peer or a policy selects. They change with pods and namespaces.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodSet {
    /// Namespaces in which pods are selected.
    pub namespaces: InNamespaces,
    /// Selects the pods in these namespaces.
    pub pods: Selector,
}

/// The namespaces of a [`PodSet`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum InNamespaces {
    /// The namespace of this name, whether or not it has an object.
    Named(Arc<str>),
    /// Namespaces whose labels match. Of a namespace without an object, only the name is known.
    Selected(Selector),
}

impl fmt::Display for PolicyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl Flow {
    /// Both directions.
    pub const ALL: [Self; 2] = [Self::Ingress, Self::Egress];
}

impl PolicyType {
    /// Whether the policy restricts traffic of this direction.
    pub const fn restricts(self, flow: Flow) -> bool {
        match flow {
            Flow::Ingress => matches!(self, Self::Ingress | Self::All),
            Flow::Egress => matches!(self, Self::Egress | Self::All),
        }
    }
}
