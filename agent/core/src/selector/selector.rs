//! One selector: labels of endpoints or nodes, a block or groups of blocks, a DNS name in `toFQDNs`
//! or in an EgressFirewall, or an entity.

mod blocks;
mod entity;
mod labels;
mod names;
mod subject;
#[cfg(test)]
mod tests;

use std::fmt;

use dns_policy::rule::NameRule;

pub use self::{
    blocks::{CidrSelector, GroupSelector},
    entity::Entity,
    labels::{LabelSelector, Operator, Requirement},
    names::{DnsNameSelector, fqdn_label},
    subject::Subject,
};
pub(crate) use self::{
    blocks::{group_label, labels_of_blocks},
    names::RuleOfName,
};
use crate::labels::{FQDN, LabelSet, NODE};

/// What a rule selects identities by.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Selector {
    /// By labels of endpoints, or by reserved labels.
    Labels(LabelSelector),
    /// By a block of addresses outside the cluster.
    Cidr(CidrSelector),
    /// By groups of blocks, which are CiliumCIDRGroups.
    Group(GroupSelector),
    /// By DNS name, in `toFQDNs` rules.
    Fqdn(NameRule),
    /// By DNS name of an EgressFirewall.
    DnsName(DnsNameSelector),
    /// By labels of nodes, in EgressFirewalls.
    Node(LabelSelector),
    /// By role, in `fromEntities` and `toEntities`.
    Entity(Entity),
}

impl Selector {
    /// Whether it selects this identity. No selector selects a Service: policy judges the Service by
    /// its backends.
    pub fn matches(&self, subject: &Subject) -> bool {
        if subject.id.is_service() {
            return false;
        }
        match self {
            Self::Labels(selector) => {
                (subject.id.is_endpoint() || selector.names_reserved())
                    && selector.matches(&subject.labels)
            }
            Self::Cidr(selector) => selector.matches(subject),
            Self::Group(selector) => selector.matches(subject),
            Self::Fqdn(selector) => subject
                .labels
                .iter()
                .any(|label| label.source() == FQDN && label.key() == selector.text()),
            Self::DnsName(name) => subject.labels.iter().any(|label| name.matches(label)),
            Self::Node(selector) => {
                let is_node = ["remote-node", "host"]
                    .iter()
                    .any(|role| subject.labels.has_reserved(role));
                is_node && selector.matches(&node_labels(&subject.labels))
            }
            Self::Entity(entity) => entity.matches(subject),
        }
    }

    /// `labels`, `cidr`, `cidrgroup`, `fqdn`, `dnsname`, `node` or `entity`.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Labels(_) => "labels",
            Self::Cidr(_) => "cidr",
            Self::Group(_) => "cidrgroup",
            Self::Fqdn(_) => "fqdn",
            Self::DnsName(_) => "dnsname",
            Self::Node(_) => "node",
            Self::Entity(_) => "entity",
        }
    }
}

/// Those labels of a node's address that come from the node's object.
fn node_labels(labels: &LabelSet) -> LabelSet {
    let own = labels.iter().filter(|label| label.source() == NODE);
    LabelSet::new(own.cloned().collect())
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Labels(selector) => write!(f, "{selector}"),
            Self::Cidr(selector) => write!(f, "{selector}"),
            Self::Group(selector) => write!(f, "{selector}"),
            Self::Fqdn(selector) => write!(f, "fqdn:{}", selector.text()),
            Self::DnsName(selector) => write!(f, "dnsname:{}", selector.text()),
            Self::Node(selector) if selector.requirements.is_empty() => f.write_str("<every node>"),
            Self::Node(selector) => write!(f, "{selector}"),
            Self::Entity(entity) => write!(f, "entity:{}", entity.as_str()),
        }
    }
}
