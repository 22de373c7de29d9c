//! Which label set gets its object next: at most 20 per second, and namespaces in turn. No input or output.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::{Duration, Instant},
};

use agent_core::{identity::cluster::WantedIdentities, labels::LabelSet};

/// Maximum number of objects within [`PERIOD`].
const RATE: usize = 20;
const PERIOD: Duration = Duration::from_secs(1);
/// Maximum number of objects that the agent makes at once for one namespace. So a tenant whose labels change all the
/// time cannot use up the range of numbers.
const BURST: u32 = 100;
/// After [`BURST`] objects, the namespace gets one more in each of these times.
const REFILL: Duration = Duration::from_secs(1);
/// First and longest pause of a namespace whose objects the API server refuses.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

/// The label sets that lack an object, and when each may be tried.
#[derive(Debug, Default)]
pub(super) struct Queue {
    pending: BTreeMap<String, BTreeMap<LabelSet, Instant>>,
    /// Namespaces for which the agent has tried to make objects, until they may get [`BURST`] objects at once again.
    made: BTreeMap<String, Share>,
    /// The latest attempts, as many as one period may have.
    attempts: VecDeque<Instant>,
    turn: u64,
    /// Namespaces whose last object was refused.
    refused: BTreeMap<String, Refused>,
}

/// A namespace whose objects wait because the API server refused one.
#[derive(Debug)]
struct Refused {
    until: Instant,
    /// The pause after the next refusal.
    next: Duration,
}

/// What a namespace has used.
#[derive(Debug)]
struct Share {
    /// When the namespace may get [`BURST`] objects at once again.
    full_at: Instant,
    /// Number of attempts for all namespaces, as of the last attempt for this one.
    turn: u64,
}

/// What to do now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    Make(LabelSet),
    WaitUntil(Instant),
    /// No label set lacks an object.
    Rest,
}

fn namespace(labels: &LabelSet) -> &str {
    labels.namespace().unwrap_or_default()
}

impl Queue {
    /// Takes the present list. New label sets are tried after `delay`.
    pub(super) fn follow(
        &mut self,
        wanted: &WantedIdentities,
        now: Instant,
        mut delay: impl FnMut() -> Duration,
    ) {
        for sets in self.pending.values_mut() {
            sets.retain(|labels, _| wanted.contains_key(labels));
        }
        for labels in wanted.keys() {
            let sets = self
                .pending
                .entry(namespace(labels).to_owned())
                .or_default();
            sets.entry(labels.clone()).or_insert_with(|| now + delay());
        }
        self.pending.retain(|_, sets| !sets.is_empty());
        self.made.retain(|_, share| share.full_at > now);
        self.refused
            .retain(|name, _| self.pending.contains_key(name));
    }

    /// The label set that is tried now.
    pub(super) fn next(&mut self, now: Instant) -> Turn {
        while self.attempts.front().is_some_and(|at| *at + PERIOD <= now) {
            self.attempts.pop_front();
        }
        let times = self.pending.iter().map(|(name, sets)| {
            let first = sets.iter().min_by_key(|(_, due)| **due);
            let share = self.made.get(name);
            // The namespace waits until its share has room.
            let room = share.and_then(|share| share.full_at.checked_sub(REFILL * (BURST - 1)));
            let refused = self.refused.get(name).map(|refused| refused.until);
            let not_before = room.max(refused);
            let due =
                first.map(|(labels, due)| (not_before.map_or(*due, |at| at.max(*due)), labels));
            (due, share.map_or(0, |share| share.turn), name)
        });
        let times =
            times.filter_map(|(due, turn, name)| due.map(|(at, labels)| (at, turn, name, labels)));
        let times: Vec<_> = times.collect();
        let due = times.iter().filter(|(at, ..)| *at <= now);
        let Some((_, _, name, labels)) = due.min_by_key(|(at, turn, ..)| (*turn, *at)) else {
            let next = times.iter().map(|(at, ..)| *at).min();
            return next.map_or(Turn::Rest, Turn::WaitUntil);
        };
        if self.attempts.len() >= RATE
            && let Some(first) = self.attempts.front()
        {
            return Turn::WaitUntil(*first + PERIOD);
        }
        let (name, labels) = ((*name).clone(), (*labels).clone());
        self.take(name, now);
        Turn::Make(labels)
    }

