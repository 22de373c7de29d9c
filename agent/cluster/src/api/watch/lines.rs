//! Lines of a watch.

use std::{future::poll_fn, task::Poll, time::Duration};

use http_body_util::BodyExt as _;
use kube::client::Body;
use tokio::time::{Instant, timeout_at};

use super::super::client::{RequestError, chain};

/// Maximum length of one line of a watch, in bytes.
const LINE_MAX: usize = 16 << 20;
/// A watch that is silent for this long begins again: the server sends a bookmark each minute, and
/// a connection to a machine without power does not end by itself.
const SILENCE: Duration = Duration::from_secs(120);

/// The next line of any of these watches, and the position of its watch.
pub(super) async fn next_of(all: &mut [Lines]) -> (usize, Result<Option<Vec<u8>>, RequestError>) {
    let waits = all.iter_mut().map(|lines| Box::pin(lines.next()));
    let mut waits: Vec<_> = waits.collect();
    poll_fn(|cx| {
        for (at, wait) in waits.iter_mut().enumerate() {
            if let Poll::Ready(line) = wait.as_mut().poll(cx) {
                return Poll::Ready((at, line));
            }
        }
        Poll::Pending
    })
    .await
}

/// Splits the body of a watch into lines, each of which is one JSON event.
pub(crate) struct Lines {
    body: Body,
    read: Vec<u8>,
    /// The bytes before this position contain no end of a line.
    searched: usize,
    /// When the server last sent something.
    heard: Instant,
}

impl Lines {
    pub(crate) fn new(body: Body) -> Self {
        Self {
            body,
            read: Vec::new(),
            searched: 0,
            heard: Instant::now(),
        }
    }

    /// The next line; `None` if the server ended the watch, or was silent for too long. A caller that gives up waiting
    /// loses nothing.
    pub(crate) async fn next(&mut self) -> Result<Option<Vec<u8>>, RequestError> {
        loop {
            let rest = self.read.get(self.searched..).unwrap_or_default();
            if let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                let after = self.read.split_off(self.searched + end + 1);
                let mut line = std::mem::replace(&mut self.read, after);
                self.searched = 0;
                line.pop();
                if line.is_empty() {
                    continue;
                }
                return Ok(Some(line));
            }
            self.searched = self.read.len();
            if self.read.len() > LINE_MAX {
                let reason = format!("a line of a watch is longer than {LINE_MAX} bytes");
                return Err(RequestError::Unreadable(reason));
            }
            match timeout_at(self.heard + SILENCE, self.body.frame()).await {
                Err(_) | Ok(None) => return Ok(None),
                Ok(Some(Ok(frame))) => {
                    self.heard = Instant::now();
                    if let Ok(data) = frame.into_data() {
                        self.read.extend_from_slice(&data);
                    }
                }
                Ok(Some(Err(error))) => return Err(RequestError::Unreachable(chain(&error))),
            }
        }
    }
}
