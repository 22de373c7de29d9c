//! The shapes that fields have: mappings, lists, texts.

use ipnet::IpNet;
use serde_json::{Map, Value};

use crate::policy::validate::fault::{Checked, Fault};
use dns_policy::{pattern, rule::NameRule};

pub(in crate::policy) fn object<'a>(
    path: &str,
    value: &'a Value,
    known: &[&str],
    unsupported: &[&str],
) -> Checked<&'a Map<String, Value>> {
    let Some(map) = value.as_object() else {
        let reason = format!("is {}, not a mapping", kind(value));
        return Err(Fault::new(
            path,
            &reason,
            &format!("write a mapping with {}", known.join(", ")),
        ));
    };
    for key in map.keys() {
        let path = format!("{path}.{key}");
        if unsupported.contains(&key.as_str()) {
            let remedy = "remove it, or keep the rule out of this agent's policies";
            return Err(Fault::new(
                &path,
                &format!("{key} is not supported"),
                remedy,
            ));
        }
        if !known.contains(&key.as_str()) {
            let remedy = format!("remove it; known here are {}", known.join(", "));
            return Err(Fault::new(&path, "is an unknown field", &remedy));
        }
    }
    Ok(map)
}

/// A mapping of any fields; none if it is absent.
pub(in crate::policy) fn mapping<'a>(
    path: &str,
    value: Option<&'a Value>,
) -> Checked<Option<&'a Map<String, Value>>> {
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(map)) => Ok(Some(map)),
        Some(other) => {
            let reason = format!("is {}, not a mapping", kind(other));
            Err(Fault::new(path, &reason, "write field: value pairs"))
        }
    }
}

pub(in crate::policy) fn list<'a>(path: &str, value: Option<&'a Value>) -> Checked<&'a [Value]> {
    match value {
        None | Some(Value::Null) => Ok(&[]),
        Some(Value::Array(items)) => Ok(items),
        Some(other) => {
            let reason = format!("is {}, not a list", kind(other));
            Err(Fault::new(
                path,
                &reason,
                "write a list (each element after a dash)",
            ))
        }
    }
}

pub(in crate::policy) fn text<'a>(path: &str, value: &'a Value) -> Checked<&'a str> {
    value.as_str().ok_or_else(|| {
        let reason = format!("is {}, not a text", kind(value));
        Fault::new(path, &reason, "put it in quotes")
    })
}

pub(super) fn boolean(path: &str, value: &Value) -> Checked<bool> {
    value.as_bool().ok_or_else(|| {
        let reason = format!("is {}, neither true nor false", kind(value));
        Fault::new(path, &reason, "write true or false")
    })
}

pub(in crate::policy) fn prefix(path: &str, value: &Value) -> Checked<IpNet> {
    let text = text(path, value)?;
    let parsed = text.parse().ok().or_else(|| {
        let address: Option<std::net::IpAddr> = text.parse().ok();
        address.map(IpNet::from)
    });
    parsed.map(|prefix| prefix.trunc()).ok_or_else(|| {
        let reason = format!("`{text}` is not a block of addresses");
        Fault::new(
            path,
            &reason,
            "write for example 10.0.0.0/8 or 2001:db8::/32",
        )
    })
}

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

pub(crate) fn name_rule(
    path: &str,
    value: &Value,
    make: fn(String) -> NameRule,
) -> Checked<NameRule> {
    let rule = make(text(path, value)?.to_owned());
    let remedy = match rule {
        NameRule::Name(_) => "write a DNS name such as www.example.com, or use matchPattern",
        NameRule::Pattern(_) => "write a pattern such as *.example.com",
    };
    pattern::validate_rule(&rule).map_err(|error| Fault::new(path, &error.to_string(), remedy))?;
    Ok(rule)
}
