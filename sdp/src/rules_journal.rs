//! The last rules from a Cilium agent, in a file for a proxy that starts while no agent is there.
//!
//! Cilium writes `ep_config.json` only at the next DNS answer, so the file can be older than the
//! policy. The rules from the live stream are newer than such a file until the stream ends. The
//! modification time of the journal's file shows that moment, because a proxy with a stream keeps
//! it at the present time. A file that the agent wrote later is newer.
//!
//! All proxies of a node share one file, because their streams have the same content.

mod image;

use std::{
    collections::BTreeMap,
    fs::{self, OpenOptions},
    io::{self, Read as _, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    time::{Duration, Instant, SystemTime},
};

use dns_policy::{rule::RulesOf, wall_time};
use ipnet::IpNet;
use parking_lot::Mutex;
use shared_maps::{EndpointId, IdentityId, user::boot_id};

pub use self::image::ImageError;
use crate::{journal::directory, kept_rules::KeptRules, maps::instances::Instance, regular_file};

/// Name of the file in the journal's directory.
pub(crate) const FILE_NAME: &str = "cilium-rules";
/// Maximum length of a file, in bytes. A longer file is neither written nor read.
const LARGEST: usize = 64 << 20;
/// Maximum number of server prefixes that are written.
pub(crate) const MOST_PREFIXES: usize = 16_384;
/// How often the file's time is set while the stream lives.
const TOUCHED_EVERY: Duration = Duration::from_secs(2);

/// The rules of one endpoint with their instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Instance of the endpoint for which the agent made the rules.
    pub instance: Instance,
    pub rules: RulesOf,
}

/// Rules that the file contains, with the prefixes of their servers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Content {
    /// Rules of each endpoint, with their instance.
    pub entries: BTreeMap<EndpointId, Entry>,
    /// Prefixes of the servers in these rules.
    pub prefixes: BTreeMap<IpNet, IdentityId>,
}

/// State of the rules journal, for `status`.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct RulesJournalStatus {
    /// Path of the file; `None` without a Cilium agent or a directory.
    pub path: Option<String>,
    /// Number of endpoints with rules in the file.
    pub endpoints: usize,
    /// Why the file is not written; `None` if it is.
    pub problem: Option<String>,
}

/// The hand-over to the thread that writes the file.
#[derive(Debug, Default)]
pub struct RulesJournal {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    paths: Option<JournalPaths>,
    content: Content,
    /// Whether the file lacks the present content.
    dirty: bool,
    /// Whether there is a file of this boot, whose time can be set.
    stored: bool,
    /// Whether a thread writes the file.
    busy: bool,
    /// Whether the stream is open and has sent the rules of the content.
    live: bool,
    touched: Option<Instant>,
    problem: Option<String>,
}

#[derive(Clone, Debug)]
struct JournalPaths {
    path: PathBuf,
    temporary: PathBuf,
    boot_id: String,
}

/// Something to do with the file, off the query path.
#[derive(Debug)]
pub struct Work {
    paths: JournalPaths,
    content: Option<Content>,
}

impl RulesJournal {
    /// Keeps the file in `dir`. `name` is the name of this proxy.
    pub fn open(&self, dir: &Path, name: &str) {
        let mut state = self.state.lock();
        match boot_id() {
            Ok(boot_id) => {
                state.paths = Some(JournalPaths {
                    path: dir.join(FILE_NAME),
                    temporary: dir.join(format!("{FILE_NAME}.{name}.new")),
                    boot_id,
                });
            }
            Err(error) => state.problem = Some(error.to_string()),
        }
    }

