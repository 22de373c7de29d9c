//! Renderings of the model: policy map entries and DNS rules.
//!
//! | rules that meet at one peer, protocol and port | entry |
//! |---|---|
//! | a deny, whatever else | deny |
//! | a DNS rule, with or without a plain allow | redirect to the proxy (a plain allow adds "every name") |
//! | a plain allow | allow |
//! | none, direction enforced | none: dropped |
//! | none, direction not enforced | allow of identity 0 |
//!
//! An identity that an ordered list selects has a table instead (`tier`).

mod dns;
mod dns_ports;
pub(crate) mod entries;
pub(crate) mod explicit;
mod observed;
pub(crate) mod service;
pub(crate) mod set_order;
pub(crate) mod tier;

pub(crate) use self::{
    dns::{DnsScope, ServicePortAt, dns_rules},
    observed::Observed,
};

use std::{collections::HashMap, sync::Arc};

use dns_policy::rule::Transport;
use shared_maps::{
    IdentityId,
    policy::{EGRESS, INGRESS, PolicyKey, PolicyValue},
};

use self::{explicit::Explicit, tier::Tier};
use super::{
    model::{Change, EndpointPolicy},
    rule::{PeerRule, Peers},
};
pub(crate) use crate::policy::compute::entries::{Entries, blocks};
use crate::{
    labels::LabelSet,
    selector::cache::{SelectorCache, SelectorId},
};

/// The rules of a policy by the selectors they use: what concerns an identity is found
/// without reading the rest.
#[derive(Debug, Default)]
pub(crate) struct RuleIndex {
    by_selector: HashMap<SelectorId, Vec<Indexed>>,
    any: Vec<Indexed>,
    tier: Option<Box<Tier>>,
    observed: Observed,
    explicit: Explicit,
    /// The entries for everyone.
    everyone: Entries,
}

type Indexed = (u8, Arc<PeerRule>);

impl RuleIndex {
    /// The index of all rules of a policy, whose selectors are registered.
    pub(crate) fn of(policy: &EndpointPolicy, selectors: &SelectorCache) -> Self {
        let mut index = Self::default();
        for (direction, side) in [(EGRESS, &policy.egress), (INGRESS, &policy.ingress)] {
            for rule in &side.rules {
                index.add(direction, &rule.rule, selectors);
            }
        }
        index.tier = Tier::of(&policy.egress, selectors, None);
        index.observed = Observed::of(&policy.egress);
        index
    }

    /// Follows a change of the policy. `policy` is its new version; the selectors of both versions are
    /// registered.
    pub(crate) fn follow(
        &mut self,
        policy: &EndpointPolicy,
        change: &Change,
        selectors: &SelectorCache,
    ) {
        if !change.egress.tier.is_empty() {
            self.tier = Tier::of(&policy.egress, selectors, self.tier.take());
        }
        self.observed = Observed::of(&policy.egress);
        for (direction, side) in [(EGRESS, &change.egress), (INGRESS, &change.ingress)] {
            for rule in &side.removed {
                self.remove(direction, rule, selectors);
            }
            for rule in &side.added {
                self.add(direction, rule, selectors);
            }
        }
    }

    fn add(&mut self, direction: u8, rule: &Arc<PeerRule>, selectors: &SelectorCache) {
        let indexed = || (direction, Arc::clone(rule));
        if rule.peers == Peers::Any {
            self.any.push(indexed());
        }
        for id in rule.selectors().filter_map(|s| selectors.id_of(s)) {
            self.by_selector.entry(id).or_default().push(indexed());
        }
    }

    fn remove(&mut self, direction: u8, rule: &Arc<PeerRule>, selectors: &SelectorCache) {
        // Takes one of several equal rules: which one makes no difference.
        let take = |list: &mut Vec<Indexed>| {
            let at = list.iter().position(|(d, r)| *d == direction && r == rule);
            at.map(|at| list.swap_remove(at));
        };
        if rule.peers == Peers::Any {
            take(&mut self.any);
        }
        for id in rule.selectors().filter_map(|s| selectors.id_of(s)) {
            if let Some(list) = self.by_selector.get_mut(&id) {
                take(list);
                if list.is_empty() {
                    self.by_selector.remove(&id);
                }
            }
        }
    }

