//! The Lease that makes one agent of the cluster the writer of conditions and Events.
//!
//! An agent takes the Lease only while it has something to report. A Lease is free if it has no
//! holder, or if it did not change for its duration: the clocks of two nodes are never compared.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Name of the Lease, in the agents' namespace.
pub(super) const NAME: &str = "holdfast-refusals";
/// How long a holder that does not renew stays the holder.
pub(super) const DURATION: Duration = Duration::from_secs(120);
/// How often the holder renews.
pub(super) const RENEW: Duration = Duration::from_secs(40);

/// What to do with the Lease.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    /// Write this new Lease.
    Create(Value),
    /// Write this in the place of the Lease: it is ours, or free.
    Update(Value),
    /// Another agent has it.
    Wait,
}

/// The Lease as it was seen last, if another agent has it.
#[derive(Debug, Default)]
pub(super) struct Sight(Option<(String, Instant)>);

impl Sight {
    /// Decides on the Lease as it is now. `stamp` is the time for the object.
    pub(super) fn step(
        &mut self,
        lease: Option<&Value>,
        node: &str,
        now: Instant,
        stamp: &str,
    ) -> Step {
        let Some(lease) = lease else {
            return Step::Create(json!({
                "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                "metadata": {"name": NAME},
                "spec": {
                    "holderIdentity": node, "leaseDurationSeconds": DURATION.as_secs(),
                    "acquireTime": stamp, "renewTime": stamp, "leaseTransitions": 0,
                },
            }));
        };
        let holder = lease["spec"]["holderIdentity"].as_str().unwrap_or_default();
        if holder == node {
            return Step::Update(renewed(lease, node, stamp));
        }
        let version = lease["metadata"]["resourceVersion"].as_str();
        let version = version.unwrap_or_default();
        let since = match &self.0 {
            Some((seen, since)) if seen == version => *since,
            _ => {
                self.0 = Some((version.to_owned(), now));
                now
            }
        };
        if !holder.is_empty() && now.saturating_duration_since(since) < DURATION {
            return Step::Wait;
        }
        let mut taken = renewed(lease, node, stamp);
        let transitions = lease["spec"]["leaseTransitions"].as_u64().unwrap_or(0);
        taken["spec"]["acquireTime"] = json!(stamp);
        taken["spec"]["leaseTransitions"] = json!(transitions.saturating_add(1));
        Step::Update(taken)
    }
}

/// The Lease without a holder, if it is ours.
pub(super) fn released(lease: &Value, node: &str) -> Option<Value> {
    (lease["spec"]["holderIdentity"] == node).then(|| {
        let mut lease = lease.clone();
        lease["spec"]["holderIdentity"] = json!("");
        lease
    })
}

fn renewed(lease: &Value, node: &str, stamp: &str) -> Value {
    let mut lease = lease.clone();
    if !lease["spec"].is_object() {
        lease["spec"] = json!({});
    }
    lease["spec"]["holderIdentity"] = json!(node);
    lease["spec"]["leaseDurationSeconds"] = json!(DURATION.as_secs());
    lease["spec"]["renewTime"] = json!(stamp);
    lease
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(holder: &str, version: &str) -> Value {
        json!({
            "metadata": {"name": NAME, "resourceVersion": version},
            "spec": {"holderIdentity": holder, "renewTime": "before", "leaseTransitions": 3},
        })
    }

    fn holder(step: &Step) -> Option<&str> {
        match step {
            Step::Create(lease) | Step::Update(lease) => lease["spec"]["holderIdentity"].as_str(),
            Step::Wait => None,
        }
    }

    #[test]
    fn a_lease_of_another_agent_is_taken_only_after_it_has_not_changed_for_its_duration() {
        let mut sight = Sight::default();
        let start = Instant::now();
        let late = start + DURATION;
        assert_eq!(
            sight.step(Some(&lease("n2", "1")), "n1", start, "now"),
            Step::Wait
        );
        // It was renewed meanwhile.
        assert_eq!(
            sight.step(Some(&lease("n2", "2")), "n1", late, "now"),
            Step::Wait
        );
        let step = sight.step(Some(&lease("n2", "2")), "n1", late + DURATION, "now");
        assert_eq!(holder(&step), Some("n1"));
        let Step::Update(taken) = step else {
            panic!("{step:?}");
        };
        assert_eq!(taken["spec"]["leaseTransitions"], 4);
        assert_eq!(taken["metadata"]["resourceVersion"], "2");
    }

    #[test]
    fn a_free_lease_and_our_own_are_taken_at_once() {
        let now = Instant::now();
        let step = |lease: Option<&Value>| Sight::default().step(lease, "n1", now, "now");
        for free in [
            None,
            Some(lease("", "1")),
            Some(lease("n1", "1")),
            Some(json!({})),
        ] {
            assert_eq!(holder(&step(free.as_ref())), Some("n1"), "{free:?}");
        }
        let released = released(&lease("n1", "1"), "n1").unwrap();
        assert_eq!(released["spec"]["holderIdentity"], "");
        assert_eq!(super::released(&lease("n2", "1"), "n1"), None);
    }
}
