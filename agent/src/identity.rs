//! Identities: numbers for sets of labels.

pub mod checkpoint;
