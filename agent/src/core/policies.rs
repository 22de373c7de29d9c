//! Policy documents come and go: labels before the rules that use them, rules before
//! labels nobody uses any more.

use std::{collections::BTreeSet, sync::Arc};

use ipnet::IpNet;
use shared_maps::IdentityId;

use super::{event::SourceEvent, plan::Plan, state::State};
use crate::{
    endpoint::endpoint::Behind,
    fqdn::cache::NamePair,
    identity::allocator::Allocator as _,
    ipcache::{
        metadata::{Claim, Owner},
        resolve::cidr_label,
    },
    labels::LabelSet,
    policy::{
        compute,
        model::EndpointPolicy,
        parse::PolicyDocument,
        repository::is_about,
        rule::{Peers, Rule},
    },
    selector::selector::{FqdnSelector, Selector},
};

impl State {
    pub(super) fn on_policy(&mut self, plan: &mut Plan, event: SourceEvent<PolicyDocument>) {
        match event {
            SourceEvent::Init => self.sync.policies.seen = Some(BTreeSet::new()),
            SourceEvent::Apply(document) => {
                if let Some(seen) = &mut self.sync.policies.seen {
                    seen.insert(document.key.clone());
                }
                self.replace_policy(plan, &document.key.clone(), Some(&Arc::new(document)));
            }
            SourceEvent::Delete(key) => self.replace_policy(plan, &key, None),
            SourceEvent::InitDone => {
                let seen = self.sync.policies.seen.take().unwrap_or_default();
                let known: Vec<String> = self.repository.iter().map(|d| d.key.clone()).collect();
                for key in known.iter().filter(|key| !seen.contains(*key)) {
                    self.replace_policy(plan, key, None);
                }
                self.sync.policies.complete = true;
            }
        }
    }

    fn replace_policy(&mut self, plan: &mut Plan, key: &str, new: Option<&Arc<PolicyDocument>>) {
        let old = self.repository.get(key).cloned();
        if old.as_ref() == new {
            return;
        }
        self.revision += 1;
        // 1: labels of new selectors, which no rule asks for yet.
        for selector in new.iter().flat_map(|d| &d.rules).flat_map(Rule::selectors) {
            self.register(selector);
        }
        self.flush(plan);
        // 2: the rules.
        match new {
            Some(document) => self.repository.insert(Arc::clone(document)),
            None => self.repository.remove(key),
        };
        let about = |labels: &LabelSet| {
            old.iter()
                .chain(new)
                .any(|document| is_about(document, labels))
        };
        let subjects = self
            .subjects
            .iter()
            .filter(|(_, subject)| about(&subject.labels));
        let subjects: Vec<IdentityId> = subjects.map(|(id, _)| *id).collect();
        for identity in subjects {
            self.compute_subject(identity);
        }
        self.flush(plan);
        // 3: labels nobody asks for any more.
        for selector in old.iter().flat_map(|d| &d.rules).flat_map(Rule::selectors) {
            self.unregister(selector);
        }
        self.flush(plan);
    }

    /// Computes a subject's policy anew, whole.
    pub(super) fn compute_subject(&mut self, identity: IdentityId) {
        let Some(subject) = self.subjects.get_mut(&identity) else {
            return;
        };
        subject.policy = EndpointPolicy::of(&subject.labels, &self.repository);
        subject.selectors.clear();
        let mut identities = BTreeSet::from([IdentityId::UNKNOWN, IdentityId::HOST]);
        let sides = [&subject.policy.egress, &subject.policy.ingress];
        for rule in sides.iter().flat_map(|side| &side.rules) {
            let Peers::Selectors(list) = &rule.rule.peers else {
                continue;
            };
            for id in list
                .iter()
                .filter_map(|selector| self.selectors.id_of(selector))
            {
                subject.selectors.insert(id);
                identities.extend(self.selectors.selections(id).into_iter().flatten());
            }
        }
        let dns = compute::dns_selectors(&subject.policy);
        subject.dns_selectors = dns
            .into_iter()
            .filter_map(|selector| self.selectors.id_of(selector))
            .collect();
        subject.dns_dirty = true;
        subject.revision = self.revision;
        subject.entries.clear();
        for peer in identities {
            let entries = compute::entries(
                &subject.policy,
                peer,
                &self.selectors,
                self.config.proxy_port,
            );
            if !entries.is_empty() {
                subject.entries.insert(peer, entries);
            }
        }
        for endpoint in &subject.endpoints {
            if let Some(endpoint) = self.endpoints.get_mut(*endpoint) {
                endpoint.behind = Behind::All;
                self.work.insert(endpoint.id);
            }
        }
    }

    /// Selections of these selectors changed by one identity.
    pub(super) fn reselect(
        &mut self,
        selectors: &[crate::selector::cache::SelectorId],
        peer: IdentityId,
    ) {
        if selectors.is_empty() {
            return;
        }
        for subject in self.subjects.values_mut() {
            let uses = |set: &BTreeSet<_>| selectors.iter().any(|selector| set.contains(selector));
            if !uses(&subject.selectors) {
                continue;
            }
            subject.dns_dirty |= uses(&subject.dns_selectors);
            let entries = compute::entries(
                &subject.policy,
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
                if let Some(endpoint) = self.endpoints.get_mut(*endpoint) {
                    endpoint.behind.add([peer]);
                    self.work.insert(endpoint.id);
                }
            }
        }
    }

    fn register(&mut self, selector: &Selector) {
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
            Selector::Labels(_) | Selector::Entity(_) => {}
        }
    }

    fn unregister(&mut self, selector: &Selector) {
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
                    self.local.release(id);
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
        let matching: Vec<_> = self
            .names
            .names()
            .map(|(name, _)| name)
            .filter(|n| matcher.matches(n))
            .cloned()
            .collect();
        for name in matching {
            let labels = self.name_selectors.labels_of(&name);
            let Some(entry) = self.names.name_mut(&name) else {
                continue;
            };
            entry.labels.clone_from(&labels);
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
        }
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
        if !self.sync.done {
            self.preallocated.insert(selector.clone(), Vec::new());
            return;
        }
        let families = [
            (self.config.enable_ipv4, "0.0.0.0/0"),
            (self.config.enable_ipv6, "::/0"),
        ];
        let mut held = Vec::new();
        for (_, all) in families.into_iter().filter(|(enabled, _)| *enabled) {
            let all: IpNet = all.parse().expect("a constant prefix");
            let labels = vec![selector.label(), self.ipcache.world().label(all).clone()];
            if let Some(id) = self.acquire_local(&LabelSet::new(labels)) {
                held.push(id);
            }
        }
        self.preallocated.insert(selector.clone(), held);
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
