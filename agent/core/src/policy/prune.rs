//! What is kept of an object: the fields that its reader reads.
//!
//! A pod comes out of kubectl with ten kilobytes, of which a few hundred bytes mean something here.

use serde_json::{Map, Value};

/// The fields of `value` at these paths, such as `spec.containers[].ports`: `[]` stands for each
/// element of a list. A path to a mapping or list keeps all of it.
pub(super) fn prune(value: &Value, paths: &[&str]) -> Value {
    let mut kept = Value::Null;
    for path in paths {
        let steps: Vec<&str> = path.split('.').collect();
        copy(value, &steps, &mut kept);
    }
    kept
}

fn copy(from: &Value, steps: &[&str], to: &mut Value) {
    let Some((step, rest)) = steps.split_first() else {
        to.clone_from(from);
        return;
    };
    let (name, each) = match step.strip_suffix("[]") {
        Some(name) => (name, true),
        None => (*step, false),
    };
    let Some(from) = from.get(name) else {
        return;
    };
    if to.is_null() {
        *to = Value::Object(Map::new());
    }
    let Some(to) = to.as_object_mut() else {
        return;
    };
    let to = to.entry(name).or_insert(Value::Null);
    match (each, from) {
        (true, Value::Array(items)) => {
            if to.is_null() {
                *to = Value::Array(vec![Value::Object(Map::new()); items.len()]);
            }
            for (to, from) in to.as_array_mut().into_iter().flatten().zip(items) {
                copy(from, rest, to);
            }
        }
        // The value does not have the shape that the reader accepts: the reader has to see that.
        (_, from) if !from.is_object() => to.clone_from(from),
        (_, from) => copy(from, rest, to),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_fields_at_the_paths_are_kept_in_their_places() {
        let value = json!({
            "kind": "Pod",
            "metadata": {"name": "a", "labels": {"x": "y"}, "managedFields": [1, 2, 3]},
            "spec": {"containers": [{"name": "c", "ports": [{"port": 1}]}, {"name": "d"}]},
            "status": null,
        });
        let paths = [
            "kind",
            "metadata.name",
            "metadata.labels",
            "spec.containers[].ports",
            "status.podIP",
            "gone.x",
        ];
        assert_eq!(
            prune(&value, &paths),
            json!({
                "kind": "Pod",
                "metadata": {"name": "a", "labels": {"x": "y"}},
                "spec": {"containers": [{"ports": [{"port": 1}]}, {}]},
                "status": null,
            })
        );
    }
}
