//! `Namespace`: its labels, which its pods carry.

use std::collections::BTreeMap;

use serde_json::Value;

use super::metadata;
use crate::policy::{kinds::Head, validate::Checked};

/// A namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Its name.
    pub name: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
}

/// Reads a namespace.
pub(in crate::policy) fn read(head: &Head, value: &Value) -> Checked<Namespace> {
    Ok(Namespace {
        name: head.name.clone(),
        labels: metadata::read(head, value)?.labels,
    })
}
