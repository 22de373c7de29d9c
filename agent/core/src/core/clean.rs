//! Removes learned names on request (`fqdn cache clean`).

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use dns_policy::{
    boot_time::BootTime, mapping::Mapping, name::Fqdn, pattern::SelectorMatcher, rule::NameRule,
};
use ipnet::IpNet;
use shared_maps::EndpointId;

use super::{
    Core,
    event::{CleanNames, StreamId},
    plan::Plan,
    state::State,
};
use crate::{
    core::{plan::Undo, state::closed_names::Cleaned},
    datapath::plan::Step,
    fqdn::{cache::NamePair, cleaned::Cleaning, firewall_names},
    ipcache::{metadata::Claim, owners::Owner},
    labels::{CLOSED_NAME, DNS_NAME, FQDN, Label, LabelSet},
};

/// A cleaned pair that stays until proxies have given up its leases.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unrevoked {
    pub name: Fqdn,
    pub address: IpAddr,
    /// When its last lease ends by itself.
    pub until: BootTime,
    /// Streams, open or closed, whose proxies did not give the lease back.
    pub streams: BTreeSet<StreamId>,
}

impl Core {
    /// Cleaned pairs that are still open. If there is a pattern, only those of names that match it.
    pub fn unrevoked(&self, pattern: Option<&str>) -> Vec<Unrevoked> {
        self.state.unrevoked(pattern)
    }
}

impl State {
    /// Whether the name of a proxy's mapping was cleaned after the proxy saw the answer.
    pub(super) fn was_cleaned(&self, mapping: &Mapping) -> bool {
        let endpoint = mapping.endpoint.id;
        self.learned
            .closed
            .covers(endpoint, &mapping.name, mapping.seen_at)
    }

    /// Plans to write the names of cleanings to disk, so that these names stay cleaned after a restart.
    pub(super) fn keep_cleaned(&mut self, plan: &mut Plan) {
        if let Some(text) = self.learned.closed.take_unsaved(&self.config.boot_id) {
            self.step(plan, Step::KeepCleaned(text), Undo::Cleaned);
        }
    }

    /// Forgets names. A pair under a lease is removed once every stream has dropped the lease, or the
    /// lease has ended.
    pub(super) fn on_clean(&mut self, plan: &mut Plan, clean: &CleanNames) {
        let cleaned = Cleaned::new(Cleaning {
            endpoint: clean.endpoint,
            pattern: clean.pattern.clone(),
            at: self.now,
            at_unix: self.unix_time(self.now),
        });
        // The command line checks the pattern first.
        let Some(cleaned) = cleaned else {
            return;
        };
        let forget = self.learned_by_endpoints(&cleaned);
        let mut revoke: BTreeMap<_, Vec<IpAddr>> = Default::default();
        let (known, alone) = match cleaned.endpoint() {
            Some(_) => (Vec::new(), Vec::new()),
            None => (
                self.learned
                    .names
                    .forget_known(|name| cleaned.is_of_name(name)),
                self.resolved_alone(|name| cleaned.is_of_name(name)),
            ),
        };
        self.forget_answers(&alone);
        self.learned.closed.add(cleaned, self.now);
        for (name, address) in known {
            self.forget_restored(&name, address);
            let gone = self.learned.names.release(&name, address, self.now);
            self.clear(gone);
            if self.note_revoking(&name, address) {
                revoke.entry(name).or_default().push(address);
            }
        }
        for (id, name, address) in forget {
            // Restored labels of the address that stand for this name are removed too.
            self.forget_restored(&name, address);
            let gone = self.learned.names.forget(id, &name, address, self.now);
            self.clear(gone);
            if self.note_revoking(&name, address) {
                revoke.entry(name).or_default().push(address);
            }
            self.files.mark_due(id, self.now);
        }
        for (name, addresses) in revoke {
            self.revoke_leases(plan, name, addresses);
        }
    }

    /// Pairs that endpoints learned and that a cleaning is about.
    fn learned_by_endpoints(&self, cleaned: &Cleaned) -> Vec<(EndpointId, Fqdn, IpAddr)> {
        let mut forget = Vec::new();
        for (id, names) in self.learned.names.endpoints() {
            if cleaned.endpoint().is_some_and(|only| only != id) {
                continue;
            }
            let live = names
                .names
                .iter()
                .flat_map(|(n, all)| all.keys().map(move |a| (n, *a)));
            let zombies = names
                .zombies
                .iter()
                .flat_map(|(a, z)| z.names.iter().map(move |n| (n, *a)));
            for (name, address) in live.chain(zombies) {
                if cleaned.is_of(id, name) {
                    forget.push((id, name.clone(), address));
                }
            }
        }
        forget
    }

    /// Removes all labels of a pair that was removed.
    pub(super) fn clear(&mut self, gone: Option<NamePair>) {
        let gone: Vec<_> = gone.into_iter().collect();
        self.forget_answers(&gone);
        self.unlabel(gone);
    }

    /// Of the labels that an earlier run gave an address, removes those that stand for this name.
    /// If labels of other names remain, all other labels stay, because those names may not be known
    /// again yet. If no label of another name remains, all restored labels of the address are removed.
    pub(super) fn forget_restored(&mut self, name: &Fqdn, address: IpAddr) {
        let prefix = IpNet::from(address);
        let metadata = self.ipcache.get(prefix);
        let Some(kept) = metadata.and_then(|m| m.labels_by(&Owner::Restored)) else {
            return;
        };
        let of_name = |label: &Label| match label.source() {
            FQDN => {
                let rule = NameRule::Pattern(label.key().to_owned());
                SelectorMatcher::compile(&rule).is_ok_and(|matcher| matcher.matches(name))
            }
            DNS_NAME | CLOSED_NAME => firewall_names::means(label.key(), name),
            _ => false,
        };
        let is_name = |label: &Label| matches!(label.source(), FQDN | DNS_NAME | CLOSED_NAME);
        let left: Vec<Label> = kept.iter().filter(|l| !of_name(l)).cloned().collect();
        if left.iter().any(is_name) {
            let left = Claim::Labels(LabelSet::new(left));
            self.ipcache.claim(prefix, Owner::Restored, left);
        } else {
            self.ipcache.unclaim(prefix, &Owner::Restored);
        }
    }

    /// Cleaned pairs that remain while a proxy may still release answers under their lease.
    pub(super) fn unrevoked(&self, pattern: Option<&str>) -> Vec<Unrevoked> {
        let what = Cleaning {
            endpoint: None,
            pattern: pattern.map(str::to_owned),
            at: self.now,
            at_unix: 0,
        };
        let Some(cleaned) = Cleaned::new(what) else {
            return Vec::new();
        };
        let pending = self.proxies.leases.pending();
        let pending = pending.filter(|pending| cleaned.is_of_name(&pending.name));
        let pairs = pending.flat_map(|pending| {
            pending.addresses.iter().map(|address| Unrevoked {
                name: pending.name.clone(),
                address: *address,
                until: pending.until,
                streams: pending.waiting.clone(),
            })
        });
        pairs.collect()
    }

    /// True if only a lease keeps the pair. The pair is then marked as being revoked, and gets no
    /// new lease.
    fn note_revoking(&mut self, name: &Fqdn, address: IpAddr) -> bool {
        let now = self.now;
        let pair = self
            .learned
            .names
            .name_mut(name)
            .and_then(|entry| entry.pairs.get_mut(&address));
        if let Some(pair) = pair.filter(|pair| pair.owners == 0 && pair.lease_end > Some(now)) {
            pair.revoking = true;
            true
        } else {
            false
        }
    }
}
