//! NetworkPolicies of Kubernetes (`networking.k8s.io/v1`) as documents of this agent: the crate
//! [`netpol`] reads them, `rules` compiles them.

mod blocks;
mod rules;

pub use self::blocks::blocks_without_pods;

use std::sync::Arc;

use netpol::field::Checked;
use serde_json::Value;

use super::document::Body;

/// Reads a document; adds to `warnings` the remarks for its author.
pub(super) fn read(value: &Value, warnings: &mut Vec<String>) -> Checked<Body> {
    let policy = netpol::read(value)?;
    let remarks = policy.warnings.iter();
    warnings.extend(remarks.map(|warning| format!("{}: {}", warning.field, warning.text)));
    Ok(Body::NetworkPolicy {
        rules: vec![rules::rule(&policy)],
        policy: Arc::new(policy),
    })
}

#[cfg(test)]
mod tests;