    fn take(&mut self, name: String, now: Instant) {
        self.turn += 1;
        self.attempts.push_back(now);
        let share = self.made.entry(name).or_insert(Share {
            full_at: now,
            turn: 0,
        });
        share.full_at = share.full_at.max(now) + REFILL;
        share.turn = self.turn;
    }

    /// Delays a label set until this time.
    pub(super) fn later(&mut self, labels: &LabelSet, at: Instant) {
        let sets = self.pending.get_mut(namespace(labels));
        if let Some(due) = sets.and_then(|sets| sets.get_mut(labels)) {
            *due = at;
        }
    }

    /// Notes that the API server refused an object. Other objects of its namespace wait; other namespaces do not.
    pub(super) fn refuse(&mut self, labels: &LabelSet, now: Instant) {
        let (first, longest) = PAUSES;
        let name = namespace(labels).to_owned();
        let refused = self.refused.entry(name).or_insert(Refused {
            until: now,
            next: first,
        });
        refused.until = now + refused.next;
        refused.next = (refused.next * 2).min(longest);
        // This object comes after the others of the namespace.
        let again = now + refused.next;
        self.later(labels, again);
    }

    /// Notes that the API server accepted an object of the namespace.
    pub(super) fn accept(&mut self, labels: &LabelSet) {
        self.refused.remove(namespace(labels));
    }

