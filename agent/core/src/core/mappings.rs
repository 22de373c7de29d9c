//! How the agent checks a mapping, and the changes that follow from it.

pub(super) mod intake;
mod name_holders;
mod name_servers;
mod rate;

use std::net::IpAddr;

use dns_policy::{
    boot_time::BootTime,
    mapping::{LONGEST_LEASE, Mapping, Realised, Refusal},
    name::Fqdn,
    table::Question,
};
use ipnet::IpNet;
use shared_maps::{FAMILY_IPV4, FAMILY_IPV6, IdentityId};

use self::name_holders::{HeldPair, Holders};
use super::{
    event::{Effect, MAX_ADDRESSES, MAX_NAME, MappingEvent, MappingResult},
    plan::{PendingResult, Plan},
    state::State,
};
use crate::{
    fqdn::{cache::Answer, embedded, longest::MAX_TTL, resolved::Room},
    ipcache::{metadata::Claim, owners::Owner},
};

/// Shortest validity of a pair that was seen while the agent was down, in seconds.
const AWAY: u64 = 30;
/// Maximum number of addresses that are learned from one mapping. Pools of servers have some dozens;
/// a name holds about as many at most (`max_ips_per_name`).
const TAKEN_ADDRESSES: usize = 1024;
/// No leases are given while less than 1/16 of the ipcache is free.
const SCARCE: usize = 16;

/// Times of a mapping's addresses.
struct Validity {
    /// Seconds, within the agent's bounds.
    ttl: u32,
    seen: BootTime,
    expires: BootTime,
    lease_end: BootTime,
}

/// The learned addresses of a mapping.
struct Learned {
    /// Prefixes of addresses with labels. The datapath must get them before the answer is released.
    prefixes: Vec<IpNet>,
    /// Addresses for which there is no room.
    left_out: usize,
    /// End of the lease that every address has.
    lease_end: Option<BootTime>,
}

/// A learned address of an answer.
struct Taken {
    /// Whether the answer may still have its lease.
    leased: bool,
    /// Whether the address has labels that the datapath must get before the answer is released.
    labelled: bool,
}

impl State {
    /// Adds the result of a mapping that is refused.
    pub(super) fn refuse(&mut self, plan: &mut Plan, event: &MappingEvent, refusal: Refusal) {
        let counter = match refusal {
            Refusal::EndpointUnknown => &mut self.counters.mappings_endpoint_unknown,
            Refusal::NotAllowed => &mut self.counters.mappings_not_allowed,
            Refusal::Invalid | Refusal::Rejected => &mut self.counters.mappings_invalid,
            Refusal::RateLimited => &mut self.counters.mappings_rate_limited,
            Refusal::NotRealised => &mut self.counters.mappings_not_realised,
        };
        *counter += 1;
        let result = self.result(event, Realised::No(refusal), None);
        let endpoint = event.mapping.endpoint.id;
        plan.answer(PendingResult {
            result,
            prefixes: Vec::new(),
            endpoint,
        });
    }

    /// Accepts a mapping, if policy allows its question.
    pub(super) fn learn(&mut self, plan: &mut Plan, event: &MappingEvent) {
        let mapping = &event.mapping;
        if let Err(refusal) = self.check(mapping) {
            if refusal == Refusal::NotAllowed {
                self.forget_cleaned(mapping);
            }
            self.refuse(plan, event, refusal);
            return;
        }
        let times = self.validity(mapping);
        let may_lease = self.proxies.leases.is_open(event.stream)
            && times.lease_end > self.now
            && !self.is_crowded();
        let holders = self.holders_of(mapping, times.ttl, times.seen);
        if holders.are_none() {
            self.pass(plan, event);
            return;
        }
        let may_lease = may_lease && holders.allow_lease();
        let lease_end = may_lease.then_some(times.lease_end);
        let learned = self.learn_addresses(mapping, &times, lease_end, holders);
        let endpoint = mapping.endpoint.id;
        self.file_soon(endpoint);
        if learned.left_out > 0 {
            self.counters.pairs_left_out += learned.left_out as u64;
            self.refuse(plan, event, Refusal::NotRealised);
            return;
        }
        let result = self.result(event, Realised::Yes, learned.lease_end);
        plan.answer(PendingResult {
            result,
            prefixes: learned.prefixes,
            endpoint,
        });
    }

