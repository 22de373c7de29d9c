//! Label selectors.

use serde_json::Value;

use super::field::{list, object, text};
use crate::{
    labels::{CIDR_GROUP, K8S, NAMESPACE_KEY, NAMESPACE_LABELS, NAMESPACE_NAME, NODE, RESERVED},
    policy::validate::{
        fault::{Checked, Fault},
        section::Scope,
    },
    selector::selector::{LabelSelector, Operator, Requirement},
};

pub(super) fn subject(path: &str, value: &Value, scope: &Scope) -> Checked<LabelSelector> {
    let mut selector = labels(path, value)?;
    if let Some(namespace) = &scope.namespace {
        if selector.mentions(NAMESPACE_KEY) {
            let remedy = "set metadata.namespace, or use CiliumClusterwideNetworkPolicy";
            return Err(Fault::new(path, "selects a namespace", remedy));
        }
        selector.requirements.insert(in_namespace(namespace));
    }
    Ok(selector)
}

pub(super) fn peer_labels(path: &str, value: &Value, scope: &Scope) -> Checked<LabelSelector> {
    let mut selector = labels(path, value)?;
    let elsewhere = selector.requirements.iter().any(|requirement| {
        requirement.key == NAMESPACE_KEY
            || requirement.key.starts_with(NAMESPACE_LABELS)
            || requirement.source.as_deref() == Some(RESERVED)
    });
    if let (Some(namespace), false) = (&scope.namespace, elsewhere) {
        selector.requirements.insert(in_namespace(namespace));
    }
    Ok(selector)
}

/// Peers of an allow rule. A requirement that a namespace without the label meets selects only pods
/// whose namespace is known, as for a NetworkPolicy: each known namespace has its name as a label.
pub(super) fn allowed_peer_labels(
    path: &str,
    value: &Value,
    scope: &Scope,
) -> Checked<LabelSelector> {
    let mut selector = peer_labels(path, value, scope)?;
    let is_about_absence = selector.requirements.iter().any(|requirement| {
        requirement.key.starts_with(NAMESPACE_LABELS)
            && matches!(
                requirement.operator,
                Operator::NotIn(_) | Operator::DoesNotExist
            )
    });
    if is_about_absence {
        let name = format!("{K8S}:{NAMESPACE_LABELS}{NAMESPACE_NAME}");
        let known = Requirement::new(&name, Operator::Exists);
        selector.requirements.insert(known);
    }
    Ok(selector)
}

/// A selector of groups: keys are of the source of their labels.
pub(super) fn group_labels(path: &str, value: &Value) -> Checked<LabelSelector> {
    labels_of(CIDR_GROUP, path, value)
}

/// A selector of nodes: keys are of the source of their labels.
pub(in crate::policy) fn node_labels(path: &str, value: &Value) -> Checked<LabelSelector> {
    labels_of(NODE, path, value)
}

fn labels_of(source: &str, path: &str, value: &Value) -> Checked<LabelSelector> {
    let mut selector = labels(path, value)?;
    let requirements = std::mem::take(&mut selector.requirements).into_iter();
    let of_source = requirements.map(|requirement| Requirement {
        source: Some(source.to_owned()),
        ..requirement
    });
    selector.requirements = of_source.collect();
    Ok(selector)
}

/// Selects every pod of a namespace.
pub(in crate::policy) fn pods_of_namespace(namespace: &str) -> LabelSelector {
    LabelSelector {
        requirements: [in_namespace(namespace)].into(),
    }
}

fn in_namespace(namespace: &str) -> Requirement {
    let operator = Operator::In([namespace.to_owned()].into());
    Requirement::new(&format!("{K8S}:{NAMESPACE_KEY}"), operator)
}

fn labels(path: &str, value: &Value) -> Checked<LabelSelector> {
    let map = object(path, value, &["matchLabels", "matchExpressions"], &[])?;
    let mut requirements = std::collections::BTreeSet::new();
    let labels_path = format!("{path}.matchLabels");
    match map.get("matchLabels") {
        None | Some(Value::Null) => {}
        Some(Value::Object(pairs)) => {
            for (key, value) in pairs {
                let wanted = text(&format!("{labels_path}.{key}"), value)?;
                let operator = Operator::In([wanted.to_owned()].into());
                requirements.insert(Requirement::new(key, operator));
            }
        }
        Some(_) => {
            return Err(Fault::new(
                &labels_path,
                "is not a mapping",
                "write key: value pairs",
            ));
        }
    }
    let path = format!("{path}.matchExpressions");
    for (n, item) in list(&path, map.get("matchExpressions"))?.iter().enumerate() {
        requirements.insert(expression(&format!("{path}[{n}]"), item)?);
    }
    Ok(LabelSelector { requirements })
}

fn expression(path: &str, value: &Value) -> Checked<Requirement> {
    let map = object(path, value, &["key", "operator", "values"], &[])?;
    let field = |name: &str| {
        let path = format!("{path}.{name}");
        match map.get(name) {
            Some(value) => text(&path, value),
            None => Err(Fault::new(&path, "is missing", "add it")),
        }
    };
    let values_path = format!("{path}.values");
    let mut values = std::collections::BTreeSet::new();
    for (n, item) in list(&values_path, map.get("values"))?.iter().enumerate() {
        values.insert(text(&format!("{values_path}[{n}]"), item)?.to_owned());
    }
    let operator = match field("operator")? {
        "In" => Operator::In(values.clone()),
        "NotIn" => Operator::NotIn(values.clone()),
        "Exists" => Operator::Exists,
        "DoesNotExist" => Operator::DoesNotExist,
        other => {
            let remedy = "use In, NotIn, Exists or DoesNotExist";
            let reason = format!("`{other}` is not an operator");
            return Err(Fault::new(&format!("{path}.operator"), &reason, remedy));
        }
    };
    let wants_values = matches!(operator, Operator::In(_) | Operator::NotIn(_));
    if wants_values == values.is_empty() {
        let (reason, remedy) = if wants_values {
            ("is empty", "list at least one value")
        } else {
            ("is set", "remove it: this operator takes no values")
        };
        return Err(Fault::new(&values_path, reason, remedy));
    }
    Ok(Requirement::new(field("key")?, operator))
}
