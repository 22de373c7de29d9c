//! A plan: ordered steps, and which of them must not run after a failure.

use std::collections::BTreeSet;

use shared_maps::{EndpointId, IdentityId};

use crate::datapath::plan::{Datapath, Step, StepError};

/// Ordered steps. Made by [`crate::core::Core::plan`], carried out by [`Plan::apply`], handed
/// back to [`crate::core::Core::commit`].
#[derive(Debug, Default)]
pub struct Plan {
    /// The steps.
    pub steps: Vec<Step>,
    /// Identities that are not on disk before this plan's checkpoints.
    pub(crate) fresh: BTreeSet<IdentityId>,
}

impl Plan {
    /// Carries out the steps in order. A step that leans on a failed one is skipped and
    /// reported as failed with [`StepError::Skipped`].
    pub fn apply(&self, datapath: &mut dyn Datapath) -> Vec<(usize, StepError)> {
        let mut failures = Vec::new();
        let mut fallen = Fallen::default();
        for (index, step) in self.steps.iter().enumerate() {
            if fallen.stops(step, &self.fresh) {
                fallen.note(step);
                failures.push((index, StepError::Skipped));
            } else if let Err(error) = datapath.apply(step) {
                fallen.note(step);
                failures.push((index, error));
            }
        }
        datapath.end_plan();
        failures
    }
}

/// What failed so far in one run of a plan.
#[derive(Default)]
struct Fallen {
    checkpoint: bool,
    ipcache: bool,
    lxc_left: bool,
    files: BTreeSet<EndpointId>,
    maps: BTreeSet<EndpointId>,
    denies: BTreeSet<EndpointId>,
    identities: BTreeSet<u32>,
}

impl Fallen {
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
            }
            // Its programs know the endpoint without it: an endpoint that the map has no room
            // for is held to its policy, and has no DNS.
            Step::SetLxc(..)
            | Step::UnsetPolicy(..)
            | Step::KeepNames(..)
            | Step::KeepCleaned(_)
            | Step::RemoveEndpoint(_)
            | Step::RemovePolicyMap(_)
            | Step::Attach(_)
            | Step::Detach(_) => {}
        }
    }

    /// Whether `step` would break an invariant after what failed: an identity in a map that
    /// is not on disk, an allow without its deny, a prefix whose identity a policy map does
    /// not know, an identity forgotten while a prefix may still map to it, programs on an
    /// interface whose policy map is not whole.
    fn stops(&self, step: &Step, fresh: &BTreeSet<IdentityId>) -> bool {
        let unsaved = |identity: u32| self.checkpoint && fresh.contains(&IdentityId(identity));
        match step {
            Step::SetPolicy(endpoint, key, value) => {
                unsaved(key.sec_label) || (!value.is_deny() && self.denies.contains(endpoint))
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
}
