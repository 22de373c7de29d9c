//! `CiliumCIDRGroup`: blocks that rules of other documents name.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use serde_json::Value;

use super::validate::{Checked, Fault, list, object, prefix, text};
use crate::{labels::LabelSet, selector::selector::labels_of_blocks};

/// A `CiliumCIDRGroup`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CidrGroup {
    /// Labels of its blocks.
    pub labels: LabelSet,
    /// Its own labels.
    pub own: BTreeMap<String, String>,
    /// The blocks.
    pub prefixes: BTreeSet<IpNet>,
}

/// Key of the group called `name`.
pub fn group_key(name: &str) -> String {
    format!("{GROUP_KIND}/{name}")
}

/// Kind of the document.
pub(super) const GROUP_KIND: &str = "CiliumCIDRGroup";

/// Checks a `CiliumCIDRGroup`.
pub fn group(value: &Value) -> Checked<CidrGroup> {
    let null = Value::Null;
    let metadata = value.get("metadata").unwrap_or(&null);
    let name = metadata.get("name").and_then(Value::as_str);
    let mut own = BTreeMap::new();
    if let Some(more) = metadata.get("labels") {
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
        labels: labels_of_blocks(name.unwrap_or_default(), &own),
        own,
        prefixes,
    })
}
