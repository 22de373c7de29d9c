//! Starts the tasks that make and delete CiliumIdentity objects.

use agent_cluster::{api::client::Api, health::ClusterHealth};

use super::Rim;
use crate::{config::Config, identities::view::Identities, runner::identity_feed::IdentityFeed};

/// Starts the tasks, if the numbers of identities are those of the cluster.
#[cfg(feature = "kubernetes")]
pub(super) fn start(
    config: &Config,
    rim: &Rim,
    api: Option<&Api>,
    health: Option<&ClusterHealth>,
    feed: &IdentityFeed,
) -> Option<Identities> {
    use crate::identities::task::{self, Settings};

    config.core.cluster_identities?;
    let flags = &config.flags.identities;
    let settings = Settings {
        api: api?.clone(),
        node: config.node_name.clone(),
        unused_for: flags.identity_unused_for,
        lease: flags.identity_lease,
    };
    let health = health?.clone();
    Some(task::start(
        settings, feed, &rim.core, health, &rim.tasks, &rim.stop,
    ))
}

/// Without the client for the API server, the agent is in no cluster.
#[cfg(not(feature = "kubernetes"))]
pub(super) fn start(
    _config: &Config,
    _rim: &Rim,
    _api: Option<&Api>,
    _health: Option<&ClusterHealth>,
    _feed: &IdentityFeed,
) -> Option<Identities> {
    None
}
