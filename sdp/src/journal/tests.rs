//! Journals of several processes in one directory. A killed process is represented by a copy of its
//! file, which no process has locked.

use std::{fs, sync::mpsc, time::Duration};

use polling::until;

use super::{ledger::Ledger, *};
use crate::mapping::pairs::{AgentAck, tests::mapping};

const BOOT: &str = "0d3f1c9e-53a1-4c0e-9d52-0123456789ab";

/// A journal, and the mappings that it adopted.
struct Process {
    journal: Arc<Journal>,
    adopted: mpsc::Receiver<Written>,
}

fn start(dir: &Path, name: &str) -> Process {
    let journal = Arc::new(Journal::default());
    let (sender, adopted) = mpsc::channel();
    let adopt = move |written: Vec<Written>| {
        for one in written {
            let _gone = sender.send(one);
        }
    };
    journal.start_in_boot(dir.to_owned(), name, BOOT.to_owned(), Box::new(adopt));
    Process { journal, adopted }
}

fn learned(name: &str) -> Note {
    let mut mapping = mapping(name, &[1], 600, 0);
    mapping.seen_at = BootTime::now();
    Note::Learned(mapping, 600)
}

/// An acknowledgement that holds for longer than any of these tests runs.
fn durable() -> AgentAck {
    AgentAck {
        seen: BootTime::now(),
        until: BootTime::now().plus_secs(600),
    }
}

fn key(note: &Note) -> crate::mapping::pairs::Key {
    match note {
        Note::Learned(mapping, _) => crate::mapping::pairs::Key::of(mapping),
        _ => panic!("{note:?}"),
    }
}

fn addresses() -> Vec<std::net::IpAddr> {
    vec![[192, 0, 2, 1].into()]
}

impl Process {
    /// Writes a note, and waits until the file has it.
    fn write(&self, note: Note) {
        until(
            "the journal works",
            || self.journal.status(),
            |_| {
                self.journal
                    .may_wait(BootTime::now(), Duration::from_secs(9))
            },
        );
        let (sender, done) = mpsc::channel();
        let waits = self.journal.note_first(
            key(&note).asked.endpoint,
            note,
            Box::new(move |_| sender.send(()).unwrap()),
        );
        assert!(waits.is_ok());
        done.recv_timeout(Duration::from_secs(20)).unwrap();
    }

    fn file(&self) -> PathBuf {
        self.journal.status().path.unwrap().into()
    }

    /// The name of the next adopted mapping.
    fn adopts(&self) -> String {
        let (mapping, lasts) = self.adopted.recv_timeout(Duration::from_secs(20)).unwrap();
        assert!(mapping.replayed);
        assert_eq!(lasts, 600);
        mapping.name.as_str().to_owned()
    }
}

fn files(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[tokio::test]
async fn the_journal_of_a_killed_process_is_adopted_and_written_first() {
    let dir = tempfile::tempdir().unwrap();
    let one = start(dir.path(), "one");
    one.write(learned("a."));
    let killed = dir.path().join("killed.9.journal");
    fs::copy(one.file(), dir.path().join("copy")).unwrap();
    fs::rename(dir.path().join("copy"), &killed).unwrap();
    assert_eq!(one.adopts(), "a.", "a live process takes it up");
    until(
        "the adopted file is removed",
        || files(dir.path()),
        |_| !killed.exists(),
    );
    assert_eq!(one.journal.status().adopted_pairs, 1);

    let other = start(dir.path(), "two");
    until(
        "the other has a file",
        || other.journal.status(),
        |status| status.path.is_some(),
    );
    one.journal.close().await;
    assert_eq!(other.adopts(), "a.", "what a process left behind in order");
    until(
        "the file of the first is removed",
        || files(dir.path()),
        |_| !one.file().exists(),
    );
    let text = fs::read(other.file()).unwrap();
    let (ledger, torn) = Ledger::read(&text, BOOT, 100).unwrap();
    assert!(!torn);
    assert_eq!(ledger.len(), 1, "the next one would find it again");
}

#[tokio::test]
async fn half_a_record_loses_no_other_record() {
    let dir = tempfile::tempdir().unwrap();
    let one = start(dir.path(), "one");
    one.write(learned("a."));
    one.write(learned("b."));
    let bytes = fs::read(one.file()).unwrap();
    one.journal.close().await;
    fs::remove_file(one.file()).unwrap();
    fs::write(dir.path().join("k.journal"), &bytes[..bytes.len() - 3]).unwrap();
    let two = start(dir.path(), "two");
    assert_eq!(two.adopts(), "a.");
    until(
        "the torn record is counted",
        || two.journal.stats().torn.get(),
        |seen| *seen == 1,
    );
    two.journal.close().await;
    assert!(two.adopted.try_recv().is_err());
}

#[tokio::test]
async fn a_journal_in_use_is_not_adopted_and_an_empty_one_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (start(dir.path(), "one"), start(dir.path(), "two"));
    one.write(learned("a."));
    two.write(learned("b."));
    let note = learned("a.");
    one.journal
        .note(Note::Settled(key(&note), addresses(), durable()));
    until(
        "the pair is released",
        || one.journal.status().pairs,
        |seen| *seen == 0,
    );
    until(
        "the file is cleared",
        || fs::metadata(one.file()).unwrap().len(),
        |seen| *seen == u64::try_from(record::HEADER).unwrap(),
    );
    one.journal.close().await;
    assert_eq!(files(dir.path()).len(), 1, "an empty journal is removed");
    two.journal.close().await;
    assert_eq!(files(dir.path()).len(), 1, "one that is not stays");
    assert!(one.adopted.try_recv().is_err() && two.adopted.try_recv().is_err());
}