    fn learn_addresses(
        &mut self,
        mapping: &Mapping,
        times: &Validity,
        lease_end: Option<BootTime>,
        holders: Holders,
    ) -> Learned {
        let labels = match self.learned.names.name(&mapping.name) {
            Some(entry) => entry.labels.clone(),
            None => self.policy.labels_of_name(&mapping.name),
        };
        let mut learned = Learned {
            prefixes: Vec::with_capacity(mapping.addresses.len().min(TAKEN_ADDRESSES)),
            left_out: mapping.addresses.len().saturating_sub(TAKEN_ADDRESSES),
            lease_end,
        };
        let last = times.expires.max(times.lease_end);
        for address in mapping.addresses.iter().copied().take(TAKEN_ADDRESSES) {
            let answer = Answer {
                endpoint: mapping.endpoint.id,
                name: &mapping.name,
                labels: labels.as_ref(),
                address,
                seen: times.seen,
                ttl: times.ttl,
                expires: times.expires,
                lease_end: learned.lease_end,
                trusted_until: holders.is_trusted().then_some(last),
            };
            let Some(taken) = self.learn_address(answer, holders, last) else {
                learned.left_out += 1;
                continue;
            };
            learned.lease_end = learned.lease_end.filter(|_| taken.leased);
            if taken.labelled {
                learned.prefixes.push(IpNet::from(address));
            }
        }
        learned
    }

    /// Accepts a mapping of which nothing is learned. The answer is released, and no lease covers later answers.
    fn pass(&mut self, plan: &mut Plan, event: &MappingEvent) {
        let endpoint = event.mapping.endpoint.id;
        self.file_soon(endpoint);
        let result = self.result(event, Realised::Yes, None);
        plan.answer(PendingResult {
            result,
            prefixes: Vec::new(),
            endpoint,
        });
    }

    /// Learns one address of an answer. `last` is when the answer ends. `None` if there is no room
    /// for the address.
    fn learn_address(
        &mut self,
        mut answer: Answer<'_>,
        holders: Holders,
        last: BootTime,
    ) -> Option<Taken> {
        let (name, address) = (answer.name, answer.address);
        let room = self.holders_room(holders, name, address);
        match room {
            Some(Room::Full) => return None,
            Some(Room::Scarce) => answer.lease_end = None,
            _ => {}
        }
        let pair = HeldPair {
            name,
            address,
            until: last,
            lease_end: None,
        };
        if !self.may_learn(name, address) {
            return Some(Taken {
                leased: answer.lease_end.is_some(),
                labelled: room.is_some() && self.hold_pair(pair),
            });
        }
        let names = &mut self.learned.names;
        if !names.make_room(answer.endpoint, name, address, self.now) {
            return None;
        }
        let leased = names.learn(&answer);
        if room.is_some() {
            self.hold_pair(HeldPair {
                lease_end: answer.lease_end.filter(|_| leased),
                ..pair
            });
        }
        if let Some(labels) = answer.labels {
            let claim = Claim::Labels(labels.clone());
            self.ipcache
                .claim(IpNet::from(address), Owner::Name(name.clone()), claim);
        }
        Some(Taken {
            leased,
            labelled: room.is_some() || answer.labels.is_some(),
        })
    }

    /// The result of a mapping, before it is durable. `lease`: its end, if one is given.
    fn result(
        &self,
        event: &MappingEvent,
        realised: Realised,
        lease: Option<BootTime>,
    ) -> MappingResult {
        MappingResult {
            stream: event.stream,
            sequence: event.sequence,
            realised,
            durable: false,
            lease_end: lease,
            revision: self.revision_in_force(),
        }
    }

