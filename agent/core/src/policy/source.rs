//! Where documents come from: a directory, a cluster, or both.

use super::document::{PolicyDocument, PolicyError};
use crate::source_event::SourceEvent;

pub mod cluster;
pub mod merge;

/// Change at a source of policies.
#[derive(Debug)]
pub enum PolicyChange {
    /// A document is new, changed or gone.
    Document(SourceEvent<PolicyDocument>),
    /// All documents that are refused now; replaces the list before.
    Rejected(Vec<PolicyError>),
    /// Whether the first listing lacks documents: they are refused, and no good version of them
    /// is known.
    Uncertain(bool),
}
