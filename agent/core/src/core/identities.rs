//! Which identity a prefix has, and what follows when an identity is added or removed.

mod breaker;
mod relabel;

use ipnet::IpNet;
use shared_maps::IdentityId;

use super::{changes::MARK, plan::Plan, state::State};
use crate::{core::state::policy_model::Touched, identity::scopes::reserved, labels::LabelSet};

impl State {
    /// Gives a prefix the identity of its labels.
    pub(super) fn resolve(&mut self, prefix: IpNet) {
        let Some(metadata) = self.ipcache.get(prefix) else {
            return;
        };
        self.counters.prefixes_resolved += 1;
        self.policy.changes_mut().spend(1);
        let was = metadata.desired;
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
                let request = self.restoration.request_of(prefix);
                let request = request.filter(|_| part.is_none());
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
        if self.ipcache.get(prefix).and_then(|m| m.desired) != was {
            self.cluster.services.note_identity(prefix);
        }
        if let Some(before) = before
            && self.numbers.release_local(before)
        {
            // Endpoints' maps will have to forget the former identity.
            let units = MARK * self.endpoints.len();
            self.policy.changes_mut().spend(units);
        }
        if in_part {
            self.note_limited(prefix);
        } else {
            self.numbers.budget_mut().unlimit(prefix);
        }
        self.note_host(prefix, labels_of_host);
    }

    /// The host has one identity, with the labels of all its addresses (Cilium: the labels of
    /// reserved identity 1 are the only ones that change).
    fn note_host(&mut self, prefix: IpNet, labels: Option<LabelSet>) {
        let Some(all) = self.numbers.set_host_labels(prefix, labels) else {
            return;
        };
        let touched = self.policy.remove_identity(IdentityId::HOST);
        self.mark_dirty_peers(&touched);
        self.introduce(IdentityId::HOST, all);
    }

    /// Identity of labels of addresses outside the cluster; `None` if no number is free.
    pub(super) fn acquire_local(&mut self, labels: &LabelSet) -> Option<IdentityId> {
        self.acquire_as(labels, None)
    }

    fn acquire_as(&mut self, labels: &LabelSet, request: Option<IdentityId>) -> Option<IdentityId> {
        let Some(acquired) = self.numbers.acquire_local(labels, request) else {
            self.counters.identity_exhausted += 1;
            return None;
        };
        if acquired.new {
            self.introduce(acquired.id, labels.clone());
        }
        Some(acquired.id)
    }

    /// Adds a new identity to the policy: the policy maps get entries for it.
    pub(super) fn introduce(&mut self, identity: IdentityId, labels: LabelSet) {
        self.numbers.budget_mut().add(identity, &labels);
        let touched = self.policy.add_identity(identity, labels);
        self.mark_dirty_peers(&touched);
    }

    pub(super) fn forget_identity(&mut self, plan: &mut Plan, identity: IdentityId) {
        if let Some(labels) = self.policy.labels_of(identity).cloned() {
            self.numbers.budget_mut().remove(identity, &labels);
            plan.forget(identity, labels);
        }
        let touched = self.policy.remove_identity(identity);
        self.mark_dirty_peers(&touched);
    }

    /// Marks the policy maps of these endpoints, because an identity's entries changed.
    pub(super) fn mark_dirty_peers(&mut self, touched: &Touched) {
        let endpoints = touched.endpoints.iter().map(|id| (*id, touched.peer));
        for (id, peer) in endpoints.chain(touched.services.iter().copied()) {
            if let Some(endpoint) = self.endpoints.mark_mut(id) {
                endpoint.dirty_peers.add([peer]);
            }
        }
        let marks = touched.endpoints.len() + touched.services.len();
        self.policy.changes_mut().spend(MARK * marks);
    }

    /// Restores identities that the plan released but a prefix still has, because its step failed:
    /// the policy of such an identity stays up to date until the prefix has another one.
    pub(super) fn revive_identities(&mut self, forgotten: Vec<(IdentityId, LabelSet)>) {
        for (identity, labels) in forgotten {
            if !self.ipcache.is_in_force(identity) {
                continue;
            }
            if self.numbers.revive(identity, labels.clone()) {
                self.introduce(identity, labels);
            }
        }
    }
}
