//! Metadata of an object: its name, its labels, and when it was made.

use std::collections::BTreeMap;

use dns_policy::wall_time;
use netpol::name::{is_dns_label, is_dns_subdomain, is_label_key, is_label_value};
use serde_json::Value;

use super::read::optional_text;
use crate::policy::{
    head::Head,
    validate::{
        fault::{Checked, Fault},
        mapping, text,
    },
};

/// What of an object's metadata has a meaning.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Metadata {
    pub(super) labels: BTreeMap<String, String>,
    /// When it was made, nanoseconds since 1970; none if it does not say.
    pub(super) created: Option<u64>,
}

/// Checks the names of a document and reads its metadata.
pub(super) fn read(head: &Head, value: &Value) -> Checked<Metadata> {
    let named = "write letters in lower case, digits, dashes and dots, at most 253, as Kubernetes \
                 does";
    if !is_dns_subdomain(&head.name) {
        let reason = format!("`{}` is not a name in Kubernetes", head.name);
        return Err(Fault::new("metadata.name", &reason, named));
    }
    if let Some(namespace) = head.namespace.as_deref()
        && !is_dns_label(namespace)
    {
        let reason = format!("`{namespace}` is not a namespace's name");
        let remedy = "write letters in lower case, digits and dashes, at most 63";
        return Err(Fault::new("metadata.namespace", &reason, remedy));
    }
    let metadata = value.get("metadata").unwrap_or(&Value::Null);
    Ok(Metadata {
        labels: labels("metadata.labels", metadata.get("labels"))?,
        created: created(metadata.get("creationTimestamp"))?,
    })
}

fn created(value: Option<&Value>) -> Checked<Option<u64>> {
    let path = "metadata.creationTimestamp";
    let Some(written) = optional_text(path, value)? else {
        return Ok(None);
    };
    let time = wall_time::parse(written).ok_or_else(|| {
        let reason = format!("`{written}` is not a time");
        Fault::new(
            path,
            &reason,
            "write it as 2026-01-31T10:00:00Z, or remove it",
        )
    })?;
    Ok(Some(time))
}

/// Labels by the rules of Kubernetes.
pub(super) fn labels(path: &str, value: Option<&Value>) -> Checked<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    for (key, value) in mapping(path, value)?.into_iter().flatten() {
        let field = format!("{path}.{key}");
        let value = text(&field, value)?;
        if !is_label_key(key) {
            let remedy = "write at most 63 letters, digits, dashes, underscores and dots, with a \
                          letter or digit at both ends; a DNS name and a slash may stand before";
            return Err(Fault::new(
                &field,
                "is not a label key in Kubernetes",
                remedy,
            ));
        }
        if !is_label_value(value) {
            let reason = format!("`{value}` is not a label value in Kubernetes");
            let remedy = "write at most 63 letters, digits, dashes, underscores and dots, with a \
                          letter or digit at both ends, or nothing";
            return Err(Fault::new(&field, &reason, remedy));
        }
        found.insert(key.clone(), value.to_owned());
    }
    Ok(found)
}
