//! Selectors of nodes in EgressFirewalls: by blocks of addresses, and by labels of Node objects.
//!
//! Owns the selected blocks and the selected keys of labels. It keeps one invariant: an address of
//! a node has the label of the longest selected block that covers it, and the labels of its node
//! whose keys are selected. Selectors of other policies use neither kind of label.

use ipnet::IpNet;

use crate::{
    core::state::{State, node_selectors::keys},
    ipcache::{metadata::Claim, owners::Owner, resolve::node_cidr_label},
    labels::LabelSet,
    policy::document::Body,
    selector::selector::LabelSelector,
    users::release,
};

impl State {
    /// Adds a selector of the nodes in this block.
    pub(in crate::core) fn ask_nodes_in(&mut self, block: IpNet) {
        let users = self.cluster.nodes.blocks.entry(block).or_default();
        *users += 1;
        if *users == 1 {
            let label = Claim::Labels(LabelSet::new(vec![node_cidr_label(block)]));
            self.ipcache.claim(block, Owner::NodesOfPolicy, label);
        }
    }

    /// Removes a selector of the nodes in this block.
    pub(in crate::core) fn drop_nodes_in(&mut self, block: IpNet) {
        if release(&mut self.cluster.nodes.blocks, &block) {
            self.ipcache.unclaim(block, &Owner::NodesOfPolicy);
        }
    }

    /// Adds a selector of nodes by their labels.
    pub(in crate::core) fn ask_node_labels(&mut self, selector: &LabelSelector) {
        let mut is_new = false;
        for key in keys(selector) {
            let users = self.cluster.nodes.keys.entry(key.to_owned()).or_default();
            *users += 1;
            is_new |= *users == 1;
        }
        if is_new {
            self.label_nodes();
        }
    }

    /// Removes a selector of nodes by their labels.
    pub(in crate::core) fn drop_node_labels(&mut self, selector: &LabelSelector) {
        let mut is_last = false;
        for key in keys(selector) {
            is_last |= release(&mut self.cluster.nodes.keys, key);
        }
        if is_last {
            self.label_nodes();
        }
    }

    /// Gives all addresses of nodes their labels again.
    fn label_nodes(&mut self) {
        let documents = self.policy.repository().iter();
        let nodes = documents.filter(|document| matches!(document.body, Body::Node(_)));
        let nodes: Vec<_> = nodes.map(|document| self.says(document)).collect();
        for (owner, labels) in nodes {
            for (prefix, labels) in labels {
                self.ipcache
                    .claim(prefix, owner.clone(), Claim::Labels(labels));
            }
        }
    }
}
