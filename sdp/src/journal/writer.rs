//! The journal's writer thread: no other thread waits for the journal's disk.

use std::{io, path::PathBuf, time::Duration};

use dns_policy::{boot_time::BootTime, mapping::Realised};

use super::{
    Journal,
    file::{Orphan, OwnFile},
    ledger::{Ledger, Note, Written},
    record::HeaderError,
};

/// Maximum number of pairs in the journal of one proxy. Above it, the endpoint with the most pairs
/// loses the pairs that end soonest.
pub(crate) const PAIRS: usize = 100_000;
/// Maximum length of a file without superfluous records, in bytes.
const MAX_BYTES: u64 = 64 << 20;
/// Below this length, in bytes, a file is not rewritten.
const SMALL: u64 = 256 << 10;
/// Interval at which the thread looks for files without a writer.
pub(super) const SCAN_INTERVAL: Duration = Duration::from_secs(1);
/// Interval at which expired pairs are removed, seconds.
const EXPIRE: u64 = 10;
/// Pause before another attempt after a failed write, seconds.
const RETRY: u64 = 2;
/// Number of mappings that are given to the sink at once.
const GIVEN: usize = 256;

/// Receives the mappings from journals of other processes.
pub(super) type Adopt = Box<dyn Fn(Vec<Written>) + Send>;

/// State of the writer thread.
pub(super) struct Writer {
    pub(super) dir: PathBuf,
    pub(super) name: String,
    pub(super) boot_id: String,
    pub(super) adopt: Adopt,
    ledger: Ledger,
    file: Option<OwnFile>,
    /// Whether the file lacks records. The records that it has are valid.
    behind: bool,
    /// Adopted files whose content is not in this process's own file yet.
    taken: Vec<Orphan>,
    rewrite_at: u64,
    retry_at: BootTime,
    expire_at: BootTime,
}

impl Writer {
    pub(super) fn new(dir: PathBuf, name: String, boot_id: String, adopt: Adopt) -> Self {
        Self {
            dir,
            name,
            boot_id,
            adopt,
            ledger: Ledger::new(PAIRS),
            file: None,
            behind: true,
            taken: Vec::new(),
            rewrite_at: SMALL,
            retry_at: BootTime::START,
            expire_at: BootTime::START,
        }
    }

    /// Works until the journal is closed.
    pub(super) fn run(mut self, journal: &Journal) {
        loop {
            self.look_after(journal, BootTime::now());
            let closing = journal.wait(SCAN_INTERVAL);
            let (notes, waiting) = journal.take();
            self.write(journal, &notes, BootTime::now());
            journal.written();
            for done in waiting {
                done(Realised::AgentAway);
            }
            if closing {
                break;
            }
        }
        self.close(journal);
    }

    /// Puts notes into the file, and publishes the result before any answer is released.
    fn write(&mut self, journal: &Journal, notes: &[Note], now: BootTime) {
        let mut records = Vec::new();
        for note in notes {
            self.ledger.take(note, &mut records);
        }
        if records.is_empty() && !self.ledger.is_empty() {
            self.report(journal);
            return;
        }
        let outcome = match &mut self.file {
            None => Ok(()),
            Some(file) if self.ledger.is_empty() => file.clear(),
            Some(_) if self.behind => Ok(()),
            Some(file) => file.append(&records),
        };
        self.note_outcome(journal, outcome, now);
        if self.ledger.is_empty() {
            // The agent has made all pairs durable.
            self.let_go_of_taken(journal);
        }
        let len = self.file.as_ref().map_or(0, OwnFile::len);
        if len > self.rewrite_at && !self.behind {
            let outcome = self.rewrite(now);
            self.note_outcome(journal, outcome, now);
        }
        self.report(journal);
    }

    /// Rewrites the file without pairs that are no longer needed.
    fn rewrite(&mut self, now: BootTime) -> io::Result<()> {
        self.ledger.expire(now);
        let mut image = self.ledger.image(&self.boot_id, now);
        while u64::try_from(image.len()).unwrap_or(u64::MAX) > MAX_BYTES && !self.ledger.is_empty()
        {
            self.ledger.shrink();
            image = self.ledger.image(&self.boot_id, now);
        }
        match &mut self.file {
            Some(file) => file.replace(&image)?,
            None => self.file = Some(OwnFile::create(&self.dir, &self.name, &image)?),
        }
        let len = self.file.as_ref().map_or(0, OwnFile::len);
        self.rewrite_at = SMALL.max(len.saturating_mul(2));
        Ok(())
    }

    /// After an error the pairs are in memory only until [`RETRY`] has passed.
    fn note_outcome(&mut self, journal: &Journal, outcome: io::Result<()>, now: BootTime) {
        let Err(error) = outcome else { return };
        self.behind = true;
        self.retry_at = now.plus_secs(RETRY);
        let own = self.file.as_ref().map(OwnFile::path);
        let place = own.unwrap_or(&self.dir).display().to_string();
        journal.fails(&place, &error);
    }

