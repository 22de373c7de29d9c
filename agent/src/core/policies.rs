//! What a change of policy does to subjects, selectors and labels; in which order, says
//! [`super::changes`].

use std::collections::BTreeSet;

use holdfast_sdp::{name::Fqdn, pattern::SelectorKey};
use ipnet::IpNet;
use shared_maps::IdentityId;

use super::{
    changes::MARK,
    state::{State, Subject},
};
use crate::{
    fqdn::cache::NamePair,
    ipcache::{
        metadata::{Claim, Owner},
        resolve::cidr_label,
    },
    labels::LabelSet,
    policy::{
        compute::{DnsScope, RuleIndex},
        model::EndpointPolicy,
        parse::PolicyDocument,
    },
    selector::{
        cache::SelectorId,
        selector::{FqdnSelector, Selector},
    },
};

impl State {
    /// Computes the policy of a new subject.
    pub(super) fn compute_subject(&mut self, identity: IdentityId) {
        let Some(subject) = self.subjects.get_mut(&identity) else {
            return;
        };
        subject.policy = EndpointPolicy::of(&subject.labels, &self.repository);
        subject.rules = RuleIndex::of(&subject.policy, &self.selectors);
        let mut peers = BTreeSet::from([IdentityId::UNKNOWN, IdentityId::HOST]);
        for id in subject.rules.selectors() {
            peers.extend(self.selectors.selections(id).into_iter().flatten());
        }
        subject.dns_scope = DnsScope::of(&subject.policy, &self.selectors);
        subject.dns_dirty = true;
        self.render(identity, peers);
    }

    /// A document that has a say in a subject's policy changed. Gives the identities whose
    /// entries its endpoints' maps have to follow.
    pub(super) fn change_subject(
        &mut self,
        identity: IdentityId,
        key: &str,
        document: Option<&PolicyDocument>,
    ) -> Vec<IdentityId> {
        let Some(subject) = self.subjects.get_mut(&identity) else {
            return Vec::new();
        };
        let change = subject.policy.put(key, &subject.labels, document);
        subject.rules.follow(&change, &self.selectors);
        let mut peers = BTreeSet::from([IdentityId::UNKNOWN, IdentityId::HOST]);
        for selector in change.rules().flat_map(|rule| rule.selectors()) {
            let id = self.selectors.id_of(selector);
            let selections = id.and_then(|id| self.selectors.selections(id));
            peers.extend(selections.into_iter().flatten());
        }
        let egress = change.egress.added.iter().chain(&change.egress.removed);
        if egress.clone().any(|rule| subject.dns_scope.is_in(rule)) {
            subject.dns_scope = DnsScope::of(&subject.policy, &self.selectors);
            subject.dns_dirty = true;
        }
        self.render(identity, peers)
    }

    /// Renders a subject's entries for some peers; gives those for which they differ.
    fn render(&mut self, identity: IdentityId, peers: BTreeSet<IdentityId>) -> Vec<IdentityId> {
        let Some(subject) = self.subjects.get_mut(&identity) else {
            return Vec::new();
        };
        let port = self.config.proxy_port;
        let mut changed = Vec::new();
        for peer in peers {
            let entries = subject.rules.entries(
                &subject.policy,
                &subject.labels,
                peer,
                &self.selectors,
                port,
            );
            let same = match subject.entries.get(&peer) {
                Some(before) => *before == entries,
                None => entries.is_empty(),
            };
            if same {
                continue;
            }
            changed.push(peer);
            if entries.is_empty() {
                subject.entries.remove(&peer);
            } else {
                subject.entries.insert(peer, entries);
            }
        }
        subject.revision = self.publication.revision();
        changed
    }

    /// Selections of these selectors changed by one identity.
    pub(super) fn reselect(&mut self, selectors: &[SelectorId], peer: IdentityId) {
        if selectors.is_empty() {
            return;
        }
        let using = |subject: &&mut Subject| subject.rules.uses(selectors);
        for subject in self.subjects.values_mut().filter(using) {
            subject.dns_dirty |= subject.dns_scope.uses(selectors);
            let entries = subject.rules.entries(
                &subject.policy,
                &subject.labels,
                peer,
                &self.selectors,
                self.config.proxy_port,
            );
            if entries.is_empty() {
                subject.entries.remove(&peer);
            } else {
                subject.entries.insert(peer, entries);
            }
            for endpoint in &subject.endpoints {
                if let Some(endpoint) = self.endpoints.mark_mut(*endpoint) {
                    endpoint.behind.add([peer]);
                }
            }
            self.changes.spent += MARK * subject.endpoints.len();
        }
    }

