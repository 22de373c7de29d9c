//! Comparing the programs that the kernel has with what was attached: a program that is missing,
//! replaced or not the first lets packets pass unjudged, so this pass is short and frequent.

use std::{collections::BTreeMap, time::Duration};

use holdfast_sdp::mapping::BootTime;
use shared_maps::EndpointId;

use super::state::State;
use crate::datapath::look::{Look, PROGRAMS_BATCH, ProgramFault};

/// Between two passes at most: with the pass itself and the repair well below five seconds.
const INTERVAL: Duration = Duration::from_secs(2);
/// Between two looks of a pass.
const PAUSE: Duration = Duration::from_millis(5);
/// Times in a row that programs are attached again for a fault that may last: another program
/// that also takes the first place would otherwise exchange places with ours for ever.
const REGAINS: u32 = 3;
/// After so many, and this long after the last one, it is tried once more.
const TRUCE: Duration = Duration::from_secs(60);

/// How far a pass over the endpoints' programs is.
#[derive(Debug, Default)]
pub(super) struct ProgramsPass {
    /// When the next look is due.
    due: BootTime,
    /// The endpoint that was looked at last; none between two passes.
    after: Option<EndpointId>,
    /// The look under way is one at programs.
    under_way: bool,
    /// Endpoints whose programs were attached again for a fault that may last.
    contested: BTreeMap<EndpointId, Contest>,
}

#[derive(Debug)]
struct Contest {
    times: u32,
    last: BootTime,
}

impl ProgramsPass {
    /// When the next look is due.
    pub(super) fn due(&self) -> BootTime {
        self.due
    }
}

impl State {
    /// The next endpoints whose programs are to be looked at; none if it is not the time.
    pub(super) fn look_at_programs(&mut self) -> Option<Look> {
        if self.programs.due > self.now {
            return None;
        }
        let next = self.endpoints.after(self.programs.after);
        let attached = next.filter_map(|endpoint| {
            let attached = endpoint.attached.clone();
            attached.filter(|attached| *attached == endpoint.attachment())
        });
        let batch: Vec<_> = attached.take(PROGRAMS_BATCH).collect();
        self.programs.after = batch.last().map(|last| last.endpoint);
        let pause = match self.programs.after {
            Some(_) => PAUSE,
            None => self.config.reconcile_interval.clamp(PAUSE, INTERVAL),
        };
        self.programs.due = self.now.plus(pause);
        self.programs.under_way = !batch.is_empty();
        self.programs.under_way.then_some(Look::Programs(batch))
    }

    /// Whether the look under way was one at programs; it ends here.
    pub(super) fn end_look_at_programs(&mut self) -> bool {
        std::mem::take(&mut self.programs.under_way)
    }

    /// Takes what is wrong about programs. Gives the number of faults that the next plan repairs.
    pub(super) fn seen_programs(&mut self, found: &[(EndpointId, Vec<ProgramFault>)]) -> u64 {
        let mut repaired = 0;
        for (id, faults) in found {
            // Both hooks of an endpoint are often overtaken by the same contender.
            let gives_up = match faults.first() {
                Some(fault) if faults.iter().all(may_last) => !self.may_regain(*id, fault),
                _ => {
                    self.end_contest(*id, faults.is_empty());
                    false
                }
            };
            // Nothing passes an interface that is gone, and nothing can be attached to it: its
            // endpoint's source finds the next one.
            let is_gone = faults
                .iter()
                .any(|f| matches!(f, ProgramFault::NoInterface(_)));
            if faults.is_empty() || gives_up || is_gone {
                continue;
            }
            if let Some(endpoint) = self.endpoints.mark_mut(*id) {
                endpoint.attached = None;
                repaired += 1;
            }
        }
        self.counters.reconciled.programs += repaired;
        repaired
    }

    /// Whether the programs are to be attached once more.
    fn may_regain(&mut self, id: EndpointId, fault: &ProgramFault) -> bool {
        let now = self.now;
        let contest = self.programs.contested.entry(id);
        let contest = contest.or_insert(Contest {
            times: 0,
            last: now,
        });
        if contest.times >= REGAINS {
            if contest.last.plus(TRUCE) > now {
                if let Some(endpoint) = self.endpoints.get_mut(id) {
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

    /// The programs are the first: after a while without a contest the next one is a new one.
    fn end_contest(&mut self, id: EndpointId, is_first: bool) {
        let Some(contest) = self.programs.contested.get(&id) else {
            return;
        };
        if is_first
            && contest.times >= REGAINS
            && let Some(endpoint) = self.endpoints.get_mut(id)
        {
            endpoint.unplaced = None;
        }
        if contest.last.plus(TRUCE) <= self.now {
            self.programs.contested.remove(&id);
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
