//! Delay of one endpoint's answers by another endpoint or a busy machine.

use polling::until;

use super::{with_journal::journalled, *};
use crate::mapping::steps;

/// While one worker holds the sink's lock, all others wait.
#[test]
fn an_answer_costs_the_sink_a_few_steps_for_each_of_its_addresses() {
    const ADDRESSES: u32 = 1024;
    const ANSWERS: u32 = 40;
    let dir = tempfile::tempdir().unwrap();
    let (sink, _journal) = journalled(dir.path());
    sink.agent_up(epoch(1), None);
    sink.rules_applied(epoch(1), 1);
    let answer = |n: u32| {
        let address = |of: u32| IpAddr::from((0x0b00_0000 + n * ADDRESSES + of).to_be_bytes());
        Mapping {
            addresses: (0..ADDRESSES).map(address).collect(),
            ..live("a.")
        }
    };
    let most = |steps: usize| steps / usize::try_from(ADDRESSES).unwrap();
    // The name gets new addresses. Each answer comes twice: with new addresses, and then under
    // their leases.
    for n in (0..ANSWERS).flat_map(|n| [n, n]) {
        let before = steps::taken();
        let release = sink.learn(answer(n), Box::new(|_| {}));
        let learned = steps::taken() - before;
        assert!(most(learned) <= 12, "{learned} steps to learn answer {n}");
        if release == Release::Held {
            let sequence = sink.next_batch(BootTime::now()).mappings[0].sequence;
            let before = steps::taken();
            sink.results(vec![
                realised(sequence, Some(90), 1),
                durable(sequence, Some(90), 1),
            ]);
            let granted = steps::taken() - before;
            assert!(most(granted) <= 12, "{granted} steps to grant answer {n}");
        }
    }
    assert_eq!(sink.stats().leased.get(), u64::from(ANSWERS));
}

fn of(endpoint: u16, name: &str) -> Mapping {
    let mut mapping = live(name);
    mapping.endpoint.id = shared_maps::EndpointId(endpoint);
    mapping
}

/// A busy machine can keep the link's thread from running.
#[test]
fn a_link_that_did_not_run_does_not_make_the_agent_hung() {
    let (sink, seen) = (
        LinkSink::new(0, Duration::from_millis(100)),
        Seen::default(),
    );
    sink.agent_up(epoch(1), None);
    let start = BootTime::now();
    let mut sequences = Vec::new();
    for name in ["a.", "b.", "c.", "d."] {
        learn(&sink, name, &seen);
        sequences.push(sink.next_batch(start).mappings[0].sequence);
        sink.read_all(start);
    }
    // The link has read nothing since then, so the results may have arrived.
    let later = start.plus_secs(1);
    sink.tick(later);
    assert_eq!(*seen.lock(), [Realised::AgentAway; 4]);
    assert_eq!(sink.stats().late.get(), 4);
    assert!(!sink.status().agent_hung);
    // Mappings that were never sent do not count either.
    for name in ["e.", "f.", "g."] {
        learn(&sink, name, &seen);
    }
    nothing_came(&sink, later.plus_secs(1));
    assert_eq!(sink.stats().late.get(), 7);
    assert!(!sink.status().agent_hung);
    sink.results(
        sequences
            .into_iter()
            .map(|s| realised(s, None, 1))
            .collect(),
    );
    assert_eq!(learn(&sink, "h.", &seen), Release::Held);
}

#[test]
fn an_agent_that_does_not_answer_in_time_counts_as_hung_at_the_third_answer() {
    let delay = Duration::from_millis(100);
    let (sink, mut now) = (LinkSink::new(0, delay), BootTime::now());
    sink.agent_up(epoch(1), None);
    for name in ["a.", "b.", "c."] {
        assert_eq!(
            sink.learn_at(live(name), Box::new(|_| {}), now),
            Release::Held
        );
        assert_eq!(sink.next_batch(now).mappings.len(), 1);
        now = now.plus(delay);
        sink.read_all(now);
    }
    assert_eq!(
        sink.learn_at(live("d."), Box::new(|_| {}), now),
        Release::AgentAway
    );
}

