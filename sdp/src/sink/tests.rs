//! Decisions of the sink, without a runtime or a network.

use std::sync::Arc;

use dns_policy::mapping::{Realised, Refusal};

use super::{state::REPLAYS_WITH_LIVE, *};
use crate::mapping::pairs::tests::mapping;

mod acknowledged;
mod shares;
mod with_journal;

type Seen = Arc<Mutex<Vec<Realised>>>;

fn epoch(start: u64) -> Epoch {
    Epoch {
        boot_id: "b".into(),
        start,
    }
}

fn sink() -> LinkSink {
    LinkSink::new(0, Duration::from_secs(3600))
}

fn live(name: &str) -> Mapping {
    Mapping {
        seen_at: BootTime::now(),
        ..mapping(name, &[1], 30, 0)
    }
}

fn learn(sink: &LinkSink, name: &str, seen: &Seen) -> Release {
    let seen = Arc::clone(seen);
    sink.learn(
        live(name),
        Box::new(move |realised| seen.lock().push(realised)),
    )
}

fn granted(sequence: u64, grant: Grant) -> MappingResult {
    MappingResult {
        sequence,
        result: Ok(grant),
    }
}

fn refused(sequence: u64, refusal: Refusal) -> MappingResult {
    MappingResult {
        sequence,
        result: Err(refusal),
    }
}

fn grant(lease_secs: Option<u64>, revision: u64) -> Grant {
    Grant {
        durable: false,
        promise: Promise::of_lease(lease_secs.map(|secs| BootTime::now().plus_secs(secs))),
        revision,
    }
}

fn realised(sequence: u64, lease_secs: Option<u64>, revision: u64) -> MappingResult {
    granted(sequence, grant(lease_secs, revision))
}

/// The link has read everything that the agent sent, and the agent's results are late.
fn nothing_came(sink: &LinkSink, now: BootTime) {
    sink.read_all(now);
    sink.tick(now);
}

/// A batch for a link with little room.
fn next_batch_with(sink: &LinkSink, now: BootTime, others: usize) -> Batch {
    let live = usize::MAX;
    sink.next_batch_in(now, Room { live, others })
}

/// The agent's result once the mapping is on its disk.
fn durable(sequence: u64, lease_secs: Option<u64>, revision: u64) -> MappingResult {
    let grant = Grant {
        durable: true,
        ..grant(lease_secs, revision)
    };
    granted(sequence, grant)
}

#[test]
fn without_an_agent_the_answer_is_sent_and_the_mapping_stays() {
    let (sink, seen) = (sink(), Seen::default());
    assert_eq!(learn(&sink, "a.", &seen), Release::AgentAway);
    assert!(sink.next_batch(BootTime::now()).is_empty());
    sink.agent_up(epoch(1), None);
    let batch = sink.next_batch(BootTime::now());
    assert_eq!(batch.mappings.len(), 1);
    assert!(batch.mappings[0].mapping.replayed);
    assert!(!batch.mappings[0].leased);
}

#[test]
fn a_leased_pair_is_released_at_once_and_still_sent() {
    let (sink, seen) = (sink(), Seen::default());
    sink.agent_up(epoch(1), None);
    sink.rules_applied(epoch(1), 4);
    assert_eq!(learn(&sink, "a.", &seen), Release::Held);
    let batch = sink.next_batch(BootTime::now());
    sink.results(vec![realised(batch.mappings[0].sequence, Some(90), 4)]);
    assert_eq!(*seen.lock(), [Realised::Yes]);
    for _ in 0..3 {
        assert_eq!(learn(&sink, "a.", &seen), Release::Leased);
    }
    let later = BootTime::now().plus_secs(1);
    let batch = sink.next_batch(later);
    assert_eq!(batch.mappings.len(), 1, "refreshes of one name go together");
    assert!(batch.mappings[0].leased);
}

