//! An agent without leases (FQDNData): answers whose pairs it has acknowledged for an endpoint are
//! released at once while the TTL in the sent mapping runs, and are still sent to the agent.

use super::*;
use crate::{query_report, query_report::Event};

const TTL: u64 = 60;

struct Case {
    sink: LinkSink,
    start: BootTime,
}

impl Case {
    /// A case with an agent that has acknowledged `a.` at 0 s.
    fn new() -> Self {
        let case = Self::unacknowledged();
        assert_eq!(case.at(0, "a."), Release::Held);
        case.acknowledge(0);
        case
    }

    fn unacknowledged() -> Self {
        Self::new_session(Duration::from_secs(3600))
    }

    fn new_session(max_delay: Duration) -> Self {
        let sink = LinkSink::new(0, max_delay);
        sink.agent_up(epoch(1), None);
        Self {
            sink,
            start: BootTime::now(),
        }
    }

    fn time(&self, secs: u64) -> BootTime {
        self.start.plus_secs(secs)
    }

    fn of(&self, secs: u64, name: &str) -> Mapping {
        Mapping {
            seen_at: self.time(secs),
            ttl: u32::try_from(TTL).unwrap(),
            ..live(name)
        }
    }

    fn at(&self, secs: u64, name: &str) -> Release {
        self.learn(self.of(secs, name))
    }

    fn learn(&self, mapping: Mapping) -> Release {
        let now = mapping.seen_at;
        self.sink.learn_at(mapping, Box::new(|_| {}), now)
    }

    fn sent(&self, secs: u64) -> Vec<Outgoing> {
        self.sink.next_batch(self.time(secs)).mappings
    }

    /// Sends all mappings and acknowledges them. Returns how many there were.
    fn acknowledge(&self, secs: u64) -> usize {
        let sent = self.sent(secs);
        let results = sent.iter().map(|out| acknowledged(out.sequence));
        self.sink.results(results.collect());
        sent.len()
    }
}

fn acknowledged(sequence: u64) -> MappingResult {
    let grant = Grant {
        durable: true,
        promise: Promise::ForItsTtl,
        revision: 0,
    };
    granted(sequence, grant)
}

#[test]
fn the_same_answer_is_released_at_once_and_sent_again() {
    let case = Case::new();
    for _ in 0..3 {
        assert_eq!(case.at(1, "a."), Release::Leased);
    }
    assert!(case.sent(2).is_empty(), "together with what follows");
    let sent = case.sent(5);
    assert_eq!(sent.len(), 1);
    assert_eq!(sent[0].mapping.seen_at, case.time(1));
    assert!(sent[0].leased, "no answer waits for it");
    assert_eq!(case.sink.stats().leased.get(), 3);
}

#[test]
fn a_name_that_is_looked_up_all_the_time_never_waits_again() {
    let case = Case::new();
    for second in 1..600 {
        assert_eq!(case.at(second, "a."), Release::Leased, "at {second} s");
        case.acknowledge(second);
    }
}

#[test]
fn an_answer_that_is_not_renewed_waits_before_its_ttl_ends() {
    let case = Case::new();
    assert_eq!(case.at(TTL - 11, "a."), Release::Leased);
    assert_eq!(case.at(TTL - 9, "a."), Release::Held);
}

#[test]
fn a_ttl_that_counts_down_counts_as_it_was_acknowledged() {
    let case = Case::new();
    let mapping = Mapping {
        ttl: 5,
        ..case.of(20, "a.")
    };
    assert_eq!(case.learn(mapping), Release::Leased);
    assert_eq!(case.acknowledge(30), 1);
    assert_eq!(case.at(TTL - 11, "a."), Release::Leased, "the longer one");
    let day = Mapping {
        ttl: i32::MAX.unsigned_abs(),
        ..case.of(20, "long.")
    };
    assert_eq!(case.learn(day), Release::Held);
    case.acknowledge(20);
    assert_eq!(case.at(20 + 3580, "long."), Release::Leased);
    assert_eq!(
        case.at(20 + 3600, "long."),
        Release::Held,
        "within the hour"
    );
}

#[test]
fn another_address_name_or_endpoint_waits() {
    let case = Case::new();
    let mapping = case.of(1, "a.");
    let other = |change: fn(&mut Mapping)| {
        let mut mapping = mapping.clone();
        change(&mut mapping);
        case.learn(mapping)
    };
    let held = Release::Held;
    assert_eq!(other(|m| m.endpoint.id.0 += 1), held, "another pod");
    assert_eq!(other(|m| m.endpoint.ifindex += 1), held, "a replaced pod");
    assert_eq!(other(|m| m.endpoint.client = [10, 0, 0, 99].into()), held);
    assert_eq!(case.at(1, "b."), held);
    assert_eq!(case.at(1, "a."), Release::Leased);
    assert_eq!(other(|m| m.addresses.push([192, 0, 2, 9].into())), held);
}

