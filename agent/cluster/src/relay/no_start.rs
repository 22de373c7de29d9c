//! In the place of relays, in a build without the feature `kubernetes`: there are none.

use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::settings::RelaySettings;
use crate::{Here, Watches, client::Api};

/// Starts nothing: there is no client.
pub(crate) fn follow(
    api: &Api,
    _: RelaySettings,
    _: Here,
    _: &TaskTracker,
    _: &CancellationToken,
) -> Watches {
    match *api {}
}
