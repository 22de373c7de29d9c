//! The shapes that fields have: mappings, lists, texts. A null is an absent field, as in
//! Kubernetes.

use serde_json::{Map, Value};

use super::{Checked, Refusal};

/// A mapping of which every field is known.
pub(super) struct Fields<'a>(&'a Map<String, Value>);

impl<'a> Fields<'a> {
    /// The mapping at `path`, refused if a field is not among `known`.
    pub(super) fn of(path: &str, value: &'a Value, known: &[&str]) -> Checked<Self> {
        let known_fields = || known.join(", ");
        let Some(map) = value.as_object() else {
            let path = if path.is_empty() { "document" } else { path };
            let reason = format!("is {}, not a mapping", kind(value));
            let remedy = format!("write a mapping with {}", known_fields());
            return Err(Refusal::new(path, &reason, &remedy));
        };
        if let Some(other) = map.keys().find(|key| !known.contains(&key.as_str())) {
            let remedy = format!("remove it; the fields here are {}", known_fields());
            let path = match path {
                "" => other.clone(),
                path => format!("{path}.{other}"),
            };
            return Err(Refusal::new(&path, "is an unknown field", &remedy));
        }
        Ok(Self(map))
    }

    /// A field that is present.
    pub(super) fn get(&self, field: &str) -> Option<&'a Value> {
        present(self.0.get(field))
    }
}

/// A value, unless it is null.
pub(super) fn present(value: Option<&Value>) -> Option<&Value> {
    value.filter(|value| !value.is_null())
}

pub(super) fn list<'a>(path: &str, value: Option<&'a Value>) -> Checked<&'a [Value]> {
    match value {
        None => Ok(&[]),
        Some(Value::Array(items)) => Ok(items),
        Some(other) => {
            let reason = format!("is {}, not a list", kind(other));
            let remedy = "write a list (each element after a dash)";
            Err(Refusal::new(path, &reason, remedy))
        }
    }
}

pub(super) fn text<'a>(path: &str, value: &'a Value) -> Checked<&'a str> {
    value.as_str().ok_or_else(|| {
        let reason = format!("is {}, not a text", kind(value));
        Refusal::new(path, &reason, "put it in quotes")
    })
}

/// The kind of a value, for messages.
pub(super) const fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "empty",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "a mapping",
    }
}
