//! Labels of the Node that its CiliumNode has a copy of: EgressFirewalls select nodes by them, and
//! agents do not read the Nodes of the cluster.
//!
//! An annotation of the CiliumNode lists the keys that were copied. So a label that vanished from the
//! Node is removed, and a label that another program gave the CiliumNode stays. The annotation is
//! there as soon as an agent has copied labels, even if the Node has none.

use std::collections::{BTreeMap, BTreeSet};

use agent_core::{
    kubernetes::unattended::{LEFT, MANAGED_BY},
    policy::cluster::node::COPIED_LABELS,
};
use serde_json::{Map, Value};

/// Maximum size of the keys of copied labels together, in bytes. All annotations of an object may have
/// 256 KiB (`TotalAnnotationSizeLimitB` of Kubernetes), and other programs add theirs.
const KEYS_MAX: usize = 128 << 10;

/// Labels of a Node.
pub(super) type Labels = BTreeMap<String, String>;

/// The labels of `node` to copy. Two keys say who writes the CiliumNode, and are never copied.
pub(super) fn of_node(node: &Value) -> Labels {
    let labels = node["metadata"]["labels"].as_object().into_iter().flatten();
    let labels = labels.filter(|(key, _)| is_copied(key));
    labels
        .filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())))
        .collect()
}

fn is_copied(key: &str) -> bool {
    ![MANAGED_BY, LEFT].contains(&key)
}

/// Why the labels of a Node cannot be copied.
pub(super) fn excess(labels: &Labels) -> Option<String> {
    let bytes: usize = labels.keys().map(|key| key.len() + 1).sum();
    (bytes > KEYS_MAX).then(|| {
        format!(
            "the keys of its {} labels have {bytes} bytes, and at most {KEYS_MAX} bytes can be copied: \
             remove labels of the Node",
            labels.len()
        )
    })
}

/// The annotation that lists the keys of `labels`.
pub(super) fn annotation(labels: &Labels) -> String {
    let keys: Vec<&str> = labels.keys().map(String::as_str).collect();
    keys.join(",")
}

/// Replaces the labels that were copied to the CiliumNode `object` before by the present labels of
/// its Node.
pub(super) fn copy(object: &mut Value, labels: &Labels) {
    let before = object["metadata"]["annotations"][COPIED_LABELS].as_str();
    let before: BTreeSet<String> = before
        .into_iter()
        .flat_map(|keys| keys.split(','))
        .filter(|key| is_copied(key) && !labels.contains_key(*key))
        .map(str::to_owned)
        .collect();
    let copies = labels
        .iter()
        .map(|(key, value)| (key.clone(), value.as_str().into()));
    let all = field(&mut object["metadata"]["labels"]);
    all.retain(|key, _| !before.contains(key));
    all.extend(copies);
    let annotations = field(&mut object["metadata"]["annotations"]);
    annotations.insert(COPIED_LABELS.to_owned(), annotation(labels).into());
}

/// The fields of an object, which is made if it is absent.
fn field(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    match value {
        Value::Object(fields) => fields,
        _ => unreachable!("it was made an object"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn node(labels: &Value) -> Labels {
        of_node(&json!({"metadata": {"name": "n1", "labels": labels}}))
    }

    #[test]
    fn copies_follow_the_node_and_labels_of_others_stay() {
        let mut object = json!({"metadata": {
            "labels": {MANAGED_BY: "holdfast-agent", "theirs": "a", "region": "north"},
            "annotations": {"other": "stays"},
        }});
        copy(&mut object, &node(&json!({"region": "east", "rack": "1"})));
        let labels =
            json!({MANAGED_BY: "holdfast-agent", "theirs": "a", "region": "east", "rack": "1"});
        let annotations = json!({"other": "stays", COPIED_LABELS: "rack,region"});
        assert_eq!(object["metadata"]["labels"], labels);
        assert_eq!(object["metadata"]["annotations"], annotations);
        copy(&mut object, &node(&json!({"rack": "2"})));
        let labels = json!({MANAGED_BY: "holdfast-agent", "theirs": "a", "rack": "2"});
        assert_eq!(object["metadata"]["labels"], labels);
        copy(&mut object, &node(&Value::Null));
        let labels = json!({MANAGED_BY: "holdfast-agent", "theirs": "a"});
        assert_eq!(object["metadata"]["labels"], labels);
        assert_eq!(object["metadata"]["annotations"][COPIED_LABELS], "");
    }

    #[test]
    fn neither_a_node_nor_the_annotation_changes_who_writes_the_object() {
        let taken = json!({MANAGED_BY: "eksctl", LEFT: "true", "region": "east"});
        assert_eq!(annotation(&node(&taken)), "region");
        let mut object = json!({"metadata": {
            "labels": {MANAGED_BY: "holdfast-agent"},
            "annotations": {COPIED_LABELS: format!("{MANAGED_BY},x")},
        }});
        copy(&mut object, &node(&Value::Null));
        assert_eq!(
            object["metadata"]["labels"],
            json!({MANAGED_BY: "holdfast-agent"})
        );
    }

    #[test]
    fn the_list_of_keys_has_a_bound() {
        let labels = |count: usize| -> Labels {
            let keys = (0..count).map(|at| format!("{at:0>300}"));
            keys.map(|key| (key, String::new())).collect()
        };
        assert_eq!(excess(&labels(400)), None);
        let refused = excess(&labels(500)).unwrap();
        assert!(refused.contains("remove labels of the Node"), "{refused}");
    }
}