    /// Content of the file, and the time until which the stream confirmed it. `None` if there is no
    /// file, or if it is of another boot.
    pub fn read(&self) -> Result<Option<(Content, SystemTime)>, ImageError> {
        let Some(paths) = self.state.lock().paths.clone() else {
            return Ok(None);
        };
        let file = match regular_file::open(&paths.path, OpenOptions::new().read(true)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        if let Some(dir) = paths.path.parent() {
            directory::check(dir)?;
        }
        let until = file.metadata()?.modified()?;
        let mut bytes = Vec::new();
        let limit = u64::try_from(LARGEST).unwrap_or(u64::MAX);
        file.take(limit).read_to_end(&mut bytes)?;
        let content = image::read(&bytes, &paths.boot_id)?;
        Ok(content.map(|content| (content, until)))
    }

    /// Takes the content of the file, which stays there until the agent sends newer rules.
    pub fn adopt(&self, content: Content) {
        let mut state = self.state.lock();
        state.content = content;
        state.stored = true;
    }

    /// Records the rules of a state. Endpoints that are not in `kept` are removed here, too.
    pub fn note(&self, said: &[RulesOf], kept: &KeptRules, prefixes: BTreeMap<IpNet, IdentityId>) {
        let mut state = self.state.lock();
        let before = state.content.clone();
        let entries = &mut state.content.entries;
        entries.retain(|id, _| kept.instance(*id).is_some());
        for rules in said {
            if let Some(instance) = kept.instance(rules.endpoint) {
                let entry = Entry {
                    instance: instance.clone(),
                    rules: rules.clone(),
                };
                entries.insert(rules.endpoint, entry);
            }
        }
        if kept.unconfirmed() == 0 {
            state.content.prefixes.clear();
        }
        // Earlier prefixes stay, because rules that the agent has not sent yet may name their
        // servers.
        state.content.prefixes.extend(prefixes);
        state.dirty |= state.content != before;
        state.live = !said.is_empty();
    }

    /// Notes that the session is over: from now on, a file of the agent may be newer.
    pub fn end_session(&self) {
        self.state.lock().live = false;
    }

    /// The next work, if there is any. Call [`Self::done`] after it.
    pub fn work(&self, now: Instant) -> Option<Work> {
        let mut state = self.state.lock();
        let due = state
            .touched
            .is_none_or(|at| now.saturating_duration_since(at) >= TOUCHED_EVERY);
        // A failed write is tried again only as often as the time of the file is set.
        let write = state.dirty && (due || state.problem.is_none());
        let touch = state.live && state.stored && !state.dirty && due;
        if state.busy || !(write || touch) {
            return None;
        }
        let work = Work {
            paths: state.paths.clone()?,
            content: write.then(|| state.content.clone()),
        };
        state.busy = true;
        state.dirty &= !write;
        state.touched = Some(now);
        Some(work)
    }

    /// Writes the file on another thread, and waits at most `longest` for it.
    pub fn write_now(self: &Arc<Self>, longest: Duration) {
        let Some(work) = self.work(Instant::now()) else {
            return;
        };
        let journal = Arc::clone(self);
        let (written, wait) = mpsc::channel();
        tokio::task::spawn_blocking(move || {
            journal.done(&work, work.run());
            // The caller may have stopped waiting.
            let _ = written.send(());
        });
        let _ = wait.recv_timeout(longest);
    }

    /// Notes the outcome of the work.
    pub fn done(&self, work: &Work, outcome: Result<(), ImageError>) {
        let mut state = self.state.lock();
        state.busy = false;
        let problem = outcome.err().map(|error| error.to_string());
        if problem.is_some() && problem != state.problem {
            tracing::warn!(
                path = %work.paths.path.display(),
                problem,
                "cannot store the agent's rules; a start without the agent will not have them"
            );
        }
        // This includes a failure to set only the time, because the file may have been deleted.
        state.dirty |= problem.is_some();
        state.stored |= problem.is_none();
        state.problem = problem;
    }

    pub fn status(&self) -> RulesJournalStatus {
        let state = self.state.lock();
        RulesJournalStatus {
            path: state.paths.as_ref().map(|p| p.path.display().to_string()),
            endpoints: state.content.entries.len(),
            problem: state.problem.clone(),
        }
    }
}

impl Work {
    /// Writes the whole file, or only sets its time.
    pub fn run(&self) -> Result<(), ImageError> {
        let JournalPaths {
            path,
            temporary,
            boot_id,
        } = &self.paths;
        let Some(content) = &self.content else {
            let file = regular_file::open(path, OpenOptions::new().append(true))?;
            let now = SystemTime::UNIX_EPOCH + Duration::from_nanos(wall_time::now());
            return Ok(file.set_modified(now)?);
        };
        let bytes = image::write(content, boot_id)?;
        if bytes.len() > LARGEST {
            return Err(ImageError::TooLarge(bytes.len()));
        }
        if let Some(dir) = path.parent() {
            directory::make(dir)?;
        }
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let mut file = regular_file::open(temporary, &mut options)?;
        // The file is not synced: after a crash of the machine, a file of the earlier boot is not
        // used anyway.
        let written = file
            .write_all(&bytes)
            .and_then(|()| fs::rename(temporary, path));
        if written.is_err() {
            let _gone_or_not = fs::remove_file(temporary);
        }
        Ok(written?)
    }
}

#[cfg(test)]
mod tests;
