//! How long each object has had no pod, by the clock of the agent that leads. No input or output.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use agent_core::{
    core::identities_in_use::UnusedIdentity, identity::cluster::WantedIdentities, labels::LabelSet,
};
use shared_maps::IdentityId;

/// Time that the agent of a pod's node has to make the object. After that the leader makes it.
const OWN_AGENT: Duration = Duration::from_secs(5);

/// Since when each object has had no pod, and each pod no object.
#[derive(Debug, Default)]
pub(super) struct Unused {
    objects: BTreeMap<IdentityId, (UnusedIdentity, Instant)>,
    lacking: BTreeMap<LabelSet, Instant>,
}

impl Unused {
    /// Forgets all times, because the agent does not know whether pods used the objects meanwhile.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }

    /// Objects that have had no pod for the time `long`.
    pub(super) fn look(
        &mut self,
        unused: Vec<UnusedIdentity>,
        long: Duration,
        now: Instant,
    ) -> Vec<UnusedIdentity> {
        let before = std::mem::take(&mut self.objects);
        for object in unused {
            let known = before.get(&object.id).filter(|(known, _)| *known == object);
            let since = known.map_or(now, |(_, since)| *since);
            self.objects.insert(object.id, (object, since));
        }
        let due = self
            .objects
            .values()
            .filter(|(_, since)| *since + long <= now);
        due.map(|(object, _)| object.clone()).collect()
    }

    /// Keeps an object: its time without a pod begins again.
    pub(super) fn keep(&mut self, id: IdentityId, now: Instant) {
        if let Some((_, since)) = self.objects.get_mut(&id) {
            *since = now;
        }
    }

    /// Label sets that still lack an object although the agent of their node had time to make it.
    pub(super) fn lacking(
        &mut self,
        mut lacking: WantedIdentities,
        now: Instant,
    ) -> WantedIdentities {
        self.lacking
            .retain(|labels, _| lacking.contains_key(labels));
        for labels in lacking.keys() {
            self.lacking.entry(labels.clone()).or_insert(now);
        }
        let known = self
            .lacking
            .iter()
            .filter(|(_, since)| **since + OWN_AGENT <= now);
        let due: BTreeSet<_> = known.map(|(labels, _)| labels).collect();
        lacking.retain(|labels, _| due.contains(labels));
        lacking
    }
}

#[cfg(test)]
mod tests {
    use agent_core::identity::cluster::WantedIdentity;

    use super::*;

    const LONG: Duration = Duration::from_mins(30);

    fn object(id: u32, uid: &str) -> UnusedIdentity {
        UnusedIdentity {
            id: IdentityId(id),
            labels: LabelSet::parse(&["k8s:app=web"]).unwrap(),
            uid: Some(uid.into()),
            is_duplicate: false,
        }
    }

    #[test]
    fn cluster_identities_are_due_after_thirty_minutes_without_a_pod_in_one_piece() {
        let start = Instant::now();
        let at = |minutes: u64| start + Duration::from_mins(minutes);
        let mut unused = Unused::default();
        let one = object(300, "a");
        assert!(unused.look(vec![one.clone()], LONG, at(0)).is_empty());
        assert!(unused.look(vec![one.clone()], LONG, at(29)).is_empty());
        // A pod had it for a moment.
        assert!(unused.look(Vec::new(), LONG, at(30)).is_empty());
        assert!(unused.look(vec![one.clone()], LONG, at(31)).is_empty());
        // It was deleted and made again: another object.
        let again = object(300, "b");
        assert!(unused.look(vec![again.clone()], LONG, at(61)).is_empty());
        assert_eq!(
            unused.look(vec![again.clone()], LONG, at(91)),
            std::slice::from_ref(&again)
        );
        unused.keep(IdentityId(300), at(91));
        assert!(unused.look(vec![again.clone()], LONG, at(92)).is_empty());
        unused.forget();
        assert!(unused.look(vec![again], LONG, at(200)).is_empty());
    }

    #[test]
    fn a_clock_that_goes_back_deletes_nothing_early_and_keeps_nothing_for_ever() {
        // The kernel's monotonic clock never goes back. The clock of this test does.
        let start = Instant::now() + Duration::from_hours(3);
        let mut unused = Unused::default();
        let one = object(300, "a");
        assert!(unused.look(vec![one.clone()], LONG, start).is_empty());
        let back = start - Duration::from_hours(2);
        assert!(unused.look(vec![one.clone()], LONG, back).is_empty());
        assert!(unused.look(vec![one.clone()], LONG, back + LONG).is_empty());
        let due = unused.look(vec![one.clone()], LONG, start + LONG);
        assert_eq!(due, [one]);
    }

    #[test]
    fn the_leader_makes_an_object_once_the_agent_of_the_node_had_time() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let labels = LabelSet::parse(&["k8s:app=web"]).unwrap();
        let identity = WantedIdentity {
            choices: vec![IdentityId(300)],
            is_of_pod: true,
            vanished: false,
            is_beyond_share: false,
        };
        let list = WantedIdentities::from([(labels, identity)]);
        let mut unused = Unused::default();
        assert!(unused.lacking(list.clone(), at(0)).is_empty());
        assert!(unused.lacking(list.clone(), at(4)).is_empty());
        assert_eq!(unused.lacking(list.clone(), at(5)), list);
        assert!(unused.lacking(WantedIdentities::new(), at(6)).is_empty());
        assert!(unused.lacking(list, at(7)).is_empty());
    }
}
