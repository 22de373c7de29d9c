//! `CiliumIdentity`: the number that a label set has in the whole cluster.

use std::sync::Arc;

use netpol::field::{Checked, Field};
use serde_json::Value;
use shared_maps::IdentityId;

use super::{metadata, read::label};
use crate::{
    identity::cluster_object::{CiliumIdentity, MADE_BY, is_ours},
    labels::{Label, LabelSet},
    policy::head::Head,
};

/// Fields that have a meaning.
pub(in crate::policy) const KEPT: &[&str] = &[
    "metadata.annotations",
    "metadata.creationTimestamp",
    "metadata.uid",
    "security-labels",
];

/// Nanoseconds of a second.
const SECOND: u64 = 1_000_000_000;

/// Numbers from here on are this node's own: no document may have them.
const NODE_LOCAL_MIN: u32 = 61_440;

/// Reads the identity whose number is the name of the document.
pub(in crate::policy) fn read(head: &Head, value: &Value) -> Checked<CiliumIdentity> {
    let name = &head.name;
    let range = format!("{}–{}", IdentityId::ENDPOINT_MIN.0, NODE_LOCAL_MIN - 1);
    let number = name.parse::<u32>().ok();
    let canonical = number
        .filter(|number| number.to_string() == *name)
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
    let metadata = metadata::read(head, &top)?;
    let uid = top.get("metadata").get("uid").optional_text()?;
    let annotations = top.get("metadata").get("annotations").mapping()?;
    let made_by = annotations.get(MADE_BY);
    Ok(CiliumIdentity {
        id,
        labels: LabelSet::new(labels),
        created: metadata.created.map(|ns| ns / SECOND),
        // Any other value, even one that is no text, is another program's.
        is_ours: is_ours(made_by.as_str()),
        uid: uid.map(Arc::from),
        is_document: false,
        is_duplicate: false,
    })
}
