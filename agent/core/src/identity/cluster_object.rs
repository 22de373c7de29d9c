//! `CiliumIdentity`: an object of the cluster that gives a label set its number.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use shared_maps::IdentityId;

use crate::labels::LabelSet;

/// Key of the annotation of objects that agents or `identity assign` made. It is no label: Cilium copies the labels
/// of a pod to the labels of the object that it makes, so that a tenant could mark an object of Cilium as ours.
pub const MADE_BY: &str = "holdfast.io/made-by";
/// Key of the label of objects with the annotation [`MADE_BY`], for people who list them. It
/// decides nothing.
pub const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// Value of [`MADE_BY`] and of [`MANAGED_BY`].
pub const HOLDFAST: &str = "holdfast";

/// A label set and its number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CiliumIdentity {
    /// The object's name.
    pub id: IdentityId,
    pub labels: LabelSet,
    /// When the object was made, seconds since 1970; documents may not say it.
    pub created: Option<u64>,
    /// Whether it has the annotation [`MADE_BY`] of Holdfast. Other writers' objects are never
    /// deleted.
    pub is_ours: bool,
    /// The object's uid; documents may not have one.
    pub uid: Option<Arc<str>>,
    /// Whether it is a document of `--policy-dir`, and not an object of the API server.
    pub is_document: bool,
    /// Whether another object of the API server with the same labels counts: no node then uses this
    /// number.
    pub is_duplicate: bool,
}

/// Where a number comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NumberSource {
    /// This node chose it.
    #[default]
    Node,
    /// A document of `--policy-dir`.
    Document,
    /// An object of the API server that an agent made.
    Agent,
    /// An object of the API server that another program made.
    OtherWriter,
}

impl NumberSource {
    /// In one word, for tables.
    pub fn word(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::Document => "document",
            Self::Agent => "cluster",
            Self::OtherWriter => "other",
        }
    }
}

/// The order of several objects with one label set: the least of them counts. That is the oldest, and
/// of objects made in the same second the one with the lowest number. An object without a time comes
/// after those that have one: objects of the API server always do, and every node has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Precedence {
    /// Seconds since 1970; `u64::MAX` = unknown.
    created: u64,
    pub(crate) id: IdentityId,
}

impl CiliumIdentity {
    /// Where its number comes from.
    pub(crate) fn source(&self) -> NumberSource {
        match (self.is_document, self.is_ours) {
            (true, _) => NumberSource::Document,
            (false, true) => NumberSource::Agent,
            (false, false) => NumberSource::OtherWriter,
        }
    }

    /// Its place among objects with the same labels.
    pub(crate) fn precedence(&self) -> Precedence {
        Precedence {
            created: self.created.unwrap_or(u64::MAX),
            id: self.id,
        }
    }
}

/// Whether an object with this value of [`MADE_BY`] is one that Holdfast made.
pub fn is_ours(made_by: Option<&str>) -> bool {
    made_by == Some(HOLDFAST)
}
