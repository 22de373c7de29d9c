//! Which answers may be released at once, and how the agent has them all the same.

use std::time::Duration;

use dns_policy::{boot_time::BootTime, mapping::Mapping};

use super::{InFlight, Moment, State, nanos};
use crate::{
    mapping::{lease, pairs::Acknowledged, repeat},
    query_report::QueryReport,
    sink::Acknowledgements,
};

/// What must be left of an acknowledged TTL for an answer to be released under it: by then the
/// agent has the answer, or has let a call go without a result.
const ACKNOWLEDGED_MARGIN: Duration = Duration::from_secs(10);

/// How an answer stands with the agent's leases.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// Some pair has no lease that lasts long enough.
    None,
    /// Each has one; the agent is asked to renew them.
    Renewed,
    /// Each has one that lasts.
    Leased,
    /// The agent has acknowledged each for this endpoint, and each acknowledged TTL still runs.
    Acknowledged,
}

/// An answer that was released at once, and its other data for the agent.
pub(in crate::sink) struct ReleasedAnswer {
    pub(super) mapping: Mapping,
    pub(super) report: Box<QueryReport>,
}

impl State {
    /// The rule of release: [`Self::leased`], or each pair is acknowledged to this endpoint in
    /// this session for longer than the agent takes to have this answer, too.
    pub(super) fn standing(&self, mapping: &Mapping, now: BootTime) -> Standing {
        let leased = self.leased(mapping, now);
        let needed = now.plus(ACKNOWLEDGED_MARGIN);
        if leased == Standing::None && self.pairs.is_acknowledged(mapping, needed, self.session) {
            return Standing::Acknowledged;
        }
        leased
    }

    /// Every pair is leased in this epoch, under the rules
    /// that this proxy applies or later ones, until the client may forget it,
    /// also if it gets the same answer again without a report to the proxy.
    fn leased(&self, mapping: &Mapping, now: BootTime) -> Standing {
        let Some((epoch, revision)) = &self.rules else {
            return Standing::None;
        };
        if self.agent.as_ref() != Some(epoch) {
            return Standing::None;
        }
        let lasts = Duration::from_secs(mapping.ttl.max(self.min_ttl).into());
        let needed = lease::needed(now.plus(repeat::WITHIN), lasts);
        let covers = |until| {
            let (name, addresses) = (&mapping.name, &mapping.addresses);
            self.leases.covers(name, addresses, until, *revision)
        };
        match needed.renewed {
            _ if !covers(needed.until) => Standing::None,
            Some(until) if !covers(until) => Standing::Renewed,
            _ => Standing::Leased,
        }
    }

    /// Has an answer sent that was released at once.
    pub(super) fn send_later(
        &mut self,
        standing: Standing,
        mapping: Mapping,
        report: Option<Box<QueryReport>>,
        now: BootTime,
    ) {
        let holder = mapping.endpoint.into();
        match report {
            _ if standing != Standing::Acknowledged => self.refresh(&mapping, now),
            Some(report) if self.besides.take(holder, 1) => {
                self.beside.push(holder, ReleasedAnswer { mapping, report });
            }
            _ => self
                .renewals
                .push((mapping.endpoint, mapping.name.clone()), now),
        }
    }

    /// Acknowledgements count in the session in which they came.
    pub(in crate::sink) fn begin_session(&mut self) {
        self.session.end();
    }

    /// An agent that plumbs addresses for longer than its own response max delay acknowledges
    /// them before it has. One that took half of ours has plumbed them, unless its setting is
    /// less than half of ours.
    pub(super) fn acknowledged(&mut self, sent: &InFlight, at: Moment) {
        let took = at.now.0.saturating_sub(sent.sent.0);
        let is_prompt = took <= nanos(at.max_delay) / 2;
        if is_prompt && self.acknowledgements == Acknowledgements::Reused {
            let acknowledged = Acknowledged::new(sent.runs_until, self.session);
            self.pairs
                .acknowledge(&sent.key, &sent.addresses, acknowledged);
        }
    }
}
