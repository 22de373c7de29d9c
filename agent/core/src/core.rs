//! The one writer: events in, plans and effects out.
//!
//! ```text
//!   event ─► Core::plan ─► Plan::apply (ordered steps) ─► Datapath ─► Core::commit ─► effects
//! ```
//! `Core` is synchronous and does no I/O: time and the outcome of each step are
//! passed in.
//!
//! Its state has these parts: `restoration`, `policy_model`, `identity_numbers` with `identity_budget`,
//! `endpoint_table`, `endpoint_files`, `lxc_table`, `leases`, `closed_names`, `publication`, `retry`,
//! `intake` and `reconcile`. Each part owns its fields, which no other file sees, and its file states
//! the invariant. Changes that wait for the outcome of a plan are in the `plan`. The other files decide
//! across parts: handlers of events change the model and mark the map entries that differ from it. One
//! `flush` at the end of the event plans the writes of these entries. Two events have an earlier flush
//! too: the one that makes all sources complete (the sync), and the end of the grace after a restart.
//!
//! The files by subject: `mappings` takes answers, `resolved` has the names of EgressFirewalls, `clean`
//! removes names on request; `changes` takes policy, `endpoints`, `pods` and `services` the rest of the
//! cluster; `identities` gives numbers to labels; `flush` plans, `restore` begins with what an earlier run
//! left, `reconcile` compares; `view` and `why` explain.

use std::collections::BTreeSet;

use dns_policy::boot_time::BootTime;
use shared_maps::EndpointId;

mod carried;
mod changes;
pub mod clean;
pub mod config;
mod endpoints;
pub mod event;
mod flush;
mod identities;
pub mod identities_in_use;
mod mappings;
pub mod packet_view;
pub mod plan;
mod pods;
mod reconcile;
mod resolved;
mod restore;
pub mod router;
mod services;
pub mod snapshot;
pub mod state;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod view;
mod wanted_identities;
pub mod why;

pub use crate::core::state::location::{Directory, EndpointLocation};
pub use config::{CoreConfig, Restored};
pub use event::{Effect, Event};
pub use plan::Plan;
pub use snapshot::{Snapshot, Summary};

use self::{
    mappings::intake::Intake,
    reconcile::Reconcile,
    state::{State, publication::PlanResult},
};
use crate::datapath::{
    map_query::{MapEntries, MapQuery},
    plan::{Step, StepError},
};

/// The core. One plan at a time: each [`Core::plan`] is followed by its [`Core::commit`].
#[derive(Debug)]
pub struct Core {
    state: State,
    intake: Intake,
    reconcile: Reconcile,
}

impl Core {
    /// Starts from what an earlier run left behind.
    pub fn new(config: CoreConfig, restored: Restored) -> Self {
        Self {
            state: State::new(config, restored),
            intake: Intake::default(),
            reconcile: Reconcile::default(),
        }
    }

    /// Handles one event and returns the plan for it. The first plan, for any event, also removes
    /// the remaining entries of endpoints whose interface was removed.
    pub fn plan(&mut self, now: BootTime, event: Event) -> Plan {
        let state = &mut self.state;
        state.now = now.max(state.now);
        let mut plan = Plan::default();
        let is_idle = matches!(event, Event::Tick);
        if state.restoration.start() {
            state.start(&mut plan);
            state.numbers.begin();
        }
        state.retry_due();
        state.end_waiting();
        self.handle(&mut plan, event);
        let state = &mut self.state;
        if state.sync_up(&mut plan) {
            self.intake.admit_early(state, &mut plan);
        }
        // After the event: a mapping in it may extend what would expire.
        state.expire();
        state.end_revocations();
        state.end_restore(&mut plan);
        state.keep_cleaned(&mut plan);
        state.flush(&mut plan);
        if is_idle && state.restoration.is_synced() {
            state.replace_programs(&mut plan);
        }
        if !state.change_in_progress() {
            state.settle_rules();
        }
        state.plan_files(&mut plan);
        plan
    }

