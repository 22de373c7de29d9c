//! Which answers may be released at once, and how the agent still receives them.

use std::time::Duration;

use dns_policy::{boot_time::BootTime, mapping::Mapping};

use super::{HoldWindow, InFlight, State, nanos, queues::ReleasedAnswer};
use crate::{
    mapping::{
        lease,
        pairs::{Acknowledged, Key},
        repeat,
    },
    query_report::QueryReport,
    sink::Acknowledgements,
};

/// Minimum time for which an acknowledged TTL must still run to release an answer under it. Within
/// this time the agent receives the answer, or a call ends without a result.
const ACKNOWLEDGED_MARGIN: Duration = Duration::from_secs(10);

/// How leases and acknowledgements of the agent cover an answer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Coverage {
    /// A pair has no lease that lasts long enough.
    None,
    /// Every pair has a lease. The agent must renew some of these leases.
    Expiring,
    /// Every pair has a lease that lasts long enough.
    Leased,
    /// The agent has acknowledged every pair for this endpoint, and no acknowledged TTL has ended.
    Acknowledged,
}

impl State {
    /// Decides whether an answer may be released. Every pair must be leased ([`Self::leased`]), or
    /// acknowledged to this endpoint in this session for longer than the agent needs to receive
    /// this answer too.
    pub(super) fn coverage(&self, mapping: &Mapping, now: BootTime) -> Coverage {
        let leased = self.leased(mapping, now);
        let needed = now.plus(ACKNOWLEDGED_MARGIN);
        if leased == Coverage::None
            && self
                .pairs
                .is_acknowledged(mapping, needed, self.agent.session)
        {
            return Coverage::Acknowledged;
        }
        leased
    }

    /// Whether every pair is leased in this epoch, under the rules that this proxy applies or later
    /// rules. The lease must last until the client's copy expires, even if the client gets the same
    /// answer again from a cache.
    fn leased(&self, mapping: &Mapping, now: BootTime) -> Coverage {
        let Some(revision) = self.agent.revision() else {
            return Coverage::None;
        };
        let lasts = Duration::from_secs(mapping.ttl.max(self.min_ttl).into());
        let needed = lease::needed(now.plus(repeat::WITHIN), lasts);
        let covers = |until| {
            let (name, addresses) = (&mapping.name, &mapping.addresses);
            self.leases.covers(name, addresses, until, revision)
        };
        match needed.renewed {
            _ if !covers(needed.until) => Coverage::None,
            Some(until) if !covers(until) => Coverage::Expiring,
            _ => Coverage::Leased,
        }
    }

    /// Queues an answer that was released at once for sending to the agent.
    pub(super) fn send_later(
        &mut self,
        coverage: Coverage,
        mapping: Mapping,
        report: Option<Box<QueryReport>>,
        now: BootTime,
    ) {
        if coverage != Coverage::Acknowledged {
            return self.refresh(&mapping, now);
        }
        let mapping = match report {
            None => mapping,
            Some(report) => {
                let holder = mapping.endpoint.into();
                let answer = ReleasedAnswer { mapping, report };
                match self.queues.released.push(holder, answer) {
                    Ok(()) => return,
                    Err(answer) => answer.mapping,
                }
            }
        };
        self.queues.renewals.push(Key::of(&mapping), now);
    }

    /// Notes an acknowledgement, if it came within half of our delay. If plumbing takes an agent
    /// longer than its own response max delay, it acknowledges addresses before they are plumbed.
    /// Within half of our delay, the addresses are plumbed, unless the agent's delay is less than
    /// half of ours.
    pub(super) fn acknowledged(&mut self, sent: &InFlight, at: HoldWindow) {
        let took = at.now.nanos().saturating_sub(sent.sent.nanos());
        let is_prompt = took <= nanos(at.max_delay) / 2;
        if is_prompt && self.agent.acknowledgements == Acknowledgements::Reused {
            let acknowledged = Acknowledged::new(sent.runs_until, self.agent.session);
            self.pairs
                .acknowledge(&sent.key, &sent.addresses, acknowledged);
        }
    }
}
