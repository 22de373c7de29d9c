//! Policies from their text, and the names that a selector matches.

use dns_policy::{pattern::SelectorMatcher, rule::NameRule};

use crate::policy::{document::PolicyDocument, parse::parse_documents};

/// The CiliumNetworkPolicy of this name and `spec`.
pub fn document(name: &str, spec: &str) -> PolicyDocument {
    let text = format!(
        "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {{name: {name}}}\nspec:\n  {spec}"
    );
    parse_documents(&text, "test").remove(0).unwrap()
}

/// The matcher of a selector's names.
pub fn matcher(selector: &NameRule) -> SelectorMatcher {
    SelectorMatcher::compile(selector).unwrap()
}
