//! Names of EgressFirewalls: which answers count, and which addresses have their labels.
//!
//! Owns the names that firewalls use, the DNS servers whose answers count for them, the objects of
//! the store, and the pairs (name, address) that follow from these. It keeps one invariant: an
//! address has a label of a name exactly while it has such a pair. Answers of other servers give no
//! address such a label. Otherwise two pods of one tenant, one of them a DNS server, could open any
//! address to every tenant.
//!
//! `dnsname:` labels come in the same plan as `fqdn:` labels ([`State::learn`]): an answer that is
//! released has both.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, SystemTime},
};

use dns_policy::{boot_time::BootTime, mapping::Mapping, name::Fqdn};
use ipnet::IpNet;

use super::{event::Effect, snapshot::FirewallSummary, state::State};
use crate::{
    core::state::resolved::{Object, Relevance},
    fqdn::{
        cache::NamePair,
        firewall_names::{FirewallNames, Openness},
        longest::MAX_TTL,
        resolved::Room,
    },
    ipcache::{metadata::Claim, owners::Owner},
    labels::CLOSED_NAME,
    name_objects::{MAX_OBJECTS, ResolvedName, WantedNames},
    policy::document::{Body, PolicyDocument},
    selector::selector::DnsNameSelector,
    source_event::SourceEvent,
};

/// Selectors of EgressFirewalls that are added or removed.
impl State {
    /// Notes that a firewall uses a name. [`Self::relabel_resolved`] then labels the addresses.
    pub(super) fn use_name(&mut self, selector: &DnsNameSelector) {
        self.resolved.used.add(selector);
        self.note_name(selector);
    }

    /// Notes that a firewall no longer uses a name.
    pub(super) fn disuse_name(&mut self, selector: &DnsNameSelector) {
        self.resolved.used.remove(selector);
        self.note_name(selector);
    }

    fn note_name(&mut self, selector: &DnsNameSelector) {
        self.resolved.changed.push(selector.clone());
        self.resolved.is_unpublished = true;
    }

    /// Labels the addresses of names that firewalls began or ceased to use.
    pub(super) fn relabel_resolved(&mut self) {
        let changed = std::mem::take(&mut self.resolved.changed);
        if changed.is_empty() {
            return;
        }
        let mut probe = FirewallNames::default();
        changed.iter().for_each(|selector| probe.add(selector));
        let mut names: BTreeSet<Fqdn> = match probe.has_wildcard() {
            true => {
                let learned = self.learned.names.names().map(|(name, _)| name);
                let known = learned.chain(self.resolved.pairs.names());
                known.filter(|name| probe.matches(name)).cloned().collect()
            }
            false => probe.wanted(),
        };
        let mut objects = Vec::new();
        for (key, object) in &self.resolved.objects {
            if probe.matches(&object.is.name) {
                objects.push(key.clone());
                names.insert(object.is.name.clone());
            }
        }
        for name in &names {
            if self.resolved.used.matches(name) {
                self.adopt_learned(name);
            } else {
                self.forget_name(name);
            }
        }
        for key in objects {
            self.hold(&key);
        }
        for name in names {
            self.label_resolved(&name);
        }
    }

    /// Takes over the addresses that answers of trusted servers gave before a firewall used the
    /// name. Leaves out addresses that something other than these answers or connections keeps.
    fn adopt_learned(&mut self, name: &Fqdn) {
        let names = &self.learned.names;
        let entry = names.name(name);
        let trusted = entry.into_iter().flat_map(|entry| &entry.pairs);
        let trusted = trusted.filter_map(|(address, pair)| {
            let until = pair.trusted_until?;
            let is_kept = until > self.now || !names.is_kept_after(name, *address, until);
            is_kept.then_some((*address, until, pair.lease_end))
        });
        let trusted: Vec<_> = trusted.collect();
        for (address, until, lease_end) in trusted {
            let openness = self.openness(address);
            if self.resolved.room(name, address, openness) != Room::Full {
                // The lease may belong to a longer answer of another server.
                let lease = lease_end.map(|end| end.min(until));
                let lease = lease.filter(|end| *end > self.now);
                let pairs = &mut self.resolved.pairs;
                pairs.learn((name, address), openness, until, lease);
            }
        }
    }

