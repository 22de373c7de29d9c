//! In the place of the DaemonSet's watch, in a build without the feature `kubernetes`: there is none.

use super::client::Api;

/// The DaemonSet that the agent is of; there is none.
#[derive(Debug)]
pub(crate) enum OwnSet {}

impl OwnSet {
    /// There is no client to look with.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "the same arguments as with the feature"
    )]
    pub fn start(api: Api, _: &str) -> Self {
        match api {}
    }

    /// Never asked.
    pub(crate) async fn was_deleted(self) -> bool {
        match self {}
    }
}
