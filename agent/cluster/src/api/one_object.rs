//! A watch of one object, which begins again whenever it ends.
//!
//! The watch selects the object by its name, and requests metadata only, so that events stay small: the
//! status of a Node or of a DaemonSet changes often.

use std::time::Duration;

use hyper::{Request, header::ACCEPT};
use serde_json::Value;
use tokio::time::Instant;

use super::{
    backoff::Backoff,
    client::{Api, RequestError},
    watch::Lines,
};

/// After this many seconds the server ends a watch. A watch without bookmarks is silent between changes,
/// and [`Lines`] gives up a connection that is silent for longer.
const WATCH_SECONDS: u32 = 100;
/// A watch that lasted this long did not fail at its beginning.
const LASTED: Duration = Duration::from_secs(WATCH_SECONDS as u64 / 2);
const METADATA: &str = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";

/// What happened to the object.
#[derive(Debug)]
pub(super) enum Event {
    /// It was added or modified.
    There(Value),
    Deleted,
    Bookmark,
}

/// The events of one watch.
pub(super) struct Events(Lines);

impl Events {
    /// Begins a watch of the object `name` of the collection at path `all`.
    ///
    /// - The watch begins with the present state (version 0), not with the version of a read. A read
    ///   gives the version of the last change. A server that was restarted no longer knows that version,
    ///   and refuses it each time.
    /// - The watch has no bookmarks: with bookmarks, a server with an old etcd refuses version 0.
    pub(super) async fn begin(api: &Api, all: &str, name: &str) -> Result<Self, RequestError> {
        let uri = format!(
            "{all}?watch=true&fieldSelector=metadata.name%3D{name}&resourceVersion=0\
             &timeoutSeconds={WATCH_SECONDS}"
        );
        let request = Request::get(uri).header(ACCEPT, METADATA).body(Vec::new());
        let request = request.map_err(|error| RequestError::Unreadable(error.to_string()))?;
        Ok(Self(Lines::new(api.send(request).await?.into_body())))
    }

    /// The next event; `None` if the server ended the watch.
    pub(super) async fn next(&mut self) -> Result<Option<Event>, RequestError> {
        let Some(line) = self.0.next().await? else {
            return Ok(None);
        };
        let event: Value = serde_json::from_slice(&line)
            .map_err(|error| RequestError::Unreadable(error.to_string()))?;
        event_of(event).map(Some)
    }
}

fn event_of(mut event: Value) -> Result<Event, RequestError> {
    let object = event.get_mut("object").map(Value::take).unwrap_or_default();
    match event.get("type").and_then(Value::as_str) {
        Some("ADDED" | "MODIFIED") => Ok(Event::There(object)),
        Some("DELETED") => Ok(Event::Deleted),
        Some("BOOKMARK") => Ok(Event::Bookmark),
        _ => {
            let text = |field| object.get(field).map(Value::to_string);
            Err(RequestError::Unreadable(format!(
                "the watch ends with {} {}",
                text("code").unwrap_or_default(),
                text("message").unwrap_or_default()
            )))
        }
    }
}

/// Pauses between the end of a watch and the next one.
#[derive(Debug, Default)]
pub(super) struct Pauses(Backoff);

impl Pauses {
    /// The pause after a watch that began at `begin`. `None` if the server ended the watch when its time was
    /// over: a change during a pause would be missed or late.
    pub(super) fn after(
        &mut self,
        begin: Instant,
        ended: &Result<(), RequestError>,
    ) -> Option<Duration> {
        let lasted = begin.elapsed() >= LASTED;
        if lasted {
            self.0 = Backoff::default();
        }
        (!lasted || ended.is_err()).then(|| self.0.pause())
    }
}
