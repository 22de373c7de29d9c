//! Blocks of NetworkPolicies that cover pods: most implementations compare an `ipBlock` with the
//! addresses of pods, and this one does not.

use crate::{
    policy::{
        cluster::pod::Pod,
        document::{Body, PolicyDocument},
        rule::{PeerRule, Rule},
    },
    selector::selector::{CidrSelector, Selector},
};

const NO_PODS: &str = "an ipBlock does not mean pods or nodes, whatever their addresses, except on nodes with \
                       `netpol run`, where it means every address; add a peer with podSelector or \
                       namespaceSelector for the pods that it covers";

/// A warning for the author of a NetworkPolicy with blocks. It names the pods of these documents
/// that the blocks cover, or, if there are none, says that blocks do not mean pods.
pub fn blocks_without_pods(document: &PolicyDocument, all: &[&PolicyDocument]) -> Option<String> {
    if !document.key.starts_with("NetworkPolicy/") {
        return None;
    }
    let pods = all.iter().filter_map(|document| match &document.body {
        Body::Pod(pod) => Some(&**pod),
        _ => None,
    });
    let pods: Vec<&Pod> = pods.collect();
    let blocks = || document.rules().iter().flat_map(blocks_of);
    if pods.is_empty() {
        let (rule, block) = blocks().next()?;
        return Some(format!("{} ({}): {NO_PODS}", rule.path, block.prefix));
    }
    blocks().find_map(|(rule, block)| {
        let mut covered = pods
            .iter()
            .filter(|pod| pod.addresses.iter().any(|address| block.covers(*address)));
        let first = covered.next()?;
        let more = match covered.count() {
            0 => String::new(),
            n => format!(" and {n} more"),
        };
        Some(format!(
            "{}: {} covers the pod {}/{}{more}; {NO_PODS}",
            rule.path, block.prefix, first.namespace, first.name
        ))
    })
}

fn blocks_of(rule: &Rule) -> impl Iterator<Item = (&PeerRule, &CidrSelector)> {
    let rules = rule.ingress.peers.iter().chain(&rule.egress.peers);
    rules.flat_map(|rule| {
        let blocks = rule.selectors().filter_map(|selector| match selector {
            Selector::Cidr(block) => Some(block),
            _ => None,
        });
        blocks.map(move |block| (&**rule, block))
    })
}
