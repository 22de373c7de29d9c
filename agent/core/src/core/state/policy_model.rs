//! Policy as it is in force, and what it means for each subject.
//!
//! Owns the documents, their selectors with the identities that each selects, the computed policy
//! of each subject, and the changes that are not in force yet ([`super::changes`]). It keeps one
//! invariant: the entries of a subject follow from its documents and from the identities that the
//! selectors select; whenever either changes, the endpoints whose maps have to follow are
//! returned.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use dns_policy::{name::Fqdn, rule::NameRule};
use ipnet::IpNet;
use shared_maps::{EndpointId, IdentityId};

mod explicit;
mod services;
pub(crate) mod subject;

use self::services::ServiceTable;
use crate::{
    core::state::{changes::Changes, policy_model::subject::Subject},
    fqdn::names::NameSelectors,
    labels::LabelSet,
    policy::{
        compute::{
            self, DnsScope, RuleIndex,
            entries::Entries,
            service::{Rendered, Service},
        },
        document::{PolicyDocument, PolicyError},
        mode::PolicyMode,
        model::EndpointPolicy,
        repository::Repository,
    },
    selector::{
        cache::{SelectorCache, SelectorId},
        selector::Selector,
    },
    users::release,
};

/// Endpoints whose maps have to follow a change.
#[derive(Debug)]
pub(crate) struct Touched {
    /// The identity whose entries changed.
    pub(crate) peer: IdentityId,
    /// Endpoints whose maps have entries of that identity.
    pub(crate) endpoints: Vec<EndpointId>,
    /// Services whose entries changed with those of that identity.
    pub(crate) services: Vec<(EndpointId, IdentityId)>,
}

impl Touched {
    const fn new(peer: IdentityId) -> Self {
        Self {
            peer,
            endpoints: Vec::new(),
            services: Vec::new(),
        }
    }
}

/// The policy in force, and the policy of each subject that follows from it.
#[derive(Debug)]
pub(crate) struct PolicyModel {
    repository: Repository,
    rejected: Vec<PolicyError>,
    selectors: SelectorCache,
    name_selectors: NameSelectors,
    /// Identities held for FQDN selectors.
    preallocated: BTreeMap<NameRule, Vec<IdentityId>>,
    /// How many selectors ask for the label of each block.
    blocks: BTreeMap<IpNet, usize>,
    subjects: BTreeMap<IdentityId, Subject>,
    services: ServiceTable,
    changes: Changes,
    proxy_port: u16,
}

impl PolicyModel {
    pub(crate) fn new(mode: PolicyMode, proxy_port: u16) -> Self {
        Self {
            repository: Repository::new(mode),
            rejected: Vec::new(),
            selectors: SelectorCache::default(),
            name_selectors: NameSelectors::default(),
            preallocated: BTreeMap::new(),
            blocks: BTreeMap::new(),
            subjects: BTreeMap::new(),
            services: ServiceTable::default(),
            changes: Changes::default(),
            proxy_port,
        }
    }

    /// Changes that are not in force yet.
    pub(crate) fn changes(&self) -> &Changes {
        &self.changes
    }

    /// Changes that are not in force yet.
    pub(crate) fn changes_mut(&mut self) -> &mut Changes {
        &mut self.changes
    }

    pub(crate) fn repository(&self) -> &Repository {
        &self.repository
    }

    /// Replaces or removes a document. Subjects keep their policy until
    /// [`Self::change_subject`].
    pub(crate) fn put_document(&mut self, key: &str, document: Option<&Arc<PolicyDocument>>) {
        match document {
            Some(document) => self.repository.insert(Arc::clone(document)),
            None => self.repository.remove(key),
        };
    }

    pub(crate) fn rejected(&self) -> &[PolicyError] {
        &self.rejected
    }

    /// Replaces the documents that are refused.
    pub(crate) fn set_rejected(&mut self, rejected: Vec<PolicyError>) {
        self.rejected = rejected;
    }
}