    pub(super) fn register(&mut self, selector: &Selector) {
        let (_, new) = self.selectors.register(selector);
        if !new {
            return;
        }
        match selector {
            Selector::Cidr(cidr) => {
                for prefix in cidr.except.iter().chain([&cidr.prefix]) {
                    self.ask_block(*prefix);
                }
            }
            Selector::Fqdn(fqdn) => {
                self.name_selectors.add(fqdn);
                self.relabel_names(fqdn);
                self.preallocate(fqdn);
            }
            Selector::Group(group) => {
                for prefix in &group.except {
                    self.ask_block(*prefix);
                }
            }
            Selector::Labels(_) | Selector::Entity(_) => {}
        }
    }

    pub(super) fn unregister(&mut self, selector: &Selector) {
        if !self.selectors.unregister(selector) {
            return;
        }
        match selector {
            Selector::Cidr(cidr) => {
                for prefix in cidr.except.iter().chain([&cidr.prefix]) {
                    self.drop_block(*prefix);
                }
            }
            Selector::Fqdn(fqdn) => {
                self.name_selectors.remove(fqdn);
                self.relabel_names(fqdn);
                for id in self.preallocated.remove(fqdn).unwrap_or_default() {
                    self.numbers.release_local(id);
                }
            }
            Selector::Group(group) => {
                for prefix in &group.except {
                    self.drop_block(*prefix);
                }
            }
            Selector::Labels(_) | Selector::Entity(_) => {}
        }
    }

    fn ask_block(&mut self, prefix: IpNet) {
        *self.blocks.entry(prefix).or_default() += 1;
        if let Some(label) = cidr_label(prefix) {
            let labels = Claim::Labels(LabelSet::new(vec![label]));
            self.ipcache.claim(prefix, Owner::Policy, labels);
        }
    }

    fn drop_block(&mut self, prefix: IpNet) {
        let Some(users) = self.blocks.get_mut(&prefix) else {
            return;
        };
        *users -= 1;
        if *users == 0 {
            self.blocks.remove(&prefix);
            self.ipcache.unclaim(prefix, &Owner::Policy);
        }
    }

    /// A selector came or went: names it matches get their labels anew.
    fn relabel_names(&mut self, selector: &FqdnSelector) {
        let mut probe = crate::fqdn::names::NameSelectors::default();
        let Some(matcher) = probe.add(selector) else {
            return;
        };
        let matching: Vec<Fqdn> = if let SelectorKey::Exact(name) = matcher.key() {
            vec![Fqdn::normalise(name)]
        } else {
            let names = self.names.names().map(|(name, _)| name);
            names.filter(|n| matcher.matches(n)).cloned().collect()
        };
        for name in matching {
            let labels = self.name_selectors.labels_of(&name);
            self.label_name(&name, labels);
        }
    }

    /// Gives all addresses of a name these labels of its, or none.
    pub(super) fn label_name(&mut self, name: &Fqdn, labels: Option<LabelSet>) {
        let Some(entry) = self.names.name_mut(name) else {
            return;
        };
        for address in entry.pairs.keys() {
            let (prefix, owner) = (IpNet::from(*address), Owner::Name(name.clone()));
            match &labels {
                Some(labels) => {
                    self.ipcache
                        .claim(prefix, owner, Claim::Labels(labels.clone()));
                }
                None => self.ipcache.unclaim(prefix, &owner),
            }
        }
        entry.labels = labels;
    }

    /// Gives selectors their identities that came before prefixes could ask for the numbers
    /// which they had.
    pub(super) fn preallocate_early(&mut self) {
        let selectors: Vec<FqdnSelector> = self.preallocated.keys().cloned().collect();
        for selector in selectors {
            self.preallocate(&selector);
        }
    }

    fn preallocate(&mut self, selector: &FqdnSelector) {
        if !self.config.preallocate_identities {
            return;
        }
        if !self.restoration.is_synced() {
            self.preallocated.insert(selector.clone(), Vec::new());
            return;
        }
        let alone = self.labels_alone(selector);
        let held = alone.iter().filter_map(|labels| self.acquire_local(labels));
        let held = held.collect();
        self.preallocated.insert(selector.clone(), held);
    }

    /// Labels of addresses that only this selector selects, of each family.
    pub(super) fn labels_alone(&self, selector: &FqdnSelector) -> Vec<LabelSet> {
        let families = [
            (self.config.enable_ipv4, "0.0.0.0/0"),
            (self.config.enable_ipv6, "::/0"),
        ];
        let enabled = families.into_iter().filter(|(enabled, _)| *enabled);
        let labels = enabled.map(|(_, all)| {
            let all: IpNet = all.parse().expect("a constant prefix");
            LabelSet::new(vec![
                selector.label(),
                self.ipcache.world().label(all).clone(),
            ])
        });
        labels.collect()
    }

    /// Takes labels off pairs that nothing keeps any more.
    pub(super) fn unlabel(&mut self, gone: Vec<NamePair>) {
        self.counters.pairs_removed += gone.len() as u64;
        for (name, address) in gone {
            self.ipcache
                .unclaim(IpNet::from(address), &Owner::Name(name));
        }
    }
}
