//! NetworkPolicies of Kubernetes (`networking.k8s.io/v1`) as documents of this agent: the crate
//! [`netpol`] reads them, `rules` compiles them.

mod blocks;
mod rules;

pub use self::blocks::blocks_without_pods;

use netpol::Refusal;
use serde_json::Value;

use super::rule::Rule;
use crate::policy::validate::fault::{Checked, Fault};

/// Reads a document; adds to `warnings` the remarks for its author.
pub(super) fn read(value: &Value, warnings: &mut Vec<String>) -> Checked<Rule> {
    let policy = netpol::read(value).map_err(fault)?;
    let remarks = policy.warnings.iter();
    warnings.extend(remarks.map(|warning| format!("{}: {}", warning.field, warning.text)));
    Ok(rules::rule(&policy))
}

fn fault(refusal: Refusal) -> Fault {
    Fault {
        field: refusal.field,
        reason: refusal.reason,
        remedy: refusal.remedy,
    }
}

#[cfg(test)]
mod tests;