    /// Whether an answer may give the address a label; counts addresses in refused prefixes.
    fn may_learn(&mut self, name: &Fqdn, address: IpAddr) -> bool {
        if self.config.refused_prefixes.covering(address).is_some() {
            self.counters.addresses_refused += 1;
            self.learned.closed.note_refused(name, address);
            return false;
        }
        self.is_plumbed(address)
    }

    /// If a proxy sends an earlier answer for a cleaned name again, removes the labels of the name that a restart
    /// restored. Nothing else removes them.
    fn forget_cleaned(&mut self, mapping: &Mapping) {
        if mapping.replayed && self.was_cleaned(mapping) {
            for address in &mapping.addresses {
                self.forget_restored(&mapping.name, *address);
            }
        }
    }

    /// How long the addresses of a mapping are valid, and how long their lease would last.
    fn validity(&self, mapping: &Mapping) -> Validity {
        let ttl = mapping.ttl.min(MAX_TTL).max(self.config.min_ttl);
        let mut seen = mapping.seen_at.min(self.now);
        if !mapping.replayed && self.was_cleaned(mapping) {
            // The client waits for this answer, so the name opens again, and stays open through a restart.
            seen = self.now;
        }
        let mut expires = seen.plus_secs(u64::from(ttl));
        let lease_end = expires.plus(self.config.lease_slack);
        let lease_end = lease_end.min(self.now.plus(LONGEST_LEASE));
        // While an agent hangs, a live mapping may wait as long as a replayed one. Both are valid for
        // at least `AWAY` seconds from now.
        if mapping.replayed || lease_end <= self.now {
            expires = expires.max(self.now.plus_secs(AWAY));
        }
        Validity {
            ttl,
            seen,
            expires,
            lease_end,
        }
    }

    /// Whether so little of the ipcache is free that no lease is given: a leased pair stays after
    /// its endpoint is removed.
    fn is_crowded(&self) -> bool {
        let max = self.config.ipcache_max;
        let used = self.learned.names.pairs().max(self.ipcache.realised());
        used >= max - max / SCARCE
    }

    /// Checks a mapping: a compromised proxy must not open what policy does not allow.
    fn check(&self, mapping: &Mapping) -> Result<(), Refusal> {
        let instance = mapping.endpoint;
        let endpoint = self
            .endpoints
            .get(instance.id)
            .ok_or(Refusal::EndpointUnknown)?;
        let is_its = endpoint.had(instance.client, mapping.seen_at)
            && endpoint.spec.interface.ifindex == instance.ifindex
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
        if self.proxies.publication.allows(&question) {
            Ok(())
        } else {
            Err(Refusal::NotAllowed)
        }
    }

    /// Identity of an address. It is the world's if nothing is known about the address.
    pub(super) fn identity_of(&self, address: IpAddr) -> IdentityId {
        let world = self.world_of(address);
        self.ipcache.identity_of(address).unwrap_or(world)
    }

    /// The identity that an address has in the datapath if no entry covers it.
    pub(super) fn world_of(&self, address: IpAddr) -> IdentityId {
        let family = match address {
            IpAddr::V4(_) => FAMILY_IPV4,
            IpAddr::V6(_) => FAMILY_IPV6,
        };
        let dual = self.config.enable_ipv4 && self.config.enable_ipv6;
        IdentityId::world_of(family, dual)
    }

    /// Whether an address may carry a name's label. Addresses of this node, of pods, and in refused
    /// prefixes never do.
    pub(super) fn is_plumbed(&self, address: IpAddr) -> bool {
        self.is_sound(address) && self.config.refused_prefixes.covering(address).is_none()
    }

    /// Whether an address can belong to a single machine outside the cluster.
    pub(super) fn is_sound(&self, address: IpAddr) -> bool {
        let sound = match address {
            IpAddr::V4(v4) => self.config.enable_ipv4 && !v4.is_broadcast(),
            IpAddr::V6(v6) => {
                self.config.enable_ipv6
                    && v6.to_ipv4_mapped().is_none()
                    && !v6.is_unicast_link_local()
            }
        };
        let within = match address {
            IpAddr::V4(_) => None,
            IpAddr::V6(v6) => Some(embedded::ipv4_in(v6)),
        };
        // A gateway may send packets for the embedded IPv4 address there, and so may the node itself.
        let mut within = within.into_iter().flatten();
        sound
            && self.is_outside(address)
            && within.all(|v4| !v4.is_broadcast() && self.is_outside(v4.into()))
    }

