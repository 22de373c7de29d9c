//! Maps without entries for everyone.
//!
//! An identity that a map has no entry of gets what the entries for everyone say. If these let
//! packets pass in a direction, a deny without room in the map would be open. The policy of an
//! endpoint whose map is full becomes *explicit* in such a direction: no entries for everyone, and a
//! table for each identity, with the same verdicts. A missing entry then drops packets, of this
//! endpoint and no other. A table that drops everything needs no entry, so that denied identities
//! take no room.

use std::borrow::Cow;

use shared_maps::{
    IdentityId,
    policy::{EGRESS, INGRESS, PolicyKey, PolicyValue},
};

use crate::policy::compute::entries::Entries;

/// The directions in which a policy is explicit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Explicit {
    egress: bool,
    ingress: bool,
}

impl Explicit {
    /// The directions in which `denied` has an entry, and entries for everyone let a packet pass.
    pub(crate) fn for_denied<'a>(
        denied: impl Iterator<Item = &'a PolicyKey>,
        everyone: &Entries,
    ) -> Self {
        let mut needs = Self::default();
        for key in denied {
            match key.egress {
                EGRESS => needs.egress = true,
                _ => needs.ingress = true,
            }
        }
        Self {
            egress: needs.egress && lets_pass(everyone, EGRESS),
            ingress: needs.ingress && lets_pass(everyone, INGRESS),
        }
    }

    pub(crate) const fn is_in(self, direction: u8) -> bool {
        match direction {
            EGRESS => self.egress,
            _ => self.ingress,
        }
    }

    pub(crate) const fn is_anywhere(self) -> bool {
        self.egress || self.ingress
    }

    /// The directions that are in `self`, in `other` or in both.
    pub(crate) const fn or(self, other: Self) -> Self {
        Self {
            egress: self.egress || other.egress,
            ingress: self.ingress || other.ingress,
        }
    }

    /// The entries of an identity that maps have.
    pub(crate) fn in_map(self, peer: IdentityId, entries: &Entries) -> Cow<'_, Entries> {
        let is_left_out = |key: &PolicyKey, value: &PolicyValue| {
            // Packets of the node itself pass without an entry: only a deny drops them.
            let is_of_node = peer == IdentityId::HOST && key.egress == INGRESS;
            let drops = key.lpm_len() == 0 && value.is_deny() && !is_of_node;
            self.is_in(key.egress) && (peer == IdentityId::UNKNOWN || drops)
        };
        if !entries.iter().any(|(key, value)| is_left_out(key, value)) {
            return Cow::Borrowed(entries);
        }
        let kept = entries
            .iter()
            .filter(|(key, value)| !is_left_out(key, value));
        Cow::Owned(kept.map(|(key, value)| (*key, *value)).collect())
    }
}

/// Whether one of the entries lets packets in this direction pass, if only to the proxy.
pub(crate) fn lets_pass(entries: &Entries, direction: u8) -> bool {
    let mut entries = entries.iter();
    entries.any(|(key, value)| key.egress == direction && !value.is_deny())
}

/// The entries of a Service: what its own entries and those for everyone mean together. Its own entries
/// alone decide about its ports. Of the entries for everyone, only the one for every protocol and port
/// counts.
pub(crate) fn of_service(id: IdentityId, mut own: Entries, everyone: &Entries) -> Entries {
    let everything = PolicyKey::new(id.0, EGRESS, 0, 0, 0);
    let for_everyone = PolicyKey::new(IdentityId::UNKNOWN.0, EGRESS, 0, 0, 0);
    match everyone.get(&for_everyone) {
        Some(value) if value.is_deny() => Entries::new(),
        Some(_) => {
            let allow = PolicyValue::allow(everything);
            own.entry(everything).or_insert(allow);
            own
        }
        None => own,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_deny_of_the_node_is_not_left_out() {
        let both = Explicit {
            egress: true,
            ingress: true,
        };
        for (peer, direction, is_kept) in [
            (IdentityId::HOST, INGRESS, true),
            (IdentityId::HOST, EGRESS, false),
            (IdentityId::WORLD_IPV4, INGRESS, false),
        ] {
            let key = PolicyKey::new(peer.0, direction, 0, 0, 0);
            let entries = Entries::from([(key, PolicyValue::deny(key))]);
            let kept = both.in_map(peer, &entries);
            assert_eq!(kept.contains_key(&key), is_kept, "{peer:?} {direction}");
        }
    }
}