    /// Removes expired pairs, writes the file again if that is due, and adopts files whose writer
    /// has exited.
    fn look_after(&mut self, journal: &Journal, now: BootTime) {
        if now >= self.expire_at {
            self.expire_at = now.plus_secs(EXPIRE);
            self.ledger.expire(now);
        }
        if self.file.as_ref().is_some_and(OwnFile::is_lost) {
            tracing::warn!("the journal's file was removed; writing it again");
            self.file = None;
            self.behind = true;
            self.retry_at = now;
        }
        if self.behind && now >= self.retry_at {
            match self.rewrite(now) {
                Ok(()) => {
                    self.behind = false;
                    journal.works();
                    self.let_go_of_taken(journal);
                }
                Err(error) => self.note_outcome(journal, Err(error), now),
            }
        }
        self.take_up(journal, now);
        self.report(journal);
    }

    /// Adopts files whose writer has exited.
    fn take_up(&mut self, journal: &Journal, now: BootTime) {
        let own = self.file.as_ref().map(|file| file.path().to_owned());
        let Ok(orphans) = Orphan::find(&self.dir, own.as_deref()) else {
            return;
        };
        let mut refused = Vec::new();
        for orphan in orphans {
            let path = orphan.path().display().to_string();
            let read = orphan.bytes().map(|bytes| {
                let read = Ledger::read(&bytes, &self.boot_id, PAIRS);
                read.map(|(ledger, torn)| (ledger.mappings(now), torn))
            });
            match read {
                Ok(Ok((mappings, torn))) => {
                    tracing::info!(
                        path,
                        mappings = mappings.len(),
                        torn,
                        "adopted the journal of another proxy"
                    );
                    journal.stats.adopted_files.add(1);
                    journal.stats.torn.add(u64::from(torn));
                    self.adopt(journal, orphan, mappings, now);
                }
                Ok(Err(HeaderError::OtherBoot)) => {
                    tracing::info!(path, "removed a journal of an earlier boot");
                    self.note_outcome_of(journal, orphan.remove());
                }
                Ok(Err(error @ HeaderError::Newer(_))) => refused.push(format!("{path}: {error}")),
                Ok(Err(error @ HeaderError::Damaged)) => {
                    tracing::error!(path, %error, "moved a damaged journal aside");
                    journal.stats.damaged.add(1);
                    self.note_outcome_of(journal, orphan.set_aside());
                }
                Err(error) => {
                    self.note_outcome_of(journal, Err(error));
                }
            }
        }
        journal.refused(&refused);
    }

    /// Writes the mappings into this process's own file, removes the other file, and then sends them to the agent.
    fn adopt(&mut self, journal: &Journal, orphan: Orphan, mappings: Vec<Written>, now: BootTime) {
        let pairs: usize = mappings.iter().map(|(m, _)| m.addresses.len()).sum();
        journal
            .stats
            .adopted_pairs
            .add(u64::try_from(pairs).unwrap_or(u64::MAX));
        let mut records = Vec::new();
        for written in &mappings {
            self.ledger
                .take(&Note::Learned(written.0.clone(), written.1), &mut records);
        }
        if !self.behind
            && let Some(file) = &mut self.file
        {
            let outcome = file.append(&records);
            self.note_outcome(journal, outcome, now);
        }
        if self.behind {
            self.taken.push(orphan);
        } else {
            self.note_outcome_of(journal, orphan.remove());
        }
        let mut rest = mappings.into_iter();
        loop {
            let some: Vec<_> = rest.by_ref().take(GIVEN).collect();
            if some.is_empty() {
                return;
            }
            (self.adopt)(some);
        }
    }

    fn let_go_of_taken(&mut self, journal: &Journal) {
        for orphan in std::mem::take(&mut self.taken) {
            self.note_outcome_of(journal, orphan.remove());
        }
    }

    fn note_outcome_of(&self, journal: &Journal, outcome: io::Result<()>) {
        if let Err(error) = outcome {
            journal.stats.errors.add(1);
            tracing::warn!(%error, "cannot adopt the journal of another proxy");
        }
    }

    fn report(&self, journal: &Journal) {
        journal.report(
            self.file.as_ref().map(|file| (file.path(), file.len())),
            self.ledger.len(),
            self.ledger.dropped(),
        );
    }

    /// Unlocks the file so that another proxy can adopt it; removes it if the agent has all its pairs.
    fn close(mut self, journal: &Journal) {
        self.report(journal);
        let left = self.ledger.len();
        if let Some(file) = self.file.take() {
            if left == 0 {
                self.note_outcome_of(journal, file.remove());
            } else {
                let path = file.path().display();
                tracing::info!(%path, pairs = left, "the journal remains for other proxies to adopt");
            }
        }
    }
}
