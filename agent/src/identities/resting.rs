//! *Resting* numbers: the agent that leads deleted their objects within the last hour, and until the hour is over no
//! agent gives the numbers to other labels. They are in an annotation of the leader's Lease: an agent that did not run
//! when an object was deleted reads them before it makes objects. No input or output.

use std::{collections::BTreeMap, time::Instant};

use agent_core::identity::cluster::REST;
use serde_json::Value;
use shared_maps::IdentityId;

/// Key of the annotation: numbers with commas between them.
pub(super) const RESTING: &str = "holdfast.io/resting-identities";
/// Maximum numbers at one time. An object has at most 256 KiB of annotations; these take 48 KiB.
const MOST: usize = 8192;

/// The numbers, and until when each of them rests.
#[derive(Debug, Default)]
pub(super) struct Resting(BTreeMap<IdentityId, Instant>);

impl Resting {
    /// Takes the numbers in the Lease. They have no times: the clocks of two nodes are never compared, so each number
    /// rests for an hour from now on.
    pub(super) fn take(&mut self, lease: Option<&Value>, now: Instant) {
        for id in numbers(lease) {
            self.0.insert(id, now + REST);
        }
    }

    /// How many more numbers may rest.
    pub(super) fn room(&mut self, now: Instant) -> usize {
        self.0.retain(|_, until| *until > now);
        MOST.saturating_sub(self.0.len())
    }

    pub(super) fn add(&mut self, id: IdentityId, now: Instant) {
        self.0.insert(id, now + REST);
    }

    /// The value of the Lease's annotation: the numbers, separated by commas.
    pub(super) fn text(&self) -> String {
        let all: Vec<String> = self.0.keys().map(|id| id.0.to_string()).collect();
        all.join(",")
    }
}

/// Numbers in the annotation of the Lease. Words that are no number of a pod, and numbers beyond the maximum, are left
/// out.
pub(super) fn numbers(lease: Option<&Value>) -> Vec<IdentityId> {
    let text = lease.and_then(|lease| lease["metadata"]["annotations"][RESTING].as_str());
    let words = text.unwrap_or_default().split(',');
    let ids = words.filter_map(|word| word.parse().ok().map(IdentityId));
    ids.filter(|id| id.is_endpoint()).take(MOST).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;

    fn lease(text: &str) -> Value {
        json!({"metadata": {"annotations": {RESTING: text}}})
    }

    #[test]
    fn numbers_rest_for_an_hour_and_once_more_under_another_leader() {
        let start = Instant::now();
        let mut resting = Resting::default();
        resting.add(IdentityId(300), start);
        resting.add(IdentityId(61_439), start + REST / 2);
        assert_eq!(resting.text(), "300,61439");
        let text = lease(&resting.text());
        assert_eq!(resting.room(start + REST), MOST - 1);
        assert_eq!(resting.text(), "61439");
        // The next leader cannot know since when numbers rest.
        let mut next = Resting::default();
        next.take(Some(&text), start + REST);
        assert_eq!(next.room(start + REST), MOST - 2);
        assert_eq!(
            next.room(start + REST * 2 - Duration::from_secs(1)),
            MOST - 2
        );
        assert_eq!(next.room(start + REST * 2), MOST);
    }

    #[test]
    fn what_is_no_number_of_a_pod_is_left_out() {
        let found = numbers(Some(&lease("300,,x,-1,1,255,16777217, 301,302")));
        assert_eq!(found, [IdentityId(300), IdentityId(302)]);
        assert_eq!(numbers(Some(&json!({}))), []);
        assert_eq!(
            numbers(Some(&json!({"metadata": {"annotations": {RESTING: 3}}}))),
            []
        );
        assert_eq!(numbers(None), []);
        let many: Vec<String> = (256..60_000).map(|number| number.to_string()).collect();
        assert_eq!(numbers(Some(&lease(&many.join(",")))).len(), MOST);
    }
}
