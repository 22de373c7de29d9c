//! Whether this process still owns what it writes: its locks are those that another agent would take.
//!
//! A lock belongs to an inode. If the directory is removed, the file system replaced or the state restored from a copy,
//! another agent could take the lock of the new inode, and the node would have two writers. The owner takes
//! the new lock too; if another agent was faster, the owner ends at once, before its next write.
//!
//! The lock of the BPF root guards the kernel: if it cannot be had again, for whatever reason, the owner ends. That of the
//! state directory guards files. If its file cannot be made again because the disk is full or read-only, no other
//! agent can make it either: the owner says so, and tries again.

use std::{process, sync::Arc, time::Duration};

use agent_core::datapath::{
    map_query::{MapEntries, MapQuery},
    plan::{Datapath, Step, StepError, Wake},
};
use agent_datapath::{
    root::{BpfRootLock, RootError},
    upkeep::{Conditions, Part},
};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::{
    epoch::{StateDirError, StateDirLock},
    runner::pulse::Pulse,
};

/// Time between two looks at the locks while nothing is written.
const INTERVAL: Duration = Duration::from_secs(1);

/// The locks of an agent. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Ownership(Arc<Mutex<Locks>>);

#[derive(Debug)]
struct Locks {
    root: BpfRootLock,
    state: StateDirLock,
}

/// Another agent has taken what this one owned, or whether it has cannot be known.
#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error(transparent)]
    Root(#[from] RootError),
    #[error(transparent)]
    State(#[from] StateDirError),
}

impl Locks {
    /// What is wrong with the lock of the state directory, although no other agent has it.
    fn keep(&mut self) -> Result<Option<StateDirError>, Lost> {
        self.root.keep()?;
        match self.state.keep() {
            Ok(()) => Ok(None),
            Err(busy @ StateDirError::Busy { .. }) => Err(busy.into()),
            Err(error) => Ok(Some(error)),
        }
    }
}

impl Ownership {
    pub(crate) fn new(root: BpfRootLock, state: StateDirLock) -> Self {
        Self(Arc::new(Mutex::new(Locks { root, state })))
    }

    /// Checks both locks until stopped.
    pub(crate) async fn watch(self, conditions: Conditions, stop: CancellationToken) {
        let mut ticker = tokio::time::interval(INTERVAL);
        while stop.run_until_cancelled(ticker.tick()).await.is_some() {
            let kept = self.0.lock().keep();
            let fault = kept_or_end(kept).map(|error| {
                format!(
                    "the lock file of the state directory was removed and cannot be made again, so that an agent with \
                     another --bpf-root could start on the same directory; the agent tries again: {error}"
                )
            });
            conditions.note(Part::Lock, fault);
        }
    }

    /// Checks the lock of the BPF root.
    fn check_root(&self) {
        let kept = self.0.lock().root.keep().map_err(Lost::from);
        kept_or_end(kept);
    }
}

/// What was kept. Ends this process if a lock is lost: what it has written stays in force.
fn kept_or_end<T>(kept: Result<T, Lost>) -> T {
    kept.unwrap_or_else(|lost| {
        tracing::error!(
            "the lock of this agent was removed, and it cannot be taken again: {lost}. This agent ends before it \
             writes anything more"
        );
        process::abort();
    })
}

/// A datapath that is written only while its agent owns it. Each step is a sign of life.
pub(crate) struct Owned {
    inner: Box<dyn Datapath>,
    ownership: Ownership,
    pulse: Pulse,
    /// The lock was looked at for the steps of this plan.
    is_checked: bool,
}

impl Owned {
    pub(crate) fn new(inner: Box<dyn Datapath>, ownership: Ownership, pulse: Pulse) -> Self {
        Self {
            inner,
            ownership,
            pulse,
            is_checked: false,
        }
    }
}

impl Datapath for Owned {
    fn apply(&mut self, step: &Step) -> Result<(), StepError> {
        if !self.is_checked {
            self.ownership.check_root();
            self.is_checked = true;
        }
        self.pulse.beat();
        self.inner.apply(step)
    }

    fn end_plan(&mut self) {
        self.inner.end_plan();
        self.is_checked = false;
    }

    fn tell_freed_addresses(&mut self, freed: Wake) {
        self.inner.tell_freed_addresses(freed);
    }

    fn read_entries(&mut self, query: &MapQuery) -> Result<MapEntries, StepError> {
        self.pulse.beat();
        self.inner.read_entries(query)
    }
}
