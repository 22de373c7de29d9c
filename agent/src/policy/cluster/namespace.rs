//! `Namespace`: its labels, which its pods carry.

use std::collections::BTreeMap;

use serde_json::Value;

use super::metadata;
use crate::policy::{kinds::Head, validate::Checked};

/// The label that the API server gives to every namespace: its name.
const NAME: &str = "kubernetes.io/metadata.name";

/// A namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Its name.
    pub name: String,
    /// Its labels, with its name among them.
    pub labels: BTreeMap<String, String>,
}

/// Reads a namespace.
pub(in crate::policy) fn read(head: &Head, value: &Value) -> Checked<Namespace> {
    let mut labels = metadata::read(head, value)?.labels;
    labels.insert(NAME.to_owned(), head.name.clone());
    Ok(Namespace {
        name: head.name.clone(),
        labels,
    })
}
