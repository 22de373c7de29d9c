//! The parts of the core's state, side by side: the model, and what the datapath has of it as far
//! as planned.

pub(in crate::core) mod closed_names;
pub(in crate::core) mod endpoint_files;
pub(in crate::core) mod endpoint_table;
pub(in crate::core) mod identity_budget;
pub(in crate::core) mod identity_numbers;
pub(in crate::core) mod leases;
pub(in crate::core) mod lxc_table;
pub(in crate::core) mod policy_model;
pub(in crate::core) mod publication;
pub(in crate::core) mod refused;
pub(in crate::core) mod restoration;
pub(in crate::core) mod retry;
pub(in crate::core) mod revocations;

use dns_policy::boot_time::BootTime;
use shared_maps::{EndpointId, IdentityId};

use super::{
    config::CoreConfig, name_servers::PassedAnswers, node_selectors::NodeSelectors, plan::Plan,
    pods::Pods, resolved::ResolvedNames, rollback::Undo, services::Services, snapshot::Counters,
};
use crate::core::state::{
    closed_names::ClosedNames, endpoint_files::EndpointFiles, endpoint_table::EndpointTable,
    identity_numbers::IdentityNumbers, leases::Leases, lxc_table::LxcTable,
    policy_model::PolicyModel, publication::Publication, restoration::Restoration, retry::Retry,
};
use crate::{
    datapath::plan::Step, fqdn::cache::NameCache, ipcache::table::Ipcache, labels::LabelSet,
};

/// Everything the core holds.
#[derive(Debug)]
pub(super) struct State {
    pub config: CoreConfig,
    pub now: BootTime,
    pub restoration: Restoration,
    pub ipcache: Ipcache,
    pub numbers: IdentityNumbers,
    pub policy: PolicyModel,
    pub resolved: ResolvedNames,
    pub learned: Learned,
    pub endpoints: EndpointTable,
    pub lxc: LxcTable,
    pub cluster: ClusterObjects,
    pub leases: Leases,
    pub retry: Retry,
    pub publication: Publication,
    pub files: EndpointFiles,
    pub counters: Counters,
}

/// What answers gave, and what they may not open.
#[derive(Debug)]
pub(super) struct Learned {
    pub names: NameCache,
    pub closed: ClosedNames,
    pub passed: PassedAnswers,
}

/// Objects of the cluster that have addresses, besides the endpoints of this node, and what policy
/// selects of them.
#[derive(Debug, Default)]
pub(super) struct ClusterObjects {
    pub pods: Pods,
    pub services: Services,
    pub nodes: NodeSelectors,
    /// How many namespaces have an object.
    pub namespaces: usize,
}

impl State {
    /// Appends a step with its undo.
    pub(super) fn step(&mut self, plan: &mut Plan, step: Step, undo: Undo) {
        match &step {
            Step::SetIpcache(..) | Step::UnsetIpcache(_) => self.counters.ipcache_writes += 1,
            Step::SetPolicy(..) | Step::UnsetPolicy(..) => self.counters.policy_writes += 1,
            _ => {}
        }
        plan.push(step, undo);
    }

    /// The subject of an identity, made if there is none.
    pub(super) fn join_subject(
        &mut self,
        identity: IdentityId,
        labels: &LabelSet,
        endpoint: EndpointId,
    ) {
        self.publication.mark_stale();
        let revision = self.publication.revision();
        self.policy.join(identity, labels, endpoint, revision);
    }

    /// An endpoint no longer has this identity.
    pub(super) fn leave_subject(&mut self, identity: IdentityId, endpoint: EndpointId) {
        self.publication.mark_stale();
        self.policy.leave(identity, endpoint);
    }
}
