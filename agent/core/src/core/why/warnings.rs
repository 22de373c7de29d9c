//! Warnings about policies that are valid, but probably do not do what their authors think.

use crate::{
    core::{Core, state::State},
    first_of::first_of,
    policy::{cidr_group::group_key, document::Body, lint},
};

/// Maximum number of endpoints that a warning names.
const NAMED: usize = 5;
/// Maximum number of warnings that are given at once.
const WARNINGS: usize = 50;

impl Core {
    /// Warnings about policies that are valid, but probably do not do what their authors think.
    pub fn policy_warnings(&self) -> Vec<String> {
        let state = &self.state;
        let documents = state.policy.repository().iter();
        let of_documents = documents.flat_map(|document| {
            let warnings = document.warnings.iter();
            warnings.map(move |warning| format!("policy {}: {warning}", document.key))
        });
        let subjects = state.policy.subjects();
        let subjects = subjects.map(|(_, subject)| (subject.policy(), subject.labels()));
        let unknown_ports = lint::unknown_ports(subjects, state.policy.selectors());
        let all = of_documents
            .chain(state.unlearned_warnings())
            .chain(self.firewall_warnings())
            .chain(state.foreign_servers())
            .chain(state.passed_warnings())
            .chain(state.group_warnings())
            .chain(state.cluster.pods.warnings().iter().cloned())
            .chain(state.service_warnings())
            .chain(state.node_warnings())
            .chain(state.own_addresses_as_blocks())
            .chain(state.unlabelled_nodes())
            .chain(unknown_ports);
        all.take(WARNINGS).collect()
    }
}

impl State {
    /// Endpoints whose policy selects names and lets them ask no server that the proxy sees.
    fn unlearned_warnings(&self) -> impl Iterator<Item = String> {
        self.policy.subjects().filter_map(|(_, subject)| {
            let text = lint::unlearned(subject.policy())?;
            let endpoints = first_of(subject.endpoints(), NAMED);
            Some(format!("endpoint {endpoints}: {text}"))
        })
    }

    /// Groups of blocks that policies name and that do not exist.
    fn group_warnings(&self) -> impl Iterator<Item = String> {
        let repository = self.policy.repository();
        repository.iter().flat_map(move |document| {
            let groups = lint::groups(document).into_iter();
            let missing = groups.filter(|name| repository.get(&group_key(name)).is_none());
            missing.map(move |name| {
                let key = &document.key;
                format!("policy {key}: there is no CiliumCIDRGroup {name}: it selects nothing")
            })
        })
    }

    /// Nodes whose labels are unknown, if a rule selects nodes by labels.
    fn unlabelled_nodes(&self) -> Option<String> {
        let documents = self.policy.repository().iter();
        let nodes = documents.filter_map(|document| match &document.body {
            Body::Node(node) if node.is_unlabelled => Some(&node.name),
            _ => None,
        });
        let nodes: Vec<&String> = nodes.collect();
        (!self.cluster.nodes.keys.is_empty() && !nodes.is_empty()).then(|| {
            format!(
                "the CiliumNode of {} has no labels of its Node: rules with a nodeSelector deny these \
                 nodes, and allow none of them, until an agent of this version has copied the labels there",
                first_of(nodes, NAMED)
            )
        })
    }

    /// Policies that name an address of this node as a block.
    fn own_addresses_as_blocks(&self) -> impl Iterator<Item = String> {
        let own = self.lxc.node_addresses();
        self.policy.repository().iter().flat_map(move |document| {
            let warnings = lint::own_addresses::warnings(document, own);
            warnings.map(|warning| format!("policy {}: {warning}", document.key))
        })
    }

    /// Other nodes that have an address of this one.
    fn node_warnings(&self) -> impl Iterator<Item = String> {
        let own_name = self.config.node_name.as_deref();
        self.policy.repository().iter().filter_map(move |document| {
            let Body::Node(other) = &document.body else {
                return None;
            };
            if own_name == Some(other.name.as_str()) {
                return None;
            }
            let own = self.lxc.node_addresses();
            let shared = other.addresses.intersection(own).next()?;
            Some(format!(
                "{} has {shared}, which is an address of this node: if it is this node, start \
                 the agent with --node-name {}",
                document.key, other.name
            ))
        })
    }
}
