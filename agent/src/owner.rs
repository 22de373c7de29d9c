//! The agent that owns the node: how it came to own it, and what the next owner has to know.

pub(crate) mod file;
pub mod takeovers;

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use dns_policy::{boot_time::BootTime, wall_time};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use self::{
    file::{OwnerFile, Run},
    takeovers::{OwnerEnd, Takeover, Takeovers},
};
use crate::config::Settings;

/// Who owns the node, since when, and whom it took over from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerView {
    /// Version of its program, such as `0.1.0`.
    pub version: String,
    /// When it became the owner, RFC 3339.
    pub since: String,
    /// Takeovers since the boot.
    pub takeovers: u64,
    /// Takeovers of the last ten minutes from owners that died.
    pub recent_takeovers: usize,
    /// The last takeover since the boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_takeover: Option<Takeover>,
}

impl OwnerView {
    pub(crate) fn of(file: &OwnerFile, now: BootTime) -> Self {
        let takeovers = &file.takeovers;
        Self {
            version: file.release.clone(),
            since: file.run.since.clone(),
            takeovers: takeovers.since_boot(OwnerEnd::Stopped)
                + takeovers.since_boot(OwnerEnd::Died),
            recent_takeovers: takeovers.recent(now),
            last_takeover: takeovers.last().cloned(),
        }
    }
}

/// The owner before, by its file. Nothing is known if it wrote none, or its file is lost or damaged.
#[derive(Debug, Default)]
pub(crate) struct Former {
    file: Option<OwnerFile>,
    boot_id: String,
}

impl Former {
    /// Reads what the owner before left in `state_dir`. `boot_id` is that of now; empty = not known.
    pub(crate) fn read(state_dir: &Path, boot_id: &str) -> Self {
        let read = OwnerFile::read(state_dir).unwrap_or_else(|error| {
            tracing::warn!(%error, "how the owner before ended is not known");
            None
        });
        Self {
            file: read,
            boot_id: boot_id.to_owned(),
        }
    }

    /// Its run, if it was of this boot.
    fn run(&self) -> Option<&Run> {
        let run = self.file.as_ref().map(|file| &file.run);
        run.filter(|run| !self.boot_id.is_empty() && run.boot_id == self.boot_id)
    }

    /// Whether it was asked to end, or died.
    pub(crate) fn end(&self) -> OwnerEnd {
        match self.run() {
            Some(run) if run.stopped => OwnerEnd::Stopped,
            _ => OwnerEnd::Died,
        }
    }

    /// Whether it had looked for all endpoints, so that they are where it had them.
    pub(crate) fn has_looked(&self) -> bool {
        self.run().is_some_and(|run| run.looked)
    }

    fn takeovers(&self) -> Takeovers {
        let takeovers = self.file.as_ref().map(|file| file.takeovers.clone());
        takeovers.unwrap_or_default().of_boot(&self.boot_id)
    }

    /// How long a standby waits before it takes over, at most `longest`.
    pub(crate) fn delay(&self, now: BootTime, longest: Duration) -> Duration {
        match self.end() {
            OwnerEnd::Stopped => Duration::ZERO,
            OwnerEnd::Died => self.takeovers().delay(now, longest),
        }
    }

    /// The takeover from this owner.
    fn takeover(&self, now: BootTime) -> Takeover {
        let owned = self
            .run()
            .and_then(|run| now.nanos().checked_sub(run.since_ns));
        Takeover {
            at_ns: now.nanos(),
            at: wall_time::render(wall_time::now()),
            end: self.end(),
            after_seconds: owned.map(|owned| Duration::from_nanos(owned).as_secs()),
            from: self.file.as_ref().map_or_else(
                || "of an unknown version".to_owned(),
                |file| file.release.clone(),
            ),
        }
    }
}

/// The owner's record of itself. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct OwnerRecord(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// `None` = nothing is written.
    state_dir: Option<PathBuf>,
    /// As it was at the begin.
    file: OwnerFile,
    looked: AtomicBool,
    stopped: AtomicBool,
    /// One write at a time.
    writing: Mutex<()>,
    /// Notified when this agent should end.
    step_aside: Notify,
}

impl OwnerRecord {
    /// This process owns the node from now on: as a standby of `former` if `is_takeover`.
    pub(crate) fn begin(
        state_dir: &Path,
        node: &str,
        settings: Settings,
        former: &Former,
        is_takeover: bool,
    ) -> Self {
        let now = BootTime::now();
        let mut takeovers = former.takeovers();
        if is_takeover {
            takeovers.add(former.takeover(now));
        }
        let run = Run {
            boot_id: former.boot_id.clone(),
            since_ns: now.nanos(),
            since: wall_time::render(wall_time::now()),
            looked: false,
            stopped: false,
        };
        let record = Self(Arc::new(Inner {
            state_dir: Some(state_dir.to_owned()),
            file: OwnerFile::new(node, settings, run, takeovers),
            ..Inner::default()
        }));
        record.write();
        record
    }

