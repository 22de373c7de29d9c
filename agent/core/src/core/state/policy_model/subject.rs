//! A *subject*: one label set of endpoints, with the policy that applies to it.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    sync::Arc,
};

use dns_policy::rule::EndpointRules;
use shared_maps::{EndpointId, IdentityId, policy::EGRESS};

use crate::{
    core::state::policy_model::services::ServiceTable,
    labels::LabelSet,
    policy::{
        compute::{
            DnsScope, Observed, RuleIndex, ServicePortAt,
            entries::Entries,
            explicit::{self, Explicit},
            service::{self, Rendered, Service},
        },
        model::EndpointPolicy,
    },
    selector::cache::SelectorCache,
};
use dns_policy::rule::Transport;
use shared_maps::Be16;

/// Endpoints with one identity. They share one policy.
#[derive(Debug)]
pub(crate) struct Subject {
    pub(crate) labels: LabelSet,
    pub(crate) policy: EndpointPolicy,
    pub(crate) rules: RuleIndex,
    pub(crate) dns_scope: DnsScope,
    pub(crate) entries: BTreeMap<IdentityId, Entries>,
    pub(crate) mixed: BTreeSet<IdentityId>,
    pub(crate) dns: Arc<EndpointRules>,
    pub(crate) dns_is_dirty: bool,
    pub(crate) endpoints: BTreeSet<EndpointId>,
    pub(crate) revision: u64,
    /// How many identities were known when it became [explicit](Explicit).
    pub(crate) explicit_at: usize,
}

static NO_ENTRIES: Entries = Entries::new();

impl Subject {
    pub(crate) fn new(labels: LabelSet) -> Self {
        Self {
            labels,
            policy: EndpointPolicy::default(),
            rules: RuleIndex::default(),
            dns_scope: DnsScope::default(),
            entries: BTreeMap::new(),
            mixed: BTreeSet::new(),
            dns: Arc::default(),
            dns_is_dirty: false,
            endpoints: BTreeSet::new(),
            revision: 0,
            explicit_at: 0,
        }
    }

    pub(crate) fn labels(&self) -> &LabelSet {
        &self.labels
    }

    pub(crate) fn policy(&self) -> &EndpointPolicy {
        &self.policy
    }

    /// Entries for an identity, from which verdicts follow; `None` if there are none.
    pub(crate) fn entries(&self, peer: IdentityId) -> Option<&Entries> {
        self.entries.get(&peer)
    }

    /// The entries for an identity that the maps of its endpoints have.
    pub(crate) fn in_map(&self, peer: IdentityId) -> Cow<'_, Entries> {
        let entries = self.entries.get(&peer).unwrap_or(&NO_ENTRIES);
        self.explicit().in_map(peer, entries)
    }

    /// The directions in which its endpoints' maps have no entries for everyone.
    pub(crate) const fn explicit(&self) -> Explicit {
        self.rules.explicit()
    }

    /// Identities with entries.
    pub(crate) fn peers(&self) -> impl Iterator<Item = IdentityId> {
        self.entries.keys().copied()
    }

    /// Its DNS rules, as of the last [`PolicyModel::refresh_dns`].
    pub(crate) fn dns(&self) -> &Arc<EndpointRules> {
        &self.dns
    }

    /// Whether its DNS rules are out of date.
    #[cfg(test)]
    pub(crate) fn dns_is_dirty(&self) -> bool {
        self.dns_is_dirty
    }

    pub(crate) fn endpoints(&self) -> &BTreeSet<EndpointId> {
        &self.endpoints
    }

    /// Revision of the policy from which its entries follow.
    pub(crate) fn revision(&self) -> u64 {
        self.revision
    }

    /// Whether ordered rules apply to it.
    pub(crate) fn has_tier(&self) -> bool {
        self.rules.has_tier()
    }

    /// Which answers of DNS servers have to pass the proxy.
    pub(crate) fn observed(&self) -> Observed {
        self.rules.observed()
    }

    /// Renders the entries of one identity. True if they changed.
    pub(crate) fn render(
        &mut self,
        peer: IdentityId,
        selectors: &SelectorCache,
        proxy_port: u16,
    ) -> bool {
        let entries = self
            .rules
            .entries(&self.policy, &self.labels, peer, selectors, proxy_port);
        self.put(peer, entries)
    }

    /// Renders the entries for everyone, which must come before those of other peers.
    pub(crate) fn render_everyone(
        &mut self,
        selectors: &SelectorCache,
        proxy_port: u16,
    ) -> Everyone {
        let everyone = IdentityId::UNKNOWN;
        let entries =
            self.rules
                .entries(&self.policy, &self.labels, everyone, selectors, proxy_port);
        let tables = self.rules.follow_everyone(&entries);
        Everyone {
            entries: self.put(everyone, entries),
            tables,
        }
    }

    /// Replaces the entries for an identity. True if they changed.
    fn put(&mut self, peer: IdentityId, entries: Entries) -> bool {
        if entries.is_empty() {
            return self.entries.remove(&peer).is_some();
        }
        match self.entries.entry(peer) {
            Entry::Occupied(before) if *before.get() == entries => false,
            Entry::Occupied(mut before) => {
                before.insert(entries);
                true
            }
            Entry::Vacant(vacant) => {
                vacant.insert(entries);
                true
            }
        }
    }
}