/// A lease ends within the hour. An answer that lasts a day is released under it, and the agent is
/// asked for a new one in time, even if only the TTL changes because a resolver counts it down.
#[test]
fn the_lease_of_a_long_answer_is_renewed_before_it_is_too_short() {
    const DAY: u64 = 86_400;
    let (sink, seen) = (sink(), Seen::default());
    sink.agent_up(epoch(1), None);
    sink.rules_applied(epoch(1), 4);
    let start = BootTime::now();
    let at = |secs: u64| {
        let mapping = Mapping {
            seen_at: start.plus_secs(secs),
            ttl: u32::try_from(DAY - secs).unwrap(),
            ..live("a.")
        };
        let seen = Arc::clone(&seen);
        let done = Box::new(move |realised| seen.lock().push(realised));
        sink.learn_at(mapping, done, start.plus_secs(secs))
    };
    let granted = |sequence, secs: u64| {
        let grant = Grant {
            durable: true,
            promise: Promise::Until(start.plus_secs(secs + 3600)),
            revision: 4,
        };
        granted(sequence, grant)
    };
    assert_eq!(at(0), Release::Held);
    let sent = sink.next_batch(start).mappings;
    sink.results(vec![granted(sent[0].sequence, 0)]);
    assert_eq!(at(10), Release::Leased);
    assert!(
        sink.next_batch(start.plus_secs(11)).is_empty(),
        "nothing new"
    );
    assert_eq!(at(40), Release::Leased);
    let sent = sink.next_batch(start.plus_secs(41)).mappings;
    assert_eq!(sent.len(), 1, "the agent is asked again");
    sink.results(vec![granted(sent[0].sequence, 41)]);
    assert_eq!(at(90), Release::Leased);
    // No query came for a while, so one answer waits.
    assert_eq!(at(170), Release::Held);
}

#[test]
fn only_mappings_with_a_waiting_answer_wake_the_sender() {
    let woken = |sink: &LinkSink| {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        std::pin::pin!(sink.has_work())
            .poll(&mut context)
            .is_ready()
    };
    let (sink, seen) = (sink(), Seen::default());
    sink.agent_up(epoch(1), None);
    sink.rules_applied(epoch(1), 4);
    assert!(woken(&sink));
    assert_eq!(learn(&sink, "a.", &seen), Release::Held);
    assert!(woken(&sink));
    let batch = sink.next_batch(BootTime::now());
    sink.results(vec![realised(batch.mappings[0].sequence, Some(90), 4)]);
    assert_eq!(learn(&sink, "a.", &seen), Release::Leased);
    assert!(!woken(&sink));
}

#[test]
fn a_lease_counts_only_for_its_epoch_revision_and_time() {
    let (sink, seen) = (sink(), Seen::default());
    sink.agent_up(epoch(1), None);
    sink.rules_applied(epoch(1), 4);
    let grant = |lease_secs, revision| {
        assert_eq!(learn(&sink, "a.", &seen), Release::Held);
        let batch = sink.next_batch(BootTime::now());
        let sequence = batch.mappings.last().unwrap().sequence;
        sink.results(vec![realised(sequence, lease_secs, revision)]);
    };
    grant(Some(10), 4);
    assert_eq!(
        learn(&sink, "a.", &seen),
        Release::Held,
        "ends before the TTL"
    );
    let _ = sink.next_batch(BootTime::now());
    grant(Some(90), 3);
    assert_eq!(learn(&sink, "a.", &seen), Release::Held, "older rules");
    let _ = sink.next_batch(BootTime::now());
    grant(Some(90), 4);
    assert_eq!(learn(&sink, "a.", &seen), Release::Leased);
    sink.rules_applied(epoch(1), 5);
    assert_eq!(
        learn(&sink, "a.", &seen),
        Release::Held,
        "newer rules in force"
    );
    sink.agent_up(epoch(2), None);
    sink.rules_applied(epoch(2), 1);
    assert_eq!(learn(&sink, "a.", &seen), Release::Held, "another epoch");
}

#[test]
fn the_agents_floor_of_ttls_lengthens_what_a_lease_must_cover() {
    let (sink, seen) = (sink(), Seen::default());
    sink.agent_up(epoch(1), Some(3600));
    sink.rules_applied(epoch(1), 1);
    assert_eq!(learn(&sink, "a.", &seen), Release::Held);
    let batch = sink.next_batch(BootTime::now());
    sink.results(vec![realised(batch.mappings[0].sequence, Some(3000), 1)]);
    assert_eq!(learn(&sink, "a.", &seen), Release::Held);
}

#[test]
fn a_lost_agent_releases_what_is_held_and_voids_leases() {
    let (sink, seen) = (sink(), Seen::default());
    sink.agent_up(epoch(1), None);
    assert_eq!(learn(&sink, "a.", &seen), Release::Held);
    let _ = sink.next_batch(BootTime::now());
    assert_eq!(learn(&sink, "b.", &seen), Release::Held);
    sink.agent_down();
    assert_eq!(*seen.lock(), [Realised::AgentAway; 2]);
    assert_eq!(sink.status().leases, 0);
    assert_eq!(sink.status().kept, 2);
}

