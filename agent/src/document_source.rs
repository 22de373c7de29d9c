//! The task that reads the documents of `--policy-dir` and sends their changes to the core.

use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    core::{event::Event, router::Router},
    kubernetes::book::Book,
    policy::source::dir::PolicyDir,
    runner::CoreHandle,
    source_event::SourceEvent,
    watched_dir::WatchedDir,
};

/// Starts the task that reads the directory. Without one the listing is empty.
pub(crate) fn start(
    policies: Option<(WatchedDir, PolicyDir)>,
    book: Book,
    core: &CoreHandle,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) {
    let core = core.clone();
    let stop = stop.clone();
    tasks.spawn(async move {
        let Some((watched, mut source)) = policies else {
            for event in [SourceEvent::Init, SourceEvent::InitDone] {
                let _stopped = core.send(Event::Policies(event)).await;
            }
            return;
        };
        let mut router = Router::new(book);
        let mut first = true;
        loop {
            let looked = tokio::task::spawn_blocking(move || {
                let changes = if first {
                    source.list()
                } else {
                    source.refresh()
                };
                let events = router.route(changes);
                (source, router, events)
            });
            let Ok((read, routed, events)) = looked.await else {
                tracing::error!(
                    "reading the policies panicked (a bug); the policies in force remain"
                );
                return;
            };
            source = read;
            router = routed;
            first = false;
            for event in events {
                if core.send(event).await.is_err() {
                    return;
                }
            }
            tokio::select! {
                () = watched.changed() => {}
                () = stop.cancelled() => return,
            }
        }
    });
}
