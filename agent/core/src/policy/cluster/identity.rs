//! `CiliumIdentity`: the number that a label set has in the whole cluster.

use netpol::field::{Checked, Field};
use serde_json::Value;
use shared_maps::IdentityId;

use super::read::label;
use crate::labels::{Label, LabelSet};

/// Numbers from here on are this node's own: no document may have them.
const NODE_LOCAL_MIN: u32 = 61_440;

/// A label set and its number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CiliumIdentity {
    pub id: IdentityId,
    pub labels: LabelSet,
}

/// Reads the identity whose number is `name`.
pub(in crate::policy) fn read(name: &str, value: &Value) -> Checked<CiliumIdentity> {
    let range = format!("{}–{}", IdentityId::ENDPOINT_MIN.0, NODE_LOCAL_MIN - 1);
    let number = name.parse::<u32>().ok();
    let canonical = number
        .filter(|number| number.to_string() == name)
        .map(IdentityId);
    let id = canonical.filter(|id| id.is_endpoint() && id.0 < NODE_LOCAL_MIN);
    let top = Field::top(value);
    let id = id.ok_or_else(|| {
        let reason = format!("`{name}` is not the number of an identity of pods");
        let remedy = format!("use a number of {range}; the name of the document is the number");
        top.get("metadata").get("name").fault(reason, remedy)
    })?;
    let written = top.get("security-labels").mapping()?;
    let labels = written.entries().map(|(key, value)| {
        let text = format!("{key}={}", value.text()?);
        let remedy = "write the source before the key, as Cilium does";
        label(&value, &text, remedy)
    });
    let labels = labels.collect::<Checked<Vec<Label>>>()?;
    if labels.is_empty() {
        let remedy = "add the labels that have this number, such as k8s:app: web";
        return written.refuse("has no label", remedy);
    }
    Ok(CiliumIdentity {
        id,
        labels: LabelSet::new(labels),
    })
}
