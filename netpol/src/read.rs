//! A JSON value into a [`NetworkPolicy`]: every refusal names its field and the remedy.
//!
//! The rules are those of the Kubernetes API server, with its defaults. Unknown fields are
//! refused, because a misspelt field would change the meaning of the policy without a message.

mod fields;
mod peers;
mod ports;
mod selectors;

use serde_json::Value;

use self::{
    fields::{Fields, list, present, text},
    peers::peers,
    ports::ports,
    selectors::selector,
};
use crate::{
    name::{is_dns_label, is_dns_subdomain},
    policy::{Direction, NetworkPolicy, Rule, Warning},
};

/// The version and the kind that [`read`] takes.
pub const API_VERSION: &str = "networking.k8s.io/v1";
/// The only `kind` that [`read`] accepts.
pub const KIND: &str = "NetworkPolicy";

/// Why a document is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {reason}; {remedy}")]
pub struct Refusal {
    /// Path of the field, for example `spec.ingress[0].from[1].ipBlock.except[0]`.
    pub field: String,
    /// The error, worded to follow the name of the field, such as `is missing`.
    pub reason: String,
    /// Advice for the author of the policy, such as `use Ingress or Egress`.
    pub remedy: String,
}

impl Refusal {
    fn new(field: &str, reason: &str, remedy: &str) -> Self {
        Self {
            field: field.to_owned(),
            reason: reason.to_owned(),
            remedy: remedy.to_owned(),
        }
    }
}

type Checked<T> = Result<T, Refusal>;

/// Reads a document of kind NetworkPolicy.
pub fn read(document: &Value) -> Checked<NetworkPolicy> {
    let known = ["apiVersion", "kind", "metadata", "spec", "status"];
    let fields = Fields::of("", document, &known)?;
    for (field, wanted) in [("apiVersion", API_VERSION), ("kind", KIND)] {
        let found = fields.get(field).and_then(Value::as_str);
        if found != Some(wanted) {
            let reason = format!("is {}", found.map_or("missing".to_owned(), quoted));
            return Err(Refusal::new(
                field,
                &reason,
                &format!("write {field}: {wanted}"),
            ));
        }
    }
    let (namespace, name) = metadata(fields.get("metadata"))?;
    let Some(spec) = fields.get("spec") else {
        let remedy = "add it; `spec: {podSelector: {}}` closes the ingress of every pod in the \
                      namespace";
        return Err(Refusal::new("spec", "is missing", remedy));
    };
    let known = ["podSelector", "policyTypes", "ingress", "egress"];
    let spec = Fields::of("spec", spec, &known)?;
    let mut warnings = Vec::new();
    let pods = spec.get("podSelector");
    let pods = pods.map(|value| selector("spec.podSelector", value));
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

fn quoted(text: &str) -> String {
    format!("`{text}`")
}

/// Namespace and name of the policy. The namespace is `default` if the document has none.
fn metadata(value: Option<&Value>) -> Checked<(String, String)> {
    let field = |field: &str| match present(value.and_then(|v| v.get(field))) {
        Some(value) => text(&format!("metadata.{field}"), value),
        None => Ok(""),
    };
    let (namespace, name) = (field("namespace")?, field("name")?);
    if name.is_empty() {
        let remedy = "give the policy a name";
        return Err(Refusal::new("metadata.name", "is missing", remedy));
    }
    if !is_dns_subdomain(name) {
        let reason = format!("`{name}` is not the name of an object");
        let remedy = "use at most 253 lower-case letters, digits, dashes and dots";
        return Err(Refusal::new("metadata.name", &reason, remedy));
    }
    if !namespace.is_empty() && !is_dns_label(namespace) {
        let reason = format!("`{namespace}` is not the name of a namespace");
        let remedy = "use at most 63 lower-case letters, digits and dashes";
        return Err(Refusal::new("metadata.namespace", &reason, remedy));
    }
    let namespace = if namespace.is_empty() {
        "default"
    } else {
        namespace
    };
    Ok((namespace.to_owned(), name.to_owned()))
}

/// Directions that a policy restricts.
struct PolicyTypes {
    ingress: bool,
    egress: bool,
}

/// Reads `policyTypes`. Without it a policy restricts ingress, and egress if it has egress rules.
fn policy_types(spec: &Fields<'_>, warnings: &mut Vec<Warning>) -> Checked<PolicyTypes> {
    let path = "spec.policyTypes";
    let mut types = PolicyTypes {
        ingress: false,
        egress: false,
    };
    let listed = list(path, spec.get("policyTypes"))?;
    for (n, value) in listed.iter().enumerate() {
        let path = format!("{path}[{n}]");
        match text(&path, value)? {
            "Ingress" => types.ingress = true,
            "Egress" => types.egress = true,
            other => {
                let reason = format!("`{other}` is not a policy type");
                return Err(Refusal::new(&path, &reason, "use Ingress or Egress"));
            }
        }
    }
    if listed.len() > 2 {
        let reason = format!("has {} elements", listed.len());
        let remedy = "list Ingress and Egress once each";
        return Err(Refusal::new(path, &reason, remedy));
    }
    if !listed.is_empty() {
        return Ok(types);
    }
    let egress = list("spec.egress", spec.get("egress"))?;
    if egress.is_empty() && spec.get("egress").is_some() {
        warnings.push(Warning {
            field: "spec.egress".to_owned(),
            text: "an empty list without policyTypes restricts nothing; write `policyTypes: \
                   [Ingress, Egress]` to close egress"
                .to_owned(),
        });
    }
    Ok(PolicyTypes {
        ingress: true,
        egress: !egress.is_empty(),
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
    spec: &Fields<'_>,
    fields: &DirectionFields,
    restricted: bool,
    warnings: &mut Vec<Warning>,
) -> Checked<Direction> {
    let path = format!("spec.{}", fields.rules);
    let mut rules = Vec::new();
    for (n, value) in list(&path, spec.get(fields.rules))?.iter().enumerate() {
        rules.push(rule(format!("{path}[{n}]"), value, fields, warnings)?);
    }
    if restricted {
        return Ok(Direction::Restricted(rules));
    }
    if !rules.is_empty() {
        let direction = fields.policy_type;
        warnings.push(Warning {
            field: path,
            text: format!(
                "has no effect: spec.policyTypes does not list {direction}; add it, or remove \
                 the rules"
            ),
        });
    }
    Ok(Direction::Open)
}

fn rule(
    path: String,
    value: &Value,
    fields: &DirectionFields,
    warnings: &mut Vec<Warning>,
) -> Checked<Rule> {
    let rule = Fields::of(&path, value, &[fields.peers, "ports"])?;
    let peers_path = format!("{path}.{}", fields.peers);
    let peers = peers(&peers_path, rule.get(fields.peers), warnings)?;
    let ports = ports(&format!("{path}.ports"), rule.get("ports"))?;
    Ok(Rule { path, peers, ports })
}

#[cfg(test)]
mod tests;
