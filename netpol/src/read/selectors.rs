//! Label selectors.

use std::collections::BTreeSet;

use super::only;
use crate::{
    field::{Checked, Field},
    name::{is_label_key, is_label_value},
    selector::{Condition, Requirement, Selector},
};

const KEY_REMEDY: &str = "write at most 63 letters, digits, dashes, underscores and dots, with a \
                          letter or digit at both ends, after an optional domain and slash";
const VALUE_REMEDY: &str = "write at most 63 letters, digits, dashes, underscores and dots, with \
                            a letter or digit at both ends";

/// A selector; the empty mapping selects all.
pub(super) fn selector(field: &Field<'_>) -> Checked<Selector> {
    only(field, &["matchLabels", "matchExpressions"])?;
    let mut requirements = BTreeSet::new();
    if let Some(labels) = field.get("matchLabels").present() {
        if !labels.is_mapping() {
            let reason = format!("is {}, not a mapping", labels.kind());
            return labels.refuse(reason, "write key: value pairs");
        }
        for (key, value) in labels.entries() {
            requirements.insert(Requirement {
                key: label_key(&value, key)?,
                condition: Condition::In([label_value(&value)?].into()),
            });
        }
    }
    for item in field.get("matchExpressions").items()? {
        requirements.insert(expression(&item)?);
    }
    Ok(Selector::new(requirements))
}

fn expression(field: &Field<'_>) -> Checked<Requirement> {
    only(field, &["key", "operator", "values"])?;
    let key = field.get("key").required("add it")?;
    let key = label_key(&key, key.text()?)?;
    let operator = field.get("operator").required("add it")?;
    let named = operator.text()?;
    let written = field.get("values");
    let values = written.items()?.map(|value| label_value(&value));
    let values = values.collect::<Checked<BTreeSet<String>>>()?;
    let has_values = !values.is_empty();
    let (condition, takes_values) = match named {
        "In" => (Condition::In(values), true),
        "NotIn" => (Condition::NotIn(values), true),
        "Exists" => (Condition::Exists, false),
        "DoesNotExist" => (Condition::DoesNotExist, false),
        other => {
            let reason = format!("`{other}` is not an operator");
            return operator.refuse(reason, "use In, NotIn, Exists or DoesNotExist");
        }
    };
    match (takes_values, has_values) {
        (true, false) => written.refuse(
            format!("is empty beside operator {named}"),
            "list at least one value",
        ),
        (false, true) => written.refuse(
            format!("is set beside operator {named}"),
            "remove it: this operator takes no values",
        ),
        _ => Ok(Requirement { key, condition }),
    }
}

fn label_key(field: &Field<'_>, key: &str) -> Checked<String> {
    if is_label_key(key) {
        return Ok(key.to_owned());
    }
    field.refuse(format!("`{key}` is not the key of a label"), KEY_REMEDY)
}

fn label_value(field: &Field<'_>) -> Checked<String> {
    let value = field.text()?;
    if is_label_value(value) {
        return Ok(value.to_owned());
    }
    let reason = format!("`{value}` is not the value of a label");
    field.refuse(reason, VALUE_REMEDY)
}
