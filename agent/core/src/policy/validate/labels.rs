//! Label selectors.

use std::collections::BTreeSet;

use netpol::field::{Checked, Field};

use super::field::only;
use crate::{
    labels::{CIDR_GROUP, K8S, NAMESPACE_KEY, NAMESPACE_LABELS, NAMESPACE_NAME, NODE, RESERVED},
    policy::validate::section::Scope,
    selector::selector::{LabelSelector, Operator, Requirement},
};

pub(super) fn subject(field: &Field<'_>, scope: &Scope) -> Checked<LabelSelector> {
    let mut selector = labels(field)?;
    if let Some(namespace) = &scope.namespace {
        if selector.mentions(NAMESPACE_KEY) {
            let remedy = "set metadata.namespace, or use CiliumClusterwideNetworkPolicy";
            return field.refuse("selects a namespace", remedy);
        }
        selector.requirements.insert(in_namespace(namespace));
    }
    Ok(selector)
}

pub(super) fn peer_labels(field: &Field<'_>, scope: &Scope) -> Checked<LabelSelector> {
    let mut selector = labels(field)?;
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
pub(super) fn allowed_peer_labels(field: &Field<'_>, scope: &Scope) -> Checked<LabelSelector> {
    let mut selector = peer_labels(field, scope)?;
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

/// A selector of groups of blocks: its keys get the source of groups' labels.
pub(super) fn group_labels(field: &Field<'_>) -> Checked<LabelSelector> {
    labels_of(CIDR_GROUP, field)
}

/// A selector of nodes: its keys get the source of nodes' labels.
pub(in crate::policy) fn node_labels(field: &Field<'_>) -> Checked<LabelSelector> {
    labels_of(NODE, field)
}

fn labels_of(source: &str, field: &Field<'_>) -> Checked<LabelSelector> {
    let mut selector = labels(field)?;
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

fn labels(field: &Field<'_>) -> Checked<LabelSelector> {
    only(field, &["matchLabels", "matchExpressions"], &[])?;
    let mut requirements = BTreeSet::new();
    let pairs = field.get("matchLabels");
    if !pairs.is_absent() && !pairs.is_mapping() {
        return pairs.refuse("is not a mapping", "write key: value pairs");
    }
    for (key, value) in pairs.entries() {
        let operator = Operator::In([value.text()?.to_owned()].into());
        requirements.insert(Requirement::new(key, operator));
    }
    for item in field.get("matchExpressions").items()? {
        requirements.insert(expression(&item)?);
    }
    Ok(LabelSelector { requirements })
}

fn expression(field: &Field<'_>) -> Checked<Requirement> {
    only(field, &["key", "operator", "values"], &[])?;
    let required = |field: &Field<'_>| match field.value {
        Some(_) => field.text().map(str::to_owned),
        None => field.refuse("is missing", "add it"),
    };
    let written = field.get("values");
    let values = written.items()?.map(|item| item.text().map(str::to_owned));
    let values = values.collect::<Checked<BTreeSet<String>>>()?;
    let is_empty = values.is_empty();
    let operator = field.get("operator");
    let operator = match required(&operator)?.as_str() {
        "In" => Operator::In(values),
        "NotIn" => Operator::NotIn(values),
        "Exists" => Operator::Exists,
        "DoesNotExist" => Operator::DoesNotExist,
        other => {
            let remedy = "use In, NotIn, Exists or DoesNotExist";
            return operator.refuse(format!("`{other}` is not an operator"), remedy);
        }
    };
    match (&operator, is_empty) {
        (Operator::In(_) | Operator::NotIn(_), true) => {
            written.refuse("is empty", "list at least one value")
        }
        (Operator::Exists | Operator::DoesNotExist, false) => {
            written.refuse("is set", "remove it: this operator takes no values")
        }
        _ => Ok(Requirement::new(&required(&field.get("key"))?, operator)),
    }
}