    /// At the end of the grace, keeps an address in a refused prefix that the earlier run denied by
    /// name. Files do not have such addresses, so the agent does not know when their answers end.
    /// They stay for the longest time that an answer can last. A wildcard stands for the names that it matches.
    pub(super) fn keep_denied(&mut self, prefix: IpNet) {
        let address = prefix.addr();
        let is_closed = prefix == IpNet::from(address)
            && self.openness(address) == Openness::Closed
            && self.is_sound(address);
        let kept = self.ipcache.get(prefix);
        let kept = kept.and_then(|metadata| metadata.labels_by(&Owner::Restored));
        let Some(kept) = kept.filter(|_| is_closed) else {
            return;
        };
        let kept = kept.iter().filter(|label| label.source() == CLOSED_NAME);
        let names: Vec<Fqdn> = kept.map(|label| Fqdn::normalise(label.key())).collect();
        let until = self.now.plus_secs(MAX_TTL.into());
        for name in names {
            if self.resolved.room(&name, address, Openness::Closed) != Room::Full {
                self.resolve_name(&name, address, until, None);
            }
        }
    }

    fn forget_name(&mut self, name: &Fqdn) {
        let addresses: Vec<IpAddr> = self.resolved.pairs.addresses(name).collect();
        for address in addresses {
            self.forget_resolved(name, address);
        }
    }

    fn forget_resolved(&mut self, name: &Fqdn, address: IpAddr) {
        if self.resolved.pairs.forget(name, address) {
            self.unlabel_resolved(vec![(name.clone(), address)]);
        }
    }

    fn label_resolved(&mut self, name: &Fqdn) {
        let addresses: Vec<IpAddr> = self.resolved.pairs.addresses(name).collect();
        for address in addresses {
            if !self.claim_resolved(name, address) {
                self.forget_resolved(name, address);
            }
        }
    }

    /// Gives an address the labels of a name. False if the name has no labels.
    fn claim_resolved(&mut self, name: &Fqdn, address: IpAddr) -> bool {
        let labels = self.resolved.used.labels_of(name, self.openness(address));
        let Some(labels) = labels else {
            return false;
        };
        let owner = Owner::Resolved(name.clone());
        self.ipcache
            .claim(IpNet::from(address), owner, Claim::Labels(labels));
        true
    }

    /// Takes labels off pairs that are gone.
    pub(super) fn unlabel_resolved(&mut self, gone: Vec<NamePair>) {
        for (name, address) in gone {
            self.ipcache
                .unclaim(IpNet::from(address), &Owner::Resolved(name));
        }
    }

    /// Whether answers may open an address.
    pub(super) fn openness(&self, address: IpAddr) -> Openness {
        match self.config.refused_prefixes.covering(address) {
            Some(_) => Openness::Closed,
            None => Openness::Open,
        }
    }
}

/// Mappings of answers, and the labels that they give.
impl State {
    /// Returns what a mapping means for EgressFirewalls, and counts the mapping.
    pub(super) fn relevance(&mut self, mapping: &Mapping, ttl: u32, seen: BootTime) -> Relevance {
        let is_trusted = self.is_trusted(mapping.server);
        if self.resolved.used.is_empty() {
            return match is_trusted {
                true => Relevance::UnusedAndTrusted,
                false => Relevance::Unused,
            };
        }
        let is_used = self.resolved.used.matches(&mapping.name);
        let observations = &mut self.counters.observations;
        match (is_used, is_trusted) {
            (false, false) => {
                observations.unmatched += 1;
                Relevance::Unused
            }
            (false, true) => {
                observations.unmatched += 1;
                Relevance::UnusedAndTrusted
            }
            (true, false) => {
                observations.untrusted += 1;
                let (ip, port) = (mapping.server.ip().to_canonical(), mapping.server.port());
                self.resolved
                    .note_untrusted((ip, port).into(), &mapping.name);
                Relevance::Untrusted
            }
            (true, true) => {
                observations.taken += 1;
                let at = self.config.boot_unix_ns.saturating_add(seen.nanos());
                let at = SystemTime::UNIX_EPOCH + Duration::from_nanos(at);
                self.resolved.observe(mapping, ttl, at);
                Relevance::Counts
            }
        }
    }