/// Selectors and the identities that they select.
impl PolicyModel {
    pub(crate) fn selectors(&self) -> &SelectorCache {
        &self.selectors
    }

    /// Labels of an identity; `None` if it is not in use.
    pub(crate) fn labels_of(&self, identity: IdentityId) -> Option<&LabelSet> {
        self.selectors.labels(identity)
    }

    /// Notes that a rule uses a selector. True if no other rule does.
    pub(crate) fn register(&mut self, selector: &Selector) -> bool {
        let (_, is_new) = self.selectors.register(selector);
        is_new
    }

    /// Notes that a rule no longer uses a selector. True if no rule does any more.
    pub(crate) fn unregister(&mut self, selector: &Selector) -> bool {
        self.selectors.unregister(selector)
    }

    /// Labels that FQDN selectors give to a name; `None` if no selector matches it.
    pub(crate) fn labels_of_name(&self, name: &Fqdn) -> Option<LabelSet> {
        self.name_selectors.labels_of(name)
    }

    /// How many names and patterns rules have.
    pub(crate) fn name_selectors_len(&self) -> usize {
        self.name_selectors.len()
    }

    /// Adds a selector whose label names get.
    pub(crate) fn add_name_selector(&mut self, selector: &NameRule) {
        self.name_selectors.add(selector);
    }

    /// Removes a selector whose label names got. Returns the identities held for it.
    pub(crate) fn remove_name_selector(&mut self, selector: &NameRule) -> Vec<IdentityId> {
        self.name_selectors.remove(selector);
        self.preallocated.remove(selector).unwrap_or_default()
    }

    /// Notes the identities that are held for a selector.
    pub(crate) fn preallocate(&mut self, selector: NameRule, held: Vec<IdentityId>) {
        self.preallocated.insert(selector, held);
    }

    /// Selectors for which identities are held, or are to be held.
    pub(crate) fn preallocated(&self) -> Vec<NameRule> {
        self.preallocated.keys().cloned().collect()
    }

    /// Notes that a selector asks for a block's label.
    pub(crate) fn ask_block(&mut self, prefix: IpNet) {
        *self.blocks.entry(prefix).or_default() += 1;
    }

    /// Notes that a selector no longer asks for a block's label. True if no selector does any more.
    pub(crate) fn drop_block(&mut self, prefix: IpNet) -> bool {
        release(&mut self.blocks, &prefix)
    }
}

/// Subjects: label sets of endpoints with their policy.
impl PolicyModel {
    pub(crate) fn subject(&self, identity: IdentityId) -> Option<&Subject> {
        self.subjects.get(&identity)
    }

    /// How many entries policy maps need because of ordered lists.
    pub(crate) fn tier_entries(&self) -> usize {
        let lists = self.subjects.values().filter(|subject| subject.has_tier());
        let entries = lists.map(|subject| {
            let selections = subject.rules.tier_selectors();
            let selections = selections.filter_map(|id| self.selectors.selections(id));
            let peers: BTreeSet<IdentityId> = selections.flatten().copied().collect();
            let entries = peers.iter().filter_map(|peer| subject.entries(*peer));
            entries.map(Entries::len).sum::<usize>()
        });
        entries.sum()
    }

    pub(crate) fn subjects(
        &self,
    ) -> impl DoubleEndedIterator<Item = (IdentityId, &Subject)> + Clone {
        self.subjects.iter().map(|(id, subject)| (*id, subject))
    }

    /// Notes that an endpoint has this identity. The policy of a new subject is computed.
    pub(crate) fn join(
        &mut self,
        identity: IdentityId,
        labels: &LabelSet,
        endpoint: EndpointId,
        revision: u64,
    ) {
        if !self.subjects.contains_key(&identity) {
            let subject = self.compute(labels.clone(), revision);
            self.subjects.insert(identity, subject);
        }
        if let Some(subject) = self.subjects.get_mut(&identity) {
            subject.endpoints.insert(endpoint);
        }
    }

