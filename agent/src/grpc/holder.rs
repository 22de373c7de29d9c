//! Which processes hold leases, and that those of a process that ended are over.
//!
//! A mapping stream that ends says nothing about the process behind it: it may go on answering
//! under the leases that it has. Its end does, and the kernel reports it on a pidfd of the peer.

use std::{
    collections::{BTreeMap, VecDeque},
    os::fd::{AsFd as _, OwnedFd},
    sync::Arc,
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use parking_lot::Mutex;
use tokio::io::{Interest, unix::AsyncFd};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    core::event::{Event, StreamId},
    runner::CoreHandle,
};

/// Processes followed at once. Leases of others last to their end, an hour at most.
const MAX_PROCESSES: usize = 512;
/// Streams remembered of one process; the oldest are forgotten.
const MAX_STREAMS: usize = 256;

/// The processes that are followed. Clones share them.
#[derive(Clone, Debug)]
pub struct Holders {
    followed: Arc<Mutex<BTreeMap<i32, Followed>>>,
    core: CoreHandle,
    tasks: TaskTracker,
    stop: CancellationToken,
}

#[derive(Debug)]
struct Followed {
    process: Arc<OwnedFd>,
    streams: VecDeque<StreamId>,
}

impl Holders {
    /// Of nobody yet. Tasks run on `tasks` until `stop`.
    pub fn new(core: CoreHandle, tasks: TaskTracker, stop: CancellationToken) -> Self {
        Self {
            followed: Arc::default(),
            core,
            tasks,
            stop,
        }
    }

    /// Tells the core when the process at the other end of a stream has ended.
    pub fn follow(&self, pid: i32, process: Arc<OwnedFd>, stream: StreamId) {
        if has_ended(&process) {
            // Another process has the connection now: nobody knows which.
            return;
        }
        let mut followed = self.followed.lock();
        // A process that lives has its number to itself.
        if let Some(known) = followed.get_mut(&pid).filter(|k| !has_ended(&k.process)) {
            known.streams.push_back(stream);
            if known.streams.len() > MAX_STREAMS {
                known.streams.pop_front();
            }
            return;
        }
        if followed.len() >= MAX_PROCESSES && !followed.contains_key(&pid) {
            return;
        }
        let before = followed.insert(
            pid,
            Followed {
                process: Arc::clone(&process),
                streams: [stream].into(),
            },
        );
        drop(followed);
        self.tasks.spawn(self.clone().watch(pid, process, before));
    }

    /// `before`: another process that had the number and has ended.
    async fn watch(self, pid: i32, process: Arc<OwnedFd>, before: Option<Followed>) {
        if let Some(before) = before {
            self.ended(before).await;
        }
        let watched = match AsyncFd::with_interest(Arc::clone(&process), Interest::READABLE) {
            Ok(watched) => watched,
            Err(error) => {
                tracing::warn!(pid, %error, "cannot watch a proxy's process; its leases last to their end");
                return;
            }
        };
        tokio::select! {
            readable = watched.readable() => {
                if readable.is_err() {
                    return;
                }
            }
            () = self.stop.cancelled() => return,
        }
        let ended = {
            let mut followed = self.followed.lock();
            match followed.get(&pid) {
                Some(known) if Arc::ptr_eq(&known.process, &process) => followed.remove(&pid),
                _ => None,
            }
        };
        if let Some(ended) = ended {
            self.ended(ended).await;
        }
    }

    async fn ended(&self, process: Followed) {
        let streams = process.streams.into();
        let _stopped = self.core.tell(Event::HolderEnded(streams)).await;
    }
}

fn has_ended(process: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
    // Of one that cannot be asked nothing is known.
    poll(&mut polled, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}