    /// Selectors that rules use, those of ordered rules included.
    pub(crate) fn selectors(&self) -> impl Iterator<Item = SelectorId> {
        self.by_selector
            .keys()
            .copied()
            .chain(self.tier_selectors())
    }

    /// Selectors that ordered rules use.
    pub(crate) fn tier_selectors(&self) -> impl Iterator<Item = SelectorId> {
        self.tier.iter().flat_map(|tier| tier.selectors())
    }

    /// Whether a rule uses one of these selectors.
    pub(crate) fn uses(&self, selectors: &[SelectorId]) -> bool {
        let tier = |id| self.tier.as_ref().is_some_and(|tier| tier.uses(id));
        let mut selectors = selectors.iter();
        selectors.any(|id| self.by_selector.contains_key(id) || tier(*id))
    }

    /// Whether there are ordered rules.
    pub(crate) const fn has_tier(&self) -> bool {
        self.tier.is_some()
    }

    /// Which answers of DNS servers have to pass the proxy.
    pub(crate) const fn observed(&self) -> Observed {
        self.observed
    }

    /// The directions in which maps have no entries for everyone.
    pub(crate) const fn explicit(&self) -> Explicit {
        self.explicit
    }

    /// Changes the directions in which maps have no entries for everyone. All entries have to be
    /// rendered again.
    pub(crate) fn set_explicit(&mut self, explicit: Explicit) {
        self.explicit = explicit;
    }

    /// The entries for everyone, whether maps have them or not.
    pub(crate) const fn everyone(&self) -> &Entries {
        &self.everyone
    }

    /// Stores the entries for everyone, from which tables are computed. True if a table may have
    /// changed.
    pub(crate) fn follow_everyone(&mut self, entries: &Entries) -> bool {
        self.everyone.clone_from(entries);
        let tier = self.tier.as_mut();
        tier.is_some_and(|tier| tier.follow_everyone(entries))
    }

    /// Renders the entries of one identity. Render the entries for everyone
    /// ([`IdentityId::UNKNOWN`]) first and pass them to [`Self::follow_everyone`], then render
    /// those of other identities. `own` are the labels of the policy's endpoints.
    pub(crate) fn entries(
        &mut self,
        policy: &EndpointPolicy,
        own: &LabelSet,
        identity: IdentityId,
        selectors: &SelectorCache,
        proxy_port: u16,
    ) -> Entries {
        let everyone = identity == IdentityId::UNKNOWN;
        let any = self.any.iter().filter(|_| everyone);
        let selecting = selectors.selecting_ids(identity);
        let selected = selecting.filter_map(|id| self.by_selector.get(&id));
        let (mut egress, mut ingress) = (Entries::new(), Entries::new());
        let peer = selectors.labels(identity);
        for (direction, rule) in any.chain(selected.flatten()) {
            let (drafts, receiver) = if *direction == EGRESS {
                (&mut egress, peer)
            } else {
                (&mut ingress, Some(own))
            };
            draft(drafts, rule, receiver, identity, *direction, proxy_port);
        }
        let mut found = Entries::new();
        for (direction, side, mut drafts) in [
            (EGRESS, &policy.egress, egress),
            (INGRESS, &policy.ingress, ingress),
        ] {
            let everything = PolicyKey::new(identity.0, direction, 0, 0, 0);
            let open = everyone && !side.enforced;
            let host = identity == IdentityId::HOST && direction == INGRESS && side.enforced;
            let observes = direction == EGRESS && self.observed != Observed::Nothing;
            if observes {
                observed::redirect(&mut drafts, identity, proxy_port);
            }
            if open || host {
                put(&mut drafts, everything, PolicyValue::allow(everything));
            }
            if observes && open && self.observed == Observed::Everything {
                observed::redirect(&mut drafts, identity, proxy_port);
            }
            let kept = without_covered(&drafts);
            let tier = self
                .tier
                .as_mut()
                .filter(|_| direction == EGRESS && !everyone);
            let selecting = selectors.selecting_ids(identity);
            let table = tier.and_then(|tier| tier.table(identity, selecting, &kept, proxy_port));
            let is_known = !everyone && peer.is_some();
            found.extend(match table {
                Some(table) => table,
                None if is_known && self.explicit.is_in(direction) => {
                    let entries = (&kept, &self.everyone);
                    tier::table_without_rules(identity, direction, entries, proxy_port)
                }
                None => kept,
            });
        }
        found
    }
}

