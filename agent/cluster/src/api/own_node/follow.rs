//! Follows the labels of this Node.
//!
//! The watch selects the Node by its name, and requests metadata only: the kubelet writes the status
//! every few minutes. An event says only that the labels may have changed. What is copied is read
//! with its own request.

use std::{
    hash::{BuildHasher as _, RandomState},
    time::Duration,
};

use hyper::{Request, header::ACCEPT};
use serde_json::Value;
use tokio::{
    sync::watch as channel,
    time::{Instant, sleep},
};

use super::labels;
use crate::api::{
    backoff::Backoff,
    client::{Api, RequestError},
    watch::Lines,
};

/// After this time the server ends a watch, seconds. Without bookmarks a watch is silent, and
/// [`Lines`] gives up a connection that is silent for longer.
const WATCH_SECONDS: u32 = 100;
/// A watch that lasted this long did not fail at its beginning.
const LASTED: Duration = Duration::from_secs(WATCH_SECONDS as u64 / 2);
const METADATA: &str = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";

/// What the watch has seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Followed {
    /// Hash of the Node's labels.
    labels: Option<u64>,
    /// The API server does not let this agent watch its Node.
    pub(super) refused: Option<String>,
}

/// Follows the Node until the receiver is dropped.
pub(super) async fn run(api: Api, name: String, seen: channel::Sender<Followed>) {
    let hash = RandomState::new();
    let mut backoff = Backoff::default();
    while !seen.is_closed() {
        let begin = Instant::now();
        let ended = follow_once(&api, &name, &hash, &seen).await;
        let lasted = begin.elapsed() >= LASTED;
        if lasted {
            backoff = Backoff::default();
        }
        match ended {
            // No pause, because the watch ended at its time.
            Ok(()) if lasted => continue,
            Ok(()) => {}
            Err(error) => {
                tracing::debug!(%error, "cannot follow the Node of this machine");
                if error.code() == Some(403) {
                    set_refused(&seen, Some(super::explain("watch", "nodes", &error)));
                }
            }
        }
        sleep(backoff.pause()).await;
    }
}

/// Follows the Node until the server ends the watch. It begins with the present state (version 0, as
/// in [`own_set`](crate::api::own_set)), so a change between two watches is seen.
async fn follow_once(
    api: &Api,
    name: &str,
    hash: &RandomState,
    seen: &channel::Sender<Followed>,
) -> Result<(), RequestError> {
    let uri = format!(
        "/api/v1/nodes?watch=true&fieldSelector=metadata.name%3D{name}&resourceVersion=0\
         &timeoutSeconds={WATCH_SECONDS}"
    );
    let request = Request::get(uri).header(ACCEPT, METADATA).body(Vec::new());
    let request = request.map_err(|error| RequestError::Unreadable(error.to_string()))?;
    let mut lines = Lines::new(api.send(request).await?.into_body());
    set_refused(seen, None);
    while let Some(line) = lines.next().await? {
        let event: Value = serde_json::from_slice(&line)
            .map_err(|error| RequestError::Unreadable(error.to_string()))?;
        match event["type"].as_str() {
            Some("ADDED" | "MODIFIED") => {
                let labels = hash.hash_one(labels::of_node(&event["object"]));
                seen.send_if_modified(|seen| seen.labels.replace(labels) != Some(labels));
            }
            Some("DELETED" | "BOOKMARK") => {}
            _ => {
                return Err(RequestError::Unreadable(format!(
                    "the watch ends with {} {}",
                    event["object"]["code"], event["object"]["message"]
                )));
            }
        }
    }
    Ok(())
}

fn set_refused(seen: &channel::Sender<Followed>, refused: Option<String>) {
    seen.send_if_modified(|seen| {
        let is_new = seen.refused != refused;
        seen.refused = refused;
        is_new
    });
}
