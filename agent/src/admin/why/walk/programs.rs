//! Whether the kernel runs the endpoint's programs: without them no policy is in force.

use agent_core::{datapath::map_query::ProgramFault, policy::trace::FlowDirection};

use super::{STATUS, Walk, hop};
use crate::admin::model::{Hop, HopState};

/// What becomes of packets that no program judges.
pub(super) struct Unjudged {
    pub(super) passes: bool,
    pub(super) text: String,
}

impl Walk<'_> {
    pub(super) fn programs(&self) -> Hop {
        let endpoint = &self.found.endpoint;
        let place = format!("{} (index {})", endpoint.ifname, endpoint.ifindex);
        let Some(fault) = self.fault() else {
            let text = format!("attached to {place}, before all others");
            return hop("programs", None, HopState::Found, text, "");
        };
        let text = format!("{place}: {fault}");
        match fault {
            ProgramFault::NoInterface(_) | ProgramFault::Unknown { .. } => {
                hop("programs", None, HopState::Unknown, text, "")
            }
            _ => hop("programs", None, HopState::Missing, text, STATUS),
        }
    }

    /// What becomes of packets of this direction if no program judges them.
    pub(super) fn unjudged(&self) -> Option<Unjudged> {
        let fault = self.fault()?;
        let is_unjudged = matches!(
            fault,
            ProgramFault::Unpinned { .. }
                | ProgramFault::Detached { .. }
                | ProgramFault::Replaced { .. }
        );
        let mut faults = self.programs.iter();
        let passes = match self.question.direction {
            // Netfilter's rules drop unjudged packets of a pod only while its interface is in the group of endpoints.
            FlowDirection::Egress => faults.any(|f| matches!(f, ProgramFault::OutOfGroup(_))),
            FlowDirection::Ingress => true,
        };
        let text = match passes {
            true => format!("passes without being judged: {fault}"),
            false => format!("is dropped because no program judges it: {fault}"),
        };
        is_unjudged.then_some(Unjudged { passes, text })
    }

    /// Another program that may decide before ours does.
    pub(super) fn overtaken(&self) -> Option<String> {
        let fault = self.fault()?;
        matches!(fault, ProgramFault::NotFirst { .. }).then(|| fault.to_string())
    }

    /// What is wrong about the program that judges the direction asked for.
    fn fault(&self) -> Option<&ProgramFault> {
        let judges = match self.question.direction {
            FlowDirection::Egress => "from_pod",
            FlowDirection::Ingress => "to_pod",
        };
        self.programs.iter().find(|fault| match fault {
            ProgramFault::NoInterface(_) | ProgramFault::NoSettings | ProgramFault::PolicyPin => {
                true
            }
            ProgramFault::OutOfGroup(_) => false,
            ProgramFault::Unpinned { program }
            | ProgramFault::Detached { program }
            | ProgramFault::Replaced { program, .. }
            | ProgramFault::NotFirst { program, .. }
            | ProgramFault::Unknown { program, .. } => *program == judges,
        })
    }
}
