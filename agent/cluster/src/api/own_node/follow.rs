//! Follows the labels of this Node.
//!
//! An event says only that the labels have possibly changed. The labels that the CiliumNode gets are read with
//! another request.

use std::hash::{BuildHasher as _, RandomState};

use tokio::{
    sync::watch as channel,
    time::{Instant, sleep},
};

use super::labels;
use crate::api::{
    client::{Api, RequestError},
    one_object::{Event, Events, Pauses},
};

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
    let mut pauses = Pauses::default();
    while !seen.is_closed() {
        let begin = Instant::now();
        let ended = follow_once(&api, &name, &hash, &seen).await;
        if let Err(error) = &ended {
            tracing::debug!(%error, "cannot follow the Node of this machine");
            if error.code() == Some(403) {
                set_refused(&seen, Some(super::explain("watch", "nodes", error)));
            }
        }
        if let Some(pause) = pauses.after(begin, &ended) {
            sleep(pause).await;
        }
    }
}

/// Follows the Node until the server ends the watch. The watch begins with the present state, so a
/// change between two watches is seen.
async fn follow_once(
    api: &Api,
    name: &str,
    hash: &RandomState,
    seen: &channel::Sender<Followed>,
) -> Result<(), RequestError> {
    let mut events = Events::begin(api, "/api/v1/nodes", name).await?;
    set_refused(seen, None);
    while let Some(event) = events.next().await? {
        if let Event::There(node) = event {
            let labels = hash.hash_one(labels::of_node(&node));
            seen.send_if_modified(|seen| seen.labels.replace(labels) != Some(labels));
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
