//! What the agent believes of a mapping, and what follows from it.

use std::net::IpAddr;

use holdfast_sdp::{
    mapping::{BootTime, Mapping, Realised, Refusal, lease},
    name::Fqdn,
    policy::{table::Question, verdict::Verdict},
};
use ipnet::IpNet;
use shared_maps::{EndpointId, FAMILY_IPV4, FAMILY_IPV6, IdentityId};

use super::{
    event::{
        Effect, MAX_ADDRESSES, MAX_NAME, MappingEvent, MappingOutcome, Revocation, RevokeAck,
        StreamId,
    },
    plan::{PendingOutcome, Plan},
    rate::MappingRate,
    revocations::PendingRevocation,
    state::State,
};
use crate::{
    endpoint::endpoint::Undurable,
    fqdn::cache::{AFTER_LEASE, Answer},
    ipcache::metadata::{Claim, Owner},
};

/// Longest TTL that is believed, seconds: a week (RFC 8767, 4).
pub(super) const MAX_TTL: u32 = 604_800;
/// What a pair seen while the agent was away gets at least, seconds.
const AWAY: u64 = 30;
/// Addresses of one mapping that are learned. Pools of servers have some dozens; a name
/// holds no more than about as many at all (`max_ips_per_name`).
const TAKEN_ADDRESSES: usize = 1024;
/// The last 1/16 of what the node takes is given without leases.
const SCARCE: usize = 16;
/// Mappings kept until the sources are synced.
pub(super) const MAX_EARLY: usize = 100_000;
/// A stream closes so soon after its process ended, seconds; one that closes later was another's.
const CLOSES_WITHIN: u64 = 5;
/// Results that wait for one endpoint's file.
const MAX_UNDURABLE: usize = 65_536;

impl State {
    pub(super) fn on_mappings(&mut self, plan: &mut Plan, mappings: Vec<MappingEvent>) {
        for event in mappings {
            let (now, rate) = (self.now, self.config.mapping_rate);
            let endpoint = event.mapping.endpoint.id;
            let addresses = event.mapping.addresses.len();
            let of_stream = self.rates.entry(event.stream);
            let of_stream = of_stream.or_insert_with(|| MappingRate::new(now));
            if !of_stream.take(endpoint, addresses, rate, now) {
                self.refuse(plan, &event, Refusal::RateLimited);
            } else if self.sync.done {
                self.learn(plan, &event);
            } else if self.early_shares.take(endpoint, 1) {
                self.early.push(event);
            } else {
                self.refuse(plan, &event, Refusal::RateLimited);
            }
        }
    }

    /// Takes up what came before the sources were synced.
    pub(super) fn learn_early(&mut self, plan: &mut Plan) {
        self.early_shares.clear();
        for event in std::mem::take(&mut self.early) {
            self.learn(plan, &event);
        }
    }

    fn refuse(&mut self, plan: &mut Plan, event: &MappingEvent, refusal: Refusal) {
        let counter = match refusal {
            Refusal::EndpointUnknown => &mut self.counters.mappings_endpoint_unknown,
            Refusal::NotAllowed => &mut self.counters.mappings_not_allowed,
            Refusal::Invalid | Refusal::Rejected => &mut self.counters.mappings_invalid,
            Refusal::RateLimited => &mut self.counters.mappings_rate_limited,
            Refusal::NotRealised => &mut self.counters.mappings_not_realised,
        };
        *counter += 1;
        let outcome = MappingOutcome {
            stream: event.stream,
            sequence: event.sequence,
            realised: Realised::No(refusal),
            durable: false,
            lease_end: 0,
            revision: self.revision_in_force(),
        };
        let endpoint = event.mapping.endpoint.id;
        plan.answer(PendingOutcome {
            outcome,
            prefixes: Vec::new(),
            endpoint,
        });
    }