    /// Notes that this agent has looked for each endpoint. Blocks.
    pub(crate) fn looked(&self) {
        self.0.looked.store(true, Ordering::Release);
        self.write();
    }

    /// Notes that this agent was asked to end. Blocks.
    pub(crate) fn stopped(&self) {
        self.0.stopped.store(true, Ordering::Release);
        self.write();
    }

    /// Makes this agent end, so that its standby takes over.
    pub(crate) fn ask_to_end(&self) {
        self.0.step_aside.notify_one();
    }

    /// Returns when this agent should end.
    pub(crate) async fn asked_to_end(&self) {
        self.0.step_aside.notified().await;
    }

    pub(crate) fn view(&self) -> OwnerView {
        OwnerView::of(&self.0.file, BootTime::now())
    }

    pub(crate) fn takeovers(&self) -> Takeovers {
        self.0.file.takeovers.clone()
    }

    fn write(&self) {
        let Some(state_dir) = &self.0.state_dir else {
            return;
        };
        let _one = self.0.writing.lock();
        let mut file = self.0.file.clone();
        file.run.looked = self.0.looked.load(Ordering::Acquire);
        file.run.stopped = self.0.stopped.load(Ordering::Acquire);
        if let Err(error) = file.write(state_dir) {
            tracing::warn!(
                path = %state_dir.join(file::FILE).display(),
                %error,
                "a standby cannot compare its settings with those of this agent, and looks for all endpoints when it \
                 takes over"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOOT: &str = "boot-a";

    fn begin(dir: &Path, boot: &str, is_takeover: bool) -> OwnerRecord {
        let former = Former::read(dir, boot);
        OwnerRecord::begin(dir, "n1", Settings::default(), &former, is_takeover)
    }

    #[test]
    fn a_takeover_says_how_the_owner_before_ended() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Former::read(dir.path(), BOOT).end(), OwnerEnd::Died);
        let first = begin(dir.path(), BOOT, false);
        assert_eq!(first.view().last_takeover, None);
        // It dies.
        let second = begin(dir.path(), BOOT, true);
        let last = second.view().last_takeover.unwrap();
        assert_eq!(last.end, OwnerEnd::Died);
        assert_eq!(last.after_seconds, Some(0));
        assert_eq!(last.from, env!("CARGO_PKG_VERSION"));
        second.stopped();
        let third = begin(dir.path(), BOOT, true);
        let view = third.view();
        assert_eq!(view.last_takeover.unwrap().end, OwnerEnd::Stopped);
        assert_eq!((view.takeovers, view.recent_takeovers), (2, 1));
        // An agent that starts because no other one owns the node takes nothing over.
        assert_eq!(begin(dir.path(), BOOT, false).view().takeovers, 2);
        let after_boot = begin(dir.path(), "boot-b", true);
        let view = after_boot.view();
        assert_eq!(view.takeovers, 1);
        let last = view.last_takeover.unwrap();
        assert_eq!((last.end, last.after_seconds), (OwnerEnd::Died, None));
    }

    #[test]
    fn endpoints_are_where_the_owner_had_them_only_if_it_has_looked_in_this_boot() {
        let dir = tempfile::tempdir().unwrap();
        let looked = |boot: &str| Former::read(dir.path(), boot).has_looked();
        assert!(!looked(BOOT));
        let owner = begin(dir.path(), BOOT, false);
        assert!(!looked(BOOT));
        owner.looked();
        assert!(looked(BOOT));
        assert!(!looked("boot-b"));
        // The next owner has not looked yet, whatever the one before did.
        let next = begin(dir.path(), BOOT, true);
        assert!(!looked(BOOT));
        next.looked();
        next.stopped();
        assert!(looked(BOOT));
        for damaged in ["", "{", r#"{"version":2}"#] {
            std::fs::write(dir.path().join(file::FILE), damaged).unwrap();
            assert!(!looked(BOOT), "{damaged:?}");
        }
        // The machine's boot is not known.
        let unknown = tempfile::tempdir().unwrap();
        begin(unknown.path(), "", false).looked();
        assert!(!Former::read(unknown.path(), "").has_looked());
    }

    #[test]
    fn takeovers_in_a_loop_wait_and_a_stopped_owner_is_followed_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let longest = Duration::from_secs(30);
        let delay = || Former::read(dir.path(), BOOT).delay(BootTime::now(), longest);
        let mut delays = Vec::new();
        let mut owner = begin(dir.path(), BOOT, false);
        for _ in 0..6 {
            delays.push(delay().as_secs());
            owner = begin(dir.path(), BOOT, true);
        }
        assert_eq!(delays, [0, 0, 0, 1, 2, 4]);
        owner.stopped();
        assert_eq!(delay(), Duration::ZERO);
        // Without the file nothing is known, and the next takeover is at once.
        std::fs::remove_file(dir.path().join(file::FILE)).unwrap();
        assert_eq!(delay(), Duration::ZERO);
    }
}
