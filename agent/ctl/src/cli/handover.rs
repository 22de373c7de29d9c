//! `handover`: the agent that stands by takes over.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use holdfast_agent::{
    admin::{client::Client, model::Status, standby::StandbyView},
    config::args::ClientArgs,
};

use super::show::print;

/// Longest time from the end of the owner until the standby is ready.
const WITHIN: Duration = Duration::from_secs(60);
/// Longest time for an answer.
const ANSWER: Duration = Duration::from_secs(5);
/// Time between two looks.
const LOOK: Duration = Duration::from_millis(200);

/// Returns when the standby owns the node and is ready.
pub(super) async fn run(args: &ClientArgs) -> Result<()> {
    let standby = StandbyView::hand_over(args.admin_socket()).await?;
    let client = Client::new(args.admin_socket());
    let begin = Instant::now();
    while begin.elapsed() < WITHIN {
        let status = tokio::time::timeout(ANSWER, client.get::<Status>("/v1/status")).await;
        if let Ok(Ok(status)) = status
            && status.ready
            && status.pid == standby.pid
            // In containers, both may have the pid 1.
            && standby.owned_by.as_ref().is_none_or(|before| before.since != status.owner.since)
        {
            return print(args.output(), &status.owner, |_| {
                format!(
                    "holdfast-agent {}, pid {}, owns this node and is ready\n",
                    status.version, status.pid
                )
            });
        }
        tokio::time::sleep(LOOK).await;
    }
    bail!(
        "pid {} is not ready {} s after the owner was asked to end; `holdfast-agent status` and its log say more",
        standby.pid,
        WITHIN.as_secs()
    )
}