    /// Takes an address of an answer that counts, for which there is room. True if the address
    /// gets a label.
    pub(super) fn resolve_name(
        &mut self,
        name: &Fqdn,
        address: IpAddr,
        until: BootTime,
        lease_end: Option<BootTime>,
    ) -> bool {
        let openness = self.openness(address);
        let pairs = &mut self.resolved.pairs;
        pairs.learn((name, address), openness, until, lease_end);
        if !self.claim_resolved(name, address) {
            self.forget_resolved(name, address);
            return false;
        }
        let gone = self.resolved.pairs.evict(name, address, self.now);
        self.unlabel_resolved(gone);
        true
    }

    /// Forgets the answers that gave these pairs.
    pub(super) fn forget_answers(&mut self, pairs: &[NamePair]) {
        for (name, address) in pairs {
            if self.resolved.pairs.forget_answers(name, *address) {
                self.unlabel_resolved(vec![(name.clone(), *address)]);
            }
        }
    }

    /// Notes that answers to endpoints no longer keep these pairs: only connections do.
    pub(super) fn end_answers(&mut self, pairs: &[NamePair]) {
        for (name, address) in pairs {
            self.resolved.pairs.end_answers(name, *address, self.now);
        }
    }

    /// Pairs of these names that no endpoint holds any more.
    pub(super) fn resolved_alone(&self, which: impl Fn(&Fqdn) -> bool) -> Vec<NamePair> {
        let names = self.resolved.pairs.names().filter(|name| which(name));
        let pairs = names.flat_map(|name| {
            let addresses = self.resolved.pairs.addresses(name);
            addresses.map(move |address| (name.clone(), address))
        });
        let is_alone = |(name, address): &NamePair| {
            let entry = self.learned.names.name(name);
            entry.is_none_or(|entry| !entry.pairs.contains_key(address))
        };
        pairs.filter(is_alone).collect()
    }
}

/// DNSNameResolver objects of the store that change.
impl State {
    /// Follows changes of objects of the store.
    pub(super) fn on_resolved(&mut self, events: Vec<SourceEvent<ResolvedName>>) {
        for event in events {
            match event {
                SourceEvent::Init => self.resolved.listed = Some(BTreeSet::new()),
                SourceEvent::Apply(object) => {
                    if let Some(listed) = &mut self.resolved.listed {
                        listed.insert(object.key.clone());
                    }
                    self.put_object(object);
                }
                SourceEvent::Delete(key) => self.remove_object(&key),
                SourceEvent::InitDone => {
                    let listed = self.resolved.listed.take().unwrap_or_default();
                    let gone = self.resolved.objects.keys();
                    let gone: Vec<String> =
                        gone.filter(|key| !listed.contains(*key)).cloned().collect();
                    for key in gone {
                        self.remove_object(&key);
                    }
                    self.resolved.left_out.retain(|key| listed.contains(key));
                }
            }
        }
    }

    fn put_object(&mut self, mut object: ResolvedName) {
        let before = self.resolved.objects.get(&object.key);
        if before.is_none() && self.resolved.objects.len() >= MAX_OBJECTS {
            if self.resolved.left_out.len() < MAX_OBJECTS {
                self.resolved.left_out.insert(object.key);
            }
            return;
        }
        self.resolved.left_out.remove(&object.key);
        let renamed = before.is_some_and(|before| before.is.name != object.name);
        if renamed {
            self.remove_object(&object.key);
        }
        let sound = object.addresses.iter().copied();
        let sound = sound.filter(|address| self.is_sound(*address));
        object.addresses = sound.take(self.config.max_ips_per_name).collect();
        let key = object.key.clone();
        match self.resolved.objects.get_mut(&key) {
            Some(known) => known.is = object,
            None => {
                let held = BTreeSet::new();
                let object = Object { is: object, held };
                self.resolved.objects.insert(key.clone(), object);
            }
        }
        self.hold(&key);
    }

