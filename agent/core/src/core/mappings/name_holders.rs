//! Kinds of rules that hold the addresses of an answer, each with labels of its own.
//!
//! A mapping is learned once, for the endpoint that got the answer ([`State::learn`]). Which rules take
//! its addresses is decided here: those with `toFQDNs`, and EgressFirewalls
//! ([`crate::core::resolved`]). `State::learn` knows neither kind; a further kind is a field of
//! [`Holders`].

use std::net::IpAddr;

use dns_policy::{boot_time::BootTime, mapping::Mapping, name::Fqdn};

use crate::{
    core::state::{State, resolved::Relevance},
    fqdn::resolved::Room,
};

/// Which kinds of rules take an answer.
#[derive(Clone, Copy, Debug)]
pub(in crate::core) struct Holders {
    /// Whether the node's names, which have the labels of `toFQDNs` rules, take the answer.
    names: bool,
    firewalls: Relevance,
}

/// A pair (name, address) for other holders than the endpoint that got the answer.
#[derive(Clone, Copy, Debug)]
pub(in crate::core) struct HeldPair<'a> {
    pub(in crate::core) name: &'a Fqdn,
    pub(in crate::core) address: IpAddr,
    /// When the answer ends.
    pub(in crate::core) until: BootTime,
    pub(in crate::core) lease_end: Option<BootTime>,
}

impl Holders {
    /// Whether no kind of rules takes the answer, so that nothing of it is learned.
    pub(in crate::core) fn are_none(self) -> bool {
        !self.names && self.firewalls != Relevance::Counts
    }

    /// Whether the answer may be under a lease: an answer that counts must not be released under the
    /// lease of one that does not count.
    pub(in crate::core) fn allow_lease(self) -> bool {
        self.firewalls != Relevance::Untrusted
    }

    /// Whether the answer comes from a trusted DNS server.
    pub(in crate::core) fn is_trusted(self) -> bool {
        self.firewalls.is_trusted()
    }
}

impl State {
    /// Which kinds of rules take an answer. Counts the answer.
    pub(in crate::core) fn holders_of(
        &mut self,
        mapping: &Mapping,
        ttl: u32,
        seen: BootTime,
    ) -> Holders {
        Holders {
            firewalls: self.relevance(mapping, ttl, seen),
            names: self.counts_for_names(mapping),
        }
    }

    /// How much room holders have for an address. `None` if only the names of the node take it: they
    /// share the endpoint's room.
    pub(in crate::core) fn holders_room(
        &self,
        holders: Holders,
        name: &Fqdn,
        address: IpAddr,
    ) -> Option<Room> {
        let is_taken = holders.firewalls == Relevance::Counts && self.is_sound(address);
        is_taken.then(|| self.resolved.room(name, address, self.openness(address)))
    }

    /// Gives the pair to the holders that have room for it. True if its address gets a label.
    pub(in crate::core) fn hold_pair(&mut self, pair: HeldPair<'_>) -> bool {
        self.resolve_name(pair.name, pair.address, pair.until, pair.lease_end)
    }

    /// Notes a connection to an address that conntrack found.
    pub(in crate::core) fn mark_held_alive(&mut self, address: IpAddr, gc_start: BootTime) {
        self.resolved.pairs.mark_alive(address, gc_start);
    }

    /// A complete conntrack scan ended: removes pairs without a connection.
    pub(in crate::core) fn end_held_scan(&mut self, gc_start: BootTime) {
        let gone = self.resolved.pairs.scanned(gc_start);
        self.unlabel_resolved(gone);
    }

    /// Removes ended pairs that no connection can use.
    pub(in crate::core) fn expire_held(&mut self) {
        let gone = self.resolved.pairs.expire(self.now);
        self.unlabel_resolved(gone);
    }
}
