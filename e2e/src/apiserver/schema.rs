//! The part of `openAPIV3Schema` that the server applies: unknown fields are pruned, values are
//! checked for type, pattern, enumeration, bounds, unique items and required fields. Of the rules in
//! CEL only `self == oldSelf` is applied.

use std::collections::{BTreeMap, BTreeSet};

use parking_lot::Mutex;
use regex::Regex;
use serde_json::{Map, Value};

/// Fields that every object may have.
const OF_EVERY_OBJECT: [&str; 3] = ["apiVersion", "kind", "metadata"];

/// Removes the fields that the schema does not have, and returns their paths.
pub(super) fn prune(schema: &Value, object: &mut Value) -> Vec<String> {
    let mut unknown = Vec::new();
    prune_at(schema, object, "", &mut unknown);
    unknown
}

fn prune_at(schema: &Value, value: &mut Value, path: &str, unknown: &mut Vec<String>) {
    match value {
        Value::Object(fields) => prune_fields(schema, fields, path, unknown),
        Value::Array(items) => {
            for (index, item) in items.iter_mut().enumerate() {
                prune_at(&schema["items"], item, &format!("{path}[{index}]"), unknown);
            }
        }
        _ => {}
    }
}

fn prune_fields(
    schema: &Value,
    fields: &mut Map<String, Value>,
    path: &str,
    unknown: &mut Vec<String>,
) {
    let keeps = schema["x-kubernetes-preserve-unknown-fields"] == true || schema.is_null();
    let names: Vec<String> = fields.keys().cloned().collect();
    for name in names {
        let at = join(path, &name);
        if path.is_empty() && OF_EVERY_OBJECT.contains(&name.as_str()) {
            continue;
        }
        let of_field = match &schema["properties"][&name] {
            Value::Null => &schema["additionalProperties"],
            schema => schema,
        };
        if of_field.is_object() {
            if let Some(value) = fields.get_mut(&name) {
                prune_at(of_field, value, &at, unknown);
            }
        } else if !keeps && of_field != true {
            fields.remove(&name);
            unknown.push(at);
        }
    }
}

/// The first field that violates the schema, and the problem.
pub(super) fn problem(
    schema: &Value,
    old: Option<&Value>,
    object: &Value,
) -> Option<(String, String)> {
    problem_at(schema, old, object, "")
}

fn problem_at(
    schema: &Value,
    old: Option<&Value>,
    value: &Value,
    path: &str,
) -> Option<(String, String)> {
    if let Some(problem) = own_problem(schema, old, value) {
        return Some((path.to_owned(), problem));
    }
    match value {
        Value::Object(fields) => {
            let required = schema["required"].as_array().into_iter().flatten();
            for name in required.filter_map(Value::as_str) {
                if !fields.contains_key(name) {
                    return Some((join(path, name), "Required value".to_owned()));
                }
            }
            fields.iter().find_map(|(name, value)| {
                let of_field = match &schema["properties"][name] {
                    Value::Null => &schema["additionalProperties"],
                    schema => schema,
                };
                let old = old.map(|old| &old[name]).filter(|old| !old.is_null());
                problem_at(of_field, old, value, &join(path, name))
            })
        }
        Value::Array(items) => items.iter().enumerate().find_map(|(index, item)| {
            problem_at(&schema["items"], None, item, &format!("{path}[{index}]"))
        }),
        _ => None,
    }
}

