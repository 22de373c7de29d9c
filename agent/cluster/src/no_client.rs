//! In the place of the client, in a build without the feature `kubernetes`: there is none.

use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{ApiSettings, Here, Watches};

/// Why no API server can be used.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// There is no client.
    #[error(
        "this program was built without the feature kubernetes, and has neither --kubernetes nor the \
         command relay; build it with `cargo build -p holdfast-agent --features kubernetes`"
    )]
    NotBuilt,
}

/// A client of the API server; there is none.
#[derive(Clone, Debug)]
pub enum Api {}

impl Api {
    /// Refuses.
    ///
    /// # Errors
    /// Always.
    pub async fn connect(_: &ApiSettings) -> Result<Self, ClientError> {
        Err(ClientError::NotBuilt)
    }

    /// Never asked.
    pub(crate) fn server(&self) -> &str {
        match *self {}
    }

    /// Never asked.
    pub(crate) fn namespace(&self) -> &str {
        match *self {}
    }

    /// Never asked.
    pub(crate) fn authorities(&self) -> &[String] {
        match *self {}
    }
}

/// Starts nothing: there is no client.
pub fn start(api: &Api, _: Here, _: &TaskTracker, _: &CancellationToken) -> Watches {
    match *api {}
}
