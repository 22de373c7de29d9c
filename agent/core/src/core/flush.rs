//! Turns changes into steps. Their order neither passes what is denied nor cuts what is allowed:
//!
//! 1. checkpoints of new identities,
//! 2. policy maps: tables of ordered rules; then denies, redirects, allows; new endpoints: file
//!    first, then the whole map,
//! 3. `cilium_lxc`,
//! 4. ipcache: longest prefixes first, then removals, shortest first,
//! 5. programs ([`programs`]); the remaining entries of removed endpoints,
//! 6. policy maps: entries that are no longer used: allows, redirects, denies; then those of tables.
//!
//! A table ([`crate::policy::compute::tier`]) is written longest prefix first, and the entries that it replaces are
//! removed shortest first. While all lengths from L on are written, the longest entry for a packet is either its
//! longest entry in the new table or its longest among the old entries. So each packet meets the old verdict or the
//! new one. A new table is written before the entries for every peer, and an old table is removed after these. So
//! while these entries change, the verdict of a packet under a table does not depend on them.

mod policy_map_plan;
mod programs;
mod rollback;
mod rules;

use ipnet::IpNet;
use shared_maps::{
    EndpointId, IdentityId,
    ipcache::IpcacheValue,
    policy::{PolicyKey, PolicyValue},
};

use super::{plan::Plan, state::State};
use crate::{
    core::plan::{Removals, Undo},
    datapath::plan::Step,
    endpoint::endpoint::DirtyPeers,
    ipcache::table::key_of,
    policy::compute::set_order::{LAST, set_order},
};

/// Maximum number of prefixes that one round moves. While the round lasts, old and new identities
/// both exist.
pub(super) const CHUNK: usize = 512;

/// How many prefixes a round moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RoundSize {
    /// As many as a chunk has.
    Chunk,
    /// No more than the work budget of a part of a change allows.
    WithinBudget,
}

impl State {
    /// Plans everything that changed, once the sources are synced.
    pub(super) fn flush(&mut self, plan: &mut Plan) {
        if !self.restoration.is_synced() {
            return;
        }
        self.end_explicit();
        let mut moves = self.ipcache.take_dirty();
        self.in_order(&mut moves);
        let mut rest = moves.as_slice();
        let mut deferred = Removals::new();
        loop {
            let done = self.round(plan, rest, &mut deferred, RoundSize::Chunk);
            rest = rest.get(done..).unwrap_or_default();
            if rest.is_empty() {
                break;
            }
        }
        // Removing what idle identities left behind takes rounds of its own.
        while self.has_work() {
            self.round(plan, &[], &mut deferred, RoundSize::Chunk);
        }
        self.plan_removals(plan, deferred);
        if !self.change_in_progress() {
            // The last round may have removed identities that DNS rules have as servers.
            self.refresh_dns();
        }
    }

    /// Puts prefixes in the order of their writes to the ipcache: longest first, then removals,
    /// shortest first.
    pub(super) fn in_order(&self, prefixes: &mut Vec<IpNet>) {
        let mut goes = Vec::new();
        prefixes.retain(|prefix| match self.ipcache.get(*prefix) {
            Some(metadata) if metadata.is_unclaimed() => {
                goes.push(*prefix);
                false
            }
            known => known.is_some(),
        });
        prefixes.sort_unstable_by_key(|prefix| (u8::MAX - prefix.prefix_len(), *prefix));
        goes.sort_unstable_by_key(|prefix| (prefix.prefix_len(), *prefix));
        prefixes.append(&mut goes);
    }

    /// Whether an endpoint lacks entries that its map would take.
    fn has_work(&self) -> bool {
        let mut dirty = self.endpoints.dirty();
        dirty.any(|endpoint| !endpoint.dirty_peers.is_none() && endpoint.problem.is_none())
    }

