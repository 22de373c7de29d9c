//! Documents (YAML or JSON, several in one text), each read by the reader of its kind.

use limits::yaml::{self, YamlError};
use netpol::field::{Field, Refusal};
use serde_json::Value;

use super::{
    document::{PolicyDocument, PolicyError},
    kinds,
};

/// Reads every document of `text`. `source_name` is for error messages (a file name).
pub fn parse_documents(text: &str, source_name: &str) -> Vec<Result<PolicyDocument, PolicyError>> {
    parse_each(text, source_name, |_, document| document)
}

/// Reads every document of `text`, each together with the JSON of the fields that mean something.
pub fn parse_with_json(
    text: &str,
    source_name: &str,
) -> Vec<Result<(PolicyDocument, String), PolicyError>> {
    parse_each(text, source_name, |value, document| {
        (document, kinds::kept(value).to_string())
    })
}

fn parse_each<T>(
    text: &str,
    source_name: &str,
    with: impl Fn(&Value, PolicyDocument) -> T,
) -> Vec<Result<T, PolicyError>> {
    let mut found = Vec::new();
    let mut add = |value: &Value, document: Result<PolicyDocument, PolicyError>| {
        found.push(document.map(|document| with(value, document)));
    };
    for (number, document) in yaml::documents(text).iter().enumerate() {
        let field = format!("document {}", number + 1);
        match document.items() {
            Some(items) => {
                for (n, item) in items.enumerate() {
                    read_text(
                        &item,
                        &format!("{field}, items[{n}]"),
                        source_name,
                        &mut add,
                    );
                }
            }
            None => read_text(document, &field, source_name, &mut add),
        }
    }
    found
}

fn read_text(
    document: &yaml::Document<'_>,
    field: &str,
    source: &str,
    found: &mut impl FnMut(&Value, Result<PolicyDocument, PolicyError>),
) {
    match document.value() {
        Ok(Value::Null) => {}
        Ok(value) => read(&value, source, found),
        Err(fault) => {
            let key = match fault {
                YamlError::LongItem(_) => kinds::head(&document.head()).ok(),
                _ => None,
            };
            let error = PolicyError {
                source_name: source.to_owned(),
                key: key.map(|(_, key, _)| key),
                field: field.to_owned(),
                reason: fault.to_string(),
                remedy: fault.remedy().to_owned(),
            };
            found(&Value::Null, Err(error));
        }
    }
}

fn read(
    value: &Value,
    source: &str,
    found: &mut impl FnMut(&Value, Result<PolicyDocument, PolicyError>),
) {
    let kind = value
        .get("kind")
        .and_then(Value::as_str)
        .unwrap_or_default();
    if let (true, Some(Value::Array(items))) = (kind.ends_with("List"), value.get("items")) {
        for item in items {
            read(item, source, found);
        }
        return;
    }
    found(value, parse_value(value, source));
}

/// Reads one document. `source` says for people where it comes from.
pub fn parse_value(value: &Value, source: &str) -> Result<PolicyDocument, PolicyError> {
    document(value, source).map_err(|(key, fault)| PolicyError {
        source_name: source.to_owned(),
        key,
        field: fault.field,
        reason: fault.reason,
        remedy: fault.remedy,
    })
}

/// Source of objects of the cluster's API, in the place of a file's name.
pub(crate) const CLUSTER: &str = "cluster";

/// Reads an object of the cluster's API.
pub fn parse_object(value: &Value, key: &str) -> Result<PolicyDocument, PolicyError> {
    let mut read = parse_value(value, CLUSTER);
    if let Err(error) = &mut read {
        error.key.get_or_insert_with(|| key.to_owned());
    }
    read
}

fn document(value: &Value, source: &str) -> Result<PolicyDocument, (Option<String>, Refusal)> {
    let (kind, key, head) =
        kinds::head(value).map_err(|fault| (kinds::key_of_refused(value), fault))?;
    let with_key = |fault| (Some(key.clone()), fault);
    yaml::check_size(value)
        .map_err(|fault| with_key(Field::top(value).fault(fault.to_string(), fault.remedy())))?;
    let mut warnings = Vec::new();
    let body = (kind.read)(&head, value, &mut warnings).map_err(with_key)?;
    Ok(PolicyDocument {
        key,
        source: source.to_owned(),
        warnings,
        body,
    })
}

#[cfg(test)]
#[path = "parse_tests.rs"]
mod tests;
