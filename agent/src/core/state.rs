//! What the core knows: the model, and what the datapath has of it as far as planned.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use holdfast_sdp::{mapping::BootTime, policy::rule::EndpointRules};
use ipnet::IpNet;
use shared_maps::{EndpointId, IdentityId};

use super::{
    config::CoreConfig, endpoint_files::EndpointFiles, endpoint_table::EndpointTable,
    identity_numbers::IdentityNumbers, intake::Intake, leases::Leases, lxc_table::LxcTable,
    plan::Plan, publication::Publication, purge::Purges, refused::RecentlyRefused,
    restoration::Restoration, retry::Retry, rollback::Undo, snapshot::Counters,
};
use crate::{
    datapath::plan::Step,
    fqdn::{cache::NameCache, names::NameSelectors},
    ipcache::table::Ipcache,
    labels::LabelSet,
    policy::{
        compute::{DnsScope, Entries, RuleIndex},
        model::EndpointPolicy,
        parse::PolicyError,
        repository::Repository,
    },
    selector::{cache::SelectorCache, selector::FqdnSelector},
};

/// Everything the core holds.
#[derive(Debug)]
pub(super) struct State {
    pub config: CoreConfig,
    pub now: BootTime,
    pub restoration: Restoration,
    pub ipcache: Ipcache,
    pub numbers: IdentityNumbers,
    pub selectors: SelectorCache,
    pub names: NameCache,
    pub name_selectors: NameSelectors,
    /// Identities held for FQDN selectors.
    pub preallocated: BTreeMap<FqdnSelector, Vec<IdentityId>>,
    /// Times that policy asks for a block's label.
    pub blocks: BTreeMap<IpNet, usize>,
    pub repository: Repository,
    pub rejected: Vec<PolicyError>,
    pub endpoints: EndpointTable,
    pub subjects: BTreeMap<IdentityId, Subject>,
    pub lxc: LxcTable,
    pub intake: Intake,
    pub leases: Leases,
    pub retry: Retry,
    /// Addresses of answers that got no label lately.
    pub refused: RecentlyRefused,
    pub purges: Purges,
    pub changes: super::changes::Changes,
    pub publication: Publication,
    pub files: EndpointFiles,
    pub pass: super::reconcile::Pass,
    pub programs: super::programs::ProgramsPass,
    pub counters: Counters,
}

/// Endpoints with one identity: they share policy.
#[derive(Debug)]
pub(super) struct Subject {
    pub labels: LabelSet,
    pub policy: EndpointPolicy,
    pub rules: RuleIndex,
    pub dns_scope: DnsScope,
    pub entries: BTreeMap<IdentityId, Entries>,
    pub dns: Arc<EndpointRules>,
    pub dns_dirty: bool,
    pub endpoints: BTreeSet<EndpointId>,
    pub revision: u64,
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
        if let std::collections::btree_map::Entry::Vacant(vacant) = self.subjects.entry(identity) {
            vacant.insert(Subject {
                labels: labels.clone(),
                policy: EndpointPolicy::default(),
                rules: RuleIndex::default(),
                dns_scope: DnsScope::default(),
                entries: BTreeMap::new(),
                dns: Arc::default(),
                dns_dirty: false,
                endpoints: BTreeSet::new(),
                revision: 0,
            });
            self.compute_subject(identity);
        }
        if let Some(subject) = self.subjects.get_mut(&identity) {
            subject.endpoints.insert(endpoint);
        }
    }

    /// An endpoint has this identity no more.
    pub(super) fn leave_subject(&mut self, identity: IdentityId, endpoint: EndpointId) {
        self.publication.mark_stale();
        if let Some(subject) = self.subjects.get_mut(&identity) {
            subject.endpoints.remove(&endpoint);
            if subject.endpoints.is_empty() {
                self.subjects.remove(&identity);
            }
        }
    }
}
