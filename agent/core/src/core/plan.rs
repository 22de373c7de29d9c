//! A plan: ordered steps, and which of them must not run after a failure.
//!
//! A plan owns everything that waits for its outcome: [`crate::core::Core::commit`] takes it out, and
//! nothing of a plan stays in the core. Each step has exactly one undo.

use std::collections::{BTreeMap, BTreeSet};

use shared_maps::{EndpointId, IdentityId, policy::PolicyKey};

use super::event::{MappingResult, Revocation};
use crate::{
    core::state::endpoint_files::Presence,
    datapath::{
        attachment::Attachment,
        plan::{Datapath, Step, StepError},
    },
    labels::LabelSet,
    policy::compute::is_within,
};
use ipnet::IpNet;
use shared_maps::{
    lxc::{LxcKey, LxcValue},
    policy::PolicyValue,
};

/// Ordered steps. Made by [`crate::core::Core::plan`], carried out by [`Plan::apply`], handed
/// back to [`crate::core::Core::commit`].
#[derive(Debug, Default)]
pub struct Plan {
    pub steps: Vec<Step>,
    /// How to roll back each of the steps.
    undo: Vec<Undo>,
    /// Identities that are not on disk before this plan's checkpoints.
    fresh: BTreeSet<IdentityId>,
    /// Results of mappings that wait for the plan's outcome.
    results: Vec<PendingResult>,
    /// Results to repeat as durable, because the plan writes the file of their endpoint.
    durable: Vec<(EndpointId, MappingResult)>,
    /// Identities that nothing has any more if no step fails.
    forgotten: Vec<(IdentityId, LabelSet)>,
    /// Revocations to send once the plan is committed.
    revocations: Vec<Revocation>,
    /// For each endpoint number, the interfaces that lose its programs.
    uncovered: BTreeMap<EndpointId, BTreeSet<u32>>,
}

/// The result of a mapping, before its plan was carried out.
#[derive(Debug)]
pub(crate) struct PendingResult {
    /// The result if every prefix is realised.
    pub(super) result: MappingResult,
    /// Prefixes that must have their identity in the datapath.
    pub(super) prefixes: Vec<ipnet::IpNet>,
    /// The endpoint that received the answer.
    pub(super) endpoint: EndpointId,
}

impl Plan {
    /// Appends a step with its undo.
    pub(super) fn push(&mut self, step: Step, undo: Undo) {
        self.steps.push(step);
        self.undo.push(undo);
    }

    /// Notes that an interface loses the programs of an endpoint number.
    pub(super) fn uncover(&mut self, id: EndpointId, ifindex: u32) {
        self.uncovered.entry(id).or_default().insert(ifindex);
    }

    /// Notes identities that the plan's checkpoints save.
    pub(super) fn save(&mut self, fresh: BTreeSet<IdentityId>) {
        self.fresh.extend(fresh);
    }

    /// Adds the result of a mapping.
    pub(super) fn answer(&mut self, result: PendingResult) {
        self.results.push(result);
    }

    /// Adds results that are durable once the endpoint's file is written.
    pub(super) fn make_durable(&mut self, id: EndpointId, results: Vec<MappingResult>) {
        let results = results.into_iter().map(|undurable| (id, undurable));
        self.durable.extend(results);
    }

    /// Notes an identity that this plan removes from every map.
    pub(super) fn forget(&mut self, identity: IdentityId, labels: LabelSet) {
        self.forgotten.push((identity, labels));
    }

    /// Adds a revocation to be sent.
    pub(super) fn revoke(&mut self, revocation: Revocation) {
        self.revocations.push(revocation);
    }

    /// Takes the undo of each failed step, the last step's first.
    pub(super) fn take_undo(&mut self, failed: &BTreeSet<usize>) -> Vec<Undo> {
        let undo = std::mem::take(&mut self.undo).into_iter().enumerate().rev();
        let of_failed = undo.filter(|(index, _)| failed.contains(index));
        of_failed.map(|(_, undo)| undo).collect()
    }

    /// Takes the identities that would have been saved, if a checkpoint failed.
    pub(super) fn take_unsaved(&mut self, failed: &BTreeSet<usize>) -> BTreeSet<IdentityId> {
        let is_checkpoint =
            |step: &Step| matches!(step, Step::Checkpoint(_) | Step::CheckpointEndpoints(_));
        let mut failed = failed.iter().filter_map(|index| self.steps.get(*index));
        if failed.any(is_checkpoint) {
            std::mem::take(&mut self.fresh)
        } else {
            BTreeSet::new()
        }
    }

    /// Takes the results that a failed write of this endpoint's file leaves not durable.
    pub(super) fn take_undurable(&mut self, id: EndpointId) -> Vec<MappingResult> {
        let durable = std::mem::take(&mut self.durable);
        let (undurable, durable): (Vec<_>, _) = durable.into_iter().partition(|(of, _)| *of == id);
        self.durable = durable;
        undurable.into_iter().map(|(_, result)| result).collect()
    }

    pub(super) fn take_durable(&mut self) -> Vec<MappingResult> {
        let durable = std::mem::take(&mut self.durable).into_iter();
        durable.map(|(_, result)| result).collect()
    }

    pub(super) fn take_results(&mut self) -> Vec<PendingResult> {
        std::mem::take(&mut self.results)
    }

    pub(super) fn take_forgotten(&mut self) -> Vec<(IdentityId, LabelSet)> {
        std::mem::take(&mut self.forgotten)
    }

    pub(super) fn take_revocations(&mut self) -> Vec<Revocation> {
        std::mem::take(&mut self.revocations)
    }