    fn learn(&mut self, plan: &mut Plan, event: &MappingEvent) {
        let mapping = &event.mapping;
        if let Err(refusal) = self.check(mapping) {
            if refusal == Refusal::NotAllowed && mapping.replayed && self.was_cleaned(mapping) {
                // Cleaned before the proxy told it again: nothing else closes what a restart
                // kept of it.
                for address in &mapping.addresses {
                    self.forget_restored(&mapping.name, *address);
                }
            }
            self.refuse(plan, event, refusal);
            return;
        }
        let endpoint = mapping.endpoint.id;
        let ttl = mapping.ttl.min(MAX_TTL).max(self.config.min_ttl);
        let mut seen = mapping.seen_at.min(self.now);
        if !mapping.replayed && self.was_cleaned(mapping) {
            // Its client waits: it opens again, and stays open through a restart.
            seen = self.now;
        }
        let mut expires = seen.plus_secs(u64::from(ttl));
        let lease_end = expires.plus(self.config.lease_slack);
        let lease_end = lease_end.min(self.now.plus(lease::LONGEST));
        // An agent that hung finds live ones that have waited for it as replays do.
        if mapping.replayed || lease_end <= self.now {
            expires = expires.max(self.now.plus_secs(AWAY));
        }
        let mut leased =
            self.streams.contains(&event.stream) && lease_end > self.now && !self.is_crowded();
        let mut left_out = mapping.addresses.len().saturating_sub(TAKEN_ADDRESSES);
        let labels = match self.names.name(&mapping.name) {
            Some(entry) => entry.labels.clone(),
            None => self.name_selectors.labels_of(&mapping.name),
        };
        let mut prefixes = Vec::with_capacity(mapping.addresses.len().min(TAKEN_ADDRESSES));
        for address in mapping.addresses.iter().copied().take(TAKEN_ADDRESSES) {
            if self.config.refused_prefixes.covering(address).is_some() {
                self.counters.addresses_refused += 1;
                self.refused.note(&mapping.name, address);
                continue;
            }
            if !self.is_plumbed(address) {
                continue;
            }
            if !self
                .names
                .make_room(endpoint, &mapping.name, address, self.now)
            {
                left_out += 1;
                continue;
            }
            leased &= self.names.learn(&Answer {
                endpoint,
                name: &mapping.name,
                labels: labels.as_ref(),
                address,
                seen,
                ttl,
                expires,
                lease_end: if leased { lease_end } else { BootTime(0) },
            });
            if let Some(labels) = &labels {
                let prefix = IpNet::from(address);
                self.ipcache.claim(
                    prefix,
                    Owner::Name(mapping.name.clone()),
                    Claim::Labels(labels.clone()),
                );
                prefixes.push(prefix);
            }
        }
        self.file_soon(endpoint);
        if left_out > 0 {
            self.counters.pairs_left_out += left_out as u64;
            self.refuse(plan, event, Refusal::NotRealised);
            return;
        }
        let outcome = MappingOutcome {
            stream: event.stream,
            sequence: event.sequence,
            realised: Realised::Yes,
            durable: false,
            lease_end: if leased { lease_end.0 } else { 0 },
            revision: self.revision_in_force(),
        };
        plan.answer(PendingOutcome {
            outcome,
            prefixes,
            endpoint,
        });
    }

    /// Whether so little of the node's room is left that nothing is promised: pairs under a
    /// lease outlive the endpoints and names that they are counted for.
    fn is_crowded(&self) -> bool {
        let max = self.config.ipcache_max;
        let used = self.names.pairs().max(self.ipcache.realised());
        used >= max - max / SCARCE
    }

