//! Watches: the changes since a revision, then each change as it comes, one JSON line each.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::{Bytes, Frame};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::failure::Failure;
use super::kind::Kind;
use super::read::{self, View};
use super::selection::Selection;
use super::server::{Shared, StreamingLists};
use super::store::Change;
use super::target::Target;

/// Number of changes that are read from the history at once.
const BATCH: usize = 256;
/// Length of a watch without `timeoutSeconds`.
const LONGEST: Duration = Duration::from_secs(1800);
/// Marks the bookmark after the initial events of a streaming list.
const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";

/// Lines of a watch. An error breaks off the connection.
pub(super) type Lines = mpsc::Sender<Result<Frame<Bytes>, io::Error>>;

/// State of one watch of a kind.
pub(super) struct Watch {
    shared: Arc<Shared>,
    kind: Arc<Kind>,
    selection: Selection,
    namespace: Option<String>,
    view: View,
    bookmarks: bool,
    ends: Instant,
    start: Start,
}

/// Events that a watch begins with.
enum Start {
    /// No events; the changes after this revision follow.
    Revision(u64),
    /// An `ADDED` event for every object.
    State,
    /// Every object as `ADDED`, then a bookmark.
    StreamingList,
}

/// The watch has ended: the client sees the end of the body.
struct Ended;

impl Watch {
    /// Reads the query of a watch.
    pub(super) fn parse(
        shared: Arc<Shared>,
        kind: Arc<Kind>,
        target: &Target,
        view: View,
    ) -> Result<Self, Failure> {
        let limit = target.parameter("timeoutSeconds").map(str::parse);
        let limit = match limit {
            None | Some(Ok(0)) => LONGEST,
            Some(Ok(seconds)) => Duration::from_secs(seconds),
            Some(Err(_)) => return Err(Failure::bad_request("invalid timeoutSeconds")),
        };
        let bookmarks = target.is_set("allowWatchBookmarks");
        let start = match target.parameter("resourceVersion") {
            _ if target.is_set("sendInitialEvents") => Start::StreamingList,
            None | Some("" | "0") if bookmarks => Start::StreamingList,
            None | Some("" | "0") => Start::State,
            Some(revision) => Start::Revision(
                revision
                    .parse()
                    .map_err(|_| Failure::bad_request("invalid resourceVersion"))?,
            ),
        };
        Ok(Self {
            selection: read::selection(target)?,
            namespace: target.namespace.clone(),
            view,
            bookmarks,
            ends: Instant::now() + limit,
            start,
            shared,
            kind,
        })
    }

    /// Sends lines until the client, the time limit or a fault ends the watch.
    pub(super) async fn run(self, lines: Lines) {
        let _ = self.send_all(&lines).await;
    }

    async fn send_all(&self, lines: &Lines) -> Result<(), Ended> {
        let mut revisions = self.shared.store.lock().subscribe();
        let mut conditions = self.shared.conditions.subscribe();
        let id = self.kind.id();
        let first = conditions.borrow_and_update().of(&id);
        let mut position = self.first_events(lines).await?;
        let mut bookmark = Instant::now() + self.shared.options.bookmarks_every;
        loop {
            let faults = conditions.borrow_and_update().of(&id);
            if faults.breaks != first.breaks {
                let broken = io::Error::other("a fault of the test");
                let _ = lines.send(Err(broken)).await;
                return Err(Ended);
            }
            if faults.expiries != first.expiries {
                return self.expire(lines, position).await;
            }
            revisions.borrow_and_update();
            let mut more = false;
            if !faults.held {
                let changes = self
                    .shared
                    .store
                    .lock()
                    .changes(&self.kind, position, BATCH);
                let Ok(changes) = changes else {
                    return self.expire(lines, position).await;
                };
                more = changes.len() == BATCH;
                for change in &changes {
                    if let Some(event) = self.event(change) {
                        self.send(lines, &event).await?;
                    }
                    position = change.revision;
                }
                if self.bookmarks && Instant::now() >= bookmark {
                    // A bookmark may name the newest revision of the store only if all changes of
                    // this kind are sent.
                    position = self.revision_if_drained(position);
                    self.send(lines, &self.bookmark(position, false)).await?;
                    bookmark = Instant::now() + self.shared.options.bookmarks_every;
                }
            }
            if more {
                continue;
            }
            tokio::select! {
                () = sleep_until(self.ends), if !faults.held => return Err(Ended),
                () = lines.closed() => return Err(Ended),
                () = sleep_until(bookmark), if self.bookmarks && !faults.held => {}
                changed = revisions.changed() => changed.map_err(|_| Ended)?,
                changed = conditions.changed() => changed.map_err(|_| Ended)?,
            }
        }
    }

