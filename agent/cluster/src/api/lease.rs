//! A Lease that makes one agent of the cluster the writer of something. No input or output.
//!
//! A Lease is free if it has no holder, or if it did not change for its duration: the clocks of two
//! nodes are never compared.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Longest duration that is accepted from the Lease of another holder.
const LONGEST: Duration = Duration::from_mins(10);

/// Which Lease, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    pub name: &'static str,
    /// How long a holder that does not renew stays the holder.
    pub duration: Duration,
}

/// What to do with the Lease.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    /// Create the Lease, which does not exist.
    Create(Value),
    /// Replace the Lease by this one: it is ours, or free.
    Update(Value),
    /// Another agent holds the Lease, and its time has not expired.
    Wait,
}

/// The Lease as it was seen last, if another agent has it.
#[derive(Debug, Default)]
pub struct Sight(Option<Seen>);

#[derive(Debug)]
struct Seen {
    version: String,
    since: Instant,
    duration: Duration,
}

impl Sight {
    /// When the Lease is free, if it does not change until then.
    pub fn free_at(&self) -> Option<Instant> {
        let seen = self.0.as_ref()?;
        Some(seen.since + seen.duration)
    }

    /// Decides on the Lease as it is now. `stamp` is the time for the object.
    pub(super) fn step(
        &mut self,
        terms: &Terms,
        lease: Option<&Value>,
        node: &str,
        now: Instant,
        stamp: &str,
    ) -> Step {
        let Some(lease) = lease else {
            return Step::Create(json!({
                "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                "metadata": {"name": terms.name},
                "spec": {
                    "holderIdentity": node, "leaseDurationSeconds": seconds(terms),
                    "acquireTime": stamp, "renewTime": stamp, "leaseTransitions": 0,
                },
            }));
        };
        let holder = lease["spec"]["holderIdentity"].as_str().unwrap_or_default();
        if holder == node {
            return Step::Update(renewed(terms, lease, node, stamp));
        }
        let version = lease["metadata"]["resourceVersion"].as_str();
        let version = version.unwrap_or_default();
        let since = match &self.0 {
            Some(seen) if seen.version == version => seen.since,
            _ => now,
        };
        // The holder's setting may differ from ours: the longer duration counts.
        let declared = lease["spec"]["leaseDurationSeconds"].as_u64().unwrap_or(0);
        let duration = Duration::from_secs(declared).min(LONGEST);
        let duration = duration.max(terms.duration);
        self.0 = Some(Seen {
            version: version.to_owned(),
            since,
            duration,
        });
        if !holder.is_empty() && now.saturating_duration_since(since) < duration {
            return Step::Wait;
        }
        let mut taken = renewed(terms, lease, node, stamp);
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

fn renewed(terms: &Terms, lease: &Value, node: &str, stamp: &str) -> Value {
    let mut lease = lease.clone();
    if !lease["spec"].is_object() {
        lease["spec"] = json!({});
    }
    lease["spec"]["holderIdentity"] = json!(node);
    lease["spec"]["leaseDurationSeconds"] = json!(seconds(terms));
    lease["spec"]["renewTime"] = json!(stamp);
    lease
}

/// The duration in whole seconds, rounded up, because the object has no fractions.
fn seconds(terms: &Terms) -> u64 {
    let up = u64::from(terms.duration.subsec_nanos() > 0);
    terms.duration.as_secs().saturating_add(up).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERMS: Terms = Terms {
        name: "test",
        duration: Duration::from_secs(120),
    };

    fn lease(holder: &str, version: &str) -> Value {
        json!({
            "metadata": {"name": TERMS.name, "resourceVersion": version},
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
        let late = start + TERMS.duration;
        let mut step =
            |lease: &Value, now: Instant| sight.step(&TERMS, Some(lease), "n1", now, "now");
        assert_eq!(step(&lease("n2", "1"), start), Step::Wait);
        // It was renewed meanwhile.
        assert_eq!(step(&lease("n2", "2"), late), Step::Wait);
        let step = step(&lease("n2", "2"), late + TERMS.duration);
        assert_eq!(holder(&step), Some("n1"));
        let Step::Update(taken) = step else {
            panic!("{step:?}");
        };
        assert_eq!(taken["spec"]["leaseTransitions"], 4);
        assert_eq!(taken["metadata"]["resourceVersion"], "2");
    }

    #[test]
    fn a_holder_with_a_longer_duration_keeps_the_lease_for_as_long_as_it_says() {
        let mut sight = Sight::default();
        let start = Instant::now();
        let mut long = lease("n2", "1");
        long["spec"]["leaseDurationSeconds"] = json!(300);
        let mut at = |now: Instant| sight.step(&TERMS, Some(&long), "n1", now, "now");
        assert_eq!(at(start), Step::Wait);
        assert_eq!(at(start + TERMS.duration * 2), Step::Wait);
        let step = at(start + Duration::from_secs(300));
        assert_eq!(holder(&step), Some("n1"));
        assert_eq!(sight.free_at(), Some(start + Duration::from_secs(300)));
    }

    #[test]
    fn a_free_lease_and_our_own_are_taken_at_once() {
        let now = Instant::now();
        let step = |lease: Option<&Value>| Sight::default().step(&TERMS, lease, "n1", now, "now");
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