    /// Carries out the steps in order. A step that depends on a failed one is skipped and reported as
    /// failed with [`StepError::Skipped`].
    pub fn apply(&self, datapath: &mut dyn Datapath) -> Vec<(usize, StepError)> {
        let mut failures = Vec::new();
        let mut failed = FailedDeps::default();
        for (index, step) in self.steps.iter().enumerate() {
            if failed.stops(step, &self.fresh) || self.uncovers(step, &failed) {
                failed.note(step);
                failures.push((index, StepError::Skipped));
            } else if let Err(error) = datapath.apply(step) {
                failed.note(step);
                failures.push((index, error));
            }
        }
        datapath.end_plan();
        failures
    }

    /// Whether a step takes programs off an interface where the next ones could not be attached.
    fn uncovers(&self, step: &Step, failed: &FailedDeps) -> bool {
        let Step::Detach(endpoint) = step else {
            return false;
        };
        let interfaces = self.uncovered.get(endpoint).into_iter().flatten();
        interfaces.into_iter().any(|at| failed.attach.contains(at))
    }
}

/// What failed so far in one run of a plan.
#[derive(Default)]
struct FailedDeps {
    checkpoint: bool,
    ipcache: bool,
    lxc_left: bool,
    attach: BTreeSet<u32>,
    files: BTreeSet<EndpointId>,
    maps: BTreeSet<EndpointId>,
    denies: BTreeSet<EndpointId>,
    identities: BTreeSet<u32>,
    entries: BTreeMap<(EndpointId, u32), Vec<PolicyKey>>,
}

impl FailedDeps {
    fn note(&mut self, step: &Step) {
        match step {
            Step::Checkpoint(_) | Step::CheckpointEndpoints(_) => self.checkpoint = true,
            Step::SetIpcache(..) | Step::UnsetIpcache(_) => self.ipcache = true,
            Step::UnsetLxc(_) => self.lxc_left = true,
            Step::CreatePolicyMap(endpoint) => {
                self.maps.insert(*endpoint);
            }
            Step::WriteEndpoint(endpoint, _) => {
                self.files.insert(*endpoint);
            }
            Step::SetPolicy(endpoint, key, value) => {
                self.maps.insert(*endpoint);
                self.identities.insert(key.sec_label);
                if value.is_deny() {
                    self.denies.insert(*endpoint);
                }
                let of_peer = self.entries.entry((*endpoint, key.sec_label));
                of_peer.or_default().push(*key);
            }
            // Nothing depends on these steps. Programs know their endpoint without the entry of
            // `cilium_lxc`: an endpoint for which that map has no room is held to its policy, and has
            // no DNS.
            Step::SetLxc(..)
            | Step::UnsetPolicy(..)
            | Step::KeepNames(..)
            | Step::KeepCleaned(_)
            | Step::RemoveEndpoint(_)
            | Step::RemovePolicyMap(_)
            | Step::Detach(_) => {}
            Step::Attach(attachment) => {
                self.attach.insert(attachment.ifindex);
            }
        }
    }

    /// Whether `step` would break an invariant after what failed: a map has an identity that is not on
    /// disk, an allow comes without its deny, an entry comes although a longer one that must precede
    /// it is missing, a prefix has an identity that a policy map does not know, an identity is
    /// forgotten while a prefix may still map to it, or an interface gets programs whose policy map is
    /// not whole.
    fn stops(&self, step: &Step, fresh: &BTreeSet<IdentityId>) -> bool {
        let unsaved = |identity: u32| self.checkpoint && fresh.contains(&IdentityId(identity));
        match step {
            Step::SetPolicy(endpoint, key, value) => {
                unsaved(key.sec_label)
                    || (!value.is_deny() && self.denies.contains(endpoint))
                    || self.lacks_longer(*endpoint, key)
            }
            Step::SetIpcache(_, value) => {
                unsaved(value.sec_identity) || self.identities.contains(&value.sec_identity)
            }
            Step::SetLxc(_, value) => {
                let endpoint = EndpointId(value.lxc_id);
                unsaved(value.sec_id)
                    || self.files.contains(&endpoint)
                    || self.maps.contains(&endpoint)
            }
            Step::Attach(attachment) => {
                self.maps.contains(&attachment.endpoint) || unsaved(attachment.identity.0)
            }
            Step::UnsetPolicy(endpoint, ..) => self.ipcache || self.maps.contains(endpoint),
            Step::RemoveEndpoint(_) => self.lxc_left,
            _ => false,
        }
    }

    /// Whether a longer entry, which takes packets from this one, could not be written.
    fn lacks_longer(&self, endpoint: EndpointId, key: &PolicyKey) -> bool {
        let failed = self.entries.get(&(endpoint, key.sec_label));
        let mut failed = failed.into_iter().flatten();
        failed.any(|longer| longer.egress == key.egress && is_within(longer, key))
    }
}

/// What the model had before a step was planned.
#[derive(Debug)]
pub(crate) enum Undo {
    Checkpoint,
    Cleaned,
    /// Whether there was a file before.
    File(EndpointId, Presence),
    /// Endpoint, and the number of the step that writes its names.
    Names(EndpointId, u64),
    RemovedFile(EndpointId),
    CreatedMap(EndpointId),
    RemovedMap(EndpointId),
    Policy(EndpointId, PolicyKey, Option<PolicyValue>),
    Lxc(LxcKey, Option<LxcValue>),
    Ipcache(IpNet, Option<IdentityId>),
    Attached(EndpointId, Option<Attachment>),
    LeftPolicy(EndpointId, PolicyKey, PolicyValue),
    /// Interfaces that have programs of a number without an endpoint.
    Left(EndpointId, BTreeSet<u32>),
}

/// Removals of policy entries, kept for the end of a round.
pub(crate) type Removals = Vec<(EndpointId, PolicyKey, PolicyValue)>;