fn draft(
    drafts: &mut Entries,
    rule: &PeerRule,
    receiver: Option<&LabelSet>,
    identity: IdentityId,
    direction: u8,
    proxy_port: u16,
) {
    if rule.ports.is_empty() {
        let key = PolicyKey::new(identity.0, direction, 0, 0, 0);
        let value = if rule.deny {
            PolicyValue::deny(key)
        } else {
            PolicyValue::allow(key)
        };
        put(drafts, key, value);
    }
    for port in &rule.ports {
        for (protocol, first, last) in port.at(receiver) {
            for (first, bits) in blocks(first, last) {
                let key = PolicyKey::new(identity.0, direction, protocol, first, bits);
                let redirected = port.dns.is_some() && Transport::from_number(protocol).is_some();
                let value = if rule.deny {
                    PolicyValue::deny(key)
                } else if redirected {
                    PolicyValue::dns_redirect(key, proxy_port)
                } else if port.dns.is_some() {
                    continue;
                } else {
                    PolicyValue::allow(key)
                };
                put(drafts, key, value);
            }
        }
    }
}

fn put(drafts: &mut Entries, key: PolicyKey, value: PolicyValue) {
    let entry = drafts.entry(key).or_insert(value);
    if value.precedence > entry.precedence {
        *entry = value;
    }
}

/// Leaves out entries under a broader one of the same identity that wins or says the same:
/// the kernel takes the longest match within an identity, so that a narrow allow would
/// otherwise pierce a broad deny.
fn without_covered(drafts: &Entries) -> Entries {
    let broader = |key: &PolicyKey, value: &PolicyValue| {
        drafts.iter().any(|(other, has)| {
            other.prefix_len < key.prefix_len
                && has.precedence >= value.precedence
                && is_within(key, other)
        })
    };
    let kept = drafts.iter().filter(|(key, value)| !broader(key, value));
    kept.map(|(key, value)| (*key, *value)).collect()
}

/// Whether `broad` matches everything that `narrow` matches. Both have the same identity and
/// direction.
pub(crate) fn is_within(narrow: &PolicyKey, broad: &PolicyKey) -> bool {
    match broad.lpm_len() {
        0 => true,
        len => {
            let bits = u32::from(len.saturating_sub(8)).min(16);
            let apart = narrow.dport.get() ^ broad.dport.get();
            narrow.protocol == broad.protocol && u32::from(apart) >> (16 - bits) == 0
        }
    }
}

/// Protocol and port that the kernel looks up among the entries for everyone, for a packet to or from
/// this identity. A Service's port differs from its backends' ports, so only entries for every
/// protocol and port count for a Service.
pub const fn everyone_at(identity: IdentityId, protocol: u8, port: u16) -> (u8, u16) {
    match identity.is_service() {
        true => (0, 0),
        false => (protocol, port),
    }
}

/// The entry of a map that decides, if any, with the verdict of the kernel (`bpf/src/policy.rs`). The
/// entry for everyone is looked up with [`everyone_at`]. If both entries deny, and the identity's
/// entry is from a table, the kernel stops at the entry for everyone; this function returns the
/// identity's.
pub fn decide<'a>(
    lookup: impl Fn(u32) -> Option<(&'a PolicyKey, &'a PolicyValue)>,
    identity: IdentityId,
) -> Option<(&'a PolicyKey, &'a PolicyValue)> {
    let own = lookup(identity.0);
    if own.is_some_and(|(_, value)| value.is_deny()) {
        return own;
    }
    match (own, lookup(0)) {
        (Some(own), Some(any)) => {
            let any_wins = any.1.precedence > own.1.precedence
                || (any.1.precedence == own.1.precedence && any.0.prefix_len > own.0.prefix_len);
            Some(if any_wins { any } else { own })
        }
        (own, any) => own.or(any),
    }
}

