//! Combines the rules of all pods of a node in one list, for traffic between them and other nodes.

use std::{collections::BTreeMap, net::IpAddr};

use super::{in_order, whole_families};
use crate::{
    configurator::PodRules,
    contiv::Flow,
    pod::PodId,
    rule::{Net, Rule},
};

/// The table of a node: the rules of its pods for traffic of direction `flow`, each with the pod's
/// address instead of any address. In order; empty if no pod has such a rule.
pub(super) fn global(flow: Flow, pods: &BTreeMap<PodId, PodRules>) -> Vec<Rule> {
    let rules = pods.values().flat_map(|pod| {
        let rules = pod.of(flow).iter();
        rules.flat_map(|rule| pod.addresses.iter().filter_map(|own| at(rule, flow, *own)))
    });
    let mut table: Vec<Rule> = rules.collect();
    if !table.is_empty() {
        table.push(Rule::PERMIT_ALL);
    }
    in_order(table)
}

/// A rule for the pod with this address; `None` if the rule's peers are of the other family.
fn at(rule: &Rule, flow: Flow, own: IpAddr) -> Option<Rule> {
    let mut rule = *rule;
    let (pod, peer) = match flow {
        Flow::Ingress => (&mut rule.destination, &mut rule.source),
        Flow::Egress => (&mut rule.source, &mut rule.destination),
    };
    *pod = Net::one(own);
    if !peer.is_of_family(own) {
        return None;
    }
    if whole_families().contains(peer) {
        *peer = Net::Any;
    }
    Some(rule)
}
