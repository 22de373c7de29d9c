//! Entries of Services: they follow from the entries of the identities behind each.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use dns_policy::rule::Transport;
use shared_maps::{
    Be16, IdentityId,
    policy::{EGRESS, PolicyKey, PolicyValue},
};

use super::{PolicyModel, Subject, Touched};
use crate::policy::compute::{
    Entries, Observed, ServicePortAt,
    service::{self, Rendered, Service},
};

/// With how many others a subject is compared: more cost more than they save.
const COMPARED: usize = 16;

/// Services by identity, and by the identities behind them.
#[derive(Debug, Default)]
pub(crate) struct ServiceTable {
    services: BTreeMap<IdentityId, Service>,
    behind: BTreeMap<IdentityId, BTreeSet<IdentityId>>,
}

impl ServiceTable {
    /// A Service.
    pub(crate) fn get(&self, id: IdentityId) -> Option<&Service> {
        self.services.get(&id)
    }

    /// Puts a Service in the place of its former version; none = it goes. False if nothing changed.
    fn put(&mut self, id: IdentityId, service: Option<Service>) -> bool {
        let before = self.services.get(&id);
        if before == service.as_ref() {
            return false;
        }
        for identity in before.into_iter().flat_map(Service::identities) {
            if let Some(services) = self.behind.get_mut(&identity) {
                services.remove(&id);
                if services.is_empty() {
                    self.behind.remove(&identity);
                }
            }
        }
        let Some(service) = service else {
            self.services.remove(&id);
            return true;
        };
        for identity in service.identities() {
            self.behind.entry(identity).or_default().insert(id);
        }
        self.services.insert(id, service);
        true
    }

    fn behind(&self, identity: IdentityId) -> impl Iterator<Item = IdentityId> {
        self.behind.get(&identity).into_iter().flatten().copied()
    }

    /// Services that a subject may have entries for.
    fn candidates(
        &self,
        entries: &BTreeMap<IdentityId, Entries>,
        observed: Observed,
    ) -> BTreeSet<IdentityId> {
        let everyone = entries.get(&IdentityId::UNKNOWN).into_iter().flatten();
        let mut everyone = everyone.filter(|(key, _)| key.egress == EGRESS);
        let is_narrow =
            |(key, value): (&PolicyKey, &PolicyValue)| key.lpm_len() > 0 || value.is_deny();
        if observed != Observed::Nothing || everyone.any(is_narrow) {
            return self.services.keys().copied().collect();
        }
        let peers = entries.keys().flat_map(|peer| self.behind(*peer));
        peers.collect()
    }

    /// Services whose entries may change with those of these peers.
    fn affected(&self, subject: &Subject, peers: &[IdentityId]) -> BTreeSet<IdentityId> {
        if self.services.is_empty() {
            return BTreeSet::new();
        }
        if peers.contains(&IdentityId::UNKNOWN) {
            let mut all = self.candidates(&subject.entries, subject.rules.observed());
            all.extend(subject.services());
            return all;
        }
        peers.iter().flat_map(|peer| self.behind(*peer)).collect()
    }
}

impl Subject {
    /// Its intended entries, by identity.
    pub(crate) const fn all_entries(&self) -> &BTreeMap<IdentityId, Entries> {
        &self.entries
    }

    /// Services for which it has entries.
    fn services(&self) -> impl Iterator<Item = IdentityId> {
        let services = IdentityId::SERVICE_MIN..=IdentityId::SERVICE_MAX;
        self.entries.range(services).map(|(id, _)| *id)
    }

    /// Services that policy closes to it because of some of their backends.
    pub(crate) fn mixed_services(&self) -> &BTreeSet<IdentityId> {
        &self.mixed
    }

    /// Renders a Service.
    fn render_service(
        &self,
        id: IdentityId,
        service: Option<&Service>,
        proxy_port: u16,
    ) -> Rendered {
        let rendered = service.map(|service| {
            let observed = self.rules.observed();
            service::render(&self.entries, service, id, proxy_port, observed)
        });
        rendered.unwrap_or_default()
    }

    /// Whether it may send the same as another subject: both then have the same entries of egress for
    /// every peer, Services too.
    fn sends_as(&self, other: &Self) -> bool {
        let (own, other) = (&self.policy.egress, &other.policy.egress);
        // Rules of all endpoints tend to come first.
        let mut rules = own.rules.iter().rev().zip(other.rules.iter().rev());
        let mut tier = own.tier.iter().zip(&other.tier);
        own.enforced == other.enforced
            && own.rules.len() == other.rules.len()
            && rules.all(|(own, other)| Arc::ptr_eq(&own.rule, &other.rule))
            && own.tier.len() == other.tier.len()
            && tier.all(|(own, other)| Arc::ptr_eq(&own.rule, &other.rule))
    }

    /// Takes a rendering of a Service. True if its entries differ from those before.
    fn put_rendered(&mut self, id: IdentityId, rendered: Rendered) -> bool {
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
        // Its DNS rules name the identities behind it, whether the entries differ or not.
        self.dns_is_dirty |= redirects(before.as_ref()) || redirects(now);
        before.as_ref() != now
    }

    /// Renders the Services whose entries may change with those of these peers. Gives those whose
    /// entries did.
    pub(super) fn follow_services(
        &mut self,
        peers: &[IdentityId],
        table: &ServiceTable,
        proxy_port: u16,
    ) -> Vec<IdentityId> {
        let affected = table.affected(self, peers).into_iter();
        affected
            .filter(|id| {
                let rendered = self.render_service(*id, table.get(*id), proxy_port);
                self.put_rendered(*id, rendered)
            })
            .collect()
    }

    /// Ports of Services at which the proxy judges its queries.
    pub(crate) fn dns_services<'a>(
        &'a self,
        table: &'a ServiceTable,
    ) -> Vec<ServicePortAt<'a>> {
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

    /// Puts a Service in the place of its former version; none = it goes. Gives the endpoints whose
    /// maps have to follow.
    pub(crate) fn put_service(
        &mut self,
        id: IdentityId,
        service: Option<Service>,
    ) -> Touched {
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
