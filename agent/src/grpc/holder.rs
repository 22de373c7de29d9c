//! Follows the processes that hold leases, and ends the leases of a process that has ended.
//!
//! When a mapping stream ends, its process may still run and answer under the leases that it has. The agent sees the
//! end of the process through its pidfd.

use std::{
    collections::VecDeque,
    os::fd::{AsFd as _, OwnedFd},
    sync::Arc,
    time::Duration,
};

use agent_core::core::event::{Event, StreamId};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::runner::CoreHandle;

/// Maximum processes that are followed at once, each with a descriptor. Leases of other processes last until they
/// expire, after an hour at most.
pub(crate) const MAX_PROCESSES: usize = 256;
/// Maximum streams that are remembered of one process; the oldest are forgotten.
const MAX_STREAMS: usize = 256;
/// Pause between two looks for processes that have ended.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// The processes that are followed. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Holders(Arc<Mutex<Vec<Followed>>>);

#[derive(Debug)]
struct Followed {
    pid: i32,
    process: Arc<OwnedFd>,
    streams: VecDeque<StreamId>,
}

impl Holders {
    /// Remembers the process at the other end of a stream, until it has ended.
    pub(crate) fn follow(&self, pid: i32, process: Arc<OwnedFd>, stream: StreamId) {
        if has_ended(&process) {
            // Another process has the connection now, and the agent cannot find out which one.
            return;
        }
        let mut followed = self.0.lock();
        // No two live processes have one number. But every process in a PID namespace that is not visible here has
        // the number 0, so each of them is followed by itself.
        let known = followed
            .iter_mut()
            .find(|known| pid > 0 && known.pid == pid && !has_ended(&known.process));
        if let Some(known) = known {
            known.streams.push_back(stream);
            if known.streams.len() > MAX_STREAMS {
                known.streams.pop_front();
            }
        } else if followed.len() < MAX_PROCESSES {
            followed.push(Followed {
                pid,
                process,
                streams: [stream].into(),
            });
        }
    }

    /// Reports to the core the streams whose processes have ended, until stopped.
    pub(crate) async fn run(self, core: CoreHandle, stop: CancellationToken) {
        let pause = || stop.run_until_cancelled(tokio::time::sleep(POLL_INTERVAL));
        while pause().await.is_some() {
            let ended = self.take_ended();
            if !ended.is_empty() && core.send(Event::HolderEnded(ended)).await.is_err() {
                return;
            }
        }
    }

    fn take_ended(&self) -> Vec<StreamId> {
        let mut followed = self.0.lock();
        let ended = followed.extract_if(.., |known| has_ended(&known.process));
        ended.flat_map(|known| known.streams).collect()
    }
}

fn has_ended(process: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
    // If the call fails, the process counts as running: its leases last to their end.
    poll(&mut polled, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A descriptor that looks like a process: readable once the other end is dropped.
    fn process() -> (Arc<OwnedFd>, OwnedFd) {
        let (reader, writer) = nix::unistd::pipe().unwrap();
        (Arc::new(reader), writer)
    }

    fn pid_is_reused(first: &str) -> Vec<StreamId> {
        let holders = Holders::default();
        let (one, lives) = process();
        let (other, _lives) = process();
        holders.follow(7, Arc::clone(&one), StreamId(1));
        holders.follow(7, one, StreamId(2));
        if first == "ends" {
            drop(lives);
            holders.follow(7, other, StreamId(3));
            return holders.take_ended();
        }
        let none = holders.take_ended();
        drop(lives);
        none
    }

    #[test]
    fn streams_of_a_process_end_with_it_and_with_no_other_of_its_number() {
        assert_eq!(pid_is_reused("ends"), [StreamId(1), StreamId(2)]);
        assert_eq!(pid_is_reused("lives"), []);
    }

    #[test]
    fn processes_of_another_pid_namespace_end_one_by_one() {
        let holders = Holders::default();
        let (one, first_lives) = process();
        let (other, second_lives) = process();
        holders.follow(0, one, StreamId(1));
        holders.follow(0, other, StreamId(2));
        drop(second_lives);
        assert_eq!(holders.take_ended(), [StreamId(2)]);
        drop(first_lives);
        assert_eq!(holders.take_ended(), [StreamId(1)]);
    }

    #[test]
    fn a_process_that_passed_its_connection_on_is_not_followed() {
        let holders = Holders::default();
        let (process, lives) = process();
        drop(lives);
        holders.follow(7, process, StreamId(1));
        assert_eq!(holders.take_ended(), []);
    }
}