#[test]
fn an_endpoint_with_thousands_of_answers_waiting_delays_no_other() {
    let (sink, seen) = (sink(), Seen::default());
    sink.agent_up(epoch(1), None);
    let mut released = 0;
    for n in 0..20_000 {
        let release = sink.learn(of(1, &format!("a{n}.")), Box::new(|_| {}));
        released += usize::from(release == Release::AgentAway);
    }
    assert!(released > 0, "its share of the queue is full");
    assert_eq!(
        sink.stats().queue_full.get(),
        u64::try_from(released).unwrap()
    );
    let seen_by = Arc::clone(&seen);
    let done = Box::new(move |realised| seen_by.lock().push(realised));
    assert_eq!(sink.learn(of(2, "b."), done), Release::Held);
    let batch = sink.next_batch(BootTime::now());
    let at = batch
        .mappings
        .iter()
        .position(|out| out.mapping.name.as_str() == "b.");
    assert_eq!(at, Some(1), "after one of the other");

    // The mappings of one endpoint on the wire are bounded. Results free room.
    let sent = || sink.next_batch(BootTime::now()).mappings;
    let mut on_wire = batch.mappings;
    while let more = sent()
        && more.iter().any(|out| !out.mapping.replayed && !out.leased)
    {
        on_wire.extend(more);
    }
    let live = |out: &&Outgoing| !out.leased && !out.mapping.replayed;
    let of_clients = on_wire.iter().filter(live).count();
    assert!(of_clients < 64, "{of_clients}");
    assert_eq!(sink.learn(of(2, "c."), Box::new(|_| {})), Release::Held);
    let next = sent();
    assert_eq!(next[0].mapping.name.as_str(), "c.");
    let of_first = on_wire.iter().filter(|out| out.mapping.endpoint.id.0 == 1);
    let results = of_first.map(|out| realised(out.sequence, None, 1));
    sink.results(results.take(20).collect());
    let sent = sent().iter().filter(live).count();
    assert!(
        sent.abs_diff(20) <= 1,
        "{sent}: the other one has a place, too"
    );
}

fn large(endpoint: u16, name: &str) -> Mapping {
    let address = |of: u32| IpAddr::from((0x0b00_0000 + of).to_be_bytes());
    Mapping {
        addresses: (0..1024).map(address).collect(),
        ttl: 3600,
        ..of(endpoint, name)
    }
}

#[test]
fn large_answers_of_one_endpoint_reach_the_agent_one_by_one() {
    let sink = sink();
    sink.agent_up(epoch(1), None);
    for n in 0..20 {
        sink.learn(large(1, &format!("a{n}.")), Box::new(|_| {}));
    }
    let sent = || sink.next_batch(BootTime::now()).mappings;
    let first = sent();
    assert_eq!(first.len(), 1, "the agent works on it for a while");
    sink.learn(of(2, "b."), Box::new(|_| {}));
    sink.results(vec![realised(first[0].sequence, None, 1)]);
    let names: Vec<_> = sent().iter().map(|out| out.mapping.name.clone()).collect();
    assert_eq!(names.iter().filter(|name| name.as_str() == "b.").count(), 1);
    assert_eq!(names.len(), 2, "and the next large one");
}

/// Many clients ask for one large name at once, and the agent gets it once.
#[test]
fn an_answer_whose_pair_is_leased_while_it_waits_is_released_and_not_sent() {
    let (sink, seen) = (sink(), Seen::default());
    sink.agent_up(epoch(1), None);
    sink.rules_applied(epoch(1), 1);
    for _ in 0..150 {
        let seen = Arc::clone(&seen);
        let done = Box::new(move |realised| seen.lock().push(realised));
        assert_eq!(sink.learn(large(1, "big."), done), Release::Held);
    }
    let sent = sink.next_batch(BootTime::now()).mappings;
    assert_eq!(sent.len(), 1);
    sink.results(vec![realised(sent[0].sequence, Some(2 * 3600), 1)]);
    assert!(sink.next_batch(BootTime::now()).mappings.is_empty());
    assert_eq!(*seen.lock(), vec![Realised::Yes; 150]);
}

