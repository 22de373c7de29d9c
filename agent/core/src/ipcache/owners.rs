//! Label sets by owner: nearly every prefix has one owner, a shared address may have thousands.

use foldhash::HashMap;

use crate::labels::LabelSet;
use dns_policy::name::Fqdn;
use shared_maps::EndpointId;
use std::{fmt, sync::Arc};

/// Up to this many owners are kept in a list, and more in a table.
const FEW: usize = 8;

/// Label sets by owner: a list while there are few, then a table.
#[derive(Clone, Debug)]
pub(super) enum ByOwner {
    Few(Vec<(Owner, LabelSet)>),
    Many(HashMap<Owner, LabelSet>),
}

impl Default for ByOwner {
    fn default() -> Self {
        Self::Few(Vec::new())
    }
}

impl ByOwner {
    /// Sets what an owner says; gives what it said before.
    pub(super) fn insert(&mut self, owner: Owner, labels: LabelSet) -> Option<LabelSet> {
        match self {
            Self::Few(list) => {
                if let Some((_, old)) = list.iter_mut().find(|(known, _)| *known == owner) {
                    return Some(std::mem::replace(old, labels));
                }
                if list.len() < FEW {
                    if list.is_empty() {
                        list.reserve_exact(1);
                    }
                    list.push((owner, labels));
                } else {
                    let mut table: HashMap<_, _> = std::mem::take(list).into_iter().collect();
                    table.insert(owner, labels);
                    *self = Self::Many(table);
                }
                None
            }
            Self::Many(table) => table.insert(owner, labels),
        }
    }

    /// Removes what an owner says, and returns it.
    pub(super) fn remove(&mut self, owner: &Owner) -> Option<LabelSet> {
        match self {
            Self::Few(list) => {
                let at = list.iter().position(|(known, _)| known == owner)?;
                Some(list.swap_remove(at).1)
            }
            Self::Many(table) => {
                let old = table.remove(owner);
                // Not at FEW: an owner that is added and removed repeatedly must not copy the table each time.
                if table.len() <= FEW / 2 {
                    *self = Self::Few(std::mem::take(table).into_iter().collect());
                }
                old
            }
        }
    }

    /// The labels that an owner gave.
    pub(super) fn get(&self, owner: &Owner) -> Option<&LabelSet> {
        match self {
            Self::Few(list) => {
                let found = list.iter().find(|(known, _)| known == owner);
                found.map(|(_, labels)| labels)
            }
            Self::Many(table) => table.get(owner),
        }
    }

    /// All owners, in no order.
    pub(super) fn owners(&self) -> impl Iterator<Item = &Owner> {
        let (list, table) = match self {
            Self::Few(list) => (Some(list), None),
            Self::Many(table) => (None, Some(table)),
        };
        let list = list.into_iter().flatten().map(|(owner, _)| owner);
        list.chain(table.into_iter().flat_map(HashMap::keys))
    }

    /// Whether no owner has an entry.
    pub(super) fn is_empty(&self) -> bool {
        match self {
            Self::Few(list) => list.is_empty(),
            Self::Many(table) => table.is_empty(),
        }
    }
}

/// Who gave a prefix its labels (or its identity): the "resource" of Cilium's metadata.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Owner {
    /// The name manager, for one name (CFP-28427, "IP Labels Lifecycle").
    Name(Fqdn),
    /// CIDR selectors of policies, for addresses outside the cluster.
    Policy,
    /// CIDR selectors of policies, for nodes.
    NodesOfPolicy,
    /// Answers of trusted DNS servers about a name that EgressFirewalls use.
    Resolved(Fqdn),
    /// The node, for all addresses outside the cluster.
    World,
    /// The node, for its own address.
    Node,
    /// A local endpoint, for its own address.
    Endpoint(EndpointId),
    /// A Service, `namespace/name`, for one of its addresses in the cluster.
    Service(Arc<str>),
    /// A Service, for an address outside the cluster that is routed to nodes.
    ExternalService(Arc<str>),
    /// An object of another source, by its name there.
    Object(Source, Arc<str>),
    /// An earlier run, until the restore grace ends.
    Restored,
}

impl Owner {
    /// Whether it is a Service or a pod of the cluster.
    pub(crate) fn is_object(&self) -> bool {
        matches!(
            self,
            Self::Service(_) | Self::ExternalService(_) | Self::Object(Source::Kubernetes, _)
        )
    }

    /// The source of what it says.
    pub const fn source(&self) -> Source {
        match self {
            Self::Name(_) | Self::Policy | Self::NodesOfPolicy | Self::Resolved(_) => {
                Source::Generated
            }
            Self::World | Self::Node | Self::Endpoint(_) => Source::Local,
            Self::Service(_) | Self::ExternalService(_) => Source::Kubernetes,
            Self::Object(source, _) => *source,
            Self::Restored => Source::Restored,
        }
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => write!(f, "fqdn-name-manager/{name}"),
            Self::Policy | Self::NodesOfPolicy => f.write_str("policy"),
            Self::Resolved(name) => write!(f, "resolved/{name}"),
            Self::World => f.write_str("world"),
            Self::Node => f.write_str("node"),
            Self::Endpoint(id) => write!(f, "endpoint/{id}"),
            Self::Service(key) | Self::ExternalService(key) => write!(f, "Service/{key}"),
            Self::Object(_, name) => f.write_str(name),
            Self::Restored => f.write_str("restored"),
        }
    }
}

/// The sources of what owners say, the most trusted first: of two values of one label the one from
/// the more trusted source counts (Cilium `pkg/source`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    /// The addresses of the API servers.
    KubeApiserver,
    /// This agent: for the node, its endpoints and the world.
    Local,
    /// Objects that give labels to prefixes, for example CiliumNodes and CiliumCIDRGroups.
    CustomResource,
    /// Pods and Services of the cluster.
    Kubernetes,
    /// Worked out from policy and answers.
    Generated,
    /// An earlier run of the agent.
    Restored,
}
