//! What the API server sends, read with only the fields that the agent needs.
//!
//! A pod is ten kilobytes of JSON, of which a few hundred bytes are needed. The other bytes are
//! skipped while the text is read, and never become values.

use std::{collections::BTreeMap, fmt};

use agent_core::{
    identity::cluster_object::MADE_BY,
    policy::cluster::node::{COPIED_LABELS, HIGH_SCALE},
};
use serde::{
    Deserialize,
    de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Map, Value};

/// Fields of every object's `metadata` that are kept.
const METADATA: [&str; 6] = [
    "name",
    "namespace",
    "labels",
    "creationTimestamp",
    "resourceVersion",
    "uid",
];

/// Annotations of every object that are kept.
const ANNOTATIONS: [&str; 4] = [
    // The uid of a static pod.
    "kubernetes.io/config.mirror",
    // The program that made a CiliumIdentity.
    MADE_BY,
    // The node's part in the tunnel, on a CiliumNode.
    HIGH_SCALE,
    COPIED_LABELS,
];

/// Which fields of a value are kept.
#[derive(Debug, Default)]
pub(super) struct Fields {
    named: BTreeMap<&'static str, Self>,
    /// Whether fields that are not in `named` are kept.
    others: bool,
}

impl Fields {
    fn all() -> Self {
        Self {
            others: true,
            ..Self::default()
        }
    }

    /// The fields of an object at `paths`, such as `spec.containers[].ports`. Without paths, every field, and
    /// from the status only `conditions`. [`METADATA`] and [`ANNOTATIONS`] are always read.
    pub(super) fn of_object(paths: &[&'static str]) -> Self {
        let mut root = match paths.is_empty() {
            true => Self::all(),
            false => Self::default(),
        };
        if paths.is_empty() {
            // From the status only the condition that says whether the object is refused.
            root.add(["status", "conditions"].into_iter());
        }
        for path in paths {
            root.add(path.split('.'));
        }
        root.named.remove("metadata");
        // The last two are of the `Status` that ends a watch.
        for name in ["apiVersion", "kind", "code", "message"] {
            root.add([name].into_iter());
        }
        for name in METADATA {
            root.add(["metadata", name].into_iter());
        }
        for name in ANNOTATIONS {
            root.add(["metadata", "annotations", name].into_iter());
        }
        root
    }

    fn add(&mut self, mut steps: impl Iterator<Item = &'static str>) {
        match steps.next() {
            Some(step) => {
                let step = step.trim_end_matches("[]");
                self.named.entry(step).or_default().add(steps);
            }
            None => self.others = true,
        }
    }

    fn of(&self, name: &str) -> Option<&Self> {
        static ALL: Fields = Fields {
            named: BTreeMap::new(),
            others: true,
        };
        match self.named.get(name) {
            Some(fields) => Some(fields),
            None => self.others.then_some(&ALL),
        }
    }
}

impl<'de> DeserializeSeed<'de> for &Fields {
    type Value = Value;

    fn deserialize<D: serde::Deserializer<'de>>(self, from: D) -> Result<Value, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for &Fields {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut all = Vec::new();
        while let Some(item) = seq.next_element_seed(self)? {
            all.push(item);
        }
        Ok(Value::Array(all))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut kept = Map::new();
        while let Some(name) = map.next_key::<String>()? {
            match self.of(&name) {
                Some(fields) => {
                    let value = map.next_value_seed(fields)?;
                    kept.insert(name, value);
                }
                None => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(Value::Object(kept))
    }
}

/// A page of a list.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Page {
    /// Its objects. Objects of built-in kinds have neither `apiVersion` nor `kind`.
    pub(super) items: Vec<Value>,
    /// The list's `resourceVersion`, from which a watch continues.
    pub(super) version: String,
    /// Where the next page begins; `None` on the last page.
    pub(super) next: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ListMetadata {
    #[serde(rename = "resourceVersion")]
    version: Option<String>,
    #[serde(rename = "continue")]
    next: Option<String>,
}

/// Reads one page of a list, and keeps only `fields` of its objects.
pub(super) fn page(text: &[u8], fields: &Fields) -> Result<Page, serde_json::Error> {
    let mut from = serde_json::Deserializer::from_slice(text);
    let page = PageOf(fields).deserialize(&mut from)?;
    from.end()?;
    Ok(page)
}

struct PageOf<'a>(&'a Fields);

impl<'de> DeserializeSeed<'de> for PageOf<'_> {
    type Value = Page;

