//! The file of endpoint identities, and the identities that were added to it.
//!
//! A number must be on disk before a map uses it, and a large cluster has thousands of numbers. So a
//! new identity is a line that is appended to a second file, and the first file is written whole
//! only when the second one has grown as large. This part owns the choice between the two, and keeps
//! one invariant: the files have each identity that was given to [`EndpointCheckpoint::add`] before
//! the last write, unless [`EndpointCheckpoint::undo`] says that a write failed.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};
use shared_maps::IdentityId;

use super::checkpoint::{self, CheckpointError, Identities};
use crate::{checksum::Sum, labels::LabelSet};

/// The first file is not written again before there are this many additions.
const MIN_ADDED: usize = 64;

/// A write of endpoint identities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndpointWrite {
    /// The whole text of `endpoint_identities.json`.
    Whole(String),
    /// `endpoint_identities.added` with its first line, which names the file that it adds to.
    FirstAdded(String),
    /// Further lines to append to `endpoint_identities.added`.
    Added(String),
}

/// Chooses to which of the two files the next new identities are written.
#[derive(Debug, Default)]
pub struct EndpointCheckpoint {
    new: Vec<(IdentityId, LabelSet)>,
    is_due: bool,
    /// What this run has written; `None`: the next write is a whole one.
    written: Option<Written>,
}

#[derive(Debug)]
struct Written {
    sum: String,
    identities: usize,
    added: usize,
}

/// First line of the second file.
#[derive(Serialize, Deserialize)]
struct Header {
    /// Checksum of the first file. Additions to another file do not count.
    adds_to: String,
}

impl EndpointCheckpoint {
    /// Notes an identity that has to be on disk.
    pub fn add(&mut self, id: IdentityId, labels: &LabelSet) {
        self.new.push((id, labels.clone()));
        self.is_due = true;
    }

    /// Notes that a write failed: the next one is whole.
    pub fn undo(&mut self) {
        self.written = None;
        self.is_due = true;
    }

    /// Takes the write that is due. `kept` gives every identity that has to be on disk.
    pub fn take(&mut self, kept: impl FnOnce() -> Identities) -> Option<EndpointWrite> {
        if !std::mem::take(&mut self.is_due) {
            return None;
        }
        let new = std::mem::take(&mut self.new);
        match &mut self.written {
            Some(written) if written.has_room(new.len()) => Some(written.add(&new)),
            _ => {
                let kept = kept();
                let text = checkpoint::render_endpoints(&kept);
                self.written = Some(Written {
                    sum: Sum::of(text.as_bytes()).hex(),
                    identities: kept.len(),
                    added: 0,
                });
                Some(EndpointWrite::Whole(text))
            }
        }
    }
}

impl Written {
    fn has_room(&self, new: usize) -> bool {
        self.added + new <= self.identities.max(MIN_ADDED)
    }

    fn add(&mut self, new: &[(IdentityId, LabelSet)]) -> EndpointWrite {
        let lines = new.iter().map(|(id, labels)| checkpoint::line(*id, labels));
        let lines: String = lines.collect();
        let is_first = self.added == 0;
        self.added += new.len();
        if !is_first {
            return EndpointWrite::Added(lines);
        }
        let adds_to = self.sum.clone();
        let header = serde_json::to_string(&Header { adds_to }).expect("a string renders as JSON");
        EndpointWrite::FirstAdded(format!("{header}\n{lines}"))
    }
}

