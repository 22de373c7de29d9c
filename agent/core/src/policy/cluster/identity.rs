//! `CiliumIdentity`: the number that a label set has in the whole cluster.

use serde_json::Value;
use shared_maps::IdentityId;

use super::read::not_reserved;
use crate::{
    labels::{Label, LabelSet},
    policy::validate::{
        fault::{Checked, Fault},
        mapping, text,
    },
};

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
    let id = id.ok_or_else(|| {
        let reason = format!("`{name}` is not the number of an identity of pods");
        let remedy = format!("use a number of {range}; the name of the document is the number");
        Fault::new("metadata.name", &reason, &remedy)
    })?;
    let path = "security-labels";
    let mut labels = Vec::new();
    for (key, value) in mapping(path, value.get(path))?.into_iter().flatten() {
        let field = format!("{path}.{key}");
        let value = text(&field, value)?;
        let label = Label::parse(&format!("{key}={value}"));
        let label = label.map_err(|error| {
            let remedy = "write the source before the key, as Cilium does";
            Fault::new(&field, &error.to_string(), remedy)
        })?;
        not_reserved(&field, &label)?;
        labels.push(label);
    }
    if labels.is_empty() {
        let remedy = "add the labels that have this number, such as k8s:app: web";
        return Err(Fault::new(path, "has no label", remedy));
    }
    Ok(CiliumIdentity {
        id,
        labels: LabelSet::new(labels),
    })
}
