//! The one writer: events in, plans and effects out.
//!
//! ```text
//!   event ─► Core::plan ─► Plan::apply (ordered steps) ─► Datapath ─► Core::commit ─► effects
//! ```
//! `Core` is synchronous and does no I/O: time and the outcome of each step are
//! passed in.

use holdfast_sdp::mapping::BootTime;

pub mod config;
pub mod event;
pub mod plan;
pub mod snapshot;

pub use config::{CoreConfig, Restored};
pub use event::{Effect, Event};
pub use plan::Plan;
pub use snapshot::{Snapshot, Summary};

use crate::datapath::plan::StepError;

/// The core. One plan at a time: each [`Core::plan`] is followed by its [`Core::commit`].
#[derive(Debug)]
pub struct Core {
    config: CoreConfig,
    restored: Restored,
}

impl Core {
    /// Starts from what an earlier run left behind.
    pub fn new(config: CoreConfig, restored: Restored) -> Self {
        Self { config, restored }
    }

    /// Takes one event and says what has to be done. The first plan of all, whatever its
    /// event, also removes what is left of endpoints whose interface is gone.
    pub fn plan(&mut self, now: BootTime, event: Event) -> Plan {
        let _ = (now, event, &self.config, &self.restored);
        Plan::default()
    }

    /// Takes the outcome of a plan: `failures` as [`Plan::apply`] returned them.
    pub fn commit(
        &mut self,
        now: BootTime,
        plan: Plan,
        failures: &[(usize, StepError)],
    ) -> Vec<Effect> {
        let _ = (now, plan, failures);
        Vec::new()
    }

    /// When [`Event::Tick`] is due next.
    pub fn next_deadline(&self) -> Option<BootTime> {
        None
    }

    /// Everything, as plain data.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot::default()
    }

    /// Counts alone; cheap.
    pub fn summary(&self) -> Summary {
        Summary::default()
    }
}