    /// A compromised proxy must not open what policy does not allow.
    fn check(&self, mapping: &Mapping) -> Result<(), Refusal> {
        let instance = mapping.endpoint;
        let endpoint = self
            .endpoints
            .get(instance.id)
            .ok_or(Refusal::EndpointUnknown)?;
        let is_its = endpoint
            .addresses()
            .any(|address| address == instance.client)
            && endpoint.spec.ifindex == instance.ifindex
            && endpoint.since <= mapping.seen_at;
        if !is_its || endpoint.restored {
            return Err(Refusal::EndpointUnknown);
        }
        let name = mapping.name.as_str();
        let sound = mapping.rcode == 0
            && !mapping.addresses.is_empty()
            && mapping.addresses.len() <= MAX_ADDRESSES
            && name.ends_with('.')
            && name.len() <= MAX_NAME
            // In presentation form every other byte is escaped.
            && name.bytes().all(|byte| matches!(byte, b' '..=b'~'));
        if !sound {
            return Err(Refusal::Invalid);
        }
        let address = mapping.server.ip().to_canonical();
        let question = Question {
            endpoint: instance.id,
            port: mapping.server.port(),
            transport: mapping.transport,
            server: self.identity_of(address),
            address,
            name,
        };
        if mapping.replayed && self.was_cleaned(mapping) {
            return Err(Refusal::NotAllowed);
        }
        match self.checker.load().check(&question) {
            Verdict::Allow => Ok(()),
            Verdict::Deny(_) => Err(Refusal::NotAllowed),
        }
    }

    /// Identity of an address, the world's if nothing else is known.
    pub(super) fn identity_of(&self, address: IpAddr) -> IdentityId {
        let world = self.world_of(address);
        self.ipcache.identity_of(address).unwrap_or(world)
    }

    /// What the datapath takes an address for where no entry covers it.
    pub(super) fn world_of(&self, address: IpAddr) -> IdentityId {
        let family = match address {
            IpAddr::V4(_) => FAMILY_IPV4,
            IpAddr::V6(_) => FAMILY_IPV6,
        };
        let dual = self.config.enable_ipv4 && self.config.enable_ipv6;
        IdentityId::world_of(family, dual)
    }

    /// Whether an address may carry a name's label: those of this node never do, nor those of
    /// refused prefixes.
    pub(super) fn is_plumbed(&self, address: IpAddr) -> bool {
        let sound = match address {
            IpAddr::V4(v4) => self.config.enable_ipv4 && !v4.is_broadcast(),
            IpAddr::V6(v6) => {
                self.config.enable_ipv6
                    && v6.to_ipv4_mapped().is_none()
                    && !v6.is_unicast_link_local()
            }
        };
        sound
            && !address.is_loopback()
            && !address.is_multicast()
            && !address.is_unspecified()
            && !self.ipcache.is_local(address)
            && self.config.refused_prefixes.covering(address).is_none()
    }

    /// Fills in what became of the mappings once the plan ran.
    pub(super) fn settle_outcomes(&mut self, outcomes: Vec<PendingOutcome>) -> Vec<Effect> {
        let mut effects = Vec::with_capacity(outcomes.len());
        for PendingOutcome {
            mut outcome,
            prefixes,
            endpoint,
        } in outcomes
        {
            if outcome.realised == Realised::Yes {
                let asker = self.endpoints.get(endpoint);
                let lacks = asker.is_some_and(|e| !e.behind.is_none()) && !prefixes.is_empty();
                if !lacks && prefixes.iter().all(|prefix| self.is_realised(*prefix)) {
                    self.counters.mappings_realised += 1;
                    outcome.revision = self.revision_in_force();
                    if outcome.lease_end > 0 {
                        let until = self.promised.entry(outcome.stream).or_default();
                        *until = (*until).max(BootTime(outcome.lease_end));
                    }
                    self.await_file(endpoint, &outcome);
                } else {
                    self.counters.mappings_not_realised += 1;
                    outcome.realised = Realised::No(Refusal::NotRealised);
                    outcome.lease_end = 0;
                }
            }
            effects.push(Effect::Outcome(outcome));
        }
        effects
    }

    fn is_realised(&self, prefix: IpNet) -> bool {
        let is = |m: &crate::ipcache::metadata::Metadata| {
            !m.unresolved && m.desired.is_some() && m.realised == m.desired
        };
        self.ipcache.get(prefix).is_some_and(is)
    }

    fn await_file(&mut self, endpoint: EndpointId, outcome: &MappingOutcome) {
        let Some(endpoint) = self.endpoints.get_mut(endpoint) else {
            return;
        };
        if endpoint.undurable.len() < MAX_UNDURABLE {
            endpoint.undurable.push(Undurable {
                stream: outcome.stream,
                sequence: outcome.sequence,
                lease_end: outcome.lease_end,
                revision: outcome.revision,
            });
        }
    }