#[test]
fn an_agent_without_leases_gets_no_repetition_while_ttls_count_down() {
    let sink = sink();
    sink.agent_up(epoch(0), None);
    for ttl in [600, 30, 20] {
        let mapping = Mapping { ttl, ..live("a.") };
        assert_eq!(sink.learn(mapping, Box::new(|_| {})), Release::Held);
        let batch = sink.next_batch(BootTime::now());
        assert_eq!(batch.mappings[0].mapping.ttl, ttl);
        sink.results(vec![durable(batch.mappings[0].sequence, None, 0)]);
    }
    sink.agent_down();
    sink.agent_up(epoch(0), None);
    assert!(sink.next_batch(BootTime::now()).is_empty());
}

#[test]
fn the_same_epoch_gets_only_what_is_not_durable_and_a_new_one_all() {
    let (sink, seen) = (sink(), Seen::default());
    sink.agent_up(epoch(1), None);
    learn(&sink, "a.", &seen);
    learn(&sink, "b.", &seen);
    let batch = sink.next_batch(BootTime::now());
    let sequences = [batch.mappings[0].sequence, batch.mappings[1].sequence];
    sink.results(sequences.map(|s| realised(s, None, 1)).into());
    assert_eq!(sink.unanswered(), 0, "no answer waits for the disk");
    sink.results(vec![durable(sequences[0], None, 1)]);
    assert_eq!(sink.stats().realised.get(), 2, "each is counted once");
    sink.agent_down();
    sink.agent_up(epoch(1), None);
    let again = sink.next_batch(BootTime::now()).mappings;
    assert_eq!(again.len(), 1);
    assert_eq!(again[0].mapping.name, batch.mappings[1].mapping.name);
    sink.agent_down();
    sink.agent_up(epoch(2), None);
    assert_eq!(sink.next_batch(BootTime::now()).mappings.len(), 2);
}

#[test]
fn live_answers_are_sent_before_replays() {
    let (sink, seen) = (sink(), Seen::default());
    for n in 0..700 {
        learn(&sink, &format!("old{n}."), &seen);
    }
    sink.agent_up(epoch(1), None);
    assert_eq!(learn(&sink, "new.", &seen), Release::Held);
    let batch = sink.next_batch(BootTime::now());
    assert_eq!(batch.mappings[0].mapping.name.as_str(), "new.");
    assert_eq!(batch.mappings.len(), 1 + REPLAYS_WITH_LIVE);
    let (mut sent, mut count) = (batch.mappings, 0);
    while !sent.is_empty() {
        count += sent.len();
        let results = sent.iter().map(|out| realised(out.sequence, None, 1));
        sink.results(results.collect());
        sent = sink.next_batch(BootTime::now()).mappings;
    }
    assert_eq!(count, 1 + 700);
}

#[test]
fn three_late_results_in_a_row_make_the_agent_hung_until_it_answers() {
    let (sink, seen) = (LinkSink::new(0, Duration::ZERO), Seen::default());
    sink.agent_up(epoch(1), None);
    let mut sequence = 0;
    for n in 0..3 {
        assert_eq!(learn(&sink, &format!("n{n}."), &seen), Release::Held);
        sequence = sink.next_batch(BootTime::now()).mappings[0].sequence;
        nothing_came(&sink, BootTime::now().plus_secs(1));
    }
    assert!(sink.status().agent_hung);
    assert_eq!(learn(&sink, "x.", &seen), Release::AgentAway);
    assert_eq!(seen.lock().len(), 3, "each held answer is released once");
    sink.results(vec![realised(sequence, None, 1)]);
    assert!(!sink.status().agent_hung);
    assert_eq!(learn(&sink, "x.", &seen), Release::Held);
}

#[test]
fn a_revocation_is_carried_out_before_it_is_acknowledged() {
    let (sink, seen) = (sink(), Seen::default());
    sink.agent_up(epoch(1), None);
    sink.rules_applied(epoch(1), 1);
    learn(&sink, "a.", &seen);
    let batch = sink.next_batch(BootTime::now());
    sink.results(vec![realised(batch.mappings[0].sequence, Some(90), 1)]);
    assert_eq!(learn(&sink, "a.", &seen), Release::Leased);
    sink.revoke(77, Some(&Fqdn::normalise("a.")), &[]);
    assert_eq!(learn(&sink, "a.", &seen), Release::Held);
    assert_eq!(sink.next_batch(BootTime::now()).revoked, [77]);
}

