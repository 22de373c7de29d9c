//! Writes that fail.

use agent_core::datapath::plan::Step;

/// Which kind of writes fails.
#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Failure {
    IpcacheEntries,
    PolicyEntries,
    Removals,
    Nothing,
}

impl Failure {
    pub(in super::super) const ALL: [Self; 4] = [
        Self::IpcacheEntries,
        Self::PolicyEntries,
        Self::Removals,
        Self::Nothing,
    ];

    /// Whether a step fails; `None` if no step does.
    pub(super) fn steps(self) -> Option<fn(&Step) -> bool> {
        match self {
            Self::IpcacheEntries => Some(|step| matches!(step, Step::SetIpcache(..))),
            Self::PolicyEntries => Some(|step| matches!(step, Step::SetPolicy(..))),
            Self::Removals => {
                Some(|step| matches!(step, Step::UnsetIpcache(_) | Step::UnsetPolicy(..)))
            }
            Self::Nothing => None,
        }
    }
}