fn own_problem(schema: &Value, old: Option<&Value>, value: &Value) -> Option<String> {
    if value.is_null() && schema["nullable"] == true {
        return None;
    }
    let fits = match schema["type"].as_str() {
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("boolean") => value.is_boolean(),
        Some("integer") => value.is_i64() || value.is_u64(),
        Some("number") => value.is_number(),
        _ => true,
    };
    if !fits {
        let wanted = schema["type"].as_str().unwrap_or_default();
        return Some(format!("Invalid value: {value}: must be of type {wanted}"));
    }
    if let (Some(pattern), Some(text)) = (schema["pattern"].as_str(), value.as_str())
        && !fits_pattern(pattern, text)
    {
        return Some(format!("Invalid value: {value}: should match '{pattern}'"));
    }
    if let Some(allowed) = schema["enum"].as_array()
        && !allowed.contains(value)
    {
        return Some(format!("Unsupported value: {value}"));
    }
    if let Some(problem) = bounds_problem(schema, value).or_else(|| duplicate(schema, value)) {
        return Some(problem);
    }
    let mut rules = schema["x-kubernetes-validations"]
        .as_array()
        .into_iter()
        .flatten();
    let changed = old.is_some_and(|old| old != value);
    rules
        .find(|rule| changed && rule["rule"] == "self == oldSelf")
        .map(|rule| {
            let message = rule["message"].as_str().unwrap_or("Value is immutable");
            format!("Invalid value: {value}: {message}")
        })
}

/// Patterns are compiled once, because a status has hundreds of values with the same pattern.
fn fits_pattern(pattern: &str, text: &str) -> bool {
    static COMPILED: Mutex<BTreeMap<String, Option<Regex>>> = Mutex::new(BTreeMap::new());
    let mut compiled = COMPILED.lock();
    if !compiled.contains_key(pattern) {
        compiled.insert(pattern.to_owned(), Regex::new(pattern).ok());
    }
    let known = compiled.get(pattern).and_then(Option::as_ref);
    known.is_some_and(|known| known.is_match(text))
}

/// Why a value violates the bounds of lengths and numbers, or the format.
fn bounds_problem(schema: &Value, value: &Value) -> Option<String> {
    let length = match value {
        Value::String(text) => Some(("Length", text.chars().count())),
        Value::Array(items) => Some(("Items", items.len())),
        Value::Object(fields) => Some(("Properties", fields.len())),
        _ => None,
    };
    if let Some((of, length)) = length {
        let bound = |which: &str| schema[format!("{which}{of}")].as_u64();
        let length = u64::try_from(length).unwrap_or(u64::MAX);
        if let Some(most) = bound("max").filter(|most| length > *most) {
            return Some(format!("Too many: {length}: must have at most {most}"));
        }
        if let Some(least) = bound("min").filter(|least| length < *least) {
            return Some(format!("Invalid value: should have at least {least}"));
        }
    }
    if let Some(number) = value.as_i64() {
        let (least, most) = match schema["format"].as_str() {
            Some("int32") => (i64::from(i32::MIN), i64::from(i32::MAX)),
            _ => (i64::MIN, i64::MAX),
        };
        let least = schema["minimum"].as_i64().unwrap_or(least);
        let most = schema["maximum"].as_i64().unwrap_or(most);
        if !(least..=most).contains(&number) {
            return Some(format!(
                "Invalid value: {number}: should be between {least} and {most}"
            ));
        }
    }
    let is_time = |text: &str| text.parse::<jiff::Timestamp>().is_ok();
    (schema["format"] == "date-time" && !value.as_str().is_some_and(is_time))
        .then(|| format!("Invalid value: {value}: must be of type date-time"))
}

/// The first item that occurs twice in a map or set.
fn duplicate(schema: &Value, value: &Value) -> Option<String> {
    let items = value.as_array()?;
    let keys = schema["x-kubernetes-list-map-keys"].as_array();
    let of = |item: &Value| match (schema["x-kubernetes-list-type"].as_str(), keys) {
        (Some("map"), Some(keys)) => {
            let keys = keys.iter().filter_map(Value::as_str);
            Some(keys.map(|key| item[key].to_string()).collect::<String>())
        }
        (Some("set"), _) => Some(item.to_string()),
        _ => None,
    };
    let mut known = BTreeSet::new();
    let mut keys = items.iter().filter_map(of);
    let twice = keys.find(|key| !known.insert(key.clone()))?;
    Some(format!("Duplicate value: {twice}"))
}

fn join(path: &str, name: &str) -> String {
    match path {
        "" => name.to_owned(),
        path => format!("{path}.{name}"),
    }
}