    /// Sends the events that a watch begins with, and returns the revision that they show.
    async fn first_events(&self, lines: &Lines) -> Result<u64, Ended> {
        let streaming = match self.start {
            Start::Revision(revision) => {
                let reaches = self.shared.store.lock().reaches(&self.kind, revision);
                if reaches.is_err() {
                    self.expire(lines, revision).await?;
                }
                return Ok(revision);
            }
            Start::State => false,
            Start::StreamingList => true,
        };
        if streaming && self.shared.options.streaming_lists == StreamingLists::Refused {
            let message = "Internal error occurred: required storage feature RequestWatchProgress is disabled";
            let event = json!({"type": "ERROR", "object": Failure::internal(message).status()});
            self.send(lines, &event).await?;
            return Err(Ended);
        }
        let (revision, objects) = {
            let store = self.shared.store.lock();
            let objects = store.objects(&self.kind, None);
            let objects: Vec<Arc<Value>> = objects.map(|(_, object)| object.clone()).collect();
            (store.revision(), objects)
        };
        for object in objects.iter().filter(|object| self.sees(object)) {
            let event = json!({"type": "ADDED", "object": self.view.object(object)});
            self.send(lines, &event).await?;
        }
        if streaming {
            self.send(lines, &self.bookmark(revision, true)).await?;
        }
        Ok(revision)
    }

    /// The newest revision, if no change of this kind after `position` is left to send.
    fn revision_if_drained(&self, position: u64) -> u64 {
        let store = self.shared.store.lock();
        match store.changes(&self.kind, position, 1) {
            Ok(changes) if changes.is_empty() => store.revision(),
            _ => position,
        }
    }

    async fn expire(&self, lines: &Lines, position: u64) -> Result<(), Ended> {
        let oldest = self.shared.store.lock().revision();
        let message = format!("too old resource version: {position} ({oldest})");
        let event = json!({"type": "ERROR", "object": Failure::expired(message).status()});
        self.send(lines, &event).await?;
        Err(Ended)
    }

    fn sees(&self, object: &Value) -> bool {
        let namespace = object["metadata"]["namespace"].as_str();
        let in_namespace = self.namespace.is_none() || self.namespace.as_deref() == namespace;
        in_namespace && self.selection.selects(object)
    }

    /// The event of a change; `None` if this watch does not select the object.
    fn event(&self, change: &Change) -> Option<Value> {
        let seen = |object: &Option<Arc<Value>>| object.as_ref().is_some_and(|o| self.sees(o));
        let (word, object) = match (seen(&change.before), seen(&change.after)) {
            (false, true) => ("ADDED", &change.after),
            (true, true) => ("MODIFIED", &change.after),
            (true, false) => ("DELETED", &change.before),
            (false, false) => return None,
        };
        let object = object.as_ref()?;
        let mut object = self.view.object(object);
        if word == "DELETED" {
            object["metadata"]["resourceVersion"] = json!(change.revision.to_string());
        }
        Some(json!({"type": word, "object": object}))
    }

    fn bookmark(&self, revision: u64, initial: bool) -> Value {
        let mut object = json!({
            "kind": self.kind.kind, "apiVersion": self.kind.api_version(),
            "metadata": {"resourceVersion": revision.to_string(), "creationTimestamp": null},
        });
        if self.kind.plural == "pods" && self.view == View::Whole {
            object["spec"] = json!({"containers": null});
            object["status"] = json!({});
        }
        if initial {
            object["metadata"]["annotations"] = json!({INITIAL_EVENTS_END: "true"});
        }
        json!({"type": "BOOKMARK", "object": self.view_of_bookmark(object)})
    }

    fn view_of_bookmark(&self, object: Value) -> Value {
        match self.view {
            View::Whole => object,
            View::Metadata => self.view.object(&object),
        }
    }

    async fn send(&self, lines: &Lines, event: &Value) -> Result<(), Ended> {
        let mut line = event.to_string();
        line.push('\n');
        let frame = Frame::data(Bytes::from(line));
        lines.send(Ok(frame)).await.map_err(|_| Ended)
    }
}