#[test]
fn revoked_pairs_are_not_sent_again() {
    let (sink, seen) = (sink(), Seen::default());
    sink.agent_up(epoch(1), None);
    sink.rules_applied(epoch(1), 1);
    for name in ["a.", "b."] {
        learn(&sink, name, &seen);
        let sequence = sink.next_batch(BootTime::now()).mappings[0].sequence;
        sink.results(vec![realised(sequence, Some(90), 1)]);
        assert_eq!(learn(&sink, name, &seen), Release::Leased);
    }
    sink.revoke(77, Some(&Fqdn::normalise("a.")), &live("a.").addresses);
    let names = |batch: Batch| -> Vec<String> {
        let name = |out: Outgoing| out.mapping.name.as_str().to_owned();
        batch.mappings.into_iter().map(name).collect()
    };
    let later = BootTime::now().plus_secs(1);
    assert_eq!(names(sink.next_batch(later)), ["b."], "the refresh is gone");
    sink.agent_down();
    sink.agent_up(epoch(1), None);
    assert_eq!(names(sink.next_batch(later)), ["b."], "not to the same run");
    sink.agent_down();
    sink.agent_up(epoch(2), None);
    assert_eq!(names(sink.next_batch(later)), ["b."], "nor to another");
}

#[test]
fn an_answer_that_is_held_outlives_a_revocation() {
    let (sink, seen) = (sink(), Seen::default());
    sink.agent_up(epoch(1), None);
    assert_eq!(learn(&sink, "a.", &seen), Release::Held);
    sink.revoke(77, None, &[]);
    assert_eq!(sink.next_batch(BootTime::now()).mappings.len(), 1);
    assert_eq!(sink.status().kept, 1);
}

#[test]
fn an_answer_that_is_under_way_outlives_a_revocation() {
    let (sink, seen) = (sink(), Seen::default());
    sink.agent_up(epoch(1), None);
    assert_eq!(learn(&sink, "a.", &seen), Release::Held);
    assert_eq!(sink.next_batch(BootTime::now()).mappings.len(), 1);
    sink.revoke(77, Some(&Fqdn::normalise("a.")), &[]);
    // The agent ends before it receives the acknowledgement of the revocation.
    sink.agent_down();
    sink.agent_up(epoch(2), None);
    assert_eq!(sink.next_batch(BootTime::now()).mappings.len(), 1);
}

#[tokio::test]
async fn a_drain_does_not_wait_for_an_agent_that_answers_nothing() {
    let (sink, seen) = (sink(), Seen::default());
    sink.agent_up(epoch(1), None);
    learn(&sink, "a.", &seen);
    let sequence = sink.next_batch(BootTime::now()).mappings[0].sequence;
    assert_eq!(sink.finish(Duration::from_millis(1)).await, 1);
    sink.results(vec![realised(sequence, None, 1)]);
    assert_eq!(sink.finish(Duration::from_secs(3600)).await, 0);
}

#[test]
fn a_durable_result_grants_no_lease() {
    let (sink, seen) = (sink(), Seen::default());
    sink.agent_up(epoch(1), None);
    sink.rules_applied(epoch(1), 1);
    learn(&sink, "a.", &seen);
    let sequence = sink.next_batch(BootTime::now()).mappings[0].sequence;
    sink.results(vec![realised(sequence, Some(90), 1)]);
    sink.revoke(77, Some(&Fqdn::normalise("a.")), &[]);
    sink.results(vec![durable(sequence, Some(90), 1)]);
    assert_eq!(learn(&sink, "a.", &seen), Release::Held);
}

#[test]
fn refusals_are_passed_on_and_retried_where_it_helps() {
    let (sink, seen) = (sink(), Seen::default());
    sink.agent_up(epoch(1), None);
    let refuse = |name: &str, refusal| {
        learn(&sink, name, &seen);
        let sequence = sink.next_batch(BootTime::now()).mappings[0].sequence;
        sink.results(vec![refused(sequence, refusal)]);
        sink.tick(BootTime::now());
        sink.next_batch(BootTime::now()).mappings.len()
    };
    assert_eq!(refuse("a.", Refusal::NotAllowed), 0);
    assert_eq!(refuse("b.", Refusal::EndpointUnknown), 1);
    assert_eq!(
        *seen.lock(),
        [
            Realised::No(Refusal::NotAllowed),
            Realised::No(Refusal::EndpointUnknown)
        ]
    );
    assert_eq!(sink.status().kept, 1);
}