/// Reads `endpoint_identities.json` and `endpoint_identities.added`. The later one of two lines
/// about one number, or about one label set, counts. A last line without line break was never used.
///
/// # Errors Damage or a later version of the first file. A damaged second file counts up to the
/// damage: a disk that lost power during a write leaves such a file.
pub fn parse(whole: &str, added: Option<&str>) -> Result<Identities, CheckpointError> {
    let identities = checkpoint::parse_endpoints(whole)?;
    let Some((header, mut lines)) = added.and_then(|added| added.split_once('\n')) else {
        return Ok(identities);
    };
    match serde_json::from_str::<Header>(header) {
        Ok(header) if header.adds_to == Sum::of(whole.as_bytes()).hex() => {}
        _ => return Ok(identities),
    }
    let by_labels = identities.iter().map(|(id, labels)| (labels.clone(), *id));
    let mut by_labels: HashMap<LabelSet, IdentityId> = by_labels.collect();
    let mut by_number: BTreeMap<IdentityId, LabelSet> = identities.into_iter().collect();
    while let Some((line, rest)) = lines.split_once('\n') {
        lines = rest;
        let (id, labels) = match checkpoint::parse_line(line) {
            Ok(Some(identity)) => identity,
            Ok(None) => continue,
            Err(CheckpointError::Json(error)) => {
                tracing::warn!(
                    %error,
                    "endpoint_identities.added is damaged; identities after the damage get new numbers"
                );
                break;
            }
            Err(error) => return Err(error),
        };
        if let Some(before) = by_labels.insert(labels.clone(), id)
            && before != id
        {
            by_number.remove(&before);
        }
        if let Some(before) = by_number.insert(id, labels.clone())
            && before != labels
        {
            by_labels.remove(&before);
        }
    }
    Ok(by_number.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(id: u32, app: &str) -> (IdentityId, LabelSet) {
        let labels = LabelSet::parse(&[&format!("k8s:app={app}")]).unwrap();
        (IdentityId(id), labels)
    }

    /// The two files as a disk has them.
    #[derive(Default)]
    struct Disk {
        whole: String,
        added: Option<String>,
        whole_writes: usize,
    }

    impl Disk {
        fn write(&mut self, write: EndpointWrite) {
            match write {
                EndpointWrite::Whole(text) => {
                    self.whole = text;
                    self.whole_writes += 1;
                }
                EndpointWrite::FirstAdded(text) => self.added = Some(text),
                EndpointWrite::Added(text) => self.added.as_mut().unwrap().push_str(&text),
            }
        }

        fn read(&self) -> Identities {
            parse(&self.whole, self.added.as_deref()).unwrap()
        }
    }

    fn put(
        checkpoint: &mut EndpointCheckpoint,
        kept: &mut Identities,
        id: u32,
        app: &str,
    ) -> EndpointWrite {
        let (id, labels) = identity(id, app);
        checkpoint.add(id, &labels);
        kept.retain(|(other, _)| *other != id);
        kept.push((id, labels));
        kept.sort();
        checkpoint.take(|| kept.clone()).unwrap()
    }

    #[test]
    fn a_thousand_new_identities_are_on_disk_after_each_write_and_few_writes_are_whole() {
        let (mut checkpoint, mut kept) = (EndpointCheckpoint::default(), Vec::new());
        let mut disk = Disk::default();
        for n in 0..1000 {
            let write = put(&mut checkpoint, &mut kept, 256 + n, &format!("app-{n}"));
            disk.write(write);
            assert_eq!(disk.read(), kept);
        }
        assert!(disk.whole_writes < 10, "{}", disk.whole_writes);
        assert_eq!(checkpoint.take(|| unreachable!()), None);
    }

    #[test]
    fn a_number_and_a_label_set_have_the_meaning_of_their_last_line() {
        let (mut checkpoint, mut kept) = (EndpointCheckpoint::default(), Vec::new());
        let mut disk = Disk::default();
        for (id, app) in [(256, "a"), (257, "b"), (258, "c"), (256, "d"), (259, "b")] {
            let write = put(&mut checkpoint, &mut kept, id, app);
            disk.write(write);
        }
        let wanted = [identity(256, "d"), identity(258, "c"), identity(259, "b")];
        assert_eq!(disk.read(), wanted);
    }

    #[test]
    fn a_failed_write_is_followed_by_a_whole_one_and_the_lines_before_it_do_not_count() {
        let (mut checkpoint, mut kept) = (EndpointCheckpoint::default(), Vec::new());
        let mut disk = Disk::default();
        for id in [256, 257] {
            let write = put(&mut checkpoint, &mut kept, id, &format!("app-{id}"));
            disk.write(write);
        }
        let _failed = put(&mut checkpoint, &mut kept, 258, "other");
        checkpoint.undo();
        kept.retain(|(id, _)| *id != IdentityId(257));
        let write = checkpoint.take(|| kept.clone()).unwrap();
        assert!(matches!(write, EndpointWrite::Whole(_)), "{write:?}");
        disk.write(write);
        assert_eq!(disk.read(), kept);
    }

    #[test]
    fn a_torn_or_damaged_line_ends_the_additions() {
        let (mut checkpoint, mut kept) = (EndpointCheckpoint::default(), Vec::new());
        let mut disk = Disk::default();
        for id in [256, 257, 258] {
            let write = put(&mut checkpoint, &mut kept, id, &format!("app-{id}"));
            disk.write(write);
        }
        let added = disk.added.clone().unwrap();
        let last = added.trim_end().rfind('\n').unwrap() + 1;
        for end in last..added.len() {
            disk.added = added.get(..end).map(str::to_owned);
            assert_eq!(disk.read(), kept[..2], "{end}");
        }
        disk.added = Some(added.replacen("257", "25x", 1));
        assert_eq!(disk.read(), kept[..1]);
        disk.added = Some("\0".repeat(9) + "\n" + &added);
        assert_eq!(disk.read(), kept[..1]);
    }

    #[test]
    fn labels_of_a_later_logic_are_refused() {
        let mut checkpoint = EndpointCheckpoint::default();
        let mut disk = Disk::default();
        for id in [256, 257] {
            disk.write(put(&mut checkpoint, &mut Vec::new(), id, "a"));
        }
        let later = r#"{"id":300,"labels":{},"logic":99}"#;
        disk.added.as_mut().unwrap().push_str(&format!("{later}\n"));
        let error = parse(&disk.whole, disk.added.as_deref()).unwrap_err();
        assert!(matches!(error, CheckpointError::NewerLogic(99)), "{error}");
    }
}