#[test]
fn an_endpoint_without_an_interface_always_waits() {
    let case = Case::unacknowledged();
    for second in 0..3 {
        let mut mapping = case.of(second, "a.");
        mapping.endpoint.ifindex = 0;
        assert_eq!(case.learn(mapping), Release::Held);
        case.acknowledge(second);
    }
}

#[test]
fn a_name_of_many_addresses_always_waits() {
    let case = Case::unacknowledged();
    let many = |secs| Mapping {
        addresses: (1..=17).map(|n| IpAddr::from([192, 0, 2, n])).collect(),
        ..case.of(secs, "a.")
    };
    for second in 0..3 {
        assert_eq!(case.learn(many(second)), Release::Held);
        case.acknowledge(second);
    }
}

#[test]
fn another_session_of_the_agent_begins_with_nothing() {
    let case = Case::new();
    case.sink.agent_down();
    assert_eq!(case.at(1, "a."), Release::AgentAway);
    case.sink.agent_up(epoch(2), None);
    assert_eq!(case.at(2, "a."), Release::Held);
    case.acknowledge(2);
    assert_eq!(case.at(3, "a."), Release::Leased);
}

#[test]
fn a_new_snapshot_of_rules_costs_no_wait() {
    let case = Case::new();
    for revision in 1..5 {
        case.sink.rules_applied(epoch(1), revision);
        assert_eq!(case.at(revision, "a."), Release::Leased);
    }
}

#[test]
fn a_refusal_or_no_result_ends_what_was_acknowledged() {
    let refused = |sequence| refused(sequence, Refusal::EndpointUnknown);
    for end in ["refused", "silent"] {
        let case = Case::new();
        assert_eq!(case.at(1, "a."), Release::Leased);
        let sent = case.sent(5);
        match end {
            "refused" => case.sink.results(vec![refused(sent[0].sequence)]),
            _ => case.sink.no_result(sent[0].sequence),
        }
        assert_eq!(case.at(6, "a."), Release::Held, "{end}");
    }
}

/// After its own response max delay, Cilium's agent acknowledges addresses that it has not plumbed
/// yet.
#[test]
fn a_late_acknowledgement_does_not_count() {
    // Half of this delay is over immediately.
    let case = Case::new_session(Duration::from_nanos(1));
    assert_eq!(case.at(0, "a."), Release::Held);
    assert_eq!(case.acknowledge(0), 1);
    assert_eq!(case.at(1, "a."), Release::Held);
}

#[test]
fn where_acknowledgements_count_once_each_answer_waits() {
    let mut case = Case::unacknowledged();
    case.sink = case.sink.with_acknowledgements(Acknowledgements::CountOnce);
    for second in 0..3 {
        assert_eq!(case.at(second, "a."), Release::Held);
        assert_eq!(case.acknowledge(second), 1);
    }
}

#[test]
fn our_own_agent_that_grants_no_lease_gives_none() {
    let case = Case::unacknowledged();
    for second in 0..3 {
        assert_eq!(case.at(second, "a."), Release::Held);
        let sequence = case.sent(second)[0].sequence;
        case.sink.results(vec![durable(sequence, None, 1)]);
    }
}

#[test]
fn an_answer_that_the_agent_logs_is_sent_at_once_with_its_report() {
    let case = Case::new();
    let report = || Some(Box::new(query_report::tests::report(Event::Query)));
    for _ in 0..3 {
        let mapping = Mapping {
            seen_at: BootTime::now(),
            ..case.of(0, "a.")
        };
        let release = case
            .sink
            .learn_reported(mapping, report(), Box::new(|_| {}));
        assert_eq!(release, Release::Leased);
    }
    let sent = case.sent(0);
    assert_eq!(sent.len(), 3);
    assert!(sent.iter().all(|out| out.leased && out.report.is_some()));
    let results = sent.iter().map(|out| acknowledged(out.sequence));
    case.sink.results(results.collect());
    assert!(case.sent(10).is_empty(), "nothing else is due");
}

#[test]
fn unacknowledged_releases_are_sent_to_the_next_session() {
    let case = Case::new();
    assert_eq!(case.at(1, "a."), Release::Leased);
    case.sink.agent_down();
    case.sink.agent_up(epoch(1), None);
    let sent = case.sent(2);
    assert_eq!(sent.len(), 1);
    assert_eq!(sent[0].mapping.seen_at, case.time(1));
}