    /// Applies an event to the model, and marks map entries that then differ from the model.
    fn handle(&mut self, plan: &mut Plan, event: Event) {
        let state = &mut self.state;
        match event {
            Event::Policies(event) => {
                state.on_policy(event);
                state.change_policy(plan);
            }
            Event::ContinueChange => state.change_policy(plan),
            Event::PoliciesRejected(errors) => state.policy.set_rejected(errors),
            Event::PoliciesUncertain(true) => state.restoration.hold_mut().begin(),
            Event::PoliciesUncertain(false) => state.end_hold(),
            Event::Pods(events) => state.on_pods(events),
            Event::Services(events) => state.on_services(events),
            Event::Identities(events) => state.on_identities(events),
            Event::NumbersGiven(given) => state.on_numbers_given(&given),
            Event::NumbersResting(ids) => state.numbers.rest(&ids, state.now),
            Event::Resolved(events) => state.on_resolved(events),
            Event::ClusterWarnings(warnings) => state.cluster.pods.warn(warnings),
            Event::Namespaces(namespaces) => state.cluster.namespaces = namespaces,
            Event::NodeInterfaces(interfaces) => state.on_node_interfaces(interfaces),
            Event::Endpoints(event) => state.on_endpoint(event),
            Event::NodeAddresses(addresses) => state.on_node_addresses(&addresses),
            Event::Mappings(mappings) => {
                for event in mappings {
                    self.intake.admit(state, plan, event);
                }
            }
            Event::Liveness {
                gc_start,
                alive,
                complete,
            } => {
                state.on_alive(gc_start, &alive);
                if complete {
                    state.on_pass_complete(gc_start);
                }
            }
            Event::StreamUp(stream) => state.proxies.leases.open(stream),
            Event::StreamDown(stream) => {
                self.intake.close(stream);
                state.files.forget_stream(stream);
                state.proxies.leases.close(stream, state.now);
            }
            Event::HolderEnded(streams) => state.proxies.leases.end_holder(&streams, state.now),
            Event::RevokeAcked(acks) => state.proxies.leases.acknowledge(&acks),
            Event::CleanNames(clean) => state.on_clean(plan, &clean),
            Event::NamesKept(written) => match written.failure {
                None => state.on_names_written(plan, written.endpoint, written.number),
                Some(failure) => {
                    state.on_names_unwritten(written.endpoint, written.number, failure);
                }
            },
            Event::Tick => {}
        }
    }

    /// Whether the first listings of all sources are complete.
    pub fn is_synced(&self) -> bool {
        self.state.restoration.is_synced()
    }

    /// Whether a change of policy has parts left: an [`Event::ContinueChange`] has to follow, and other
    /// events may come before it.
    pub fn change_in_progress(&self) -> bool {
        self.state.change_in_progress()
    }

    /// Takes the outcome of a plan: `failures` as [`Plan::apply`] returned them.
    pub fn commit(
        &mut self,
        now: BootTime,
        mut plan: Plan,
        failures: &[(usize, StepError)],
    ) -> Vec<Effect> {
        let state = &mut self.state;
        state.now = now.max(state.now);
        let failed: BTreeSet<usize> = failures.iter().map(|(index, _)| *index).collect();
        state.note_placed(&plan, failures);
        let unsaved = plan.take_unsaved(&failed);
        state.numbers.mark_fresh(unsaved);
        state.counters.step_failures += failed.len() as u64;
        state.retry.note(failures, state.now);
        for undo in plan.take_undo(&failed) {
            state.rollback(&mut plan, undo);
        }
        state.revive_identities(plan.take_forgotten());
        let mut effects = state.settle_results(plan.take_results());
        let durable = plan.take_durable().into_iter();
        effects.extend(durable.map(Effect::Result));
        effects.extend(state.take_resolver_effects());
        state.free_numbers();
        if state.renumber() {
            state.retry.schedule(state.now);
        }
        let revocations = plan.take_revocations().into_iter();
        effects.extend(revocations.map(Effect::Revoke));
        let result = match failed.is_empty() {
            true => PlanResult::Done,
            false => PlanResult::Failed,
        };
        if let Some(result) = state.part_ended(result) {
            effects.append(&mut state.publish(result));
        }
        if !failed.is_empty()
            || state.retry.has_prefixes()
            || state.numbers.budget().limited() > 0
            || state.cluster.pods.lacks_identities()
            || state.endpoints.lacks_identities()
        {
            state.retry.schedule(state.now);
        }
        effects.extend(state.take_wanted_identities());
        effects
    }

    /// When [`Event::Tick`] is due next.
    pub fn next_deadline(&self) -> Option<BootTime> {
        let state = &self.state;
        let programs = state.has_former_programs().then_some(state.now);
        self.next_urgent().into_iter().chain(programs).min()
    }