#[test]
fn a_mapping_without_a_result_is_sent_again_and_counts_as_silence() {
    let (sink, seen) = (LinkSink::new(0, Duration::from_millis(1)), Seen::default());
    sink.agent_up(epoch(1), None);
    let mut sequences = Vec::new();
    for name in ["a.", "b.", "c."] {
        learn(&sink, name, &seen);
        sequences.push(sink.next_batch(BootTime::now()).mappings[0].sequence);
    }
    let later = BootTime::now().plus_secs(1);
    nothing_came(&sink, later);
    assert!(sink.status().agent_hung);
    for sequence in sequences {
        sink.no_result(sequence);
    }
    assert!(sink.status().agent_hung, "a result that does not come");
    sink.tick(later);
    let again = sink.next_batch(later).mappings;
    assert_eq!(again.len(), 3);
    assert!(again.iter().all(|out| out.mapping.replayed));
}

/// A hung agent of Cilium: each call runs out of time, and few are open at once.
#[test]
fn mappings_without_a_waiting_answer_stay_in_the_sink_until_there_is_room() {
    let (sink, seen) = (LinkSink::new(0, Duration::from_millis(1)), Seen::default());
    sink.agent_up(epoch(1), None);
    for name in ["a.", "b.", "c."] {
        learn(&sink, name, &seen);
    }
    assert_eq!(
        next_batch_with(&sink, BootTime::now(), 16).mappings.len(),
        3
    );
    let later = BootTime::now().plus_secs(1);
    nothing_came(&sink, later);
    assert!(sink.status().agent_hung);
    let names: Vec<String> = (0..100).map(|n| format!("n{n}.")).collect();
    for second in 1..10 {
        for name in &names {
            let mapping = Mapping {
                seen_at: later,
                ..mapping(name, &[1], 30, 0)
            };
            let now = later.plus_secs(second);
            assert_eq!(
                sink.learn_at(mapping, Box::new(|_| {}), now),
                Release::AgentAway
            );
            assert!(next_batch_with(&sink, now.plus_secs(1), 0).is_empty());
        }
    }
    let status = sink.status();
    assert_eq!((status.queued, status.in_flight), (100, 3));
    let mut sent: Vec<_> = (0..20)
        .flat_map(|_| next_batch_with(&sink, later.plus_secs(20), 16).mappings)
        .map(|out| out.mapping.name)
        .collect();
    sent.sort();
    sent.dedup();
    assert_eq!((sent.len(), sink.status().queued), (100, 0), "each once");
}

#[test]
fn silence_does_not_count_as_a_pairs_attempt() {
    let (sink, seen) = (sink(), Seen::default());
    sink.agent_up(epoch(1), None);
    learn(&sink, "a.", &seen);
    let mut now = BootTime::now();
    for call in 0..64 {
        let sent = next_batch_with(&sink, now, 16).mappings;
        assert_eq!(sent.len(), 1, "call {call}");
        sink.no_result(sent[0].sequence);
        now = now.plus_secs(5);
        sink.tick(now);
    }
    // This is longer than the TTL and the time that the table adds to it.
    now = now.plus_secs(60);
    sink.tick(now);
    assert!(next_batch_with(&sink, now, 16).is_empty());
    assert_eq!(sink.status().kept, 0);
}

#[test]
fn a_name_of_several_answers_is_queued_once() {
    let (sink, now) = (sink(), BootTime::now());
    sink.agent_up(epoch(1), None);
    for (address, ttl) in [(1, 300), (2, 400), (3, 500)] {
        let mapping = Mapping {
            seen_at: now,
            ..mapping("a.", &[address], ttl, 0)
        };
        sink.learn_at(mapping, Box::new(|_| {}), now);
    }
    for _ in 0..5 {
        let sent = next_batch_with(&sink, now, 16).mappings;
        assert_eq!(sent.len(), 3);
        for out in sent {
            sink.no_result(out.sequence);
        }
        sink.tick(now);
    }
}
