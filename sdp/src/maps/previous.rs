//! Entries of the previous agent's tables that the present agent has not sent yet.
//!
//! Cilium's agent makes a new, empty ipcache map at each start and fills it while it learns. Its
//! first states over FQDNData have only a part of the prefixes and no endpoints. So a missing entry
//! does not show that the entry was removed. The proxy reads it from the previous table, prefix by
//! prefix, until the present table has the entry for another owner, or the agent has been ready for
//! [`SETTLED_AFTER`].

use std::{
    collections::HashSet,
    net::IpAddr,
    time::{Duration, Instant},
};

use ipnet::IpNet;
use shared_maps::IdentityId;

use super::{
    instances::Instances,
    tables::{AgentTables, full_length},
};
use crate::resolve::QueryClient;

/// After an agent has sent rules for this long without a break, entries that it has not sent are
/// removed.
pub(crate) const SETTLED_AFTER: Duration = Duration::from_secs(30);

/// Maximum number of look-ups of one address while the map changes between two of them.
const MAX_LOOKUPS: usize = 8;

/// Entries of the previous source that the present one does not contradict.
///
/// An entry that the present source has with the same owner stays here, because an agent that
/// starts can remove an entry and add it again.
#[derive(Clone, Debug, Default)]
pub(super) struct PreviousTables {
    tables: AgentTables,
    /// Prefixes that the present source has also had, with the same identity.
    confirmed: HashSet<IpNet>,
}

impl PreviousTables {
    /// Adds the prefixes of a source that is being replaced. They replace older prefixes here.
    pub(super) fn absorb_prefixes(&mut self, gone: &AgentTables) {
        self.confirmed.clear();
        for (prefix, identity) in &gone.prefixes {
            self.tables.add_prefix(*prefix, *identity);
        }
    }

    /// Adds the endpoints of a source that is being replaced.
    pub(super) fn absorb_endpoints(&mut self, gone: &AgentTables) {
        for (ip, (id, identity)) in &gone.endpoints {
            self.tables.add_endpoint(*ip, *id, *identity);
        }
    }

    /// Removes entries that the present source contradicts, and notes the entries that it confirms.
    pub(super) fn compare(&mut self, now: &AgentTables) {
        let had = self.tables.prefixes.iter();
        let confirmed = had.filter(|(prefix, identity)| now.prefixes.get(prefix) == Some(identity));
        self.confirmed.extend(confirmed.map(|(prefix, _)| *prefix));
        self.tables.retain_prefixes(|prefix, identity| {
            now.prefixes.get(prefix).is_none_or(|now| now == identity)
        });
        let kept = &self.tables.prefixes;
        self.confirmed.retain(|prefix| kept.contains_key(prefix));
        let changed = |id, identity| {
            let mut of = now.endpoints.values().filter(|(other, _)| *other == id);
            of.any(|(_, other)| *other != identity)
        };
        self.tables.endpoints.retain(|ip, (id, identity)| {
            let own = now.prefixes.get(&IpNet::from(*ip));
            !now.endpoints.contains_key(ip)
                && !changed(*id, *identity)
                && own.is_none_or(|own| own == identity)
        });
    }

    /// Whether there are no previous entries.
    pub(super) fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    /// Number of entries that the present source has not had yet.
    pub(super) fn lacking(&self) -> usize {
        self.tables.prefixes.len() - self.confirmed.len() + self.tables.endpoints.len()
    }

    /// The endpoint that has the address `client`, if the present source has none.
    pub(super) fn client(&self, client: IpAddr) -> QueryClient {
        self.tables.client(client)
    }

    /// Identity of `server`. `now` looks the server up in the present source, by the longest prefix
    /// with at most the given number of bits.
    pub(super) fn server(
        &self,
        server: IpAddr,
        now: impl Fn(u8) -> Option<IdentityId>,
    ) -> Option<IdentityId> {
        let full = full_length(server);
        let Some((length, previous)) = self.tables.longest(server, full) else {
            return now(full);
        };
        let mut found = now(full);
        for _ in 0..MAX_LOOKUPS {
            // If shorter prefixes have another owner, the present source has a prefix of the same
            // length.
            let covering = length.checked_sub(1).and_then(&now);
            if found == covering {
                return Some(previous);
            }
            // A prefix that was added between the two look-ups also makes them differ.
            let again = now(full);
            if again == found {
                return found;
            }
            found = again;
        }
        found
    }

    pub(super) fn instances(&self, into: &mut Instances) {
        self.tables.instances(into);
    }
}

/// Time since which the present agent has been ready.
#[derive(Debug, Default)]
pub(super) struct Settling {
    ready: bool,
    since: Option<Instant>,
}

impl Settling {
    /// Notes whether the agent sends rules, or is gone.
    pub(super) fn set_ready(&mut self, ready: bool) {
        if !ready {
            self.since = None;
        }
        self.ready = ready;
    }

    /// Whether an agent sends rules.
    pub(super) fn is_ready(&self) -> bool {
        self.ready
    }

    /// Starts the time again, because another source is in use.
    pub(super) fn begin(&mut self) {
        self.since = None;
    }

    /// Whether entries that the present source lacks count as removed.
    pub(super) fn is_over(&mut self, now: Instant) -> bool {
        if !self.ready {
            return false;
        }
        let since = *self.since.get_or_insert(now);
        now.saturating_duration_since(since) >= SETTLED_AFTER
    }
}

#[cfg(test)]
mod tests {
    use shared_maps::EndpointId;

    use super::*;

