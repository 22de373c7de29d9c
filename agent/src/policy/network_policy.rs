//! NetworkPolicies of Kubernetes (`networking.k8s.io/v1`) as documents of this agent: the crate
//! [`netpol`] reads them, [`rules`] compiles them.

mod rules;

use netpol::{NetworkPolicy, Refusal};
use serde_json::Value;

use super::{
    rule::Rule,
    validate::{Checked, Fault},
};

/// Reads a document; adds to `warnings` the remarks for its author.
pub(super) fn read(value: &Value, warnings: &mut Vec<String>) -> Checked<Rule> {
    let policy = netpol::read(value).map_err(fault)?;
    let remarks = policy.warnings.iter();
    warnings.extend(remarks.map(|warning| format!("{}: {}", warning.field, warning.text)));
    warnings.extend(blocks_without_pods(&policy));
    Ok(rules::rule(&policy))
}

fn fault(refusal: Refusal) -> Fault {
    Fault {
        field: refusal.field,
        reason: refusal.reason,
        remedy: refusal.remedy,
    }
}

/// Most implementations compare an `ipBlock` with the addresses of pods. This one does not.
fn blocks_without_pods(policy: &NetworkPolicy) -> Option<String> {
    let mut blocks = policy.blocks();
    let first = blocks.next()?;
    let more = match blocks.count() {
        0 => String::new(),
        n => format!(" (and {n} more)"),
    };
    Some(format!(
        "{}{more}: an ipBlock does not mean pods or nodes, whatever their addresses; add a peer \
         with podSelector or namespaceSelector for the pods that it covers",
        first.path()
    ))
}

#[cfg(test)]
mod tests;