    /// Notes that an endpoint no longer has this identity.
    pub(crate) fn leave(&mut self, identity: IdentityId, endpoint: EndpointId) {
        if let Some(subject) = self.subjects.get_mut(&identity) {
            subject.endpoints.remove(&endpoint);
            if subject.endpoints.is_empty() {
                self.subjects.remove(&identity);
            }
        }
    }

    fn compute(&self, labels: LabelSet, revision: u64) -> Subject {
        let mut subject = Subject::new(labels);
        subject.policy = EndpointPolicy::of(&subject.labels, &self.repository);
        subject.rules = RuleIndex::of(&subject.policy, &self.selectors);
        subject.dns_scope = DnsScope::of(&subject.policy, &self.selectors, &[]);
        subject.dns_is_dirty = true;
        subject.revision = revision;
        let mut peers = BTreeSet::from([IdentityId::HOST]);
        for id in subject.rules.selectors() {
            peers.extend(self.selectors.selections(id).into_iter().flatten());
        }
        subject.render_everyone(&self.selectors, self.proxy_port);
        for peer in peers {
            subject.render(peer, &self.selectors, self.proxy_port);
        }
        subject.follow_services(&[IdentityId::UNKNOWN], &self.services, self.proxy_port);
        subject
    }

    /// Follows the change of a document that is about a subject. Returns the identities whose
    /// entries the maps of its endpoints have to follow.
    pub(crate) fn change_subject(
        &mut self,
        identity: IdentityId,
        key: &str,
        document: Option<&PolicyDocument>,
        revision: u64,
    ) -> Vec<IdentityId> {
        let mut other_rendering = self.end_explicit(identity);
        let Some(subject) = self.subjects.get_mut(&identity) else {
            return Vec::new();
        };
        let (selectors, port) = (&self.selectors, self.proxy_port);
        let change = subject.policy.put(key, &subject.labels, document);
        let before = subject.rules.observed();
        subject.rules.follow(&subject.policy, &change, selectors);
        let observed_otherwise = subject.rules.observed() != before;
        let egress = change.egress.added.iter().chain(&change.egress.removed);
        let mut egress = egress.into_iter();
        if observed_otherwise || egress.any(|rule| subject.dns_scope.is_in(rule)) {
            subject.dns_scope = DnsScope::of(&subject.policy, selectors, &[]);
            subject.dns_is_dirty = true;
        }
        subject.revision = revision;
        let everyone = subject.render_everyone(selectors, port);
        let mut used: Vec<SelectorId> = change
            .selectors()
            .filter_map(|selector| selectors.id_of(selector))
            .collect();
        if observed_otherwise {
            used.extend(subject.rules.selectors());
        } else if everyone.tables {
            used.extend(subject.rules.tier_selectors());
        }
        let selections = used.iter().filter_map(|id| selectors.selections(*id));
        let mut peers: BTreeSet<IdentityId> = selections.flatten().copied().collect();
        peers.insert(IdentityId::HOST);
        let mut changed = Vec::new();
        changed.extend(everyone.entries.then_some(IdentityId::UNKNOWN));
        let peers = peers.into_iter();
        changed.extend(peers.filter(|peer| subject.render(*peer, selectors, port)));
        let services = match observed_otherwise {
            true => subject.follow_services(&[IdentityId::UNKNOWN], &self.services, port),
            false => subject.follow_services(&changed, &self.services, port),
        };
        changed.extend(services);
        changed.append(&mut other_rendering);
        changed
    }

    /// Adds an identity that came into use. Returns the endpoints whose maps have to follow.
    pub(crate) fn add_identity(&mut self, identity: IdentityId, labels: LabelSet) -> Touched {
        let selectors = self.selectors.add_identity(identity, labels);
        self.reselect(&selectors, identity)
    }