#[tokio::test]
async fn files_of_other_kinds_are_distinguished() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let other_boot = "ffffffff-53a1-4c0e-9d52-0123456789ab";
    fs::write(path("old.journal"), record::header(other_boot)).unwrap();
    fs::write(path("bad.journal"), b"no journal").unwrap();
    fs::write(path("half.new"), b"").unwrap();
    fs::write(path("note.txt"), b"not ours").unwrap();
    let mut newer = record::header(BOOT);
    newer[8] = 7;
    fs::write(path("newer.journal"), &newer).unwrap();
    let one = start(dir.path(), "one");
    let status = until(
        "the files are read",
        || one.journal.status(),
        |status| !status.refused.is_empty(),
    );
    assert!(status.refused[0].contains("newer.journal") && status.refused[0].contains("version 7"));
    assert!(status.text().contains("newer.journal"));
    until(
        "the other files are adopted or renamed",
        || files(dir.path()),
        |left| {
            left.len() == 4
                && ["bad.journal.corrupt", "newer.journal", "note.txt"]
                    .iter()
                    .all(|name| left.contains(&(*name).to_owned()))
        },
    );
    assert_eq!(one.journal.stats().damaged.get(), 1);
    assert_eq!(fs::read(path("newer.journal")).unwrap(), newer);
    one.journal.close().await;
}

#[tokio::test]
async fn a_directory_that_cannot_be_written_leaves_it_in_memory() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, b"").unwrap();
    let one = start(&file.join("below"), "one");
    until(
        "the failed write is counted",
        || one.journal.status().errors,
        |seen| *seen > 0,
    );
    one.journal.note(learned("a."));
    until(
        "the pair is counted",
        || one.journal.status().pairs,
        |seen| *seen == 1,
    );
    assert!(
        !one.journal
            .may_wait(BootTime::now(), Duration::from_secs(9))
    );
    let status = one.journal.status();
    let why = status.memory_only.clone().unwrap();
    assert!(why.contains("file/below"), "{why}");
    assert!(status.text().contains("memory only"), "{status:?}");
    fs::remove_file(&file).unwrap();
    until(
        "the write is tried again",
        || one.journal.status(),
        |status| status.memory_only.is_none() && status.path.is_some(),
    );
    let bytes = fs::read(one.file()).unwrap();
    assert_eq!(Ledger::read(&bytes, BOOT, 9).unwrap().0.len(), 1);
    one.journal.close().await;
}

#[tokio::test]
async fn the_file_stays_small_and_is_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let one = start(dir.path(), "one");
    one.write(learned("kept."));
    for n in 0..20_000 {
        let note = learned(&format!("name-number-{}.test.", n % 500));
        let settled = Note::Settled(key(&note), addresses(), durable());
        one.journal.note(note);
        one.journal.note(settled);
        if n % 1000 == 0 {
            one.write(learned("kept."));
        }
    }
    one.write(learned("kept."));
    assert_eq!(one.journal.status().pairs, 1);
    assert_eq!(one.journal.status().dropped, 0);
    let length = fs::metadata(one.file()).unwrap().len();
    assert!(length < 600 << 10, "{length} bytes");
    fs::remove_file(one.file()).unwrap();
    until(
        "the file is written again",
        || files(dir.path()),
        |_| one.file().exists(),
    );
    let bytes = fs::read(one.file()).unwrap();
    assert_eq!(Ledger::read(&bytes, BOOT, 9).unwrap().0.len(), 1);
    one.journal.close().await;
}

/// The disk stands still while one endpoint asks for more and more names.
#[test]
fn an_endpoint_that_fills_the_queue_keeps_no_other_from_the_journal() {
    let journal = Journal::default();
    journal.attend();
    let of = |endpoint: u16, name: &str| {
        let Note::Learned(mut mapping, lasts) = learned(name) else {
            unreachable!()
        };
        mapping.endpoint.id = shared_maps::EndpointId(endpoint);
        (mapping.endpoint, Note::Learned(mapping, lasts))
    };
    for n in 0..2 * QUEUE {
        let (endpoint, note) = of(1, &format!("a{n}."));
        let _released = journal.note_first(endpoint, note, Box::new(|_| {}));
    }
    assert!(journal.stats().skipped.get() > 0);
    let (endpoint, note) = of(2, "b.");
    assert!(journal.note_first(endpoint, note, Box::new(|_| {})).is_ok());
    assert!(journal.wait_behind(endpoint, Box::new(|_| {})).is_ok());
    let (notes, waiting) = journal.take();
    assert!(notes.len() <= QUEUE && waiting.len() <= WAITING);
    assert!(
        notes
            .iter()
            .any(|note| key(note).asked.endpoint == endpoint)
    );
    journal.written();
    assert!(
        journal.wait_behind(endpoint, Box::new(|_| {})).is_err(),
        "all is written"
    );
}
