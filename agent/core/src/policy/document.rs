//! A document that was read: its key, and one body for each kind.

use std::{collections::BTreeMap, sync::Arc};

use ipnet::IpNet;
use netpol::NetworkPolicy;

use super::{
    cidr_group::CidrGroup,
    cluster::{
        endpoint::CiliumEndpoint, namespace::Namespace, node::Node, pod::Pod, service::Service,
        service_cidr::ServiceCidr, slice::EndpointSlice, world_cidrs::WorldCidrs,
    },
    egress_firewall,
    rule::Rule,
};
use crate::{
    identity::cluster_object::CiliumIdentity, ipcache::owners::Source, labels::LabelSet,
    name_objects::object::Resolver,
};

/// A document that was read without error.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyDocument {
    /// `kind/namespace/name` (`kind/name` when cluster-wide): unique over all sources.
    pub key: String,
    /// Where it came from, for people.
    pub source: String,
    /// Warnings for the document's author.
    pub warnings: Vec<String>,
    pub body: Body,
}

/// The content of a document, by kind.
#[derive(Clone, Debug, PartialEq)]
pub enum Body {
    /// Rules of a policy, of any of its kinds except NetworkPolicy.
    Rules(Vec<Rule>),
    /// A NetworkPolicy, which is also enforced without identities.
    NetworkPolicy {
        policy: Arc<NetworkPolicy>,
        /// Its rules over identities.
        rules: Vec<Rule>,
    },
    /// Blocks that rules of other documents name.
    Group(CidrGroup),
    /// A node of the cluster.
    Node(Node),
    /// Blocks of addresses of Services.
    ServiceCidr(ServiceCidr),
    Slice(Arc<EndpointSlice>),
    Pod(Arc<Pod>),
    Namespace(Arc<Namespace>),
    Service(Arc<Service>),
    /// A pod as Cilium describes it.
    Endpoint(Arc<CiliumEndpoint>),
    /// The number of a label set.
    Identity(CiliumIdentity),
    /// Blocks outside of the cluster.
    World(WorldCidrs),
    /// Addresses of a name that EgressFirewalls use.
    NameResolver(Arc<Resolver>),
}

impl PolicyDocument {
    /// Its rules; empty unless it is a policy.
    pub fn rules(&self) -> &[Rule] {
        match &self.body {
            Body::Rules(rules) | Body::NetworkPolicy { rules, .. } => rules,
            _ => &[],
        }
    }

    /// Whether it is a policy: it has rules.
    pub(crate) fn is_policy(&self) -> bool {
        matches!(self.body, Body::Rules(_) | Body::NetworkPolicy { .. })
    }

    /// Whether it is an EgressFirewall.
    pub fn is_firewall(&self) -> bool {
        self.key.split('/').next() == Some(egress_firewall::KIND)
    }

    /// Its blocks, if it is a `CiliumCIDRGroup`.
    pub fn group(&self) -> Option<&CidrGroup> {
        match &self.body {
            Body::Group(group) => Some(group),
            _ => None,
        }
    }

    /// Labels that it gives to prefixes, and their source. `own` is the name of this node; `asked`
    /// says which keys of a node's labels count.
    pub fn labels(
        &self,
        own: Option<&str>,
        asked: &dyn Fn(&str) -> bool,
    ) -> (Source, BTreeMap<IpNet, LabelSet>) {
        match &self.body {
            Body::Node(node) => (Source::CustomResource, node.address_labels(own, asked)),
            Body::ServiceCidr(blocks) => (Source::CustomResource, blocks.labels()),
            Body::Slice(slice) if slice.is_of_api_servers() => {
                (Source::KubeApiserver, slice.api_server_labels())
            }
            Body::Group(group) => {
                let blocks = group.prefixes.iter();
                let blocks = blocks.map(|prefix| (*prefix, group.labels.clone()));
                (Source::CustomResource, blocks.collect())
            }
            _ => (Source::CustomResource, BTreeMap::new()),
        }
    }
}

/// A document that is refused, and why.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error("{source_name}{}: {field}: {reason}; {remedy}", .key.as_ref().map(|k| format!(" ({k})")).unwrap_or_default())]
pub struct PolicyError {
    /// File or directory of the document; `cluster` for an object of the API server.
    pub source_name: String,
    /// Key, if it could be read: the last good version of this document stays in force.
    pub key: Option<String>,
    /// Path of the field, for example `spec.egress[0].toFQDNs[1].matchPattern`.
    pub field: String,
    pub reason: String,
    pub remedy: String,
}
