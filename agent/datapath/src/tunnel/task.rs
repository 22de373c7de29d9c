//! The task that keeps the tunnel as the mode and the objects of the cluster want it.

use std::time::Duration;

use agent_core::{
    high_scale::objects::{HighScaleView, World},
    tunnel_mode::TunnelMode,
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{Tunnel, TunnelError, blocks_map, outside, status};

/// How long a new native device may be without the programs, and the time until an attempt to write the
/// map of blocks is repeated.
const INTERVAL: Duration = Duration::from_secs(1);

impl Tunnel {
    /// Keeps the programs attached, and the map of blocks as the objects say, until stopped. The objects
    /// count once the agent is `ready`: before that, numbers of pods may mean other labels to other nodes.
    pub async fn run(
        mut self,
        mut objects: watch::Receiver<HighScaleView>,
        ready: impl Future<Output = bool>,
        stop: CancellationToken,
    ) {
        let mut ticker = tokio::time::interval(INTERVAL);
        let mut ready = std::pin::pin!(ready);
        let mut is_ready = false;
        let mut is_due = true;
        loop {
            tokio::select! {
                _ = ticker.tick() => {}
                became_ready = &mut ready, if !is_ready => match became_ready {
                    true => is_ready = true,
                    false => return,
                },
                () = stop.cancelled() => return,
            }
            is_due |= objects.has_changed().unwrap_or(false);
            let mut fault = None;
            if is_ready && is_due {
                let view = objects.borrow_and_update().clone();
                fault = self.follow(view).err();
                is_due = fault.is_some();
            }
            let refreshed = self.refresh().await.err();
            self.report(fault.or(refreshed));
        }
    }

    fn report(&self, fault: Option<TunnelError>) {
        let fault = fault.map(|error| error.to_string());
        self.status.change(|view| {
            if let Some(error) = fault.as_ref().filter(|_| fault != view.fault) {
                tracing::error!(error, "the tunnel between nodes is not as it should be");
            }
            view.fault = fault;
        });
    }

    /// Takes what the objects say. The blocks go to the map before anything is wrapped by them.
    pub fn follow(&mut self, objects: HighScaleView) -> Result<(), TunnelError> {
        let is_full = self.settings.mode == TunnelMode::Full;
        let mut count = None;
        match &objects.world {
            World::Unknown | World::TooMany(_) => {}
            // The map stays: sources in its blocks are no pods'.
            World::Absent => self.wraps = false,
            World::Blocks(blocks) => {
                outside::write(blocks, &blocks_map(&self.globals)?)?;
                self.wraps = is_full;
                count = Some(blocks.keys().len());
            }
        }
        let behind = match is_full {
            true => objects.behind().map(str::to_owned).collect(),
            false => Vec::new(),
        };
        let is_listed = objects.world != World::Unknown;
        self.world = objects.world;
        self.report_world(count);
        self.status.change(|view| {
            view.behind = behind;
            view.other_nodes = is_listed.then_some(objects.nodes.len());
        });
        Ok(())
    }

    pub(super) fn report_world(&self, count: Option<usize>) {
        let problem = status::problem(&self.world, self.settings.mode, self.wraps);
        self.status.change(|view| {
            let is_new = problem != view.world_problem && self.world != World::Unknown;
            if let Some(problem) = problem.as_ref().filter(|_| is_new) {
                tracing::error!("{problem}");
            }
            view.world_problem = problem;
            view.wraps = self.wraps;
            view.world_blocks = count.or(view.world_blocks);
        });
    }
}