    fn remove_object(&mut self, key: &str) {
        self.resolved.left_out.remove(key);
        if let Some(object) = self.resolved.objects.remove(key) {
            for address in object.held {
                let pairs = &mut self.resolved.pairs;
                pairs.release(&object.is.name, address, self.now);
            }
        }
    }

    /// Makes an object keep the addresses that it lists, as long as a firewall uses its name.
    fn hold(&mut self, key: &str) {
        let Some(object) = self.resolved.objects.get_mut(key) else {
            return;
        };
        let name = object.is.name.clone();
        let wanted = match self.resolved.used.matches(&name) {
            true => object.is.addresses.clone(),
            false => BTreeSet::new(),
        };
        let before = std::mem::take(&mut object.held);
        for address in before.difference(&wanted) {
            self.resolved.pairs.release(&name, *address, self.now);
        }
        let mut held = BTreeSet::new();
        for address in wanted {
            let openness = self.openness(address);
            if before.contains(&address) {
                held.insert(address);
            } else if self.resolved.pairs.may_hold(&name, address, openness) {
                self.resolved.pairs.hold(&name, address, openness);
                if self.claim_resolved(&name, address) {
                    held.insert(address);
                } else {
                    self.forget_resolved(&name, address);
                }
            }
        }
        if let Some(object) = self.resolved.objects.get_mut(key) {
            object.held = held;
        }
    }
}

/// DNS servers, and what the resolver and views get.
impl State {
    pub(super) fn firewall_summary(&self) -> FirewallSummary {
        let documents = self.policy.repository().iter();
        let lists = documents.filter(|document| document.is_firewall());
        let rules = lists.map(|document| document.rules().iter().map(|rule| rule.tier.len()).sum());
        let rules: Vec<usize> = rules.collect();
        let has_blocks = |document: &Arc<PolicyDocument>| match &document.body {
            Body::Node(node) => !node.pod_blocks.is_empty(),
            _ => false,
        };
        let has_pods = self.cluster.pods.len() > 0
            || !self.config.pod_blocks.is_empty()
            || self.policy.repository().iter().any(has_blocks);
        FirewallSummary {
            firewalls: rules.len(),
            rules: rules.iter().sum(),
            names: self.resolved.used.len(),
            addresses: self.resolved.pairs.len(),
            objects_left_out: self.resolved.left_out.len(),
            trusted_dns: self
                .resolved
                .servers
                .asked
                .iter()
                .map(SocketAddr::to_string)
                .collect(),
            entries: self.policy.tier_entries(),
            takes_pods_for_outside: !rules.is_empty() && !has_pods,
        }
    }

    /// Names for which the resolver keeps objects. It may remove other objects only once every
    /// document has been read.
    fn wanted_names(&self) -> WantedNames {
        WantedNames {
            names: self.resolved.used.wanted(),
            is_complete: self.restoration.is_synced() && !self.restoration.hold().is_uncertain(),
        }
    }

    /// Marks the names to be sent to the resolver again, because more names, or all of them, are known.
    pub(super) fn publish_names(&mut self) {
        self.resolved.is_unpublished = true;
    }

    /// Takes the effects for the resolver after a plan.
    pub(super) fn take_resolver_effects(&mut self) -> Vec<Effect> {
        let observed = std::mem::take(&mut self.resolved.observed).into_iter();
        let mut effects: Vec<Effect> = observed.map(Effect::Observed).collect();
        if std::mem::take(&mut self.resolved.is_unpublished) {
            effects.push(Effect::Resolver {
                names: Arc::new(self.wanted_names()),
                servers: Arc::clone(&self.resolved.servers),
            });
        }
        effects
    }
}
