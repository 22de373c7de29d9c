//! Documents that are refused, as `status` names them.

use super::scenario::Node;
use crate::{core::Event, policy::document::PolicyError};

fn error(number: usize, reason: &str) -> PolicyError {
    PolicyError {
        source_name: format!("policies/{number}.yaml"),
        key: Some(format!("CiliumWorldCIDRs/{number}")),
        field: "spec.cidrs[0]".to_owned(),
        reason: reason.to_owned(),
        remedy: "write ADDRESS/LENGTH".to_owned(),
    }
}

#[test]
fn a_summary_names_the_first_refused_documents_and_counts_all() {
    let mut node = Node::usual();
    assert!(node.core.summary().refused.is_empty());
    let long = "é".repeat(10_000);
    let errors = (0..5).map(|number| error(number, if number == 1 { &long } else { "no block" }));
    node.event(Event::PoliciesRejected(errors.collect()));
    let summary = node.core.summary();
    assert_eq!(summary.policies_rejected, 5);
    let sources = summary
        .refused
        .iter()
        .map(|refused| refused.source.as_str());
    let first = ["policies/0.yaml", "policies/1.yaml", "policies/2.yaml"];
    assert_eq!(sources.collect::<Vec<_>>(), first);
    let [whole, cut, _] = summary.refused.as_slice() else {
        panic!("three");
    };
    assert_eq!(whole.key.as_deref(), Some("CiliumWorldCIDRs/0"));
    assert_eq!(
        whole.reason,
        "spec.cidrs[0]: no block; write ADDRESS/LENGTH"
    );
    assert_eq!(cut.reason.chars().count(), 301);
    assert!(cut.reason.ends_with("é…"), "{}", cut.reason);
    // `policy get` has all of them, and all of the text.
    let rejected = node.core.snapshot().rejected;
    assert!(rejected.len() == 5 && rejected[1].reason.contains(&long));
    node.event(Event::PoliciesRejected(Vec::new()));
    assert!(node.core.summary().refused.is_empty());
}
