//! Objects as kubectl prints them, and refusals with their fields.

use crate::policy::{
    document::{PolicyDocument, PolicyError},
    parse::parse_documents,
};

mod nodes;
mod objects;
mod refused;

fn read(text: &str) -> Result<PolicyDocument, PolicyError> {
    let mut found = parse_documents(text, "test");
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

/// Checks that the text is read, and that it is refused for `field` once `to` takes the place of
/// `from`.
#[track_caller]
fn refused(text: &str, from: &str, to: &str, field: &str) {
    read(text).unwrap();
    let changed = text.replacen(from, to, 1);
    assert_ne!(changed, text, "{from}");
    let error = read(&changed).unwrap_err();
    assert_eq!(error.field, field, "{from} → {to}: {error}");
    assert!(!error.remedy.is_empty(), "{error}");
}
