//! The condition `Valid` in the status of a policy, as Cilium's operator writes it.
//!
//! A refused policy gets `False`, and an accepted one `True`. The reason shows whether an agent wrote the
//! condition. If another writer set the condition to `False`, the agents never set it to `True`.

use serde_json::{Value, json};

/// Type of the condition that the agents write.
const VALID: &str = "Valid";
/// Reason of a policy that is refused.
const REFUSED: &str = "Refused";
/// Reason and message of a policy that is accepted.
const ACCEPTED: (&str, &str) = ("Accepted", "Policy validation succeeded");

/// Whether the status has to be written if the policy is accepted. That is so if the status says that the agents
/// refused the policy, or has no condition `Valid`.
pub(crate) fn is_marked(status: Option<&Value>) -> bool {
    let conditions = status.and_then(|status| status.get("conditions"));
    let mut conditions = conditions.and_then(Value::as_array).into_iter().flatten();
    says_otherwise(conditions.find(|condition| condition["type"] == VALID))
}

/// Whether the condition `Valid` is missing, or is a refusal by an agent.
fn says_otherwise(valid: Option<&Value>) -> bool {
    valid.is_none_or(|valid| valid["status"] == "False" && valid["reason"] == REFUSED)
}

/// The patch of the status: `refusal` as its message; without a refusal, "accepted". `now` is the time
/// of the change. `None` if the status needs no change.
///
/// The patch names the version of the object, so that it fails if another writer was faster.
pub(super) fn patch(object: &Value, refusal: Option<&str>, now: &str) -> Option<Value> {
    let conditions = object["status"]["conditions"].as_array();
    let mut conditions = conditions.cloned().unwrap_or_default();
    let old = conditions.iter().position(|one| one["type"] == VALID);
    let old = old.map(|at| conditions.remove(at));
    if refusal.is_none() && !says_otherwise(old.as_ref()) {
        return None;
    }
    let (status, reason, message) = match refusal {
        Some(message) => ("False", REFUSED, message),
        None => ("True", ACCEPTED.0, ACCEPTED.1),
    };
    let since = match &old {
        Some(old) if old["status"] == status => {
            if old["reason"] == reason && old["message"] == message {
                return None;
            }
            old["lastTransitionTime"].as_str().unwrap_or(now)
        }
        _ => now,
    };
    conditions.push(json!({
        "type": VALID, "status": status, "reason": reason, "message": message,
        "lastTransitionTime": since,
    }));
    Some(json!({
        "metadata": {"resourceVersion": object["metadata"]["resourceVersion"]},
        "status": {"conditions": conditions},
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(conditions: &Value) -> Value {
        json!({"metadata": {"resourceVersion": "7"}, "status": {"conditions": conditions}})
    }

    fn refused(message: &str) -> Value {
        json!({
            "type": "Valid", "status": "False", "reason": "Refused", "message": message,
            "lastTransitionTime": "before",
        })
    }

    #[test]
    fn a_refused_policy_gets_a_condition_with_the_field_and_keeps_the_others() {
        let other = json!({"type": "Other", "status": "True"});
        let patch = patch(&object(&json!([other])), Some("spec.egress: bad"), "now").unwrap();
        assert_eq!(patch["metadata"], json!({"resourceVersion": "7"}));
        let mut ours = refused("spec.egress: bad");
        ours["lastTransitionTime"] = json!("now");
        assert_eq!(patch["status"]["conditions"], json!([other, ours]));
    }

    #[test]
    fn the_same_condition_is_not_written_twice_and_a_new_message_is_no_transition() {
        let object = object(&json!([refused("a")]));
        assert_eq!(patch(&object, Some("a"), "now"), None);
        let patch = patch(&object, Some("b"), "now").unwrap();
        let condition = &patch["status"]["conditions"][0];
        assert_eq!(condition["message"], "b");
        assert_eq!(condition["lastTransitionTime"], "before");
    }

    #[test]
    fn a_policy_that_another_writer_refuses_is_not_accepted() {
        for conditions in [json!([refused("a")]), json!([]), json!(null), json!("odd")] {
            let accepted = patch(&object(&conditions), None, "now").unwrap();
            let condition = &accepted["status"]["conditions"][0];
            assert_eq!(condition["status"], "True", "{conditions}");
            assert_eq!(condition["lastTransitionTime"], "now");
            assert!(is_marked(Some(&json!({"conditions": conditions}))));
            assert!(!is_marked(Some(&accepted["status"])), "{conditions}");
            assert_eq!(patch(&accepted, None, "later"), None);
        }
        let of_cilium = json!({"type": "Valid", "status": "False", "message": "x"});
        let conditions = json!([of_cilium]);
        assert_eq!(patch(&object(&conditions), None, "now"), None);
        assert!(!is_marked(Some(&json!({"conditions": conditions}))));
        assert!(is_marked(None));
    }
}
