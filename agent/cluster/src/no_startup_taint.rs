//! In the place of the startup taint, in a build without the feature `kubernetes`: there is none.

use tokio_util::sync::CancellationToken;

use super::{client::Api, health::ClusterHealth};

/// The startup taint of this node; there is none.
#[derive(Debug)]
#[expect(dead_code, reason = "there is no client to remove it with")]
pub(crate) struct StartupTaint {
    /// There is no client.
    pub api: Api,
    /// `--node-name`.
    pub node: String,
    /// `--agent-not-ready-taint-key`.
    pub key: String,
    /// Nothing is reported.
    pub health: ClusterHealth,
}

impl StartupTaint {
    /// Never run.
    pub(crate) async fn run(self, _: impl Future<Output = bool>, _: CancellationToken) {
        match self.api {}
    }
}
