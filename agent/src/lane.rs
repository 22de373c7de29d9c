//! A thread with its own async runtime, for tasks that no other task may delay.

use std::{io, thread};

use tokio::runtime::{Builder, Handle};
use tokio_util::sync::{CancellationToken, DropGuard};

/// The thread's handle. When it is dropped, the thread ends, and its tasks with it.
#[derive(Debug)]
pub(crate) struct Lane {
    handle: Handle,
    _end: DropGuard,
}

impl Lane {
    /// Starts the thread; tasks are spawned with [`Self::handle`].
    pub(crate) fn start(name: &str) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let end = CancellationToken::new();
        let ended = end.clone();
        let thread = thread::Builder::new().name(name.to_owned());
        thread.spawn(move || runtime.block_on(ended.cancelled()))?;
        Ok(Self {
            handle,
            _end: end.drop_guard(),
        })
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }
}
