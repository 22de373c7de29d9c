//! Selectors of nodes: the blocks and the keys of labels that they use.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;

use crate::selector::selector::LabelSelector;

/// How many selectors depend on each block of nodes, and on each key of node labels.
#[derive(Debug, Default)]
pub(crate) struct NodeSelectors {
    pub(crate) blocks: BTreeMap<IpNet, usize>,
    pub(crate) keys: BTreeMap<String, usize>,
}

impl NodeSelectors {
    /// Whether a selector asks for labels of this key.
    pub(crate) fn asks_for(&self, key: &str) -> bool {
        self.keys.contains_key(key)
    }
}

pub(crate) fn keys(selector: &LabelSelector) -> BTreeSet<&str> {
    let requirements = selector.requirements.iter();
    requirements.map(|r| r.key.as_str()).collect()
}
