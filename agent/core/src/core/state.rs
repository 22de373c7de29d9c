//! The parts of the core's state: the model, and the part of it that the datapath has once all plans are carried out.

pub(crate) mod carried;
pub(crate) mod changes;
pub(crate) mod closed_names;
pub(crate) mod endpoint_files;
pub(crate) mod endpoint_table;
pub(crate) mod hold;
pub(crate) mod identity_budget;
pub(crate) mod identity_numbers;
pub(crate) mod leases;
pub(crate) mod left_behind;
pub mod location;
pub(crate) mod lxc_table;
pub(crate) mod node_selectors;
pub(crate) mod passed_answers;
pub(crate) mod pods;
pub(crate) mod policy_model;
pub(crate) mod publication;
pub(crate) mod refused;
pub(crate) mod resolved;
pub(crate) mod restoration;
pub(crate) mod retry;
pub(crate) mod revocations;
pub(crate) mod services;

use std::sync::Arc;

use dns_policy::boot_time::BootTime;
use shared_maps::{EndpointId, IdentityId};

use super::{config::CoreConfig, plan::Plan, snapshot::Counters};
use crate::{
    core::{
        plan::Undo,
        state::{
            carried::Carried, closed_names::ClosedNames, endpoint_files::EndpointFiles,
            endpoint_table::EndpointTable, identity_numbers::IdentityNumbers, leases::Leases,
            lxc_table::LxcTable, node_selectors::NodeSelectors, passed_answers::PassedAnswers,
            pods::Pods, policy_model::PolicyModel, publication::Publication,
            resolved::ResolvedNames, restoration::Restoration, retry::Retry, services::Services,
        },
    },
    datapath::plan::Step,
    fqdn::cache::NameCache,
    identity::cluster::WantedIdentities,
    ipcache::table::Ipcache,
    labels::LabelSet,
};

/// The parts of the core's state.
#[derive(Debug)]
pub(crate) struct State {
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
    pub proxies: Proxies,
    pub retry: Retry,
    pub files: EndpointFiles,
    pub counters: Counters,
}

/// Names and addresses from answers, and what answers may not open.
#[derive(Debug)]
pub(crate) struct Learned {
    pub names: NameCache,
    pub closed: ClosedNames,
    pub passed: PassedAnswers,
}

/// What the proxies have from the agent: leases of addresses, and DNS rules.
#[derive(Debug, Default)]
pub(crate) struct Proxies {
    pub leases: Leases,
    pub publication: Publication,
}

/// Objects of the cluster that have addresses, besides the endpoints of this node, and the selectors of nodes.
#[derive(Debug, Default)]
pub(crate) struct ClusterObjects {
    pub pods: Pods,
    pub services: Services,
    pub nodes: NodeSelectors,
    /// How many Namespace objects there are.
    pub namespaces: usize,
    /// Label sets of this node that lack an object, as they were published last.
    pub wanted: Arc<WantedIdentities>,
    /// Identities that packets of other nodes may carry.
    pub carried: Carried,
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

    /// The subject of an identity; it is made if there is none.
    pub(super) fn join_subject(
        &mut self,
        identity: IdentityId,
        labels: &LabelSet,
        endpoint: EndpointId,
    ) {
        self.proxies.publication.mark_stale();
        let revision = self.proxies.publication.revision();
        self.policy.join(identity, labels, endpoint, revision);
    }

    /// Notes that an endpoint no longer has this identity.
    pub(super) fn leave_subject(&mut self, identity: IdentityId, endpoint: EndpointId) {
        self.proxies.publication.mark_stale();
        self.policy.leave(identity, endpoint);
    }
}