    /// As [`Self::next_deadline`], without work that may wait while there are events. This is the replacement of
    /// programs of an earlier run: each program takes the kernel longer than many events.
    pub fn next_urgent(&self) -> Option<BootTime> {
        let state = &self.state;
        let file = state.files.next_due();
        let times = [
            state.learned.names.next_deadline(),
            state.resolved.next_deadline(),
            state.retry.next(),
            state.restored_until(),
            state.proxies.leases.next_end(),
            state.cluster.services.next_expiry(),
            state.numbers.next_deadline(),
        ];
        let file = file.filter(|_| state.restoration.is_synced());
        let times = times.into_iter().chain([file]);
        times.flatten().min()
    }

    /// When [`Core::next_query`] is due next; `None` before the sources are synced.
    pub fn query_due(&self) -> Option<BootTime> {
        self.reconcile.due(&self.state)
    }

    /// The next query, which compares the datapath with the model; `None` before it is due. The
    /// next call must be [`Core::reconcile`].
    pub fn next_query(&mut self, now: BootTime) -> Option<MapQuery> {
        self.state.now = now.max(self.state.now);
        self.reconcile.next(&mut self.state)
    }

    /// Compares entries of the datapath with the model; `None` means that the query failed. Returns
    /// the number of differences, which the next plan repairs.
    pub fn reconcile(&mut self, entries: Option<MapEntries>) -> u64 {
        self.reconcile.compare(&mut self.state, entries)
    }

    /// The whole state as plain data. The cost grows with the size of the state.
    pub fn snapshot(&self) -> Snapshot {
        self.state.snapshot()
    }

    /// Endpoints, identities and prefixes. The cost grows with the number of prefixes.
    pub fn directory(&self) -> Directory {
        self.state.directory()
    }

    /// Where the endpoints are; cheap.
    pub fn locations(&self) -> Vec<EndpointLocation> {
        self.state.locations()
    }

    /// Only the counts of [`Self::snapshot`], which are cheap.
    pub fn summary(&self) -> Summary {
        self.state.summary()
    }
}

impl State {
    /// Once all sources are complete, plans the whole model with a flush of its own, so that
    /// mappings which proxies sent earlier are judged by the resulting rules. Returns whether this
    /// call did so.
    fn sync_up(&mut self, plan: &mut Plan) -> bool {
        let until = self.now.plus(self.config.restore_grace);
        if !self.restoration.sync(until) {
            return false;
        }
        let left: Vec<_> = self
            .endpoints
            .iter()
            .filter(|e| e.restored)
            .map(|e| e.id)
            .collect();
        for id in left {
            self.remove_endpoint(id);
        }
        self.share_numbers();
        self.proxies.publication.begin_first_revision();
        self.await_names();
        self.hold_endpoints();
        self.relabel_resolved();
        self.publish_names();
        self.relabel(plan);
        self.preallocate_early();
        self.flush(plan);
        self.numbers.budget_mut().end_expecting();
        self.settle_rules();
        true
    }

    /// Marks failed items, so that they are planned again.
    fn retry_due(&mut self) {
        let Some(prefixes) = self.retry.take_due(self.now) else {
            return;
        };
        for prefix in prefixes {
            self.ipcache.mark(prefix);
        }
        self.retry_limited();
        self.retry_pods();
        self.retry_endpoints();
    }

    /// Notes which endpoints have their address in `cilium_lxc` and their programs attached.
    fn note_placed(&mut self, plan: &Plan, failures: &[(usize, StepError)]) {
        let of = |step: &Step| match step {
            Step::SetLxc(_, value) => Some(EndpointId(value.lxc_id)),
            Step::Attach(attachment) => Some(attachment.endpoint),
            _ => None,
        };
        let placed = plan.steps.iter().filter_map(of);
        for id in placed.collect::<BTreeSet<_>>() {
            if let Some(endpoint) = self.endpoints.get_mut(id) {
                endpoint.unplaced = None;
            }
        }
        for (index, error) in failures {
            let step = plan.steps.get(*index);
            let id = step.and_then(of);
            if let Some(endpoint) = id.and_then(|id| self.endpoints.get_mut(id)) {
                let effect = match step {
                    Some(Step::SetLxc(..)) => "the proxies refuse the DNS queries of this endpoint",
                    _ => "nothing restricts this endpoint",
                };
                endpoint
                    .unplaced
                    .get_or_insert_with(|| format!("{error}: without it {effect}"));
            }
        }
    }

    /// Frees the numbers of removed endpoints that have nothing left in the datapath.
    fn free_numbers(&mut self) {
        let with_entries = match self.endpoints.has_leaving() {
            true => self.lxc.endpoints(),
            false => BTreeSet::new(),
        };
        let files = &self.files;
        self.endpoints
            .free_numbers(|id| files.is_left(id) || with_entries.contains(&id));
    }
}

#[cfg(test)]
mod tests;
