//! Containers that are about to start: the OCI hook waits for the answer.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use hyper::{Request, StatusCode, body::Incoming};
use serde::{Deserialize, Serialize};

use super::server::{self, Admin};
use crate::{
    cni::{endpoints::Endpoints, enforcement},
    endpoint::source::containers::{ContainerStart, StartError},
    refusal::Refusal,
};

/// The longest time that a container's start waits.
const LONGEST: Duration = Duration::from_secs(20);

/// Pause between two looks at an agent that starts.
const PAUSE: Duration = Duration::from_millis(50);

/// A container whose network is there, and whose program does not run yet.
#[derive(Debug, Serialize, Deserialize)]
pub struct Starting {
    /// The runtime's id of the container.
    pub id: String,
    /// Process that becomes the container's first one.
    pub pid: u32,
    /// How many milliseconds the hook waits for the answer.
    pub wait_ms: u64,
}

/// A container that may start.
#[derive(Debug, Serialize, Deserialize)]
pub struct MayStart {
    /// Keys of its endpoints; empty if no document names it, or if it has no network.
    pub endpoints: Vec<String>,
}

impl From<StartError> for Refusal {
    fn from(error: StartError) -> Self {
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, error.to_string())
    }
}

impl Admin {
    /// Answers once the container of a request is under policy.
    pub(super) async fn containers(&self, request: Request<Incoming>) -> Result<Vec<u8>, Refusal> {
        let starting = server::body(request, "a container").await?;
        server::render(&self.start_container(starting).await?)
    }

    async fn start_container(&self, starting: Starting) -> Result<MayStart, Refusal> {
        let begin = Instant::now();
        let deadline = begin + Duration::from_millis(starting.wait_ms).min(LONGEST);
        let book = Arc::clone(&self.endpoints);
        let (id, pid) = (starting.id.clone(), starting.pid);
        let start = Arc::new(ContainerStart { id, pid });
        let found = loop {
            let (book, start) = (Arc::clone(&book), Arc::clone(&start));
            let found = tokio::task::spawn_blocking(move || book.start_container(&start));
            match found.await.map_err(|error| Refusal::internal(&error))? {
                Err(StartError::Starting) if Instant::now() + PAUSE < deadline => {
                    tokio::time::sleep(PAUSE).await;
                }
                found => break found,
            }
        };
        let found = found.inspect_err(|error| {
            tracing::warn!(container = starting.id, %error, "the container is not under policy and does not start");
        })?;
        let endpoints = Endpoints {
            core: self.core.clone(),
            book: Arc::clone(&self.endpoints),
        };
        for key in &found.keys {
            enforcement::in_force(&endpoints, key, deadline).await?;
        }
        if let Some(name) = found.name.filter(|_| !found.keys.is_empty()) {
            let took = begin.elapsed();
            tracing::info!(container = %name, ?took, "the container is under policy and may start");
        }
        Ok(MayStart {
            endpoints: found.keys,
        })
    }
}
