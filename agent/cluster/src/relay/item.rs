//! An object as it is sent: the part that other objects share, and its own part.
//!
//! The replicas of a Deployment differ in their names, nodes and addresses. Everything else in them
//! is one template, which is sent once.

use serde_json::{Map, Value};

/// Fields of `spec` that differ between the pods of one workload.
const OWN_SPEC: [&str; 1] = ["nodeName"];
/// Fields of `metadata` that the pods of one workload have in common.
const SHARED_METADATA: &str = "labels";
/// The kind whose objects have templates.
const WITH_TEMPLATE: &str = "Pod";

/// Stands for the name in the key of an object without a name.
const NAMELESS: &str = "?";

/// Both parts, as JSON objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Parts {
    /// `None` if no other object would share it.
    pub(super) template: Option<String>,
    /// The object's own part, without `apiVersion` and `kind`.
    pub(super) own: String,
}

/// Takes apart an object whose key is `kind/namespace/name` or `kind/name`.
pub(super) fn split(key: &str, mut object: Value) -> Parts {
    let mut template = Map::new();
    if let Some(fields) = object.as_object_mut() {
        for name in ["apiVersion", "kind"] {
            fields.remove(name);
        }
        if key.split('/').next() == Some(WITH_TEMPLATE) {
            take_shared(fields, &mut template);
        }
        if let Some(metadata) = fields.get_mut("metadata").and_then(Value::as_object_mut) {
            let (namespace, name) = place(key);
            if metadata.get("name").and_then(Value::as_str) == Some(name)
                && metadata.get("namespace").and_then(Value::as_str) == namespace
            {
                metadata.remove("name");
                metadata.remove("namespace");
            }
        }
    }
    Parts {
        template: (!template.is_empty()).then(|| Value::Object(template).to_string()),
        own: object.to_string(),
    }
}

/// Moves the fields that replicas have in common.
fn take_shared(object: &mut Map<String, Value>, template: &mut Map<String, Value>) {
    let metadata = object.get_mut("metadata").and_then(Value::as_object_mut);
    if let Some((name, labels)) = metadata.and_then(|all| all.remove_entry(SHARED_METADATA)) {
        let shared = Map::from_iter([(name, labels)]);
        template.insert("metadata".to_owned(), shared.into());
    }
    let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) else {
        return;
    };
    let mut shared = std::mem::take(spec);
    for name in OWN_SPEC {
        spec.extend(shared.remove_entry(name));
    }
    if !shared.is_empty() {
        template.insert("spec".to_owned(), shared.into());
    }
}

/// Puts an object together again. `kind` and `version` are those of its kind.
pub(super) fn join(
    key: &str,
    (kind, version): (&str, &str),
    template: Option<&Value>,
    mut own: Value,
) -> Value {
    if let Some(template) = template {
        merge(&mut own, template);
    }
    if let Some(fields) = own.as_object_mut() {
        fields.insert("kind".to_owned(), kind.into());
        fields.insert("apiVersion".to_owned(), version.into());
        let (namespace, name) = place(key);
        if name != NAMELESS {
            let metadata = fields
                .entry("metadata")
                .or_insert_with(|| Map::new().into());
            if let Some(metadata) = metadata.as_object_mut()
                && !metadata.contains_key("name")
            {
                metadata.insert("name".to_owned(), name.into());
                let namespace =
                    namespace.map(|namespace| ("namespace".to_owned(), namespace.into()));
                metadata.extend(namespace);
            }
        }
    }
    own
}

/// Adds the fields of `from` that `to` does not have.
fn merge(to: &mut Value, from: &Value) {
    let (Some(to), Some(from)) = (to.as_object_mut(), from.as_object()) else {
        return;
    };
    for (name, value) in from {
        match to.get_mut(name) {
            Some(known) => merge(known, value),
            None => drop(to.insert(name.clone(), value.clone())),
        }
    }
}

/// Namespace and name in a key.
fn place(key: &str) -> (Option<&str>, &str) {
    let (_, place) = key.split_once('/').unwrap_or(("", key));
    match place.split_once('/') {
        Some((namespace, name)) => (Some(namespace), name),
        None => (None, place),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(name: &str, node: &str, address: &str) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": name, "namespace": "shop", "labels": {"app": "web"},
                "creationTimestamp": "2026-11-22T12:00:00Z",
            },
            "spec": {
                "nodeName": node, "serviceAccountName": "web",
                "containers": [{"ports": [{"name": "http", "containerPort": 80}]}],
            },
            "status": {"podIP": address, "podIPs": [{"ip": address}]},
        })
    }

    #[test]
    fn replicas_share_all_but_name_node_time_and_status() {
        let a = split("Pod/shop/web-1", pod("web-1", "n1", "10.2.0.1"));
        let b = split("Pod/shop/web-2", pod("web-2", "n2", "10.2.0.2"));
        assert!(a.template.is_some());
        assert_eq!(a.template, b.template);
        let own = json!({
            "metadata": {"creationTimestamp": "2026-11-22T12:00:00Z"},
            "spec": {"nodeName": "n1"},
            "status": {"podIP": "10.2.0.1", "podIPs": [{"ip": "10.2.0.1"}]},
        });
        assert_eq!(a.own, own.to_string());
    }

    #[test]
    fn every_object_is_the_same_after_the_way() {
        let objects = [
            ("Pod/shop/web-1", "v1", pod("web-1", "n1", "10.2.0.1")),
            (
                "Namespace/shop",
                "v1",
                json!({"metadata": {"name": "shop", "labels": {"a": "b"}}}),
            ),
            // Malformed objects. The agent must refuse them as if its own watch had read them.
            (
                "Pod/n/odd",
                "v1",
                json!({"metadata": {"name": "odd", "namespace": "n"}, "spec": 7}),
            ),
            (
                "Pod/n/odd",
                "v1",
                json!({"metadata": {"name": "odd", "namespace": "n", "labels": 1}}),
            ),
            ("Pod/?", "v1", json!({"metadata": null})),
            ("Pod/?", "v1", json!({"spec": {"hostNetwork": 3}})),
            (
                "CiliumNetworkPolicy/shop/a",
                "cilium.io/v2",
                json!({"metadata": {"name": "a", "namespace": "shop"}, "spec": {"x": null}}),
            ),
        ];
        for (key, version, mut object) in objects {
            let kind = key.split('/').next().unwrap();
            object["kind"] = kind.into();
            object["apiVersion"] = version.into();
            let parts = split(key, object.clone());
            let template = parts
                .template
                .map(|text| serde_json::from_str(&text).unwrap());
            let own = serde_json::from_str(&parts.own).unwrap();
            let joined = join(key, (kind, version), template.as_ref(), own);
            assert_eq!(joined, object);
        }
    }
}