/// Longest match of a packet among entries of one identity.
pub(crate) fn longest<'a>(
    entries: impl Iterator<Item = (&'a PolicyKey, &'a PolicyValue)>,
    direction: u8,
    protocol: u8,
    port: u16,
) -> Option<(&'a PolicyKey, &'a PolicyValue)> {
    let packet = PolicyKey::new(0, direction, protocol, port, 16);
    entries
        .filter(|(key, _)| key.egress == direction && is_within(&packet, key))
        .max_by_key(|(key, _)| key.prefix_len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{
        model::Side,
        rule::{PortRule, Ports, Protocol},
    };

    #[test]
    fn ranges_become_few_blocks() {
        assert_eq!(blocks(53, 53), [(53, 16)]);
        assert_eq!(blocks(0, 65535), [(0, 0)]);
        assert_eq!(blocks(80, 83), [(80, 14)]);
        assert_eq!(blocks(1, 4), [(1, 16), (2, 15), (4, 16)]);
        for (first, last) in [(1, 65534), (1024, 32767), (30000, 32767), (65535, 65535)] {
            let mut covered = 0u32;
            for (start, bits) in blocks(first, last) {
                assert!(start >= first);
                assert_eq!(u32::from(start) % (1 << (16 - bits)), 0);
                covered += 1 << (16 - bits);
            }
            assert_eq!(covered, u32::from(last) - u32::from(first) + 1);
        }
    }

    fn allow(ports: &[(u16, u16)], deny: bool) -> PeerRule {
        let ports = ports.iter().map(|(first, last)| PortRule {
            protocol: Protocol::Tcp,
            ports: Ports::Range(*first, *last),
            dns: None,
        });
        PeerRule {
            path: "spec.egress[0]".into(),
            deny,
            peers: Peers::Any,
            ports: ports.collect(),
        }
    }

    fn policy(rules: Vec<PeerRule>) -> EndpointPolicy {
        let rules = rules.into_iter().map(|rule| super::super::model::SideRule {
            document: "d".into(),
            rule: Arc::new(rule),
        });
        let egress = Side {
            enforced: true,
            enforcers: vec!["d".into()],
            tier: Vec::new(),
            rules: rules.collect(),
        };
        EndpointPolicy {
            egress,
            ..EndpointPolicy::default()
        }
    }

    fn everyone(policy: &EndpointPolicy) -> Entries {
        let selectors = SelectorCache::default();
        let mut index = RuleIndex::of(policy, &selectors);
        let own = LabelSet::new(Vec::new());
        index.entries(policy, &own, IdentityId::UNKNOWN, &selectors, 1)
    }

    #[test]
    fn a_narrow_allow_does_not_pierce_a_broad_deny() {
        let policy = policy(vec![
            allow(&[(443, 443)], false),
            allow(&[(0, 65535)], true),
        ]);
        let entries = everyone(&policy);
        let egress: Vec<_> = entries
            .iter()
            .filter(|(key, _)| key.egress == EGRESS)
            .collect();
        assert_eq!(egress.len(), 1);
        assert!(egress[0].1.is_deny());
    }

    #[test]
    fn a_narrow_deny_cuts_a_broad_allow() {
        let policy = policy(vec![
            allow(&[(0, 65535)], false),
            allow(&[(443, 443)], true),
        ]);
        let entries = everyone(&policy);
        let verdict = |port| {
            let lookup = |id| {
                longest(
                    entries.iter().filter(move |(k, _)| k.sec_label == id),
                    EGRESS,
                    6,
                    port,
                )
            };
            decide(lookup, IdentityId(300)).map(|(_, value)| value.is_deny())
        };
        assert_eq!(verdict(443), Some(true));
        assert_eq!(verdict(444), Some(false));
    }
}
