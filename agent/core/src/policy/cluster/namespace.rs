//! `Namespace`: its labels, which its pods carry.

use std::{collections::BTreeMap, sync::Arc};

use serde_json::Value;

use super::{metadata, read::optional_text};
use crate::policy::{head::Head, validate::fault::Checked};

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
    let mut labels = metadata::read(head, value)?.labels;
    labels.insert(NAME.to_owned(), head.name.clone());
    let written = value
        .get("metadata")
        .and_then(|metadata| metadata.get("uid"));
    let uid = optional_text("metadata.uid", written)?;
    Ok(Namespace {
        name: head.name.clone(),
        labels,
        uid: uid.map(Arc::from),
    })
}