    fn deserialize<D: serde::Deserializer<'de>>(self, from: D) -> Result<Page, D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for PageOf<'_> {
    type Value = Page;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of objects")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Page, A::Error> {
        let mut page = Page::default();
        let mut has_items = false;
        while let Some(name) = map.next_key::<String>()? {
            match name.as_str() {
                "metadata" => {
                    let metadata: ListMetadata = map.next_value()?;
                    page.version = metadata.version.unwrap_or_default();
                    page.next = metadata.next.filter(|next| !next.is_empty());
                }
                "items" => {
                    has_items = true;
                    match map.next_value_seed(self.0)? {
                        Value::Array(items) => page.items = items,
                        // Go writes an empty list as null.
                        Value::Null => {}
                        _ => return Err(A::Error::custom("items is not a list")),
                    }
                }
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        match has_items {
            true => Ok(page),
            false => Err(A::Error::missing_field("items")),
        }
    }
}

/// A line of a watch.
#[derive(Debug, PartialEq)]
pub(super) enum Line {
    /// The object is there now, new or changed.
    Applied(Value),
    /// The object was deleted; this is its last state.
    Deleted(Value),
    /// The version that the watch has reached, without a change of an object.
    Bookmark(Value),
    /// The server ends the watch.
    Failed {
        /// Code as in HTTP; 410: the version is too old, and the list has to be read again.
        code: u16,
        message: String,
    },
}

/// Reads a line. `metadata.resourceVersion` of its object is the version to go on from.
pub(super) fn line(text: &[u8], fields: &Fields) -> Result<Line, serde_json::Error> {
    let (kind, object) =
        LineOf(fields).deserialize(&mut serde_json::Deserializer::from_slice(text))?;
    Ok(match kind.as_str() {
        "ADDED" | "MODIFIED" => Line::Applied(object),
        "DELETED" => Line::Deleted(object),
        "BOOKMARK" => Line::Bookmark(object),
        "ERROR" => {
            let code = object.get("code").and_then(Value::as_u64);
            let message = object.get("message").and_then(Value::as_str);
            Line::Failed {
                code: code.and_then(|code| code.try_into().ok()).unwrap_or(0),
                message: message.unwrap_or("without a message").to_owned(),
            }
        }
        other => {
            let reason = format!("unknown event `{other}` in a watch");
            return Err(serde_json::Error::custom(reason));
        }
    })
}

struct LineOf<'a>(&'a Fields);

impl<'de> DeserializeSeed<'de> for LineOf<'_> {
    type Value = (String, Value);

