//! `Namespace`: its labels, which its pods carry.

use std::{collections::BTreeMap, sync::Arc};

use netpol::field::{Checked, Field};
use serde_json::Value;

use super::metadata;
use crate::policy::head::Head;

/// The label that the API server gives to every namespace: its name.
const NAME: &str = "kubernetes.io/metadata.name";

/// The fields of a Namespace that have a meaning here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    pub name: String,
    /// Its labels, with its name among them.
    pub labels: BTreeMap<String, String>,
    pub uid: Option<Arc<str>>,
}

/// Reads a Namespace, and adds the label that has its name.
pub(in crate::policy) fn read(head: &Head, value: &Value) -> Checked<Namespace> {
    let top = Field::top(value);
    let mut labels = metadata::read(head, &top)?.labels;
    labels.insert(NAME.to_owned(), head.name.clone());
    let uid = top.get("metadata").get("uid");
    Ok(Namespace {
        name: head.name.clone(),
        labels,
        uid: uid.optional_text()?.map(Arc::from),
    })
}
