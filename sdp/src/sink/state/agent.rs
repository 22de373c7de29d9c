//! The agent to which the sink sends, and what decides whether its leases and acknowledgements
//! count.

use dns_policy::epoch::Epoch;

use crate::{mapping::pairs::Session, sink::Acknowledgements};

#[derive(Default)]
pub(in crate::sink) struct Agent {
    /// `None` while no agent is connected.
    epoch: Option<Epoch>,
    last_epoch: Option<Epoch>,
    /// The present session. Acknowledgements of other sessions do not count.
    pub(super) session: Session,
    pub(in crate::sink) acknowledgements: Acknowledgements,
    /// Epoch and revision of the rules that this proxy applies.
    pub(in crate::sink) rules: Option<(Epoch, u64)>,
}

impl Agent {
    pub(in crate::sink) fn is_connected(&self) -> bool {
        self.epoch.is_some()
    }

    /// Notes that an agent has connected. Returns whether its epoch differs from the last agent's.
    pub(super) fn connected(&mut self, epoch: Epoch) -> bool {
        self.session.end();
        let is_other = self.last_epoch.as_ref() != Some(&epoch);
        self.last_epoch = Some(epoch.clone());
        self.epoch = Some(epoch);
        is_other
    }

    /// Notes that the agent has disconnected. Returns whether an agent was connected.
    pub(super) fn disconnected(&mut self) -> bool {
        self.session.end();
        self.epoch.take().is_some()
    }

    /// Revision of the applied rules, if the connected agent sent them.
    pub(super) fn revision(&self) -> Option<u64> {
        let (epoch, revision) = self.rules.as_ref()?;
        (self.epoch.as_ref() == Some(epoch)).then_some(*revision)
    }
}
