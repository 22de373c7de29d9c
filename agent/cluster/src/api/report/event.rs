//! Events for refused objects. The same refusal of the same object is one Event, with a count.

use serde_json::{Value, json};

/// Maximum bytes of a note that the API server accepts.
pub(super) const NOTE_MAX: usize = 1024;
/// Value of `reportingController` in every Event.
const CONTROLLER: &str = "holdfast-agent";
/// Maximum bytes of a node's name in an Event.
const INSTANCE_MAX: usize = 128;
/// Maximum bytes of the object's name in the name of its Event.
const NAME_MAX: usize = 200;
/// The namespace of Events about objects without a namespace.
const DEFAULT_NAMESPACE: &str = "default";

/// The namespace of an object's Events.
pub(super) fn namespace(object: &Value) -> &str {
    let namespace = object["metadata"]["namespace"].as_str();
    namespace.unwrap_or(DEFAULT_NAMESPACE)
}

/// Name of the Event: always the same for a refusal, so that all agents that report it raise one count.
pub(super) fn name(object: &Value, note: &str) -> String {
    let uid = object["metadata"]["uid"].as_str().unwrap_or_default();
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    let name = shortened(name, NAME_MAX).trim_end_matches(['.', '-']);
    format!("{name}.{:016x}", fnv1a(&[uid, note]))
}

/// A new `events.k8s.io/v1` Event of type `Warning`. `now` becomes its `eventTime`.
pub(super) fn event(object: &Value, note: &str, node: &str, now: &str) -> Value {
    let metadata = &object["metadata"];
    json!({
        "apiVersion": "events.k8s.io/v1", "kind": "Event",
        "metadata": {"name": name(object, note), "namespace": namespace(object)},
        "eventTime": now,
        "type": "Warning", "reason": "Refused", "action": "Validate",
        "reportingController": CONTROLLER,
        "reportingInstance": shortened(node, INSTANCE_MAX),
        "regarding": {
            "apiVersion": object["apiVersion"], "kind": object["kind"],
            "namespace": metadata["namespace"].as_str().unwrap_or_default(),
            "name": metadata["name"], "uid": metadata["uid"],
        },
        "note": note,
    })
}

/// The patch of an Event that exists.
pub(super) fn series(count: u32, now: &str) -> Value {
    json!({"series": {"count": count, "lastObservedTime": now}})
}

/// At most `limit` bytes of a text.
pub(super) fn shortened(text: &str, limit: usize) -> &str {
    text.get(..text.floor_char_boundary(limit)).unwrap_or(text)
}

/// FNV-1a of texts: the same in every version of the agent.
fn fnv1a(texts: &[&str]) -> u64 {
    let bytes = texts.iter().flat_map(|text| text.bytes().chain([0]));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_has_one_name_and_an_object_without_namespace_has_its_events_in_default() {
        let object = json!({
            "apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy",
            "metadata": {"name": "web", "namespace": "shop", "uid": "1"},
        });
        let event_of = event(&object, "spec: bad", "n1", "now");
        assert_eq!(event_of["metadata"]["namespace"], "shop");
        assert_eq!(event_of["regarding"]["uid"], "1");
        assert_eq!(name(&object, "spec: bad"), "web.c4d23592f30b3428");
        assert_ne!(name(&object, "spec: worse"), name(&object, "spec: bad"));
        let mut cluster = object.clone();
        cluster["metadata"] = json!({"name": "a".repeat(253), "uid": "1"});
        let event_of = event(&cluster, "x", &"n".repeat(253), "now");
        assert_eq!(event_of["metadata"]["namespace"], "default");
        assert_eq!(event_of["regarding"]["namespace"], "");
        assert!(name(&cluster, "x").len() <= 253);
        assert_eq!(event_of["reportingInstance"].as_str().unwrap().len(), 128);
    }

    #[test]
    fn a_text_is_cut_between_letters() {
        assert_eq!(shortened("aä", 2), "a");
        assert_eq!(shortened("aä", 3), "aä");
    }
}