    /// Namespaces that wait because they have used up their share.
    pub(super) fn limited(&self, now: Instant) -> BTreeSet<String> {
        let is_limited = |name: &&String| {
            let share = self.made.get(*name);
            share.is_some_and(|share| share.full_at > now + REFILL * (BURST - 1))
        };
        let waiting = self
            .pending
            .iter()
            .filter(|(_, sets)| sets.values().any(|due| *due <= now));
        waiting
            .map(|(name, _)| name)
            .filter(is_limited)
            .cloned()
            .collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use agent_core::identity::cluster::WantedIdentity;

    use super::*;

    fn wanted(namespace: &str, sets: std::ops::Range<usize>) -> WantedIdentities {
        let set = |n: usize| {
            let texts = [
                format!("k8s:n={n}"),
                format!("k8s:io.kubernetes.pod.namespace={namespace}"),
            ];
            let identity = WantedIdentity {
                choices: Vec::new(),
                is_of_pod: true,
                vanished: false,
                is_beyond_share: false,
            };
            (LabelSet::parse(&texts).unwrap(), identity)
        };
        sets.map(set).collect()
    }

    /// Makes all objects that may be made at once.
    fn make_all(queue: &mut Queue, now: Instant) -> Vec<LabelSet> {
        let mut made = Vec::new();
        while let Turn::Make(labels) = queue.next(now) {
            queue.later(&labels, now + Duration::from_hours(1));
            made.push(labels);
        }
        made
    }

    #[test]
    fn cluster_identities_are_made_twenty_in_a_second_at_most() {
        let mut queue = Queue::default();
        let start = Instant::now();
        let list = wanted("a", 0..50);
        queue.follow(&list, start, || Duration::ZERO);
        assert_eq!(make_all(&mut queue, start).len(), 20);
        assert_eq!(queue.next(start), Turn::WaitUntil(start + PERIOD));
        assert!(make_all(&mut queue, start + PERIOD / 2).is_empty());
        assert_eq!(make_all(&mut queue, start + PERIOD).len(), 20);
        assert_eq!(make_all(&mut queue, start + PERIOD * 2).len(), 10);
        // The number is known: the label set leaves the queue.
        queue.follow(&WantedIdentities::new(), start + PERIOD * 2, || {
            Duration::ZERO
        });
        assert_eq!(queue.next(start + PERIOD * 2), Turn::Rest);
        assert!(queue.is_empty());
    }

    #[test]
    fn a_new_set_waits_for_its_delay_and_one_that_was_there_keeps_its_time() {
        let mut queue = Queue::default();
        let start = Instant::now();
        let list = wanted("a", 0..1);
        queue.follow(&list, start, || Duration::from_millis(30));
        let due = start + Duration::from_millis(30);
        assert_eq!(queue.next(start), Turn::WaitUntil(due));
        queue.follow(&list, due, || Duration::from_secs(9));
        assert!(matches!(queue.next(due), Turn::Make(_)));
    }

    #[test]
    fn a_namespace_whose_objects_are_refused_waits_longer_each_time_and_others_do_not() {
        let mut queue = Queue::default();
        let start = Instant::now();
        let mut list = wanted("bad", 0..2);
        queue.follow(&list, start, || Duration::ZERO);
        let refuse = |queue: &mut Queue, now: Instant| match queue.next(now) {
            Turn::Make(labels) => {
                queue.refuse(&labels, now);
                labels
            }
            other => panic!("{other:?}"),
        };
        let first = refuse(&mut queue, start);
        let Turn::WaitUntil(at) = queue.next(start) else {
            panic!("it does not wait");
        };
        assert_eq!(at, start + PAUSES.0);
        list.append(&mut wanted("good", 0..1));
        queue.follow(&list, start, || Duration::ZERO);
        let Turn::Make(good) = queue.next(start) else {
            panic!("the other namespace waits");
        };
        assert_eq!(good.namespace(), Some("good"));
        queue.later(&good, start + Duration::from_hours(9));
        // The other label set of the namespace is next, and the pause grows up to its end.
        assert_ne!(refuse(&mut queue, at), first);
        let (mut now, mut pauses) = (at, Vec::new());
        while let Turn::WaitUntil(next) = queue.next(now) {
            pauses.push(next - now);
            now = next;
            refuse(&mut queue, now);
            if pauses.len() > 9 {
                break;
            }
        }
        assert!(pauses.is_sorted(), "{pauses:?}");
        assert_eq!(pauses.last(), Some(&PAUSES.1));
        // An object is accepted: the namespace begins with the first pause again.
        queue.accept(&first);
        refuse(&mut queue, now + PAUSES.1);
        assert_eq!(
            queue.next(now + PAUSES.1),
            Turn::WaitUntil(now + PAUSES.1 + PAUSES.0)
        );
    }

    #[test]
    fn cluster_identities_wait_no_longer_if_the_clock_is_set_back() {
        let mut queue = Queue::default();
        let start = Instant::now() + Duration::from_hours(2);
        let list = wanted("a", 0..30);
        queue.follow(&list, start, || Duration::ZERO);
        assert_eq!(make_all(&mut queue, start).len(), 20);
        // The kernel's monotonic clock does not go back. The clock of this test does.
        let back = start - Duration::from_hours(1);
        queue.follow(&list, back, || Duration::ZERO);
        assert!(matches!(queue.next(back), Turn::WaitUntil(at) if at <= start + PERIOD));
        assert_eq!(make_all(&mut queue, start + PERIOD).len(), 10);
    }

    #[test]
    fn a_namespace_that_changes_its_labels_all_the_time_leaves_the_others_their_turn() {
        let mut queue = Queue::default();
        let start = Instant::now();
        let mut list = wanted("churn", 0..4000);
        queue.follow(&list, start, || Duration::ZERO);
        let mut made = make_all(&mut queue, start).len();
        list.append(&mut wanted("quiet", 0..3));
        let second = start + PERIOD;
        queue.follow(&list, second, || Duration::ZERO);
        let both = make_all(&mut queue, second);
        let quiet = both
            .iter()
            .position(|labels| labels.namespace() == Some("quiet"));
        assert_eq!(quiet, Some(0));
        let quiet = both
            .iter()
            .filter(|labels| labels.namespace() == Some("quiet"));
        assert_eq!(quiet.count(), 3);
        made += both.len() - 3;
        for n in 2..60 {
            made += make_all(&mut queue, start + PERIOD * n).len();
        }
        // `BURST` objects at once, and then one more in each second.
        assert!((150..=160).contains(&made), "{made}");
        assert_eq!(
            queue.limited(start + PERIOD * 60 - Duration::from_millis(1)),
            ["churn".to_owned()].into()
        );
    }
}