    /// Plans the pending changes and at most one chunk of these prefixes. Returns how many prefixes
    /// it planned.
    pub(super) fn round(
        &mut self,
        plan: &mut Plan,
        prefixes: &[IpNet],
        deferred: &mut Removals,
        size: RoundSize,
    ) -> usize {
        let mut taken = 0;
        for prefix in prefixes.iter().take(CHUNK) {
            if size == RoundSize::WithinBudget && taken > 0 && !self.has_room() {
                break;
            }
            self.resolve(*prefix);
            taken += 1;
        }
        let prefixes = prefixes.get(..taken).unwrap_or_default();
        self.follow_backends();
        self.checkpoint(plan);
        let mut removals = Removals::new();
        if !self.change_in_progress() {
            self.refresh_dns();
        }
        for id in self.endpoints.dirty_ids() {
            self.plan_policy(plan, id, &mut removals);
        }
        self.follow_moves(plan, prefixes);
        self.plan_lxc_sets(plan);
        self.plan_ipcache(plan, prefixes);
        self.plan_attach(plan);
        self.plan_lxc_removals(plan);
        self.close_left(plan);
        self.plan_leaving(plan);
        // The policy entries of an identity stay as long as the datapath maps a prefix to it.
        let ipcache = &self.ipcache;
        let idle = self.numbers.sweep(&|id| ipcache.is_in_force(id));
        for id in idle {
            self.forget_identity(plan, id);
            self.drop_kept_entries(plan, id);
        }
        self.sweep_policy(&mut removals);
        removals.append(deferred);
        // After a restart an identity is known again only once a chunk resolves one of its
        // prefixes: until then the datapath may use it.
        let (now, later) = removals.into_iter().partition(|(_, key, _)| {
            let peer = IdentityId(key.sec_label);
            self.policy.labels_of(peer).is_some() || !self.ipcache.is_in_force(peer)
        });
        *deferred = later;
        self.plan_removals(plan, now);
        let files = &self.files;
        self.endpoints.retain_dirty(|endpoint| {
            !endpoint.dirty_peers.is_none()
                || endpoint.policy_map.is_none()
                || !files.exists(endpoint.id)
                || (endpoint.attached.as_ref() != Some(&endpoint.attachment())
                    && !endpoint.is_judged_by_former_programs())
        });
        taken
    }

    pub(super) fn checkpoint(&mut self, plan: &mut Plan) {
        let due = self.numbers.take_checkpoints();
        if let Some(text) = due.local {
            self.step(plan, Step::Checkpoint(text), Undo::Checkpoint);
        }
        if let Some(write) = due.endpoints {
            self.step(plan, Step::CheckpointEndpoints(write), Undo::Checkpoint);
        }
        plan.save(due.fresh);
    }

    pub(super) fn refresh_dns(&mut self) {
        if self.policy.refresh_dns() {
            self.proxies.publication.mark_stale();
        }
    }

    /// Plans the change of an entry from its former to its new value.
    pub(super) fn put_policy(
        &mut self,
        plan: &mut Plan,
        id: EndpointId,
        key: PolicyKey,
        (value, old): (Option<PolicyValue>, Option<PolicyValue>),
    ) {
        let step = match value {
            Some(value) => Step::SetPolicy(id, key, value),
            None => Step::UnsetPolicy(id, key),
        };
        self.step(plan, step, Undo::Policy(id, key, old));
        if let Some(endpoint) = self.endpoints.get_any_mut(id) {
            endpoint.policy_map.get_or_insert_default().put(key, value);
        }
    }

    /// Adds the entries of identities that were just forgotten, so that their removal needs no further round. Entries
    /// of identities in use stay until all of the new policy is in force.
    fn sweep_policy(&mut self, removals: &mut Removals) {
        for id in self.endpoints.dirty_ids() {
            let Some(endpoint) = self.endpoints.get_mut(id) else {
                continue;
            };
            let DirtyPeers::Some(peers) = &endpoint.dirty_peers else {
                continue;
            };
            let Some(subject) = self.policy.subject(endpoint.identity) else {
                continue;
            };
            let Some(map) = &endpoint.policy_map else {
                continue;
            };
            let gone: Vec<IdentityId> = peers
                .iter()
                .copied()
                .filter(|peer| self.policy.labels_of(*peer).is_none() && !peer.is_service())
                .filter(|peer| *peer != IdentityId::UNKNOWN && subject.entries(*peer).is_none())
                .collect();
            for peer in &gone {
                let entries = map.get(*peer).into_iter().flatten();
                removals.extend(entries.map(|(key, value)| (endpoint.id, *key, *value)));
            }
            if let DirtyPeers::Some(peers) = &mut endpoint.dirty_peers {
                peers.retain(|peer| !gone.contains(peer));
            }
        }
        removals.sort_unstable_by_key(|(id, key, value)| (*id, set_order(key, value), *key));
        removals.dedup_by_key(|(id, key, _)| (*id, *key));
    }