    /// Removes an identity that is no longer in use. Returns the endpoints whose maps have to
    /// follow.
    pub(crate) fn remove_identity(&mut self, identity: IdentityId) -> Touched {
        let selectors = self.selectors.remove_identity(identity);
        self.reselect(&selectors, identity)
    }

    /// Follows selectors whose selection changed by one identity.
    fn reselect(&mut self, selectors: &[SelectorId], peer: IdentityId) -> Touched {
        let mut touched = Touched::new(peer);
        let using = |subject: &&mut Subject| {
            subject.explicit().is_anywhere() || subject.rules.uses(selectors)
        };
        for subject in self.subjects.values_mut().filter(using) {
            subject.dns_is_dirty |= subject.dns_scope.uses(selectors);
            subject.render(peer, &self.selectors, self.proxy_port);
            touched.endpoints.extend(&subject.endpoints);
            for service in subject.follow_services(&[peer], &self.services, self.proxy_port) {
                let endpoints = subject.endpoints.iter();
                touched.services.extend(endpoints.map(|id| (*id, service)));
            }
        }
        touched
    }

    /// Computes the DNS rules of all subjects that are out of date. True if the rules of any subject changed.
    pub(crate) fn refresh_dns(&mut self) -> bool {
        let mut changed = false;
        let dirty = self.subjects.values_mut();
        for subject in dirty.filter(|subject| subject.dns_is_dirty) {
            subject.dns_is_dirty = false;
            let services = subject.dns_services(&self.services);
            let rules = compute::dns_rules(&subject.policy, &self.selectors, &services);
            if subject.dns_scope.is_by_name() || !services.is_empty() {
                let scope = DnsScope::of(&subject.policy, &self.selectors, &services);
                subject.dns_scope = scope;
            }
            if *subject.dns != rules {
                subject.dns = Arc::new(rules);
                changed = true;
            }
        }
        changed
    }
}

impl PolicyModel {
    /// Services and the identities behind them.
    #[cfg(test)]
    pub(crate) fn services(&self) -> &ServiceTable {
        &self.services
    }

    /// Whether policy closes a Service to a subject because of some of its backends.
    pub(crate) fn has_mixed_services(&self) -> bool {
        self.subjects
            .values()
            .any(|subject| !subject.mixed.is_empty())
    }

    /// Services that policy closes to a subject because of some of their backends.
    pub(crate) fn mixed_services(&self) -> BTreeSet<IdentityId> {
        let subjects = self.subjects.values();
        subjects
            .flat_map(|subject| subject.mixed_services())
            .copied()
            .collect()
    }

    /// Replaces a Service by a new version; `None` removes it. Returns the endpoints whose maps have to
    /// follow.
    pub(crate) fn put_service(&mut self, id: IdentityId, service: Option<Service>) -> Touched {
        let mut touched = Touched::new(id);
        if !self.services.put(id, service) {
            return touched;
        }
        let rendered = self.rendered_for_all(id);
        for (subject, rendered) in self.subjects.values_mut().zip(rendered) {
            if subject.put_rendered(id, rendered) {
                touched.endpoints.extend(&subject.endpoints);
            }
        }
        touched
    }

    /// Renders a Service for every subject, in their order. Subjects that may send the same share one
    /// rendering: a Service may have as many identities behind it as backends.
    fn rendered_for_all(&self, id: IdentityId) -> Vec<Rendered> {
        let service = self.services.get(id);
        let mut different: Vec<(&Subject, Rendered)> = Vec::new();
        let subjects = self.subjects.values().map(|subject| {
            let mut known = different.iter().rev().take(COMPARED);
            if let Some((_, rendered)) = known.find(|(known, _)| subject.sends_as(known)) {
                return rendered.clone();
            }
            let rendered = subject.render_service(id, service, self.proxy_port);
            different.push((subject, rendered.clone()));
            rendered
        });
        subjects.collect()
    }
}

/// With how many other subjects a subject is compared: further comparisons cost more than they save.
const COMPARED: usize = 16;