    /// Whether an address may belong to a machine that is neither this node nor a pod.
    fn is_outside(&self, address: IpAddr) -> bool {
        !address.is_loopback()
            && !address.is_multicast()
            && !address.is_unspecified()
            && !self.ipcache.is_of_cluster(address)
    }

    /// Fills in the outcome of the mappings once the plan ran.
    pub(super) fn settle_results(&mut self, results: Vec<PendingResult>) -> Vec<Effect> {
        let mut effects = Vec::with_capacity(results.len());
        for PendingResult {
            mut result,
            prefixes,
            endpoint,
        } in results
        {
            if result.realised == Realised::Yes {
                let asker = self.endpoints.get(endpoint);
                let lacks = asker.is_some_and(|e| !e.dirty_peers.is_none()) && !prefixes.is_empty();
                if !lacks && prefixes.iter().all(|prefix| self.is_realised(*prefix)) {
                    self.counters.mappings_realised += 1;
                    result.revision = self.revision_in_force();
                    if let Some(until) = result.lease_end {
                        self.proxies.leases.promise(result.stream, until);
                    }
                    self.files.await_write(endpoint, &result);
                } else {
                    self.counters.mappings_not_realised += 1;
                    result.realised = Realised::No(Refusal::NotRealised);
                    result.lease_end = None;
                }
            }
            effects.push(Effect::Result(result));
        }
        effects
    }

    fn is_realised(&self, prefix: IpNet) -> bool {
        let is = |m: &crate::ipcache::metadata::Metadata| {
            !m.unresolved && m.desired.is_some() && m.realised == m.desired
        };
        self.ipcache.get(prefix).is_some_and(is)
    }

    pub(super) fn revoke_leases(&mut self, plan: &mut Plan, name: Fqdn, addresses: Vec<IpAddr>) {
        self.counters.revocations += 1;
        let pairs = self.learned.names.name(&name).into_iter();
        let pairs = pairs.flat_map(|entry| &entry.pairs);
        let ends = pairs
            .filter(|(address, _)| addresses.contains(address))
            .filter_map(|(_, pair)| pair.lease_end);
        let until = ends.max().unwrap_or(self.now);
        plan.revoke(self.proxies.leases.revoke(name, addresses, until, self.now));
    }

    /// Ends revocations that every stream acknowledged or whose leases ended.
    pub(super) fn end_revocations(&mut self) {
        let now = self.now;
        for pending in self.proxies.leases.take_ended(now) {
            for address in pending.addresses {
                let gone = self.learned.names.revoked(&pending.name, address, now);
                self.clear(gone);
            }
        }
    }

    /// Notes connections that a pass over the conntrack maps found.
    pub(super) fn on_alive(&mut self, gc_start: BootTime, alive: &[(IpAddr, IpAddr)]) {
        for (local, remote) in alive {
            if let Some(id) = self.endpoints.by_address(*local) {
                self.learned.names.mark_alive(id, *remote, gc_start);
                self.mark_held_alive(*remote, gc_start);
            }
        }
    }

    /// Notes that the pass read every conntrack map to its end.
    pub(super) fn on_pass_complete(&mut self, gc_start: BootTime) {
        let expired = self.learned.names.scanned(gc_start, self.now);
        self.release(expired);
        self.end_held_scan(gc_start);
    }

    /// Removes expired pairs. It runs after the event is handled, because a mapping in it may
    /// extend them.
    pub(super) fn expire(&mut self) {
        let expired = self.learned.names.expire(self.now);
        self.release(expired);
        self.expire_held();
    }

    fn release(&mut self, expired: crate::fqdn::cache::Expired) {
        self.unlabel(expired.pairs);
        for id in expired.endpoints {
            self.file_soon(id);
        }
    }
}