    pub(super) fn plan_removals(&mut self, plan: &mut Plan, mut removals: Removals) {
        removals.retain(|(id, key, _)| !self.wants(*id, key));
        removals.sort_by_key(|(id, key, value)| (*id, LAST - set_order(key, value), *key));
        for (id, key, value) in removals {
            self.step(
                plan,
                Step::UnsetPolicy(id, key),
                Undo::Policy(id, key, Some(value)),
            );
            let map = self
                .endpoints
                .get_mut(id)
                .and_then(|e| e.policy_map.as_mut());
            if let Some(map) = map {
                map.put(key, None);
            }
        }
    }

    /// Whether the endpoint's policy has this entry.
    fn wants(&self, id: EndpointId, key: &PolicyKey) -> bool {
        self.endpoints
            .get(id)
            .and_then(|endpoint| self.policy.subject(endpoint.identity))
            .is_some_and(|subject| {
                let peer = IdentityId(key.sec_label);
                subject.in_map(peer).contains_key(key)
            })
    }

    /// Plans the wanted entries of `cilium_lxc`.
    fn plan_lxc_sets(&mut self, plan: &mut Plan) {
        let (endpoints, files) = (&self.endpoints, &self.files);
        // Whether the endpoint at an address, if there is one, has its policy map and file.
        let is_ready = |address| {
            let at = endpoints.by_address(address);
            let endpoint = at.and_then(|id| endpoints.get(id));
            endpoint
                .is_none_or(|endpoint| endpoint.policy_map.is_some() && files.exists(endpoint.id))
        };
        for change in self.lxc.plan_sets(is_ready) {
            let step = Step::SetLxc(change.key, change.value);
            self.step(plan, step, Undo::Lxc(change.key, change.before));
        }
    }

    /// Plans the removal of the other entries of `cilium_lxc`.
    fn plan_lxc_removals(&mut self, plan: &mut Plan) {
        for (key, before) in self.lxc.plan_removals() {
            self.step(plan, Step::UnsetLxc(key), Undo::Lxc(key, Some(before)));
        }
    }

    pub(super) fn plan_ipcache(&mut self, plan: &mut Plan, prefixes: &[IpNet]) {
        for prefix in prefixes {
            let Some(metadata) = self.ipcache.get(*prefix) else {
                continue;
            };
            let (wanted, has) = (metadata.desired, metadata.realised);
            if wanted == has {
                continue;
            }
            let key = key_of(*prefix);
            let full = has.is_none() && self.ipcache.realised() >= self.config.ipcache_max;
            match wanted {
                Some(_) if full => {
                    self.retry.add(*prefix);
                    continue;
                }
                Some(identity) => {
                    let value = IpcacheValue {
                        sec_identity: identity.0,
                        ..IpcacheValue::default()
                    };
                    self.step(
                        plan,
                        Step::SetIpcache(key, value),
                        Undo::Ipcache(*prefix, has),
                    );
                }
                None => self.step(plan, Step::UnsetIpcache(key), Undo::Ipcache(*prefix, has)),
            }
            self.ipcache.realise(*prefix, wanted);
        }
    }

    /// Removes the remaining entries of removed endpoints, whose addresses no longer map to them.
    fn plan_leaving(&mut self, plan: &mut Plan) {
        let left: Vec<_> = self
            .endpoints
            .leaving_mut()
            .map(|endpoint| {
                let mapped = endpoint.policy_map.take().is_some();
                (endpoint.id, endpoint.attached.take(), mapped)
            })
            .collect();
        for (id, attached, mapped) in left {
            if let Some(attachment) = &attached {
                plan.uncover(id, attachment.ifindex);
                self.step(plan, Step::Detach(id), Undo::Attached(id, attached));
            }
            if self.files.remove_left(id) {
                self.step(plan, Step::RemoveEndpoint(id), Undo::RemovedFile(id));
            }
            if mapped {
                self.step(plan, Step::RemovePolicyMap(id), Undo::RemovedMap(id));
            }
        }
        self.replace_left(plan);
        let orphans = self.endpoints.take_orphans();
        for id in orphans {
            self.step(plan, Step::Detach(id), Undo::Attached(id, None));
            self.step(plan, Step::RemovePolicyMap(id), Undo::RemovedMap(id));
        }
    }
}
