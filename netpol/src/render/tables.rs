//! Tables of rules for an access control that judges each packet once: local tables for traffic of
//! the node's pods in one direction, and a global table for traffic between these pods and other
//! nodes.
//!
//! A local table combines both sides of a connection within the node (`combine`). Pods whose tables
//! have equal rules share a table.

mod combine;
mod global;
mod txn;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use ipnet::{Ipv4Net, Ipv6Net};

pub use self::txn::{Change, Tables, Txn};
use crate::{
    configurator::PodRules,
    contiv::Flow,
    pod::PodId,
    rule::{Action, Net, Rule},
};

/// The rules of a table, in order. The first rule that matches a packet judges it.
pub type Rules = Arc<[Rule]>;

/// All tables of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// Local tables, each with its pods. A pod without a table is open.
    pub local: BTreeMap<Rules, BTreeSet<PodId>>,
    /// The table for traffic with other nodes. If it has no rules, all of that traffic passes.
    pub global: Rules,
}

/// A pod with two local tables.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("pod {0} has two local tables: remove one")]
pub struct InTwoTables(pub PodId);

impl View {
    /// The tables of these pods, which must be all pods of a node. Local tables are for traffic of
    /// direction `flow`.
    pub fn of(pods: &BTreeMap<PodId, PodRules>, flow: Flow) -> Self {
        let mut local: BTreeMap<Rules, BTreeSet<PodId>> = BTreeMap::new();
        for (id, pod) in pods {
            let rules = combine::local(pod, flow, pods);
            if !rules.is_empty() {
                local.entry(rules.into()).or_default().insert(id.clone());
            }
        }
        let global = global::global(combine::opposite(flow), pods);
        Self {
            local,
            global: global.into(),
        }
    }

    /// The local table of a pod.
    pub fn local_of(&self, pod: &PodId) -> Option<&Rules> {
        let mut tables = self.local.iter();
        let found = tables.find(|(_, pods)| pods.contains(pod));
        found.map(|(rules, _)| rules)
    }

    /// Fails if a pod has two local tables.
    pub fn check(&self) -> Result<(), InTwoTables> {
        let mut seen = BTreeSet::new();
        let twice = self.local.values().flatten().find(|pod| !seen.insert(*pod));
        twice.map_or(Ok(()), |pod| Err(InTwoTables(pod.clone())))
    }
}

/// A name for a table with these rules. Equal rules have equal names on every node and in every
/// run.
pub fn name(rules: &[Rule]) -> String {
    const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0000_0100_0000_01b3;
    let texts = rules.iter().map(|rule| format!("{rule}\n"));
    let hash = texts.fold(BASIS, |hash, text| {
        let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(PRIME);
        text.bytes().fold(hash, step)
    });
    format!("{hash:016x}")
}

/// Rules in order, without duplicates. Two rules that differ only because one is for all IPv4
/// addresses and one for all IPv6 addresses become one rule for any address. A permission wins over
/// a refusal of the same packets, as in a pod's list, where the refusal is last.
fn in_order(rules: Vec<Rule>) -> Vec<Rule> {
    let mut rules: BTreeSet<Rule> = rules.into_iter().collect();
    let [four, six] = whole_families();
    let sides: [fn(&mut Rule) -> &mut Net; 2] =
        [|rule| &mut rule.source, |rule| &mut rule.destination];
    for side in sides {
        let with = |rule: &Rule, net| {
            let mut rule = *rule;
            *side(&mut rule) = net;
            rule
        };
        let of_both = |rule: &&Rule| **rule == with(rule, four) && rules.contains(&with(rule, six));
        for rule in rules.iter().filter(of_both).copied().collect::<Vec<_>>() {
            rules.remove(&rule);
            rules.remove(&with(&rule, six));
            rules.insert(with(&rule, Net::Any));
        }
    }
    let is_hidden = |rule: &Rule| {
        let action = Action::Permit;
        rule.action == Action::Deny && rules.contains(&Rule { action, ..*rule })
    };
    rules
        .iter()
        .filter(|rule| !is_hidden(rule))
        .copied()
        .collect()
}

/// All addresses of IPv4, and all addresses of IPv6.
fn whole_families() -> [Net; 2] {
    [
        Net::Block(Ipv4Net::default().into()),
        Net::Block(Ipv6Net::default().into()),
    ]
}
