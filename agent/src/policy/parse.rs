//! Policy documents (YAML or JSON, several in one text) into validated rules.

use std::collections::{BTreeMap, BTreeSet};

use daemon::yaml::{self, YamlError};
use ipnet::IpNet;
use serde_json::{Map, Value};

use super::{
    cluster::{self, ClusterObject},
    network_policy,
    rule::Rule,
    validate::{Fault, Scope, group, rule, warnings},
};
use crate::{ipcache::metadata::Source, labels::LabelSet};

/// A policy document that was read without error.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyDocument {
    /// `kind/namespace/name` (`kind/name` when cluster-wide): unique over all sources.
    pub key: String,
    /// Where it came from, for people.
    pub source: String,
    /// What its author should know.
    pub warnings: Vec<String>,
    /// Its rules.
    pub rules: Vec<Rule>,
    /// Blocks that rules of other documents name.
    pub group: Option<CidrGroup>,
    /// Nodes or API servers.
    pub cluster: Option<Box<ClusterObject>>,
}

impl PolicyDocument {
    /// Labels that it gives to prefixes, and how far it is trusted. `own` is the name of this
    /// node.
    pub fn labels(&self, own: Option<&str>) -> (Source, BTreeMap<IpNet, LabelSet>) {
        if let Some(object) = &self.cluster {
            let labels = object.labels(own).into_iter();
            let labels = labels.map(|(address, labels)| (IpNet::from(address), labels));
            return (object.source(), labels.collect());
        }
        let blocks = self.group.iter().flat_map(|group| {
            let prefixes = group.prefixes.iter();
            prefixes.map(|prefix| (*prefix, group.labels.clone()))
        });
        (Source::CustomResource, blocks.collect())
    }
}

/// A `CiliumCIDRGroup`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CidrGroup {
    /// Labels of its blocks.
    pub labels: LabelSet,
    /// Its own labels.
    pub own: BTreeMap<String, String>,
    /// The blocks.
    pub prefixes: BTreeSet<IpNet>,
}

/// Key of the group called `name`.
pub fn group_key(name: &str) -> String {
    format!("{GROUP_KIND}/{name}")
}

const GROUP_KIND: &str = "CiliumCIDRGroup";

/// A policy document that is refused, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{source_name}{}: {field}: {reason}; {remedy}", .key.as_ref().map(|k| format!(" ({k})")).unwrap_or_default())]
pub struct PolicyError {
    /// Where it came from.
    pub source_name: String,
    /// Key, if it could be read that far: the last good version of it stays in force.
    pub key: Option<String>,
    /// Path of the field, for example `spec.egress[0].toFQDNs[1].matchPattern`.
    pub field: String,
    /// What is wrong.
    pub reason: String,
    /// What to do.
    pub remedy: String,
}

/// Reads every document of `text`. `source_name` is for error messages (a file name).
pub fn parse_documents(text: &str, source_name: &str) -> Vec<Result<PolicyDocument, PolicyError>> {
    parse_each(text, source_name, |_, document| document)
}

/// Reads every document of `text`, each together with its JSON.
pub(super) fn parse_with_json(
    text: &str,
    source_name: &str,
) -> Vec<Result<(PolicyDocument, String), PolicyError>> {
    parse_each(text, source_name, |value, document| {
        (document, value.to_string())
    })
}

