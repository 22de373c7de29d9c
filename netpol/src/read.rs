//! Reads a JSON value into a [`NetworkPolicy`]. Every refusal names its field and the remedy.
//!
//! The rules and defaults are those of the Kubernetes API server. Unknown fields are refused,
//! because a misspelt field would silently change the meaning of the policy.

mod peers;
mod ports;
mod selectors;

use serde_json::Value;

use self::{peers::peers, ports::ports, selectors::selector};
use crate::{
    field::{Checked, Field},
    name::{is_dns_label, is_dns_subdomain},
    policy::{Direction, NetworkPolicy, Rule, Warning},
};

/// The only `apiVersion` that [`read`] accepts.
pub const API_VERSION: &str = "networking.k8s.io/v1";
/// The only `kind` that [`read`] accepts.
pub const KIND: &str = "NetworkPolicy";

/// Reads a document of kind NetworkPolicy.
pub fn read(document: &Value) -> Checked<NetworkPolicy> {
    let top = Field::top(document);
    only(&top, &["apiVersion", "kind", "metadata", "spec", "status"])?;
    for (field, wanted) in [("apiVersion", API_VERSION), ("kind", KIND)] {
        let field = top.get(field);
        let found = field.as_str();
        if found != Some(wanted) {
            let found = found.map_or("missing".to_owned(), |text| format!("`{text}`"));
            let remedy = format!("write {}: {wanted}", field.path);
            return field.refuse(format!("is {found}"), remedy);
        }
    }
    let (namespace, name) = metadata(&top.get("metadata"))?;
    let remedy =
        "add it; `spec: {podSelector: {}}` closes the ingress of every pod in the namespace";
    let spec = top.get("spec").required(remedy)?;
    only(&spec, &["podSelector", "policyTypes", "ingress", "egress"])?;
    let mut warnings = Vec::new();
    let pods = spec.get("podSelector").present();
    let pods = pods.map(|pods| selector(&pods));
    let types = policy_types(&spec, &mut warnings)?;
    Ok(NetworkPolicy {
        namespace,
        name,
        pods: pods.transpose()?.unwrap_or_default(),
        ingress: direction(&spec, &INGRESS, types.ingress, &mut warnings)?,
        egress: direction(&spec, &EGRESS, types.egress, &mut warnings)?,
        warnings,
    })
}

/// Refuses a value that is not a mapping, and a field that is not in `known`.
fn only(field: &Field<'_>, known: &[&str]) -> Checked<()> {
    match field.keys(known)?.find(|key| !known.contains(key)) {
        None => Ok(()),
        Some(other) => field
            .get(other)
            .refuse("is an unknown field", nearest::remedy(other, known)),
    }
}

/// Namespace and name of the policy. The namespace is `default` if the document has none.
fn metadata(metadata: &Field<'_>) -> Checked<(String, String)> {
    let field = metadata.get("namespace");
    let namespace = field.optional_text()?.unwrap_or("default");
    let named = metadata.get("name");
    let Some(name) = named.optional_text()? else {
        return named.refuse("is missing", "give the policy a name");
    };
    if !is_dns_subdomain(name) {
        let reason = format!("`{name}` is not the name of an object");
        let remedy = "use at most 253 lower-case letters, digits, dashes and dots";
        return named.refuse(reason, remedy);
    }
    if !is_dns_label(namespace) {
        let reason = format!("`{namespace}` is not the name of a namespace");
        let remedy = "use at most 63 lower-case letters, digits and dashes";
        return field.refuse(reason, remedy);
    }
    Ok((namespace.to_owned(), name.to_owned()))
}

/// Directions that a policy restricts.
struct PolicyTypes {
    ingress: bool,
    egress: bool,
}

/// Reads `policyTypes`. Without it a policy restricts ingress, and egress if it has egress rules.
fn policy_types(spec: &Field<'_>, warnings: &mut Vec<Warning>) -> Checked<PolicyTypes> {
    let mut types = PolicyTypes {
        ingress: false,
        egress: false,
    };
    let field = spec.get("policyTypes");
    let listed = field.items()?;
    let length = listed.len();
    for item in listed {
        match item.text()? {
            "Ingress" => types.ingress = true,
            "Egress" => types.egress = true,
            other => {
                let reason = format!("`{other}` is not a policy type");
                return item.refuse(reason, "use Ingress or Egress");
            }
        }
    }
    if length > 2 {
        let reason = format!("has {length} elements");
        return field.refuse(reason, "list Ingress and Egress once each");
    }
    if length > 0 {
        return Ok(types);
    }
    let egress = spec.get("egress");
    let has_egress = egress.items()?.len() > 0;
    if !has_egress && !egress.is_absent() {
        warnings.push(Warning {
            field: egress.path,
            text: "an empty list without policyTypes restricts nothing; write `policyTypes: \
                   [Ingress, Egress]` to close egress"
                .to_owned(),
        });
    }
    Ok(PolicyTypes {
        ingress: true,
        egress: has_egress,
    })
}

/// Names of the fields of one direction.
struct DirectionFields {
    rules: &'static str,
    peers: &'static str,
    policy_type: &'static str,
}

const INGRESS: DirectionFields = DirectionFields {
    rules: "ingress",
    peers: "from",
    policy_type: "Ingress",
};
const EGRESS: DirectionFields = DirectionFields {
    rules: "egress",
    peers: "to",
    policy_type: "Egress",
};

fn direction(
    spec: &Field<'_>,
    fields: &DirectionFields,
    restricted: bool,
    warnings: &mut Vec<Warning>,
) -> Checked<Direction> {
    let field = spec.get(fields.rules);
    let mut rules = Vec::new();
    for item in field.items()? {
        only(&item, &[fields.peers, "ports"])?;
        rules.push(Rule {
            peers: peers(&item.get(fields.peers), warnings)?,
            ports: ports(&item.get("ports"))?,
            path: item.path,
        });
    }
    if restricted {
        return Ok(Direction::Restricted(rules));
    }
    if !rules.is_empty() {
        let direction = fields.policy_type;
        warnings.push(Warning {
            field: field.path,
            text: format!(
                "has no effect: spec.policyTypes does not list {direction}; add it, or remove \
                 the rules"
            ),
        });
    }
    Ok(Direction::Open)
}

#[cfg(test)]
mod tests;
