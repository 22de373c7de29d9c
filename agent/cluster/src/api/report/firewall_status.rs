//! The status of an EgressFirewall, in the shape of OVN-Kubernetes: a message of each program that
//! reports, and one sentence about all of them.
//!
//! All agents together have one message, and one of them writes it. With a message of each node there would be
//! nodes × objects writes, and the object would grow with the cluster. The message shows whether the agents accept the
//! rules. `holdfast-agent status` of a node shows whether that node enforces them.

use serde_json::{Value, json};

use super::event::shortened;

/// Prefix of the one message that all agents share in `status.messages`.
const OURS: &str = "holdfast: ";
/// The two texts of OVN-Kubernetes for `status.status`. Its cluster manager computes that field from
/// `status.messages`.
const APPLIED: &str = "EgressFirewall Rules applied";
const REFUSED: &str = "EgressFirewall Rules not correctly applied";
/// Maximum bytes of a reason in the message; a longer reason is cut.
const REASON_MAX: usize = 1024;

/// Whether the status has to be written if the rules are accepted.
pub(super) fn is_marked(status: Option<&Value>) -> bool {
    let messages = messages(status);
    match ours(&messages) {
        Some(message) => message != format!("{OURS}{APPLIED}"),
        // If there are messages of OVN-Kubernetes, the status belongs to OVN-Kubernetes.
        None => messages.is_empty() && sentence(status).is_empty(),
    }
}

/// The patch of the status: `refusal` as its message; without one, "accepted". `None` if the status needs no change.
///
/// The patch names the version of the object, so that it fails if another writer was faster.
pub(super) fn patch(object: &Value, refusal: Option<&str>) -> Option<Value> {
    let status = object.get("status");
    if refusal.is_none() && !is_marked(status) {
        return None;
    }
    let message = match refusal {
        Some(reason) => format!("{OURS}{REFUSED}: {}", shortened(reason, REASON_MAX)),
        None => format!("{OURS}{APPLIED}"),
    };
    let known = messages(status);
    let others = known.iter().filter(|one| !one.starts_with(OURS));
    let mut written: Vec<&str> = others.copied().collect();
    written.push(&message);
    let is_refused = written.iter().any(|one| one.contains(REFUSED));
    let sentence_of_all = if is_refused { REFUSED } else { APPLIED };
    if ours(&known) == Some(&message) && sentence(status) == sentence_of_all {
        return None;
    }
    Some(json!({
        "metadata": {"resourceVersion": object["metadata"]["resourceVersion"]},
        "status": {"status": sentence_of_all, "messages": written},
    }))
}

fn messages(status: Option<&Value>) -> Vec<&str> {
    let messages = status.and_then(|status| status.get("messages"));
    let messages = messages.and_then(Value::as_array).into_iter().flatten();
    messages.filter_map(Value::as_str).collect()
}

fn ours<'a>(messages: &[&'a str]) -> Option<&'a str> {
    let mut messages = messages.iter().copied();
    messages.find(|message| message.starts_with(OURS))
}

fn sentence(status: Option<&Value>) -> &str {
    let sentence = status.and_then(|status| status.get("status"));
    sentence.and_then(Value::as_str).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(status: &Value) -> Value {
        json!({"metadata": {"resourceVersion": "7"}, "status": status})
    }

    /// The status after a patch.
    fn after(status: &Value, refusal: Option<&str>) -> Option<Value> {
        let mut patch = patch(&object(status), refusal)?;
        assert_eq!(patch["metadata"], json!({"resourceVersion": "7"}));
        Some(patch["status"].take())
    }

    #[test]
    fn a_refused_firewall_says_so_beside_the_messages_of_others_until_it_is_accepted() {
        let of_ovn = "zone-1: EgressFirewall Rules applied";
        let before = json!({"status": "EgressFirewall Rules applied", "messages": [of_ovn]});
        let refused = after(&before, Some("spec.egress[0]: bad")).unwrap();
        let message = "holdfast: EgressFirewall Rules not correctly applied: spec.egress[0]: bad";
        assert_eq!(
            refused,
            json!({"status": REFUSED, "messages": [of_ovn, message]})
        );
        assert_eq!(after(&refused, Some("spec.egress[0]: bad")), None);
        assert!(is_marked(Some(&refused)));
        let accepted = after(&refused, None).unwrap();
        assert_eq!(accepted["status"], APPLIED);
        assert_eq!(accepted["messages"][0], of_ovn);
        assert!(!is_marked(Some(&accepted)));
        assert_eq!(after(&accepted, None), None);
    }

    #[test]
    fn an_accepted_firewall_gets_one_status_and_that_of_ovn_kubernetes_is_left_alone() {
        for empty in [
            json!(null),
            json!({}),
            json!({"status": ""}),
            json!({"messages": 7}),
        ] {
            assert!(is_marked(Some(&empty)), "{empty}");
            let accepted = after(&empty, None).unwrap();
            assert_eq!(accepted["status"], "EgressFirewall Rules applied");
            assert!(!is_marked(Some(&accepted)));
        }
        assert!(is_marked(None));
        for others in [
            json!({"status": "EgressFirewall Rules applied"}),
            json!({"messages": ["zone-1: EgressFirewall Rules applied"]}),
        ] {
            assert!(!is_marked(Some(&others)), "{others}");
            assert_eq!(after(&others, None), None);
        }
    }

    #[test]
    fn a_fault_that_another_program_reports_stays_in_the_sentence_about_all() {
        let of_ovn = "zone-1: EgressFirewall Rules not correctly applied: no ACL";
        let ours = "holdfast: EgressFirewall Rules not correctly applied: spec: bad";
        let before = json!({"status": REFUSED, "messages": [of_ovn, ours]});
        let accepted = after(&before, None).unwrap();
        assert_eq!(accepted["status"], REFUSED);
    }
}
