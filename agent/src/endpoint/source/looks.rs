//! When to look for endpoints: at changes of the directory, of interfaces and of routes.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::EndpointBook;
use crate::{endpoint::link_events::LinkEvents, watched_dir::WatchedDir};

/// Rest after a look that an event caused, as a multiple of the time that the look took: events
/// that come without end do not take more than a tenth of a processor.
const REST: u32 = 10;
/// The shortest and the longest rest.
const SHORTEST: Duration = Duration::from_millis(20);
const LONGEST: Duration = Duration::from_secs(1);

/// Why the endpoints are looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Look {
    /// The first listing.
    First,
    /// The directory changed.
    Directory,
    /// Interfaces or routes changed.
    Links,
    /// It is time.
    Timer,
}

impl Look {
    fn at(self, book: &EndpointBook) {
        match self {
            Self::First => book.list(),
            Self::Directory => book.refresh(),
            Self::Links => book.follow_links(),
            Self::Timer => book.follow(),
        }
    }
}

/// Lists the endpoints, then keeps looking until stopped. `dir` is watched for documents.
pub fn run(book: Arc<EndpointBook>, dir: &Path, tasks: &TaskTracker, stop: CancellationToken) {
    let watched = dir.to_owned();
    let links = LinkEvents::watch(tasks, stop.clone());
    tasks.spawn(async move {
        let dir = WatchedDir::new(&watched);
        let mut changed = std::pin::pin!(dir.changed());
        let mut look = Look::First;
        let mut rested = tokio::time::Instant::now();
        loop {
            let source = Arc::clone(&book);
            let looked = tokio::task::spawn_blocking(move || {
                let begin = Instant::now();
                look.at(&source);
                (begin.elapsed(), source.next_look())
            });
            let Ok((took, next)) = looked.await else {
                tracing::error!("reading the endpoints panicked (a bug)");
                return;
            };
            if look == Look::Links {
                let rest = (took * REST).clamp(SHORTEST, LONGEST);
                rested = tokio::time::Instant::now() + rest;
            }
            let event = async {
                tokio::time::sleep_until(rested).await;
                links.changed().await;
            };
            look = tokio::select! {
                () = &mut changed => {
                    changed.set(dir.changed());
                    Look::Directory
                }
                () = event => Look::Links,
                () = tokio::time::sleep(next) => Look::Timer,
                () = stop.cancelled() => return,
            };
        }
    });
}
