//! `CiliumCIDRGroup`: blocks with labels, which rules of other documents name.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use netpol::field::{Checked, Field};
use serde_json::Value;

use super::validate::{only, prefix};
use crate::{labels::LabelSet, selector::selector::labels_of_blocks};

pub(crate) const KIND: &str = "CiliumCIDRGroup";

/// Blocks of addresses with the labels of their `CiliumCIDRGroup`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CidrGroup {
    /// Labels that the blocks get: one for the group's name, and one for each of `own`.
    pub labels: LabelSet,
    /// Labels of the object itself (`metadata.labels`).
    pub own: BTreeMap<String, String>,
    /// The blocks, from `spec.externalCIDRs` of the object.
    pub prefixes: BTreeSet<IpNet>,
}

/// Key of the group called `name`.
pub fn group_key(name: &str) -> String {
    format!("{KIND}/{name}")
}

/// Checks the group called `name`.
pub(super) fn read(name: &str, value: &Value) -> Checked<CidrGroup> {
    let top = Field::top(value);
    let mut own = BTreeMap::new();
    let labels = top.get("metadata").get("labels");
    if labels.value.is_some() && !labels.is_mapping() {
        return labels.refuse("is not a mapping", "write key: value pairs");
    }
    for (key, value) in labels.entries() {
        own.insert(key.to_owned(), value.text()?.to_owned());
    }
    let spec = top.get("spec");
    if spec.value.is_none() {
        return spec.refuse("is missing", "add spec with externalCIDRs");
    }
    only(&spec, &["externalCIDRs"], &[])?;
    let blocks = spec.get("externalCIDRs").items()?;
    let prefixes = blocks.map(|item| prefix(&item));
    let prefixes = prefixes.collect::<Checked<BTreeSet<IpNet>>>()?;
    Ok(CidrGroup {
        labels: labels_of_blocks(name, &own),
        own,
        prefixes,
    })
}