#[test]
fn replays_of_endpoints_take_turns() {
    let sink = sink();
    for n in 0..5000 {
        sink.learn(of(1, &format!("a{n}.")), Box::new(|_| {}));
    }
    sink.learn(of(2, "b."), Box::new(|_| {}));
    sink.agent_up(epoch(1), None);
    let sent = sink.next_batch(BootTime::now()).mappings;
    let at = sent.iter().position(|out| out.mapping.endpoint.id.0 == 2);
    assert!(at.is_some_and(|at| at < 2), "{at:?}");
}

#[test]
fn a_batch_that_cannot_be_sent_yet_does_not_keep_the_sender_busy() {
    let sink = sink();
    sink.agent_up(epoch(1), None);
    for n in 0..3000 {
        sink.learn(of(1, &format!("a{n}.")), Box::new(|_| {}));
    }
    let woken = || {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        std::pin::pin!(sink.has_work())
            .poll(&mut context)
            .is_ready()
    };
    let mut turns = 0;
    while woken() {
        turns += 1;
        assert!(turns < 100, "it spins");
        sink.next_batch(BootTime::now());
    }
    let next = sink.next_batch(BootTime::now());
    assert!(next.is_empty(), "all that may go is sent");
    assert!(sink.status().queued > 0);
}

/// Names learned for an endpoint while the agent was down, in this process and in the next.
#[test]
fn large_answers_of_one_endpoint_lose_no_name_of_another_while_the_agent_is_down() {
    let dir = tempfile::tempdir().unwrap();
    let (sink, journal) = journalled(dir.path());
    let names: Vec<String> = (0..30).map(|n| format!("b{n}.")).collect();
    for name in &names {
        sink.learn(of(2, name), Box::new(|_| {}));
    }
    // This is more than the journal can hold.
    for n in 0..120 {
        sink.learn(large(1, &format!("a{n}.")), Box::new(|_| {}));
    }
    let count = |sink: &LinkSink| {
        sink.agent_up(epoch(1), None);
        let mut count = std::collections::BTreeSet::new();
        while let sent = sink.next_batch(BootTime::now()).mappings
            && !sent.is_empty()
        {
            let other = sent
                .into_iter()
                .filter(|out| out.mapping.endpoint.id.0 == 2);
            count.extend(other.map(|out| out.mapping.name.as_str().to_owned()));
        }
        count.len()
    };
    assert_eq!(count(&sink), 30);

    until(
        "the journal is full",
        || journal.status().dropped,
        |seen| *seen > 0,
    );
    let killed = tempfile::tempdir().unwrap();
    let path = killed.path().join("killed.journal");
    std::fs::copy(journal.status().path.unwrap(), path).unwrap();
    let (next, journal) = journalled(killed.path());
    until(
        "the file is adopted",
        || journal.stats().adopted_files.get(),
        |seen| *seen == 1,
    );
    until(
        "the sink has the adopted pairs",
        || next.status().kept,
        |seen| *seen >= 30,
    );
    until(
        "the sink has all names",
        || count(&next),
        |seen| *seen == 30,
    );
}

/// An agent that is back gets all pairs that are kept, and one pod's 200,000 pairs come first.
#[test]
fn an_answer_waits_behind_few_of_the_names_that_are_sent_again() {
    let sink = sink();
    for n in 0..6000 {
        sink.learn(of(1, &format!("a{n}.")), Box::new(|_| {}));
    }
    sink.agent_up(epoch(1), None);
    let send_all = || {
        let mut sent = Vec::new();
        while let more = sink.next_batch(BootTime::now()).mappings
            && !more.is_empty()
        {
            sent.extend(more);
        }
        sent
    };
    let mut count = 0;
    while let sent = send_all()
        && !sent.is_empty()
    {
        assert!(sent.len() <= 300, "{} without a result", sent.len());
        count += sent.len();
        let results = sent.iter().map(|out| realised(out.sequence, None, 1));
        sink.results(results.collect());
    }
    assert_eq!(count, 6000);
    assert_eq!(sink.status().in_flight, 0);
}