    const SERVER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 53));
    const POD: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 7));

    fn table(prefixes: &[(&str, u32)]) -> AgentTables {
        let mut table = AgentTables::default();
        for (prefix, identity) in prefixes {
            table.add_prefix(prefix.parse().unwrap(), IdentityId(*identity));
        }
        table
    }

    fn after(prefixes: &[(&str, u32)]) -> PreviousTables {
        let mut previous = PreviousTables::default();
        previous.absorb_prefixes(&table(prefixes));
        previous
    }

    fn server(previous: &PreviousTables, now: &AgentTables) -> Option<u32> {
        previous
            .server(SERVER, |limit| now.server(SERVER, limit))
            .map(|identity| identity.0)
    }

    #[test]
    fn entries_missing_in_the_new_map_are_answered_from_the_old_one() {
        let previous = after(&[("0.0.0.0/0", 2), ("10.0.0.53/32", 500)]);
        assert_eq!(server(&previous, &table(&[])), Some(500));
        // A prefix of length 0 says nothing about this server.
        assert_eq!(server(&previous, &table(&[("0.0.0.0/0", 2)])), Some(500));
        assert_eq!(server(&previous, &table(&[("10.0.0.0/8", 9)])), Some(500));
        assert_eq!(server(&PreviousTables::default(), &table(&[])), None);
    }

    #[test]
    fn an_address_with_another_owner_in_the_new_map_belongs_to_it() {
        let previous = after(&[("10.0.0.0/24", 500)]);
        for now in [
            &[("10.0.0.53/32", 600)][..],
            &[("10.0.0.0/24", 600)],
            &[("0.0.0.0/0", 2), ("10.0.0.0/24", 600)],
            &[("0.0.0.0/0", 500), ("10.0.0.0/24", 600)],
        ] {
            assert_eq!(server(&previous, &table(now)), Some(600), "{now:?}");
        }
    }

    #[test]
    fn a_prefix_that_once_had_another_owner_in_the_new_map_is_not_answered_as_before() {
        let mut previous = after(&[("10.0.0.53/32", 500), ("10.0.0.54/32", 501)]);
        previous.compare(&table(&[("10.0.0.53/32", 2), ("0.0.0.0/0", 2)]));
        assert_eq!(
            (previous.lacking(), server(&previous, &table(&[]))),
            (1, None)
        );
    }

    #[test]
    fn a_prefix_that_the_new_map_removes_for_a_moment_is_answered_as_before() {
        let mut previous = after(&[("10.0.0.53/32", 500)]);
        previous.compare(&table(&[("10.0.0.53/32", 500)]));
        assert_eq!(previous.lacking(), 0);
        assert_eq!(server(&previous, &table(&[("0.0.0.0/0", 2)])), Some(500));
        // The map is replaced again, and the new one lacks the prefix at first.
        previous.absorb_prefixes(&table(&[("10.0.0.53/32", 500)]));
        assert_eq!(previous.lacking(), 1);
    }

    #[test]
    fn a_prefix_that_is_added_between_two_look_ups_opens_no_gap() {
        let previous = after(&[("10.0.0.53/32", 500)]);
        for filling in [[None, Some(2)], [Some(2), Some(9)]] {
            // The shorter prefix exists from the second look-up on.
            let looked = std::cell::Cell::new(0);
            let found = previous.server(SERVER, |_| {
                looked.set(looked.get() + 1);
                filling[usize::from(looked.get() > 1)].map(IdentityId)
            });
            assert_eq!(found, Some(IdentityId(500)), "{filling:?}");
        }
    }

    #[test]
    fn a_map_that_is_replaced_half_filled_counts_over_the_one_before_it() {
        let mut previous = after(&[("10.0.0.53/32", 500), ("10.0.0.0/24", 700)]);
        previous.absorb_prefixes(&table(&[("10.0.0.53/32", 600)]));
        assert_eq!(server(&previous, &table(&[])), Some(600));
        assert_eq!(previous.lacking(), 2);
    }

    #[test]
    fn an_endpoint_is_kept_until_its_address_or_number_is_anothers() {
        let mut gone = AgentTables::default();
        gone.add_endpoint(POD, EndpointId(7), IdentityId(300));
        let kept = |now: &AgentTables| {
            let mut previous = PreviousTables::default();
            previous.absorb_endpoints(&gone);
            previous.compare(now);
            !previous.is_empty()
        };
        assert!(kept(&table(&[("10.0.0.7/32", 300)])));
        assert!(!kept(&table(&[("10.0.0.7/32", 301)])));
        let endpoint = |ip: IpAddr, id: u16, identity: u32| {
            let mut now = AgentTables::default();
            now.add_endpoint(ip, EndpointId(id), IdentityId(identity));
            now
        };
        assert!(!kept(&endpoint(POD, 8, 300)));
        assert!(!kept(&endpoint(SERVER, 7, 301)));
        assert!(kept(&endpoint(SERVER, 8, 301)));
    }

    #[test]
    fn time_counts_only_while_an_agent_is_ready() {
        let start = Instant::now();
        let mut settling = Settling::default();
        assert!(!settling.is_over(start));
        settling.set_ready(true);
        assert!(!settling.is_over(start));
        settling.set_ready(false);
        assert!(!settling.is_over(start + SETTLED_AFTER));
        settling.set_ready(true);
        assert!(!settling.is_over(start + SETTLED_AFTER));
        assert!(settling.is_over(start + 2 * SETTLED_AFTER));
        settling.begin();
        assert!(!settling.is_over(start + 2 * SETTLED_AFTER));
    }
}