impl Subject {
    /// Its intended entries, by identity.
    pub(crate) const fn all_entries(&self) -> &BTreeMap<IdentityId, Entries> {
        &self.entries
    }

    /// Services for which it has entries.
    pub(crate) fn services(&self) -> impl Iterator<Item = IdentityId> {
        let services = IdentityId::SERVICE_MIN..=IdentityId::SERVICE_MAX;
        self.entries.range(services).map(|(id, _)| *id)
    }

    /// Services that policy closes to it because of some of their backends.
    pub(crate) fn mixed_services(&self) -> &BTreeSet<IdentityId> {
        &self.mixed
    }

    /// Computes the entries of the subject for a Service. Without a Service there are none.
    pub(crate) fn render_service(
        &self,
        id: IdentityId,
        service: Option<&Service>,
        proxy_port: u16,
    ) -> Rendered {
        let rendered = service.map(|service| {
            let observed = self.rules.observed();
            let mut rendered = service::render(&self.entries, service, id, proxy_port, observed);
            if self.explicit().is_in(EGRESS) {
                let own = std::mem::take(&mut rendered.entries);
                rendered.entries = explicit::of_service(id, own, self.rules.everyone());
            }
            rendered
        });
        rendered.unwrap_or_default()
    }

    /// Whether it may send the same as another subject: both then have the same entries of egress for
    /// every peer, including Services.
    pub(crate) fn sends_as(&self, other: &Self) -> bool {
        if self.explicit() != other.explicit() {
            return false;
        }
        let (own, other) = (&self.policy.egress, &other.policy.egress);
        // Rules that select all endpoints tend to come first, so a comparison from the end finds a difference sooner.
        let mut rules = own.rules.iter().rev().zip(other.rules.iter().rev());
        let mut tier = own.tier.iter().zip(&other.tier);
        own.enforced == other.enforced
            && own.rules.len() == other.rules.len()
            && rules.all(|(own, other)| Arc::ptr_eq(&own.rule, &other.rule))
            && own.tier.len() == other.tier.len()
            && tier.all(|(own, other)| Arc::ptr_eq(&own.rule, &other.rule))
    }

    /// Takes a rendering of a Service. True if its entries changed.
    pub(crate) fn put_rendered(&mut self, id: IdentityId, rendered: Rendered) -> bool {
        match rendered.is_mixed {
            true => self.mixed.insert(id),
            false => self.mixed.remove(&id),
        };
        let before = match rendered.entries.is_empty() {
            true => self.entries.remove(&id),
            false => self.entries.insert(id, rendered.entries),
        };
        let now = self.entries.get(&id);
        let redirects = |entries: Option<&Entries>| {
            let mut values = entries.into_iter().flat_map(Entries::values);
            values.any(|value| value.proxy_port != Be16::ZERO)
        };
        // The subject's DNS rules name the identities behind the Service, whether the entries differ or
        // not.
        self.dns_is_dirty |= redirects(before.as_ref()) || redirects(now);
        before.as_ref() != now
    }

    /// Renders the Services whose entries may change with those of these peers. Gives the Services
    /// whose entries did change.
    pub(crate) fn follow_services(
        &mut self,
        peers: &[IdentityId],
        table: &ServiceTable,
        proxy_port: u16,
    ) -> Vec<IdentityId> {
        let affected = self.services_of(peers, table).into_iter();
        affected
            .filter(|id| {
                let rendered = self.render_service(*id, table.get(*id), proxy_port);
                self.put_rendered(*id, rendered)
            })
            .collect()
    }

    /// Services whose entries may change with those of these peers.
    fn services_of(&self, peers: &[IdentityId], table: &ServiceTable) -> BTreeSet<IdentityId> {
        if table.is_empty() {
            return BTreeSet::new();
        }
        if peers.contains(&IdentityId::UNKNOWN) {
            let mut all = match self.explicit().is_in(EGRESS) {
                true => table.identities().collect(),
                false => table.candidates(&self.entries, self.rules.observed()),
            };
            all.extend(self.services());
            return all;
        }
        peers.iter().flat_map(|peer| table.behind(*peer)).collect()
    }

    /// Ports of Services at which the proxy judges the subject's queries.
    pub(crate) fn dns_services<'a>(&'a self, table: &'a ServiceTable) -> Vec<ServicePortAt<'a>> {
        let ports = self.services().filter_map(|id| Some((id, table.get(id)?)));
        let ports =
            ports.flat_map(|(id, service)| service.ports.iter().map(move |port| (id, port)));
        let ports = ports.filter_map(|(id, port)| {
            let key = (id.0, port.protocol, port.port);
            let mut entries = self.entries.get(&id)?.iter();
            let redirects = entries.any(|(at, value)| {
                (at.sec_label, at.protocol, at.dport.get()) == key && value.proxy_port != Be16::ZERO
            });
            let transport = Transport::from_number(port.protocol)?;
            redirects.then_some(ServicePortAt {
                identity: id,
                at: (port.port, transport),
                backends: &port.backends,
            })
        });
        ports.collect()
    }
}

/// What changed when the entries for everyone were rendered.
pub(crate) struct Everyone {
    /// Whether the entries for everyone changed.
    pub(crate) entries: bool,
    /// Whether the tables of ordered rules changed, which are made with these entries.
    pub(crate) tables: bool,
}
