//! When to poll for endpoints: at changes of the directory, of interfaces and of routes.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::oneshot;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::EndpointBook;
use crate::{endpoint::link_events::LinkEvents, watched_dir::WatchedDir};

/// Pause after a poll that an event caused, as a multiple of the time that the poll took. So even an endless series of
/// events takes at most a tenth of a processor.
const REST: u32 = 10;
/// The shortest and the longest pause.
const SHORTEST: Duration = Duration::from_millis(20);
const LONGEST: Duration = Duration::from_secs(1);

/// The reason for a poll.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Trigger {
    First,
    Directory,
    /// The kernel reported a change of interfaces or routes.
    Links,
    /// The poll interval is over.
    Timer,
}

impl Trigger {
    fn at(self, book: &EndpointBook) {
        self.look(book);
        book.take_in();
    }

    fn look(self, book: &EndpointBook) {
        match self {
            Self::First => book.list(),
            Self::Directory => book.refresh(),
            Self::Links => book.follow_links(),
            Self::Timer => book.follow(),
        }
    }
}

/// Lists the endpoints, then polls until stopped. `dir` is watched for documents. Returns a receiver that says when
/// each endpoint of the first listing has been looked at and sent to the core; it closes without a message if the agent
/// stops before.
pub(crate) fn run(
    book: Arc<EndpointBook>,
    dir: &Path,
    tasks: &TaskTracker,
    stop: CancellationToken,
) -> oneshot::Receiver<()> {
    let (send_looked, looked) = oneshot::channel();
    let mut send_looked = Some(send_looked);
    let watched = dir.to_owned();
    let links = LinkEvents::watch(tasks, stop.clone());
    tasks.spawn(async move {
        let dir = WatchedDir::new(&watched);
        let mut changed = std::pin::pin!(dir.changed());
        let mut trigger = Trigger::First;
        let mut rested = tokio::time::Instant::now();
        loop {
            let source = Arc::clone(&book);
            let polled = tokio::task::spawn_blocking(move || {
                let begin = Instant::now();
                trigger.at(&source);
                (begin.elapsed(), source.next_poll())
            });
            let Ok((took, next)) = polled.await else {
                tracing::error!("reading the endpoints panicked (a bug)");
                return;
            };
            if let Some(send_looked) = send_looked.take() {
                let (source, stop) = (Arc::clone(&book), stop.clone());
                tokio::task::spawn_blocking(move || {
                    if source.look_at_kept(|| stop.is_cancelled()) {
                        let _stopping = send_looked.send(());
                    }
                });
            }
            if trigger == Trigger::Links {
                let rest = (took * REST).clamp(SHORTEST, LONGEST);
                rested = tokio::time::Instant::now() + rest;
            }
            let event = async {
                tokio::time::sleep_until(rested).await;
                links.changed().await;
            };
            trigger = tokio::select! {
                () = &mut changed => {
                    changed.set(dir.changed());
                    Trigger::Directory
                }
                () = event => Trigger::Links,
                () = tokio::time::sleep(next) => Trigger::Timer,
                () = stop.cancelled() => return,
            };
        }
    });
    looked
}
