//! Label selectors.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{
    Checked, Refusal,
    fields::{Fields, kind, list, text},
};
use crate::{
    name::{is_label_key, is_label_value},
    selector::{Condition, Requirement, Selector},
};

const KEY_REMEDY: &str = "write at most 63 letters, digits, dashes, underscores and dots, with a \
                          letter or digit at both ends, after an optional domain and slash";
const VALUE_REMEDY: &str = "write at most 63 letters, digits, dashes, underscores and dots, with \
                            a letter or digit at both ends";

/// The selector at `path`; the empty mapping selects all.
pub(super) fn selector(path: &str, value: &Value) -> Checked<Selector> {
    let fields = Fields::of(path, value, &["matchLabels", "matchExpressions"])?;
    let mut requirements = BTreeSet::new();
    if let Some(labels) = fields.get("matchLabels") {
        let path = format!("{path}.matchLabels");
        let Some(labels) = labels.as_object() else {
            let reason = format!("is {}, not a mapping", kind(labels));
            return Err(Refusal::new(&path, &reason, "write key: value pairs"));
        };
        for (key, value) in labels {
            let path = format!("{path}.{key}");
            requirements.insert(Requirement {
                key: label_key(&path, key)?,
                condition: Condition::In([label_value(&path, value)?].into()),
            });
        }
    }
    let path = format!("{path}.matchExpressions");
    let expressions = list(&path, fields.get("matchExpressions"))?;
    for (n, value) in expressions.iter().enumerate() {
        requirements.insert(expression(&format!("{path}[{n}]"), value)?);
    }
    Ok(Selector::new(requirements))
}

fn expression(path: &str, value: &Value) -> Checked<Requirement> {
    let fields = Fields::of(path, value, &["key", "operator", "values"])?;
    let required = |field: &str| {
        let path = format!("{path}.{field}");
        match fields.get(field) {
            Some(value) => text(&path, value),
            None => Err(Refusal::new(&path, "is missing", "add it")),
        }
    };
    let key = label_key(&format!("{path}.key"), required("key")?)?;
    let operator = required("operator")?;
    let values_path = format!("{path}.values");
    let mut values = BTreeSet::new();
    for (n, value) in list(&values_path, fields.get("values"))?.iter().enumerate() {
        values.insert(label_value(&format!("{values_path}[{n}]"), value)?);
    }
    let has_values = !values.is_empty();
    let (condition, takes_values) = match operator {
        "In" => (Condition::In(values), true),
        "NotIn" => (Condition::NotIn(values), true),
        "Exists" => (Condition::Exists, false),
        "DoesNotExist" => (Condition::DoesNotExist, false),
        other => {
            let reason = format!("`{other}` is not an operator");
            let remedy = "use In, NotIn, Exists or DoesNotExist";
            return Err(Refusal::new(&format!("{path}.operator"), &reason, remedy));
        }
    };
    match (takes_values, has_values) {
        (true, false) => {
            let reason = format!("is empty beside operator {operator}");
            let remedy = "list at least one value";
            Err(Refusal::new(&values_path, &reason, remedy))
        }
        (false, true) => {
            let reason = format!("is set beside operator {operator}");
            let remedy = "remove it: this operator takes no values";
            Err(Refusal::new(&values_path, &reason, remedy))
        }
        _ => Ok(Requirement { key, condition }),
    }
}

fn label_key(path: &str, key: &str) -> Checked<String> {
    if is_label_key(key) {
        return Ok(key.to_owned());
    }
    let reason = format!("`{key}` is not the key of a label");
    Err(Refusal::new(path, &reason, KEY_REMEDY))
}

fn label_value(path: &str, value: &Value) -> Checked<String> {
    let value = text(path, value)?;
    if is_label_value(value) {
        return Ok(value.to_owned());
    }
    let reason = format!("`{value}` is not the value of a label");
    Err(Refusal::new(path, &reason, VALUE_REMEDY))
}
