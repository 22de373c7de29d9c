//! `CiliumCIDRGroup`: blocks with labels, which rules of other documents name.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use serde_json::Value;

use super::validate::{list, object, prefix, text};
use crate::{
    labels::LabelSet,
    policy::validate::fault::{Checked, Fault},
    selector::selector::labels_of_blocks,
};

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
    let mut own = BTreeMap::new();
    let metadata = value.get("metadata");
    if let Some(more) = metadata.and_then(|metadata| metadata.get("labels")) {
        let Some(more) = more.as_object() else {
            return Err(Fault::new(
                "metadata.labels",
                "is not a mapping",
                "write key: value pairs",
            ));
        };
        for (key, value) in more {
            let value = text(&format!("metadata.labels.{key}"), value)?;
            own.insert(key.clone(), value.to_owned());
        }
    }
    let Some(spec) = value.get("spec") else {
        return Err(Fault::new(
            "spec",
            "is missing",
            "add spec with externalCIDRs",
        ));
    };
    let spec = object("spec", spec, &["externalCIDRs"], &[])?;
    let mut prefixes = BTreeSet::new();
    let blocks = list("spec.externalCIDRs", spec.get("externalCIDRs"))?;
    for (n, item) in blocks.iter().enumerate() {
        prefixes.insert(prefix(&format!("spec.externalCIDRs[{n}]"), item)?);
    }
    Ok(CidrGroup {
        labels: labels_of_blocks(name, &own),
        own,
        prefixes,
    })
}