    pub(super) fn on_stream_down(&mut self, stream: StreamId) {
        self.streams.remove(&stream);
        self.rates.remove(&stream);
        for endpoint in self.endpoints.iter_mut() {
            let keeping = endpoint.keeping.as_mut().map(|(_, results)| results);
            for results in keeping.into_iter().chain([&mut endpoint.undurable]) {
                results.retain(|undurable| undurable.stream != stream);
            }
        }
        // Its proxy may not know yet, and may still answer under the leases it has: they are
        // honoured, whether their revocation is under way or comes later.
        let now = self.now;
        self.departed.retain(|_, until| *until > now);
        let promised = self.promised.remove(&stream);
        let ended = self.holderless.remove(&stream);
        let ended = ended.filter(|at| now <= at.plus_secs(CLOSES_WITHIN));
        let promised = promised.filter(|_| ended.is_none());
        if let Some(until) = promised.map(|until| until.plus_secs(AFTER_LEASE))
            && until > now
        {
            self.departed.insert(stream, until);
        }
        if !self.departed.contains_key(&stream) {
            self.revocations.forget_stream(stream);
        }
    }

    /// The leases of these streams are over. Their pairs stay for their TTLs and connections.
    pub(super) fn on_holder_ended(&mut self, streams: &[StreamId]) {
        for stream in streams {
            if self.streams.contains(stream) {
                // Its end is on its way, unless another process took the connection over.
                self.holderless.insert(*stream, self.now);
            } else {
                self.departed.remove(stream);
                self.revocations.forget_stream(*stream);
            }
        }
    }

    pub(super) fn on_revoke_acked(&mut self, acks: &[RevokeAck]) {
        for ack in acks {
            self.revocations.acked(ack.stream, ack.id);
        }
    }

    pub(super) fn revoke_leases(&mut self, plan: &mut Plan, name: Fqdn, addresses: Vec<IpAddr>) {
        let id = self.next_revocation;
        self.next_revocation += 1;
        self.counters.revocations += 1;
        let ends = self
            .names
            .name(&name)
            .into_iter()
            .flat_map(|entry| &entry.pairs);
        let ends = ends.filter(|(address, _)| addresses.contains(address));
        let until = ends
            .map(|(_, pair)| pair.lease_end)
            .max()
            .unwrap_or(self.now);
        let now = self.now;
        self.departed.retain(|_, until| *until > now);
        let streams: Vec<StreamId> = self.streams.iter().copied().collect();
        plan.revoke(Revocation {
            id,
            streams: streams.clone(),
            name: name.clone(),
            addresses: addresses.clone(),
        });
        let pending = PendingRevocation {
            waiting: streams
                .into_iter()
                .chain(self.departed.keys().copied())
                .collect(),
            name,
            addresses,
            until: until.plus_secs(AFTER_LEASE),
        };
        self.revocations.insert(id, pending);
    }

    /// Ends revocations that every stream acknowledged or whose leases ended.
    pub(super) fn end_revocations(&mut self) {
        let now = self.now;
        for pending in self.revocations.take_ended(now) {
            for address in pending.addresses {
                let gone = self.names.revoked(&pending.name, address, now);
                self.unlabel(gone.into_iter().collect());
            }
        }
    }

    pub(super) fn on_liveness(
        &mut self,
        gc_start: BootTime,
        alive: &[(IpAddr, IpAddr)],
        complete: bool,
    ) {
        for (local, remote) in alive {
            if let Some(id) = self.endpoints.by_address(*local) {
                self.names.mark_alive(id, *remote, gc_start);
            }
        }
        if complete {
            let expired = self.names.pass(gc_start, self.now);
            self.release(expired);
        }
    }

    /// Lets go of what expired, as far as the inbox does not say otherwise.
    pub(super) fn expire(&mut self) {
        let expired = self.names.expire(self.now);
        self.release(expired);
    }

    fn release(&mut self, expired: crate::fqdn::cache::Expired) {
        self.unlabel(expired.pairs);
        for id in expired.endpoints {
            self.file_soon(id);
        }
    }
}
