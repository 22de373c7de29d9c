//! The core with its datapath. The thread that has the engine's lock handles one event after the other.

use std::time::{Duration, Instant};

use agent_core::{
    core::{
        Core,
        event::{Effect, Event},
        plan::Plan,
    },
    datapath::{
        map_query::{MapEntries, ProgramFault},
        plan::{Datapath, Step},
    },
};
use dns_policy::boot_time::BootTime;
use shared_maps::EndpointId;

use super::{Feeds, start::Start};
use crate::proxies::Proxies;

/// Maximum failed steps of one plan that are logged one by one.
const LOGGED: usize = 10;
/// An event that takes longer than this is logged: names, pods and policies wait for it.
const SLOW: Duration = Duration::from_millis(30);
/// Maximum mappings, and maximum steps, that a stream's own thread carries out.
const FEW: usize = 16;

/// The result of an attempt of a stream's thread to carry out an event.
#[expect(
    clippy::large_enum_variant,
    reason = "it lives on the stack, for one match"
)]
pub(super) enum AtOnce {
    Done,
    /// The event is planned. The core's thread has to carry the plan out.
    Planned,
    /// Nothing was done with the event. It has to be queued.
    Refused(Event),
}

/// The core, with the datapath, the proxies and the tasks that get its results.
pub(super) struct Engine {
    pub(super) core: Core,
    datapath: Box<dyn Datapath>,
    proxies: Proxies,
    feeds: Feeds,
    /// A plan with a step that may take long, made on a stream's thread.
    planned: Option<Plan>,
    /// When the core's thread wakes by itself.
    pub(super) wakes_at: Option<BootTime>,
    /// Whether a step panicked on a stream's thread. The core's model may then be half changed.
    pub(super) broken: bool,
    start: Start,
}

impl Engine {
    pub(super) fn new(
        core: Core,
        datapath: Box<dyn Datapath>,
        proxies: Proxies,
        feeds: Feeds,
    ) -> Self {
        Self {
            core,
            datapath,
            proxies,
            feeds,
            planned: None,
            wakes_at: None,
            broken: false,
            start: Start::default(),
        }
    }

    /// Plans the event, and carries the plan out if no step of it can wait for a disk or load a
    /// program. To be called only while no event waits in a queue.
    pub(super) fn step_at_once(&mut self, event: Event) -> AtOnce {
        let few = matches!(&event, Event::Mappings(mappings) if mappings.len() <= FEW);
        if !few || self.broken || self.planned.is_some() || self.core.change_in_progress() {
            return AtOnce::Refused(event);
        }
        let plan = self.core.plan(BootTime::now(), event);
        if plan.steps.len() > FEW || !plan.steps.iter().all(is_quick) {
            self.planned = Some(plan);
            return AtOnce::Planned;
        }
        self.carry_out(plan, false);
        AtOnce::Done
    }

    /// Carries out the plan of a stream's thread. To be called before any other event is handled.
    pub(super) fn finish_planned(&mut self) {
        if let Some(plan) = self.planned.take() {
            self.carry_out(plan, false);
        }
    }

    /// Whether the core's thread has something to do before it would wake by itself.
    pub(super) fn is_behind(&self) -> bool {
        let earlier = |at| self.wakes_at.is_none_or(|wakes| at < wakes);
        self.core.change_in_progress() || self.core.next_deadline().is_some_and(earlier)
    }

    /// Compares one batch of the datapath with the model, if it is due.
    pub(super) fn reconcile(&mut self) {
        let Some(query) = self.core.next_query(BootTime::now()) else {
            return;
        };
        let entries = self.datapath.read_entries(&query);
        match &entries {
            Ok(MapEntries::Programs(found)) => log_faults(found),
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(%error, "a map could not be compared with the model");
            }
        }
        let differences = self.core.reconcile(entries.ok());
        if differences > 0 {
            tracing::warn!(
                differences,
                of = query.name(),
                "the datapath differed from the model; repaired"
            );
            self.step(Event::Tick);
        }
    }

    /// Plans the event and carries the plan out.
    pub(super) fn step(&mut self, event: Event) {
        let by_source = matches!(
            event,
            Event::Policies(_)
                | Event::ContinueChange
                | Event::Endpoints(_)
                | Event::NodeAddresses(_)
                | Event::NodeInterfaces(_)
        );
        let kind = event.kind();
        let begin = Instant::now();
        let plan = self.core.plan(BootTime::now(), event);
        let (steps, planned) = (plan.steps.len(), begin.elapsed());
        self.carry_out(plan, by_source);
        let took = begin.elapsed();
        if took > SLOW {
            tracing::debug!(kind, steps, ?planned, ?took, "an event took long");
        }
        self.start.note_synced(&self.core);
    }

    fn carry_out(&mut self, plan: Plan, by_source: bool) {
        let writes_files_only = plan
            .steps
            .iter()
            .all(|step| matches!(step, Step::WriteEndpoint(..) | Step::KeepNames(..)));
        let failures = plan.apply(&mut *self.datapath);
        for (index, error) in failures.iter().take(LOGGED) {
            let Some(step) = plan.steps.get(*index) else {
                continue;
            };
            let endpoint = step.endpoint().map(|id| id.0);
            let address = step.prefix().map(tracing::field::display);
            tracing::warn!(
                step = step.name(), endpoint, address, %error,
                "a step failed; the entries in force before it remain"
            );
        }
        if failures.len() > LOGGED {
            tracing::warn!(more = failures.len() - LOGGED, "further steps failed");
        }
        let effects = self.core.commit(BootTime::now(), plan, &failures);
        if by_source || !writes_files_only {
            // Streams have to learn of the change before they get the rules that refer to it.
            self.proxies.changed();
        }
        self.publish(effects);
    }

    fn publish(&self, effects: Vec<Effect>) {
        let mut results = Vec::new();
        let mut revocations = Vec::new();
        for effect in effects {
            match effect {
                Effect::Result(result) => results.push(result),
                Effect::Rules(update) => self.proxies.rules(update),
                Effect::SnapshotReady => self.proxies.ready(),
                Effect::Revoke(revocation) => revocations.push(revocation),
                Effect::Observed(observation) => self.feeds.resolver.observe(observation),
                Effect::Resolver { names, servers } => {
                    self.feeds.resolver.publish(names, servers);
                }
                Effect::WantedIdentities(wanted) => self.feeds.identities.publish(wanted),
            }
        }
        // One message per stream, however many names were cleaned.
        self.proxies.revoke(revocations);
        if !results.is_empty() {
            self.proxies.results(results);
        }
    }
}

/// Whether a step is one system call on a map, or is only handed to another thread.
fn is_quick(step: &Step) -> bool {
    match step {
        Step::SetIpcache(..)
        | Step::UnsetIpcache(_)
        | Step::SetPolicy(..)
        | Step::UnsetPolicy(..)
        | Step::KeepNames(..) => true,
        Step::Checkpoint(_)
        | Step::CheckpointEndpoints(_)
        | Step::WriteEndpoint(..)
        | Step::KeepCleaned(_)
        | Step::RemoveEndpoint(_)
        | Step::CreatePolicyMap(_)
        | Step::RemovePolicyMap(_)
        | Step::SetLxc(..)
        | Step::UnsetLxc(_)
        | Step::Attach(_)
        | Step::Detach(_) => false,
    }
}

fn log_faults(found: &[(EndpointId, Vec<ProgramFault>)]) {
    for (endpoint, faults) in found {
        for fault in faults {
            tracing::warn!(endpoint = endpoint.0, %fault, "the programs of an endpoint are not in force");
        }
    }
}
