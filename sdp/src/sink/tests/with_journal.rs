//! Mappings that a sink writes to its journal, and mappings that it adopts.

use polling::until;

use super::*;

/// A sink with a journal in the directory, and the journal.
pub(super) fn journalled(dir: &std::path::Path) -> (Arc<LinkSink>, Arc<crate::journal::Journal>) {
    let journal = Arc::new(crate::journal::Journal::default());
    let sink = LinkSink::with_journal(0, Duration::from_secs(3600), Arc::clone(&journal));
    let sink = Arc::new(sink);
    let adopts = Arc::clone(&sink);
    journal.start(dir, "one", move |written| adopts.adopt(&written));
    until(
        "the journal works",
        || journal.status(),
        |_| journal.may_wait(BootTime::now(), Duration::from_secs(9)),
    );
    (sink, journal)
}

#[test]
fn without_an_agent_a_new_pair_is_written_before_its_answer_is_sent() {
    let dir = tempfile::tempdir().unwrap();
    let (sink, journal) = journalled(dir.path());
    let seen = Seen::default();
    assert_eq!(learn(&sink, "a.", &seen), Release::Held);
    until(
        "the answer is released",
        || seen.lock().clone(),
        |seen| *seen == [Realised::AgentAway],
    );
    assert_eq!(journal.status().pairs, 1);
    let header_only = std::fs::metadata(journal.status().path.unwrap()).unwrap();
    assert!(header_only.len() > 60, "it is in the file");
    assert_eq!(
        learn(&sink, "a.", &seen),
        Release::AgentAway,
        "known on disk: no wait"
    );
    assert_eq!(sink.stats().agent_away.get(), 2);

    sink.agent_up(epoch(1), None);
    let batch = sink.next_batch(BootTime::now());
    let sequence = batch.mappings[0].sequence;
    sink.results(vec![
        realised(sequence, None, 1),
        durable(sequence, None, 1),
    ]);
    until(
        "the durable pair leaves the journal",
        || journal.status().pairs,
        |seen| *seen == 0,
    );
}

#[test]
fn a_journal_of_another_process_is_sent() {
    let dir = tempfile::tempdir().unwrap();
    let (first, journal) = journalled(dir.path());
    let seen = Seen::default();
    assert_eq!(learn(&first, "a.", &seen), Release::Held);
    until(
        "the pair is written",
        || seen.lock().len(),
        |seen| *seen == 1,
    );
    std::fs::copy(
        journal.status().path.unwrap(),
        dir.path().join("killed.journal"),
    )
    .unwrap();
    let other = tempfile::tempdir().unwrap();
    std::fs::rename(
        dir.path().join("killed.journal"),
        other.path().join("killed.journal"),
    )
    .unwrap();
    let (sink, journal) = journalled(other.path());
    until(
        "the pair is adopted",
        || sink.status().kept,
        |seen| *seen == 1,
    );
    assert_eq!(journal.status().adopted_pairs, 1);
    sink.agent_up(epoch(1), None);
    let batch = sink.next_batch(BootTime::now());
    assert_eq!(batch.mappings.len(), 1);
    assert!(batch.mappings[0].mapping.replayed);
}

#[test]
fn a_revocation_reaches_the_journal() {
    let dir = tempfile::tempdir().unwrap();
    let (sink, journal) = journalled(dir.path());
    let seen = Seen::default();
    sink.agent_up(epoch(1), None);
    assert_eq!(learn(&sink, "a.", &seen), Release::Held);
    let sequence = sink.next_batch(BootTime::now()).mappings[0].sequence;
    sink.results(vec![realised(sequence, Some(90), 1)]);
    until(
        "the pair is written",
        || journal.status().pairs,
        |seen| *seen == 1,
    );
    sink.revoke(1, Some(&dns_policy::name::Fqdn::normalise("a.")), &[]);
    until(
        "the pair leaves the journal",
        || journal.status().pairs,
        |seen| *seen == 0,
    );
}
