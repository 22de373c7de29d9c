//! Selectors of blocks of addresses: one block, or groups of them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
};

use ipnet::IpNet;

use super::{LabelSelector, Operator, Subject};
use crate::labels::{CIDR_GROUP, Label, LabelSet};

/// A block, of which parts may be left out.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CidrSelector {
    pub prefix: IpNet,
    /// Parts of the block that are left out.
    pub except: BTreeSet<IpNet>,
    /// Whether it selects nodes of the cluster too, by their addresses.
    pub nodes: bool,
}

impl CidrSelector {
    /// Whether an address is in the block and in none of the parts left out.
    pub(crate) fn covers(&self, address: IpAddr) -> bool {
        self.prefix.contains(&address) && !self.except.iter().any(|part| part.contains(&address))
    }

    pub(super) fn matches(&self, subject: &Subject) -> bool {
        let in_block = subject
            .cidr
            .is_some_and(|block| self.prefix.contains(&block));
        let is_outside = in_block || self.means_world_of(subject);
        let holds_node = |block: &IpNet| {
            let mut except = self.except.iter();
            self.prefix.contains(block) && !except.any(|part| part.contains(block))
        };
        is_outside && !subject.is_in(&self.except)
            || self.nodes && subject.node_cidrs.iter().any(holds_node)
    }

    /// Whether it is the whole of a family, and the subject is outside the cluster and may be of
    /// that family.
    fn means_world_of(&self, subject: &Subject) -> bool {
        self.prefix.prefix_len() == 0
            && subject.is_world_of(self.prefix)
            && subject
                .cidr
                .is_none_or(|block| is_ipv4(block) == is_ipv4(self.prefix))
    }
}

fn is_ipv4(block: IpNet) -> bool {
    matches!(block, IpNet::V4(_))
}

impl fmt::Display for CidrSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cidr:{}", self.prefix)?;
        write_except(f, &self.except)
    }
}

fn write_except(f: &mut fmt::Formatter<'_>, except: &BTreeSet<IpNet>) -> fmt::Result {
    except
        .iter()
        .try_for_each(|part| write!(f, " except {part}"))
}

/// Groups of blocks, of which parts may be left out.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupSelector {
    /// Labels of a group, all of source `CIDR_GROUP`; its name is among them (`group_label`).
    pub labels: LabelSelector,
    /// Parts of the blocks that are left out.
    pub except: BTreeSet<IpNet>,
}

/// The label that blocks of the group called `name` have (Cilium's spelling).
pub(crate) fn group_label(name: &str) -> Label {
    Label::new(CIDR_GROUP, &format!("{GROUP_NAME}{name}"), "")
}

/// Key of [`group_label`] before the group's name.
const GROUP_NAME: &str = "io.cilium.policy.cidrgroupname/";
/// Start of the key of the label that stands for a label of a block's group; `group/key:value` follows.
/// Groups that overlap may give one key several values, and each label of a set has its own key.
const GROUP_LABEL: &str = "holdfast.cidrgrouplabel/";

/// Labels that blocks of a group have.
pub(crate) fn labels_of_blocks(name: &str, labels: &BTreeMap<String, String>) -> LabelSet {
    let own = labels.iter().map(|(key, value)| {
        Label::new(
            CIDR_GROUP,
            &format!("{GROUP_LABEL}{name}/{key}:{value}"),
            "",
        )
    });
    LabelSet::new(own.chain([group_label(name)]).collect())
}

/// Labels of a group, as a [`GroupSelector`] sees them.
fn labels_of_group(name: &str, block: &LabelSet) -> LabelSet {
    let keys = block.iter().filter(|label| label.source() == CIDR_GROUP);
    let own = keys.filter_map(|label| {
        let (group, text) = label.key().strip_prefix(GROUP_LABEL)?.split_once('/')?;
        let (key, value) = text.rsplit_once(':')?;
        (group == name).then(|| Label::new(CIDR_GROUP, key, value))
    });
    LabelSet::new(own.chain([group_label(name)]).collect())
}

impl GroupSelector {
    /// The group that it asks for by name, if it does.
    pub fn name(&self) -> Option<&str> {
        self.key()?.strip_prefix(GROUP_NAME)
    }

    /// Key of the label that the blocks of the named group have.
    pub(in crate::selector) fn key(&self) -> Option<&str> {
        let mut named = self.labels.requirements.iter();
        let named = named.find(|requirement| {
            requirement.operator == Operator::Exists && requirement.key.starts_with(GROUP_NAME)
        });
        named.map(|requirement| requirement.key.as_str())
    }

    pub(super) fn matches(&self, subject: &Subject) -> bool {
        let labels = &subject.labels;
        let groups = labels.iter().filter(|label| label.source() == CIDR_GROUP);
        let mut groups = groups.filter_map(|label| label.key().strip_prefix(GROUP_NAME));
        groups.any(|name| self.labels.matches(&labels_of_group(name, labels)))
            && !subject.is_in(&self.except)
    }
}

impl fmt::Display for GroupSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "cidrgroup:{name}")?,
            None if self.labels.requirements.is_empty() => {
                f.write_str("cidrgroup:<every group>")?
            }
            None => write!(f, "{}", self.labels)?,
        }
        write_except(f, &self.except)
    }
}
