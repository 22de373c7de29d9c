//! What the core knows: the model, and what the datapath has of it as far as planned.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use holdfast_sdp::{mapping::BootTime, policy::rule::EndpointRules};
use ipnet::IpNet;
use shared_maps::{EndpointId, IdentityId};

use super::{
    clean::Cleaned, config::CoreConfig, endpoint_files::EndpointFiles,
    endpoint_table::EndpointTable, intake::Intake, leases::Leases, lxc_table::LxcTable, plan::Plan,
    publication::Publication, refused::RecentlyRefused, retry::Retry, rollback::Undo,
    snapshot::Counters,
};
use crate::{
    datapath::plan::Step,
    fqdn::{cache::NameCache, names::NameSelectors},
    identity::{allocator::Allocator, checkpoint::LocalFile, scopes::LocalScopes},
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
    pub sync: Sync,
    pub ipcache: Ipcache,
    pub local: LocalScopes,
    pub local_file: LocalFile,
    pub pods: Box<dyn Allocator>,
    /// Identities with an fqdn label.
    pub fqdn_identities: BTreeSet<IdentityId>,
    /// Those of them with several, which the circuit breaker limits ([`super::breaker`]).
    pub fqdn_combinations: usize,
    /// At the sync: labels of those that are still to come.
    pub fqdn_awaited: BTreeSet<LabelSet>,
    /// How often one came or went.
    pub fqdn_changes: u64,
    /// Prefixes that have the identity of some of their names only.
    pub limited: BTreeSet<IpNet>,
    /// Those of them to look at again, and the changes that they know of.
    pub limited_queue: VecDeque<IpNet>,
    pub limited_seen: u64,
    pub selectors: SelectorCache,
    pub names: NameCache,
    pub name_selectors: NameSelectors,
    /// Labels of the node's addresses that have more than the host's own: all of them are the
    /// host identity's.
    pub host_labels: BTreeMap<IpNet, LabelSet>,
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
    /// What was asked to be forgotten, the newest last.
    pub cleaned: VecDeque<Cleaned>,
    /// The file does not have it yet.
    pub cleaned_due: bool,
    pub checkpoint_due: CheckpointDue,
    pub changes: super::changes::Changes,
    pub publication: Publication,
    pub files: EndpointFiles,
    pub restore_until: Option<BootTime>,
    pub restored_prefixes: Vec<IpNet>,
    /// Numbers that prefixes had before the start and no checkpoint knows.
    pub requested: BTreeMap<IpNet, IdentityId>,
    /// Rules in the files of the run before.
    pub former_rules: BTreeSet<super::directory::RuleKey>,
    pub hold: super::hold::Hold,
    pub pass: super::reconcile::Pass,
    pub programs: super::programs::ProgramsPass,
    pub counters: Counters,
}

/// How far the sources are.
#[derive(Debug, Default)]
pub(super) struct Sync {
    pub policies: Listing,
    pub endpoints: Listing,
    /// Both were complete once.
    pub done: bool,
    /// The first plan was made.
    pub started: bool,
}

/// Progress of one source's listing.
#[derive(Debug, Default)]
pub(super) struct Listing {
    pub complete: bool,
    /// Keys applied since the listing began; none = no listing goes on.
    pub seen: Option<BTreeSet<String>>,
}

/// Which checkpoints a plan must begin with.
#[derive(Debug, Default)]
pub(super) struct CheckpointDue {
    pub local: bool,
    pub endpoints: bool,
    pub fresh: BTreeSet<IdentityId>,
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
