//! Why a node deliberately has no agent.

use super::objects::{DaemonSet, Node, Placement, Taint, Toleration};

/// Taints that every DaemonSet pod in the node's own network tolerates.
const TOLERATED: [&str; 7] = [
    "node.kubernetes.io/not-ready",
    "node.kubernetes.io/unreachable",
    "node.kubernetes.io/disk-pressure",
    "node.kubernetes.io/memory-pressure",
    "node.kubernetes.io/pid-pressure",
    "node.kubernetes.io/unschedulable",
    "node.kubernetes.io/network-unavailable",
];

/// What keeps the pods of all DaemonSets off the node; `None` if nothing does, or if there is no DaemonSet.
pub(super) fn excluded(node: &Node, sets: &[DaemonSet]) -> Option<String> {
    let mut reason = None;
    for set in sets {
        let of_set = of_set(node, &set.spec.template.spec)?;
        reason.get_or_insert(of_set);
    }
    reason
}

fn of_set(node: &Node, placement: &Placement) -> Option<String> {
    let mut wanted = placement.node_selector.iter();
    let labels = &node.metadata.labels;
    if let Some((key, value)) = wanted.find(|(key, value)| labels.get(*key) != Some(*value)) {
        return Some(format!("nodeSelector of the DaemonSet: {key}={value}"));
    }
    let tolerations = &placement.tolerations;
    let mut taints = node.spec.taints.iter();
    let taint = taints.find(|taint| keeps_off(taint, tolerations))?;
    let Taint { key, effect, .. } = taint;
    Some(format!(
        "the DaemonSet does not tolerate the taint {key}:{effect}"
    ))
}

fn keeps_off(taint: &Taint, tolerations: &[Toleration]) -> bool {
    taint.effect != "PreferNoSchedule"
        && !TOLERATED.contains(&taint.key.as_str())
        && !tolerations.iter().any(|one| one.tolerates(taint))
}

impl Toleration {
    fn tolerates(&self, taint: &Taint) -> bool {
        let exists = self.operator == "Exists";
        (self.effect.is_empty() || self.effect == taint.effect)
            && (self.key == taint.key || (self.key.is_empty() && exists))
            && (exists || self.value == taint.value)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn why(labels: &Value, taints: &Value, placement: &Value) -> Option<String> {
        let node =
            json!({"metadata": {"name": "n1", "labels": labels}, "spec": {"taints": taints}});
        let set = json!({"spec": {"template": {"spec": placement}}});
        let sets = [serde_json::from_value(set).unwrap()];
        excluded(&serde_json::from_value(node).unwrap(), &sets)
    }

    #[test]
    fn a_selector_excludes_nodes_without_the_label() {
        let placement = json!({"nodeSelector": {"kubernetes.io/arch": "amd64"}});
        let arm = json!({"kubernetes.io/arch": "arm64"});
        let reason = why(&arm, &json!([]), &placement).unwrap();
        assert!(reason.ends_with("kubernetes.io/arch=amd64"), "{reason}");
        let amd = json!({"kubernetes.io/arch": "amd64"});
        assert_eq!(why(&amd, &json!([]), &placement), None);
    }

    #[test]
    fn a_taint_excludes_unless_it_is_tolerated() {
        let taints = json!([{"key": "team", "value": "a", "effect": "NoSchedule"}]);
        for (tolerations, excludes) in [
            (json!([]), true),
            (json!([{"operator": "Exists"}]), false),
            (json!([{"key": "team", "operator": "Exists"}]), false),
            (json!([{"key": "team", "value": "a"}]), false),
            (json!([{"key": "team", "value": "b"}]), true),
            (json!([{"operator": "Exists", "effect": "NoExecute"}]), true),
        ] {
            let placement = json!({"tolerations": tolerations});
            let reason = why(&json!({}), &taints, &placement);
            assert_eq!(reason.is_some(), excludes, "{tolerations}: {reason:?}");
        }
    }

    #[test]
    fn the_first_daemonset_that_leaves_a_node_out_is_named() {
        let set = |key: &str| {
            let placement = json!({"nodeSelector": {key: "x"}});
            serde_json::from_value(json!({"spec": {"template": {"spec": placement}}})).unwrap()
        };
        let reason = excluded(&Node::default(), &[set("arch"), set("enforcement")]);
        assert!(reason.unwrap().ends_with("arch=x"));
    }

    #[test]
    fn a_node_that_is_only_cordoned_or_not_ready_should_have_an_agent() {
        let taints = json!([
            {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"},
            {"key": "team", "effect": "PreferNoSchedule"},
        ]);
        assert_eq!(why(&json!({}), &taints, &json!({})), None);
        assert_eq!(excluded(&Node::default(), &[]), None);
    }
}
