//! Egress rules by labels, which select fewer pods on nodes that read no pods of other nodes.

use crate::{
    policy::{
        document::PolicyDocument,
        rule::{Peers, TierRule},
    },
    selector::selector::Selector,
};

/// A warning about each rule that selects fewer pods if pods of other nodes are not read
/// (`--high-scale-prune`).
pub fn warnings(document: &PolicyDocument) -> Vec<String> {
    let rules = document.rules().iter();
    let paths = rules.flat_map(|rule| {
        let peers = rule.egress.peers.iter().filter(|peer| match &peer.peers {
            Peers::Selectors(list) => list.iter().any(selects_pods),
            Peers::Any => false,
        });
        let in_tier = |rule: &&std::sync::Arc<TierRule>| rule.selectors.iter().any(selects_pods);
        let tier = rule.tier.iter().filter(in_tier).map(|rule| &rule.path);
        peers.map(|peer| &peer.path).chain(tier)
    });
    paths
        .map(|path| {
            format!(
                "{path}: selects pods of the same node, and those of --high-scale-keep, where agents have \
                 --high-scale-prune; add the blocks of the other pods (toCIDR)"
            )
        })
        .collect()
}

/// Whether it selects pods by their labels.
fn selects_pods(selector: &Selector) -> bool {
    matches!(selector, Selector::Labels(labels) if !labels.names_reserved())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::parse::parse_documents;

    fn count(rule: &str) -> usize {
        let text = format!(
            "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {{name: a}}\n\
             spec: {{endpointSelector: {{}}, {rule}}}\n"
        );
        let mut read = parse_documents(&text, "test.yaml");
        warnings(&read.remove(0).unwrap()).len()
    }

    #[test]
    fn high_scale_rules_by_labels_are_named_in_egress_only() {
        let peers = "[{matchLabels: {app: db}}]";
        for (rule, expected) in [
            (format!("egress: [{{toEndpoints: {peers}}}]"), 1),
            (format!("egressDeny: [{{toEndpoints: {peers}}}]"), 1),
            (format!("ingress: [{{fromEndpoints: {peers}}}]"), 0),
            ("egress: [{toCIDR: [10.0.0.0/8]}]".to_owned(), 0),
            ("egress: [{toEntities: [world]}]".to_owned(), 0),
            ("egress: [{}]".to_owned(), 0),
        ] {
            assert_eq!(count(&rule), expected, "{rule}");
        }
    }
}
