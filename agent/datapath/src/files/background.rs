//! The state directory with a thread of its own for writes that the core does not wait for.
//!
//! Learned names are written every few seconds. Making the text and syncing it can take long, and
//! an answer with a new address must not wait for either.

use std::{
    collections::{BTreeSet, VecDeque},
    io,
    sync::Arc,
    thread::{self, JoinHandle},
};

use agent_core::datapath::{
    late_text::LateText,
    plan::{Datapath, NamesWritten, Step, StepError},
};
use parking_lot::{Condvar, Mutex};
use shared_maps::EndpointId;

use super::StateFiles;

/// Writes the state directory; [`Step::KeepNames`] in the background, everything else at once.
pub struct BackgroundFiles {
    files: StateFiles,
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    /// Notified when a write was queued or finished, or when the thread has to stop.
    changed: Condvar,
}

/// At most one write per endpoint: the core requests the next one when it has the result of the last.
#[derive(Default)]
struct Waiting {
    writes: VecDeque<Write>,
    /// The endpoint whose file is being written.
    busy: Option<EndpointId>,
    stopped: bool,
}

struct Write {
    endpoint: EndpointId,
    number: u64,
    text: LateText,
}

impl BackgroundFiles {
    /// `send` gets the result of each write, on the thread that wrote.
    pub fn start(
        files: StateFiles,
        send: impl Fn(NamesWritten) + Send + 'static,
    ) -> io::Result<Self> {
        let queue = Arc::new(Queue::default());
        let (taken, written) = (Arc::clone(&queue), files.clone());
        let thread = thread::Builder::new()
            .name("files".to_owned())
            .spawn(move || {
                let mut failing = BTreeSet::new();
                while let Some(write) = taken.next() {
                    let done = written.write_endpoint(write.endpoint, &write.text.make());
                    match &done {
                        Ok(()) => {
                            failing.remove(&write.endpoint);
                        }
                        Err(error) if failing.insert(write.endpoint) => {
                            tracing::warn!(
                                endpoint = write.endpoint.0, %error,
                                "cannot write learned names to disk; the agent tries again every second"
                            );
                        }
                        Err(_) => {}
                    }
                    // Before the event is sent: a thread that waits for the write must not also wait for the core.
                    taken.finish();
                    send(NamesWritten {
                        endpoint: write.endpoint,
                        number: write.number,
                        failure: done.err().map(|error| error.to_string()),
                    });
                }
            })?;
        Ok(Self {
            files,
            queue,
            thread: Some(thread),
        })
    }
}

impl Queue {
    fn put(&self, write: Write) {
        self.waiting.lock().writes.push_back(write);
        self.changed.notify_all();
    }

    /// The next write; `None` when all are done and no more will come.
    fn next(&self) -> Option<Write> {
        let mut waiting = self.waiting.lock();
        loop {
            if let Some(write) = waiting.writes.pop_front() {
                waiting.busy = Some(write.endpoint);
                return Some(write);
            }
            if waiting.stopped {
                return None;
            }
            self.changed.wait(&mut waiting);
        }
    }

    fn finish(&self) {
        self.waiting.lock().busy = None;
        self.changed.notify_all();
    }

    /// Drops what is queued for an endpoint, and waits for what is being written.
    fn overtake(&self, endpoint: EndpointId) {
        let mut waiting = self.waiting.lock();
        waiting.writes.retain(|write| write.endpoint != endpoint);
        while waiting.busy == Some(endpoint) {
            self.changed.wait(&mut waiting);
        }
    }

    fn stop(&self) {
        self.waiting.lock().stopped = true;
        self.changed.notify_all();
    }
}

impl Datapath for BackgroundFiles {
    fn apply(&mut self, step: &Step) -> Result<(), StepError> {
        match step {
            Step::KeepNames(endpoint, number, text) => {
                self.queue.put(Write {
                    endpoint: *endpoint,
                    number: *number,
                    text: text.clone(),
                });
                return Ok(());
            }
            Step::WriteEndpoint(endpoint, _) | Step::RemoveEndpoint(endpoint) => {
                self.queue.overtake(*endpoint);
            }
            _ => {}
        }
        self.files.apply(step)
    }
}

/// Dropping it writes what is queued.
impl Drop for BackgroundFiles {
    fn drop(&mut self) {
        self.queue.stop();
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            tracing::error!("the thread that writes files panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, sync::mpsc};

    use super::*;

    fn kept(number: u64, text: &'static str) -> Step {
        Step::KeepNames(
            EndpointId(7),
            number,
            LateText::new(move || text.to_owned()),
        )
    }

    #[test]
    fn delayed_writes_are_reported_and_done_before_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateFiles::open(dir.path()).unwrap();
        let file = state
            .endpoint_dir(EndpointId(7))
            .join(super::super::ENDPOINT_FILE);
        let (sender, events) = mpsc::channel();
        let mut files =
            BackgroundFiles::start(state, move |event| sender.send(event).unwrap()).unwrap();
        files.apply(&kept(1, "one")).unwrap();
        let written = events.recv().unwrap();
        assert_eq!((written.number, written.failure), (1, None));
        assert_eq!(fs::read(&file).unwrap(), b"one");
        files.apply(&kept(2, "two")).unwrap();
        drop(files);
        assert_eq!(fs::read(&file).unwrap(), b"two");
    }

    #[test]
    fn a_failed_write_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateFiles::open(dir.path()).unwrap();
        // A file in the directory's place.
        fs::write(state.endpoint_dir(EndpointId(7)), "").unwrap();
        let (sender, events) = mpsc::channel();
        let mut files =
            BackgroundFiles::start(state, move |event| sender.send(event).unwrap()).unwrap();
        files.apply(&kept(1, "one")).unwrap();
        let written = events.recv().unwrap();
        let failure = written.failure.expect("a file is in the way");
        assert!(failure.contains("/7"), "{failure}");
    }

    #[test]
    fn an_immediate_write_is_done_after_earlier_delayed_ones() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateFiles::open(dir.path()).unwrap();
        let file = state
            .endpoint_dir(EndpointId(7))
            .join(super::super::ENDPOINT_FILE);
        // The thread blocks in `send` after the first write: the other writes wait in the queue.
        let (go, wait) = mpsc::channel::<()>();
        let (sender, events) = mpsc::channel();
        let mut files = BackgroundFiles::start(state, move |event| {
            sender.send(event).unwrap();
            let _gone = wait.recv();
        })
        .unwrap();
        files.apply(&kept(1, "one")).unwrap();
        events.recv().unwrap();
        files.apply(&kept(2, "two")).unwrap();
        files
            .apply(&Step::WriteEndpoint(EndpointId(7), "now".to_owned()))
            .unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"now");
        files.apply(&kept(3, "three")).unwrap();
        files.apply(&Step::RemoveEndpoint(EndpointId(7))).unwrap();
        drop(go);
        drop(files);
        assert!(
            !file.exists(),
            "a write of before the removal came after it"
        );
    }
}
