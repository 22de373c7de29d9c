//! What `netpol run` reports to the service manager.

use std::{sync::Arc, time::Duration};

use daemon::service_manager::ServiceManager;
use tokio_util::sync::CancellationToken;

use super::state::Shared;

/// Time between two reports to the service manager.
const INTERVAL: Duration = Duration::from_secs(1);

/// Reports until stopped. The process is ready when the kernel has the table of the documents, even if something on
/// the node leads packets past it: the status counts such problems.
pub(super) async fn report(manager: ServiceManager, shared: Arc<Shared>, stop: CancellationToken) {
    if !manager.is_present() {
        return;
    }
    let mut ticker = tokio::time::interval(INTERVAL);
    ticker.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while stop.run_until_cancelled(ticker.tick()).await.is_some() {
        let (is_in_force, is_alive, problems) = {
            let state = shared.state.lock();
            let problems = state.problems().len();
            (state.is_in_force(), state.force.is_alive(), problems)
        };
        let status = match (is_in_force, problems) {
            (false, _) => "the policies are not in force".to_owned(),
            (true, 0) => "the policies are in force".to_owned(),
            (true, count) => {
                format!("the policies are in force; PROBLEM lines of `netpol status`: {count}")
            }
        };
        manager.state(is_in_force, &status);
        if is_alive {
            manager.alive();
        }
    }
}