fn parse_each<T>(
    text: &str,
    source_name: &str,
    with: impl Fn(&Value, PolicyDocument) -> T,
) -> Vec<Result<T, PolicyError>> {
    let mut found = Vec::new();
    let faulty = |number: usize, fault: &YamlError| PolicyError {
        source_name: source_name.to_owned(),
        key: None,
        field: format!("document {}", number + 1),
        reason: fault.to_string(),
        remedy: fault.remedy().to_owned(),
    };
    for (number, document) in yaml::documents(text).iter().enumerate() {
        match document.value() {
            Ok(Value::Null) => {}
            Ok(value) => read(&value, source_name, &mut |value, document| {
                found.push(document.map(|document| with(value, document)));
            }),
            Err(fault) => found.push(Err(faulty(number, &fault))),
        }
    }
    found
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

/// Reads one document.
pub(super) fn parse_value(value: &Value, source: &str) -> Result<PolicyDocument, PolicyError> {
    document(value, source).map_err(|(key, fault)| PolicyError {
        source_name: source.to_owned(),
        key,
        field: fault.field,
        reason: fault.reason,
        remedy: fault.remedy,
    })
}

fn document(value: &Value, source: &str) -> Result<PolicyDocument, (Option<String>, Fault)> {
    let (kind, key, scope) = head(value).map_err(|fault| (None, fault))?;
    let with_key = |fault| (Some(key.clone()), fault);
    yaml::check_size(value)
        .map_err(|fault| with_key(Fault::new("document", &fault.to_string(), fault.remedy())))?;
    let without_rules = |group, cluster| PolicyDocument {
        key: key.clone(),
        source: source.to_owned(),
        warnings: Vec::new(),
        rules: Vec::new(),
        group,
        cluster,
    };
    let mut parts = key.split('/').skip(1);
    match kind {
        Kind::Group => {
            let group = group(value).map_err(with_key)?;
            return Ok(without_rules(Some(group), None));
        }
        Kind::Node => {
            let name = parts.next().unwrap_or_default();
            let node = cluster::node(name, value).map_err(with_key)?;
            return Ok(without_rules(None, Some(node.into())));
        }
        Kind::ApiServers => {
            let namespace = parts.next().unwrap_or_default();
            let servers = cluster::api_servers(namespace, value).map_err(with_key)?;
            return Ok(without_rules(None, Some(servers.into())));
        }
        Kind::NetworkPolicy => {
            let mut warnings = Vec::new();
            let rules = network_policy::read(value, &mut warnings).map_err(with_key)?;
            return Ok(PolicyDocument {
                rules,
                warnings,
                ..without_rules(None, None)
            });
        }
        Kind::Policy => {}
    }
    let mut rules = Vec::new();
    match (value.get("spec"), value.get("specs")) {
        (Some(spec), None) => rules.push(rule("spec", spec, &scope).map_err(with_key)?),
        (None, Some(Value::Array(specs))) if !specs.is_empty() => {
            for (n, spec) in specs.iter().enumerate() {
                rules.push(rule(&format!("specs[{n}]"), spec, &scope).map_err(with_key)?);
            }
        }
        (Some(_), Some(_)) => {
            let fault = Fault::new("specs", "stands beside spec", "use one of the two");
            return Err(with_key(fault));
        }
        _ => {
            let fault = Fault::new("spec", "is missing", "add spec with an endpointSelector");
            return Err(with_key(fault));
        }
    }
    let warnings = warnings(&rules);
    Ok(PolicyDocument {
        key,
        source: source.to_owned(),
        warnings,
        rules,
        group: None,
        cluster: None,
    })
}

/// What a document is.
enum Kind {
    Policy,
    NetworkPolicy,
    Group,
    Node,
    ApiServers,
}

const NODE_KIND: &str = "CiliumNode";
const SLICE_KIND: &str = "EndpointSlice";

fn check_fields(kind: &str, map: &Map<String, Value>) -> Result<(), Fault> {
    let known: &[&str] = if kind == SLICE_KIND {
        &[
            "apiVersion",
            "kind",
            "metadata",
            "addressType",
            "endpoints",
            "ports",
        ]
    } else {
        &["apiVersion", "kind", "metadata", "spec", "specs", "status"]
    };
    if let Some(other) = map.keys().find(|key| !known.contains(&key.as_str())) {
        let remedy = format!("remove it; the fields here are {}", known.join(", "));
        return Err(Fault::new(other, "is an unknown field", &remedy));
    }
    Ok(())
}

fn check_version(kind: &str, found: &str) -> Result<(), Fault> {
    let old_group = kind == GROUP_KIND && found == "cilium.io/v2alpha1";
    let version = match kind {
        SLICE_KIND => "discovery.k8s.io/v1",
        netpol::read::KIND => netpol::read::API_VERSION,
        _ => "cilium.io/v2",
    };
    if found != version && !old_group {
        let reason = format!("is `{found}`");
        let remedy = if kind == SLICE_KIND || kind.starts_with("Cilium") {
            format!("write apiVersion: {version}")
        } else {
            format!(
                "only kinds of apiVersion {version}, such as CiliumNetworkPolicy, and EndpointSlice \
                 are supported: write the policy as one of these"
            )
        };
        return Err(Fault::new("apiVersion", &reason, &remedy));
    }
    Ok(())
}

/// Reads kind and metadata: the document's key, and what its selectors may mean.
fn head(value: &Value) -> Result<(Kind, String, Scope), Fault> {
    let Some(map) = value.as_object() else {
        return Err(Fault::new(
            "document",
            "is not a mapping",
            "start it with apiVersion and kind",
        ));
    };
    let text = |field: &str| map.get(field).and_then(Value::as_str).unwrap_or_default();
    let kind = text("kind");
    check_fields(kind, map)?;
    check_version(kind, text("apiVersion"))?;
    let metadata = |field: &str| {
        let value = map
            .get("metadata")
            .and_then(|m| m.get(field))
            .and_then(Value::as_str);
        value.filter(|text| !text.is_empty())
    };
    let name = metadata("name")
        .ok_or_else(|| Fault::new("metadata.name", "is missing", "give the document a name"))?;
    let cluster_wide = Scope { namespace: None };
    match kind {
        "CiliumNetworkPolicy" => {
            let namespace = metadata("namespace").unwrap_or("default");
            let scope = Scope {
                namespace: Some(namespace.to_owned()),
            };
            Ok((Kind::Policy, format!("{kind}/{namespace}/{name}"), scope))
        }
        "CiliumClusterwideNetworkPolicy" => {
            if metadata("namespace").is_some() {
                let remedy = "remove it, or use kind CiliumNetworkPolicy";
                return Err(Fault::new(
                    "metadata.namespace",
                    "is set on a cluster-wide policy",
                    remedy,
                ));
            }
            Ok((Kind::Policy, format!("{kind}/{name}"), cluster_wide))
        }
        netpol::read::KIND => {
            let namespace = metadata("namespace").unwrap_or("default");
            let key = format!("{kind}/{namespace}/{name}");
            Ok((Kind::NetworkPolicy, key, cluster_wide))
        }
        GROUP_KIND => Ok((Kind::Group, group_key(name), cluster_wide)),
        NODE_KIND => Ok((Kind::Node, format!("{kind}/{name}"), cluster_wide)),
        SLICE_KIND => {
            let namespace = metadata("namespace").unwrap_or("default");
            let key = format!("{kind}/{namespace}/{name}");
            Ok((Kind::ApiServers, key, cluster_wide))
        }
        other => Err(Fault::new(
            "kind",
            &format!("`{other}` is not supported"),
            "use CiliumNetworkPolicy, CiliumClusterwideNetworkPolicy, CiliumCIDRGroup, CiliumNode \
             or EndpointSlice",
        )),
    }
}

#[cfg(test)]
#[path = "parse_tests.rs"]
mod tests;
