//! Metadata of an object: its name, its labels, and when it was made.

use std::collections::BTreeMap;

use dns_policy::wall_time;
use netpol::{
    field::{Checked, Field},
    name::{is_dns_label, is_dns_subdomain, is_label_key, is_label_value},
};

use crate::policy::head::Head;

/// The fields of an object's metadata that have a meaning here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Metadata {
    pub(super) labels: BTreeMap<String, String>,
    /// When it was made, nanoseconds since 1970; `None` if it does not say.
    pub(super) created: Option<u64>,
}

/// Checks the names of a document and reads its metadata.
pub(super) fn read(head: &Head, top: &Field<'_>) -> Checked<Metadata> {
    let metadata = top.get("metadata");
    if !is_dns_subdomain(&head.name) {
        let reason = format!("`{}` is not a name in Kubernetes", head.name);
        let remedy = "write letters in lower case, digits, dashes and dots, at most 253, as \
                      Kubernetes does";
        return metadata.get("name").refuse(reason, remedy);
    }
    if let Some(namespace) = head.namespace.as_deref()
        && !is_dns_label(namespace)
    {
        let reason = format!("`{namespace}` is not a namespace's name");
        let remedy = "write letters in lower case, digits and dashes, at most 63";
        return metadata.get("namespace").refuse(reason, remedy);
    }
    Ok(Metadata {
        labels: labels(metadata.get("labels"))?,
        created: created(&metadata.get("creationTimestamp"))?,
    })
}

fn created(field: &Field<'_>) -> Checked<Option<u64>> {
    let Some(written) = field.optional_text()? else {
        return Ok(None);
    };
    let time = wall_time::parse(written).ok_or_else(|| {
        let remedy = "write it as 2026-01-31T10:00:00Z, or remove it";
        field.fault(format!("`{written}` is not a time"), remedy)
    })?;
    Ok(Some(time))
}

/// Labels by the rules of Kubernetes.
fn labels(field: Field<'_>) -> Checked<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    for (key, field) in field.mapping()?.entries() {
        let value = field.text()?;
        if !is_label_key(key) {
            let remedy = "write at most 63 letters, digits, dashes, underscores and dots, with a \
                          letter or digit at both ends; a DNS name and a slash may stand before";
            return field.refuse("is not a label key in Kubernetes", remedy);
        }
        if !is_label_value(value) {
            let reason = format!("`{value}` is not a label value in Kubernetes");
            let remedy = "write at most 63 letters, digits, dashes, underscores and dots, with a \
                          letter or digit at both ends, or nothing";
            return field.refuse(reason, remedy);
        }
        found.insert(key.to_owned(), value.to_owned());
    }
    Ok(found)
}
