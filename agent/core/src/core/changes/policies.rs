//! What a change of policy does to subjects, selectors and labels. [`crate::core::changes`] has the
//! order.

use dns_policy::{name::Fqdn, pattern::SelectorKey, rule::NameRule};
use ipnet::IpNet;

use crate::{
    core::state::State,
    fqdn::cache::NamePair,
    ipcache::{metadata::Claim, owners::Owner, resolve::cidr_label},
    labels::LabelSet,
    selector::selector::{Selector, fqdn_label},
};

impl State {
    pub(in crate::core) fn register(&mut self, selector: &Selector) {
        if !self.policy.register(selector) {
            return;
        }
        match selector {
            Selector::Cidr(cidr) => {
                for prefix in cidr.except.iter().chain([&cidr.prefix]) {
                    self.ask_block(*prefix);
                }
                if cidr.nodes {
                    self.ask_nodes_in(cidr.prefix);
                }
            }
            Selector::Fqdn(fqdn) => {
                self.policy.add_name_selector(fqdn);
                self.relabel_names(fqdn);
                self.preallocate(fqdn);
            }
            Selector::Group(group) => {
                for prefix in &group.except {
                    self.ask_block(*prefix);
                }
            }
            Selector::DnsName(name) => self.use_name(name),
            Selector::Node(labels) => self.ask_node_labels(labels),
            Selector::Labels(_) | Selector::Entity(_) => {}
        }
    }

    pub(in crate::core) fn unregister(&mut self, selector: &Selector) {
        if !self.policy.unregister(selector) {
            return;
        }
        match selector {
            Selector::Cidr(cidr) => {
                for prefix in cidr.except.iter().chain([&cidr.prefix]) {
                    self.drop_block(*prefix);
                }
                if cidr.nodes {
                    self.drop_nodes_in(cidr.prefix);
                }
            }
            Selector::Fqdn(fqdn) => {
                let held = self.policy.remove_name_selector(fqdn);
                self.relabel_names(fqdn);
                for id in held {
                    self.numbers.release_local(id);
                }
            }
            Selector::Group(group) => {
                for prefix in &group.except {
                    self.drop_block(*prefix);
                }
            }
            Selector::DnsName(name) => self.disuse_name(name),
            Selector::Node(labels) => self.drop_node_labels(labels),
            Selector::Labels(_) | Selector::Entity(_) => {}
        }
    }

    fn ask_block(&mut self, prefix: IpNet) {
        self.policy.ask_block(prefix);
        if let Some(label) = cidr_label(prefix) {
            let labels = Claim::Labels(LabelSet::new(vec![label]));
            self.ipcache.claim(prefix, Owner::Policy, labels);
        }
    }

    fn drop_block(&mut self, prefix: IpNet) {
        if self.policy.drop_block(prefix) {
            self.ipcache.unclaim(prefix, &Owner::Policy);
        }
    }

    /// A selector was added or removed: the names that it matches get their labels again.
    fn relabel_names(&mut self, selector: &NameRule) {
        let mut probe = crate::fqdn::names::NameSelectors::default();
        let Some(matcher) = probe.add(selector) else {
            return;
        };
        let matching: Vec<Fqdn> = if let SelectorKey::Exact(name) = matcher.key() {
            vec![Fqdn::normalise(name)]
        } else {
            let names = self.learned.names.names().map(|(name, _)| name);
            names.filter(|n| matcher.matches(n)).cloned().collect()
        };
        for name in matching {
            let labels = self.policy.labels_of_name(&name);
            self.label_name(&name, labels);
        }
    }

    /// Gives all addresses of a name these labels; `None` takes its labels from them.
    pub(in crate::core) fn label_name(&mut self, name: &Fqdn, labels: Option<LabelSet>) {
        let Some(entry) = self.learned.names.name_mut(name) else {
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

    /// Gives identities to selectors that were added before the sync: until then prefixes could not
    /// ask for their former numbers.
    pub(in crate::core) fn preallocate_early(&mut self) {
        for selector in self.policy.preallocated() {
            self.preallocate(&selector);
        }
    }

    fn preallocate(&mut self, selector: &NameRule) {
        if !self.config.preallocate_identities {
            return;
        }
        if !self.restoration.is_synced() {
            self.policy.preallocate(selector.clone(), Vec::new());
            return;
        }
        let alone = self.labels_alone(selector);
        let held = alone.iter().filter_map(|labels| self.acquire_local(labels));
        let held = held.collect();
        self.policy.preallocate(selector.clone(), held);
    }

    /// For each family, the labels of an address that only this selector selects.
    pub(in crate::core) fn labels_alone(&self, selector: &NameRule) -> Vec<LabelSet> {
        let labels = self.config.whole_families().map(|all| {
            LabelSet::new(vec![
                fqdn_label(selector),
                self.ipcache.world().label(all).clone(),
            ])
        });
        labels.collect()
    }

    /// Removes the labels of pairs (name, address) that nothing keeps any more.
    pub(in crate::core) fn unlabel(&mut self, gone: Vec<NamePair>) {
        self.counters.pairs_removed += gone.len() as u64;
        self.end_answers(&gone);
        for (name, address) in gone {
            self.ipcache
                .unclaim(IpNet::from(address), &Owner::Name(name));
        }
    }
}
