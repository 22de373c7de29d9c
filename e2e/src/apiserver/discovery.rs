//! Documents for kubectl and other clients that first ask which kinds exist.

use std::sync::Arc;

use serde_json::{Value, json};

use super::kind::Kind;

/// The discovery document at `path`; `None` for all other paths.
pub(super) fn document(path: &str, kinds: &[Arc<Kind>]) -> Option<Value> {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    match parts.as_slice() {
        ["version"] => Some(json!({"major": "1", "minor": "36", "gitVersion": "v1.36.2"})),
        ["api"] => Some(json!({"kind": "APIVersions", "versions": ["v1"]})),
        ["api", "v1"] => Some(resources("", "v1", kinds)),
        ["apis"] => Some(json!({
            "kind": "APIGroupList", "apiVersion": "v1", "groups": groups(kinds),
        })),
        ["apis", group, version] => {
            let known = kinds
                .iter()
                .any(|k| k.group == *group && k.version == *version);
            known.then(|| resources(group, version, kinds))
        }
        _ => None,
    }
}

fn groups(kinds: &[Arc<Kind>]) -> Vec<Value> {
    let mut versions: Vec<(&str, &str)> = kinds
        .iter()
        .filter(|kind| !kind.group.is_empty())
        .map(|kind| (kind.group.as_str(), kind.version.as_str()))
        .collect();
    versions.sort_unstable();
    versions.dedup();
    let groups = versions.into_iter().map(|(group, version)| {
        let version = json!({"groupVersion": format!("{group}/{version}"), "version": version});
        json!({"name": group, "versions": [version], "preferredVersion": version})
    });
    groups.collect()
}

fn resources(group: &str, version: &str, kinds: &[Arc<Kind>]) -> Value {
    let verbs = [
        "create", "delete", "get", "list", "patch", "update", "watch",
    ];
    let of_group = kinds
        .iter()
        .filter(|k| k.group == group && k.version == version);
    let mut all = Vec::new();
    for kind in of_group {
        let entry = |name: String, verbs: &[&str]| {
            json!({
                "name": name, "singularName": kind.kind.to_lowercase(), "kind": kind.kind,
                "namespaced": kind.namespaced, "verbs": verbs,
            })
        };
        all.push(entry(kind.plural.clone(), &verbs));
        if kind.status {
            all.push(entry(
                format!("{}/status", kind.plural),
                &["get", "patch", "update"],
            ));
        }
    }
    let version = match group {
        "" => version.to_owned(),
        group => format!("{group}/{version}"),
    };
    json!({
        "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": all,
    })
}
