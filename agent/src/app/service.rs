//! What the agent reports to the service manager.

use std::{sync::Arc, time::Duration};

use daemon::service_manager::ServiceManager;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{proxies::RulesTable, runner::CoreHandle};

/// Time between two reports, a small part of the unit's `WatchdogSec`.
const INTERVAL: Duration = Duration::from_secs(1);

/// Reports until stopped. The agent is ready when the policy of its sources is in force, and alive while
/// its core answers.
pub(super) async fn report(
    manager: ServiceManager,
    core: CoreHandle,
    rules: watch::Receiver<Arc<RulesTable>>,
    stop: CancellationToken,
) {
    if !manager.is_present() {
        return;
    }
    let mut ticker = tokio::time::interval(INTERVAL);
    ticker.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while stop.run_until_cancelled(ticker.tick()).await.is_some() {
        let is_ready = rules.borrow().ready;
        match core.summary().await {
            Ok(_) if !is_ready => manager.state(false, "policies or endpoints are not read yet"),
            Ok(summary) => manager.state(
                true,
                &format!(
                    "{} endpoints, {} policies",
                    summary.endpoints, summary.policies
                ),
            ),
            Err(error) => {
                manager.state(false, &error.to_string());
                continue;
            }
        }
        manager.alive();
    }
}
