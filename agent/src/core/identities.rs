//! Which identity a prefix has, and what follows when one comes or goes.

use ipnet::IpNet;
use shared_maps::IdentityId;

use super::{breaker::is_combination, changes::MARK, plan::Plan, state::State};
use crate::{
    identity::{allocator::Allocator as _, scopes::reserved},
    labels::{FQDN, Label, LabelSet, RESERVED},
};

impl State {
    /// Gives a prefix the identity of its labels.
    pub(super) fn resolve(&mut self, prefix: IpNet) {
        let Some(metadata) = self.ipcache.get(prefix) else {
            return;
        };
        self.counters.prefixes_resolved += 1;
        self.changes.spent += 1;
        let before = metadata.desired.filter(|_| metadata.held);
        let (mut labels_of_host, mut in_part) = (None, false);
        if metadata.is_unclaimed() {
            self.ipcache.desire(prefix, None, false);
        } else if let Some(identity) = metadata.identity() {
            if identity == IdentityId::HOST {
                labels_of_host = Some(self.ipcache.labels(prefix));
            }
            self.ipcache.desire(prefix, Some(identity), false);
        } else {
            let labels = self.ipcache.labels(prefix);
            if labels.has_reserved("host") {
                self.ipcache.desire(prefix, Some(IdentityId::HOST), false);
                labels_of_host = Some(labels);
            } else if let Some(reserved) = reserved(&labels) {
                self.ipcache.desire(prefix, Some(reserved), false);
            } else {
                let part = self.part_of(prefix, &labels);
                let request = self.requested.get(&prefix).filter(|_| part.is_none());
                let request = request.copied();
                let labels = part.as_ref().unwrap_or(&labels);
                let Some(identity) = self.acquire_as(labels, request) else {
                    self.ipcache.leave_unresolved(prefix);
                    self.retry.add(prefix);
                    return;
                };
                self.ipcache.desire(prefix, Some(identity), true);
                in_part = part.is_some();
            }
        }
        self.retry.remove(prefix);
        if let Some(before) = before
            && self.local.release(before)
        {
            // Endpoints' maps will have to forget it.
            self.changes.spent += MARK * self.endpoints.len();
        }
        self.note_limited(prefix, in_part);
        self.note_host(prefix, labels_of_host);
    }

    /// The host has one identity, with the labels of all its addresses (Cilium: the labels of
    /// reserved identity 1 are the only ones that change).
    fn note_host(&mut self, prefix: IpNet, labels: Option<LabelSet>) {
        let labels = labels.filter(|labels| labels.as_slice().len() > 1);
        let changed = match labels {
            Some(labels) => self.host_labels.insert(prefix, labels.clone()) != Some(labels),
            None => self.host_labels.remove(&prefix).is_some(),
        };
        if !changed {
            return;
        }
        let all = self.host_labels.values().flat_map(LabelSet::iter).cloned();
        let host = [Label::new(RESERVED, "host", "")];
        let all = LabelSet::new(all.chain(host).collect());
        let selectors = self.selectors.remove_identity(IdentityId::HOST);
        self.reselect(&selectors, IdentityId::HOST);
        self.introduce(IdentityId::HOST, all);
    }

    /// Identity of labels of addresses outside; none if there is no number for it.
    pub(super) fn acquire_local(&mut self, labels: &LabelSet) -> Option<IdentityId> {
        self.acquire_as(labels, None)
    }

    fn acquire_as(&mut self, labels: &LabelSet, request: Option<IdentityId>) -> Option<IdentityId> {
        let Ok(acquired) = self.local.acquire_as(labels, request) else {
            self.counters.identity_exhausted += 1;
            return None;
        };
        if acquired.new {
            self.introduce(acquired.id, labels.clone());
        }
        if acquired.fresh {
            self.checkpoint_due.local = true;
            self.checkpoint_due.fresh.insert(acquired.id);
        }
        Some(acquired.id)
    }

    /// A new identity: policy maps have to know it.
    pub(super) fn introduce(&mut self, identity: IdentityId, labels: LabelSet) {
        if labels.iter().any(|label| label.source() == FQDN) {
            if self.fqdn_identities.insert(identity) {
                self.fqdn_changes += 1;
                self.fqdn_combinations += usize::from(is_combination(&labels));
            }
            self.fqdn_awaited.remove(&labels);
        }
        let selectors = self.selectors.add_identity(identity, labels);
        self.reselect(&selectors, identity);
    }

    pub(super) fn forget_identity(&mut self, plan: &mut Plan, identity: IdentityId) {
        if let Some(labels) = self.selectors.labels(identity).cloned() {
            if self.fqdn_identities.remove(&identity) {
                self.fqdn_changes += 1;
                self.fqdn_combinations -= usize::from(is_combination(&labels));
            }
            plan.forget(identity, labels);
        }
        let selectors = self.selectors.remove_identity(identity);
        self.reselect(&selectors, identity);
    }

    /// Takes up again what the plan forgot and a prefix has still, because its step failed:
    /// policy of that identity follows what changes until the prefix has another.
    pub(super) fn revive_identities(&mut self, forgotten: Vec<(IdentityId, LabelSet)>) {
        for (identity, labels) in forgotten {
            if !self.ipcache.is_in_force(identity) {
                continue;
            }
            let revived = if !identity.is_endpoint() {
                self.checkpoint_due.local = true;
                self.local.revive(identity, labels.clone())
            } else {
                self.checkpoint_due.endpoints = true;
                self.pods.revive(identity, labels.clone())
            };
            if revived {
                self.introduce(identity, labels);
            }
        }
    }
}
