//! Comparing the programs that the kernel has with those that were attached. If a program is missing, replaced or not
//! the first one, packets pass unjudged. So this run is short and frequent.

use std::{collections::BTreeMap, time::Duration};

use dns_policy::boot_time::BootTime;
use shared_maps::EndpointId;

use crate::{
    core::state::State,
    datapath::map_query::{MapQuery, PROGRAMS_BATCH, ProgramFault},
};

/// Longest pause between two runs: with a run and the repair it stays well below five seconds.
const INTERVAL: Duration = Duration::from_secs(2);
/// Pause between two queries of a run.
const PAUSE: Duration = Duration::from_millis(5);
/// How many times in a row programs are attached again for a fault that may last: another program
/// that also takes the first place would otherwise exchange places with ours for ever.
const REGAINS: u32 = 3;
/// Time after the last of [`REGAINS`] attempts until the programs are attached once more.
const TRUCE: Duration = Duration::from_secs(60);

/// How far a run over the endpoints' programs is.
#[derive(Debug, Default)]
pub(in crate::core) struct ProgramsRun {
    /// When the next query is due.
    due: BootTime,
    /// The endpoint that was queried last; `None` between two runs.
    after: Option<EndpointId>,
    /// Whether the query under way is for programs.
    under_way: bool,
    /// Endpoints whose programs were attached again for a fault that may last.
    contested: BTreeMap<EndpointId, Contest>,
}

#[derive(Debug)]
struct Contest {
    times: u32,
    last: BootTime,
}

impl ProgramsRun {
    /// When the next query is due.
    pub(in crate::core) fn due(&self) -> BootTime {
        self.due
    }
    /// The next endpoints whose programs are queried; `None` before they are due.
    pub(in crate::core) fn next(&mut self, state: &mut State) -> Option<MapQuery> {
        if self.due > state.now {
            return None;
        }
        let next = state.endpoints.after(self.after);
        let attached = next.filter_map(|endpoint| {
            let attached = endpoint.attached.clone();
            attached.filter(|attached| *attached == endpoint.attachment())
        });
        let batch: Vec<_> = attached.take(PROGRAMS_BATCH).collect();
        self.after = batch.last().map(|last| last.endpoint);
        let pause = match self.after {
            Some(_) => PAUSE,
            None => state.config.reconcile_interval.clamp(PAUSE, INTERVAL),
        };
        self.due = state.now.plus(pause);
        self.under_way = !batch.is_empty();
        self.under_way.then_some(MapQuery::Programs(batch))
    }

    /// Whether the query under way was for programs; the query ends here.
    pub(in crate::core) fn end_query(&mut self) -> bool {
        std::mem::take(&mut self.under_way)
    }

    /// Records the faults of programs. Returns the number of faults that the next plan repairs.
    pub(in crate::core) fn compare(
        &mut self,
        state: &mut State,
        found: &[(EndpointId, Vec<ProgramFault>)],
    ) -> u64 {
        let mut repaired = 0;
        for (id, faults) in found {
            // Often the same program is before ours at both hooks of an endpoint, so the first fault stands for all.
            let gives_up = match faults.first() {
                Some(fault) if faults.iter().all(may_last) => !self.may_regain(state, *id, fault),
                _ => {
                    if faults.is_empty() {
                        self.end_contest(state, *id);
                    }
                    self.forget_contest(*id, state.now);
                    false
                }
            };
            // Nothing passes an interface that is gone, and nothing can be attached to it: the
            // endpoint's source finds the next interface.
            let is_gone = faults
                .iter()
                .any(|f| matches!(f, ProgramFault::NoInterface(_)));
            if faults.is_empty() || gives_up || is_gone {
                continue;
            }
            if let Some(endpoint) = state.endpoints.mark_mut(*id) {
                endpoint.attached = None;
                repaired += 1;
            }
        }
        state.counters.reconciled.programs += repaired;
        repaired
    }

    /// Whether the programs are to be attached once more.
    fn may_regain(&mut self, state: &mut State, id: EndpointId, fault: &ProgramFault) -> bool {
        let now = state.now;
        let contest = self.contested.entry(id);
        let contest = contest.or_insert(Contest {
            times: 0,
            last: now,
        });
        if contest.times >= REGAINS {
            if contest.last.plus(TRUCE) > now {
                if let Some(endpoint) = state.endpoints.get_mut(id) {
                    endpoint.unplaced = Some(given_up(fault));
                }
                return false;
            }
            contest.times = 0;
        }
        contest.times += 1;
        contest.last = now;
        true
    }

    /// Ends a contest: the programs are the first again.
    fn end_contest(&self, state: &mut State, id: EndpointId) {
        if self
            .contested
            .get(&id)
            .is_some_and(|contest| contest.times >= REGAINS)
            && let Some(endpoint) = state.endpoints.get_mut(id)
        {
            endpoint.unplaced = None;
        }
    }

    /// Forgets a contest that has been quiet for a while: the next one counts from the start.
    fn forget_contest(&mut self, id: EndpointId, now: BootTime) {
        let contest = self.contested.get(&id);
        if contest.is_some_and(|contest| contest.last.plus(TRUCE) <= now) {
            self.contested.remove(&id);
        }
    }
}

/// Whether the fault may be there again as soon as the programs are attached.
fn may_last(fault: &ProgramFault) -> bool {
    matches!(
        fault,
        ProgramFault::NotFirst { .. } | ProgramFault::Unknown { .. }
    )
}

/// The endpoint's problem while its programs are not attached again.
fn given_up(fault: &ProgramFault) -> String {
    match fault {
        ProgramFault::NotFirst { .. } => {
            format!("{fault}; it took the first place again {REGAINS} times: stop what attaches it")
        }
        _ => format!("{fault}; attaching it again {REGAINS} times did not help"),
    }
}