    fn deserialize<D: serde::Deserializer<'de>>(self, from: D) -> Result<Self::Value, D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for LineOf<'_> {
    type Value = (String, Value);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an event of a watch")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut kind, mut object) = (String::new(), Value::Null);
        while let Some(name) = map.next_key::<String>()? {
            match name.as_str() {
                "type" => kind = map.next_value()?,
                "object" => object = map.next_value_seed(self.0)?,
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok((kind, object))
    }
}

#[cfg(test)]
mod tests {
    use agent_core::policy::kinds;
    use serde_json::json;

    use super::*;

    const PATHS: &[&str] = &[
        "metadata.labels",
        "spec.nodeName",
        "spec.containers[].ports",
    ];

    #[test]
    fn a_page_holds_only_fields_that_mean_something() {
        let text = json!({
            "kind": "PodList",
            "metadata": {"resourceVersion": "7", "continue": "more", "remainingItemCount": 3},
            "items": [{
                "metadata": {"name": "a", "namespace": "b", "managedFields": [{"x": 1}],
                    "annotations": {"a": "b", "kubernetes.io/config.mirror": "c", "holdfast.io/made-by": "d"}},
                "spec": {"nodeName": "n", "volumes": [1], "containers": [{"image": "i", "ports": [{"containerPort": 1}]}]},
                "status": {"phase": "Running"},
            }],
        });
        let fields = Fields::of_object(PATHS);
        let page = page(text.to_string().as_bytes(), &fields).unwrap();
        assert_eq!(
            (page.version.as_str(), page.next.as_deref()),
            ("7", Some("more"))
        );
        let kept = json!({
            "metadata": {"name": "a", "namespace": "b",
                "annotations": {"kubernetes.io/config.mirror": "c", "holdfast.io/made-by": "d"}},
            "spec": {"nodeName": "n", "containers": [{"ports": [{"containerPort": 1}]}]},
        });
        assert_eq!(page.items, [kept]);
    }

    #[test]
    fn a_policy_keeps_every_field_but_most_of_its_status_and_its_history() {
        let text = json!({
            "metadata": {"resourceVersion": "7"},
            "items": [{
                "apiVersion": "cilium.io/v2",
                "kind": "CiliumNetworkPolicy",
                "metadata": {"name": "a", "managedFields": []},
                "spec": {"unknown": [null, 1, -1, 0.5, true, "x"]},
                "status": {"conditions": [{"type": "Valid"}], "nodes": {"n1": {}}},
            }],
        });
        let page = page(text.to_string().as_bytes(), &Fields::of_object(&[])).unwrap();
        let kept = json!({
            "apiVersion": "cilium.io/v2",
            "kind": "CiliumNetworkPolicy",
            "metadata": {"name": "a"},
            "spec": {"unknown": [null, 1, -1, 0.5, true, "x"]},
            "status": {"conditions": [{"type": "Valid"}]},
        });
        assert_eq!(page.items, [kept]);
    }

    #[test]
    fn a_node_keeps_the_annotations_that_agents_read() {
        let fields = Fields::of_object(kinds::kept_fields("CiliumNode"));
        let annotations = json!({HIGH_SCALE: "full", COPIED_LABELS: "region"});
        let mut written = annotations.clone();
        written["other"] = json!("dropped");
        let text = json!({"type": "ADDED", "object": {
            "apiVersion": "cilium.io/v2", "kind": "CiliumNode",
            "metadata": {"name": "a", "annotations": written}, "spec": {},
        }});
        let read = line(text.to_string().as_bytes(), &fields).unwrap();
        assert!(
            matches!(&read, Line::Applied(node) if node["metadata"]["annotations"] == annotations),
            "{read:?}"
        );
    }

    #[test]
    fn an_empty_list_may_be_null_and_anything_else_is_no_list() {
        let fields = Fields::of_object(&[]);
        let empty = page(
            br#"{"metadata":{"resourceVersion":"1"},"items":null}"#,
            &fields,
        );
        assert_eq!(empty.unwrap().items, Vec::<Value>::new());
        for bad in ["{}", "[]", r#"{"items":{}}"#, r#"{"items":[]"#, "<html>"] {
            assert!(page(bad.as_bytes(), &fields).is_err(), "{bad}");
        }
    }

    #[test]
    fn lines_of_a_watch_are_told_apart() {
        let fields = Fields::of_object(PATHS);
        let object = json!({"metadata": {"name": "a", "resourceVersion": "8"}});
        let of = |kind: &str, object: &Value| {
            let text = json!({"type": kind, "object": object});
            line(text.to_string().as_bytes(), &fields)
        };
        assert_eq!(of("ADDED", &object).unwrap(), Line::Applied(object.clone()));
        assert_eq!(
            of("MODIFIED", &object).unwrap(),
            Line::Applied(object.clone())
        );
        assert_eq!(
            of("DELETED", &object).unwrap(),
            Line::Deleted(object.clone())
        );
        assert_eq!(of("BOOKMARK", &object).unwrap(), Line::Bookmark(object));
        assert!(of("NEWS", &Value::Null).is_err());
        let text = br#"{"type":"ERROR","object":{"kind":"Status","code":410,"message":"too old resource version: 2 (346)"}}"#;
        let failed = Line::Failed {
            code: 410,
            message: "too old resource version: 2 (346)".to_owned(),
        };
        assert_eq!(line(text, &fields).unwrap(), failed);
    }
}
