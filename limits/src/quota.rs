//! Each endpoint's share of something limited: queries in flight, connections, queued mappings.
//!
//! A [`Quota`] divides the *units* of a limit between *holders*. A holder's *share* is what it may
//! take of them. A [`Permit`] has units of one holder and gives them back when it is dropped.

mod shared;

use std::{collections::HashMap, hash::Hash};

use dns_policy::mapping::EndpointInstance;
use foldhash::quality::RandomState;
use shared_maps::EndpointId;

pub use shared::{Permit, SharedQuota};

/// The owner of a share.
///
/// - An endpoint is its number and its host-side interface: an endpoint that gets the number of
///   a removed one starts with an empty share. All addresses of a pod count together.
/// - The node itself has one share, as if it were an endpoint. It gets no answers from the
///   proxy, so that its share limits only what a local process can take away from endpoints.
/// - All sources that belong to no endpoint have one share together, however many addresses
///   they use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Holder {
    /// One instance of an endpoint.
    Endpoint {
        /// Number of the endpoint. Another pod can get it after this one is removed.
        id: EndpointId,
        /// Number of the host-side interface, which distinguishes endpoints with the same number.
        ifindex: u32,
    },
    /// The node itself, with one share for all of its processes.
    Host,
    /// Every source without an endpoint.
    Unknown,
}

impl From<EndpointInstance> for Holder {
    fn from(endpoint: EndpointInstance) -> Self {
        Self::Endpoint {
            id: endpoint.id,
            ifindex: endpoint.ifindex,
        }
    }
}

/// The part of a limit that is kept for holders with few units: one unit in this many.
const KEPT: usize = 4;
/// A holder has few units if it has none, or fewer than one in this many of the limit.
const FEW: usize = 1024;

/// The rule of [`Quota`], for holders whose units are counted elsewhere.
pub fn may_take(held: usize, free: usize, limit: usize) -> bool {
    let has_few = held < (limit / FEW).max(1);
    (has_few && free > 0) || (held < free && free > limit / KEPT)
}

/// Units of one limit, counted by holder.
///
/// **The rule.** A holder may take one more unit while it holds fewer than are free. The last
/// quarter of the limit is kept for holders that have less than 1/1024 of it.
///
/// - A holder that is alone gets half of the limit.
/// - `n` holders that take units in turn, all they can, get `1 / (n + 1)` of the limit each, or
///   together three quarters of it if that is less.
/// - Holders that fill up one after another and keep their units get 1/2 and 1/4. Each of the
///   next ones gets 1/1024, at least one unit; the kept quarter is enough for 256 of them.
/// - No holder is limited because of holders that take nothing.
///
/// A unit is whatever the caller counts: queries, connections, bytes. Counts per period follow
/// the same rule with [`Quota::clear`] at the start of each period.
///
/// The table has an entry for each holder with at least one unit, so the limit bounds it too.
#[derive(Debug)]
pub struct Quota<K = Holder> {
    limit: usize,
    used: usize,
    by_holder: HashMap<K, usize, RandomState>,
}

impl<K: Copy + Eq + Hash + Ord> Quota<K> {
    /// An empty quota of `limit` units.
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            used: 0,
            by_holder: HashMap::default(),
        }
    }

    /// Changes the limit. Units above a lower limit stay taken until they are given back.
    pub fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Units in all, free or taken.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Units taken by all holders.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Units that `holder` has taken.
    pub fn held_by(&self, holder: K) -> usize {
        self.by_holder.get(&holder).copied().unwrap_or(0)
    }

    /// Whether `holder` may take `units` more: the rule, applied to one unit after another.
    pub fn allows(&self, holder: K, units: usize) -> bool {
        let Some(more) = units.checked_sub(1) else {
            return true;
        };
        let held = self.held_by(holder).saturating_add(more);
        let free = self.limit.saturating_sub(self.used).saturating_sub(more);
        may_take(held, free, self.limit)
    }

    /// Takes `units` if the rule allows all of them; otherwise takes none and returns `false`.
    #[must_use = "units that were not taken must not be given back"]
    pub fn take(&mut self, holder: K, units: usize) -> bool {
        let allowed = self.allows(holder, units);
        if allowed {
            self.add(holder, units);
        }
        allowed
    }

    /// Counts `units` without asking the rule: for units that exist already, as those read from
    /// a file, or that replace evicted ones.
    pub fn add(&mut self, holder: K, units: usize) {
        if units > 0 {
            *self.by_holder.entry(holder).or_default() += units;
            self.used += units;
        }
    }

    /// Gives `units` back; more than `holder` has taken count as all of its units.
    pub fn give_back(&mut self, holder: K, units: usize) {
        let Some(held) = self.by_holder.get_mut(&holder) else {
            return;
        };
        let units = units.min(*held);
        *held -= units;
        self.used -= units;
        if *held == 0 {
            self.by_holder.remove(&holder);
        }
    }

    /// Gives back all units of `holder`. Returns how many there were.
    pub fn remove(&mut self, holder: K) -> usize {
        let held = self.by_holder.remove(&holder).unwrap_or(0);
        self.used -= held;
        held
    }

    /// Gives back all units of all holders.
    pub fn clear(&mut self) {
        self.by_holder.clear();
        self.used = 0;
    }

    /// The holder with most units, and how many: the one to evict from when the limit is
    /// reached. Among equals, always the same one. One step for each holder.
    pub fn largest(&self) -> Option<(K, usize)> {
        let all = self.by_holder.iter().map(|(holder, held)| (*held, *holder));
        all.max().map(|(held, holder)| (holder, held))
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use proptest::prelude::*;

    use super::*;

    fn endpoint(id: u16) -> Holder {
        Holder::Endpoint {
            id: EndpointId(id),
            ifindex: 100 + u32::from(id),
        }
    }

    /// Lets each of the first `holders` endpoints take units in turn until none may take more.
    fn all_greedy(limit: usize, holders: u16) -> Quota {
        let mut quota = Quota::new(limit);
        while (0..holders)
            .filter(|id| quota.take(endpoint(*id), 1))
            .count()
            > 0
        {}
        quota
    }

    #[test]
    fn an_endpoint_that_is_alone_gets_half() {
        for limit in [1, 2, 8, 4096, 65_536] {
            let quota = all_greedy(limit, 1);
            assert_eq!(quota.held_by(endpoint(0)), limit.div_ceil(2), "{limit}");
        }
        assert!(!Quota::new(0).take(endpoint(0), 1));
    }

    #[test]
    fn greedy_endpoints_get_equal_shares_and_leave_a_quarter_or_a_share_free() {
        for holders in [1, 2, 3, 10, 110] {
            let limit = 4096;
            let mut quota = all_greedy(limit, holders);
            let others = usize::from(holders);
            let share = (limit / (others + 1)).min(limit * 3 / 4 / others);
            for id in 0..holders {
                let held = quota.held_by(endpoint(id));
                assert!(held.abs_diff(share) <= 1, "{holders} holders: {held}");
            }
            assert!(quota.take(endpoint(holders), 1), "the next finds a place");
        }
    }

    #[test]
    fn an_endpoint_that_takes_all_it_can_first_does_not_keep_others_out() {
        let mut quota = Quota::new(4096);
        while quota.take(endpoint(1), 1) {}
        let one_query_each = (2..1000).all(|id| quota.take(endpoint(id), 1));
        assert!(one_query_each);
    }

    #[test]
    fn endpoints_that_fill_up_one_after_another_leave_some_for_each_of_256() {
        for (limit, least) in [(4096, 4), (65_536, 64), (1024, 1), (600, 1)] {
            let mut quota = Quota::new(limit);
            let shares: Vec<usize> = (0..120)
                .map(|id| {
                    while quota.take(endpoint(id), 1) {}
                    quota.held_by(endpoint(id))
                })
                .collect();
            assert_eq!(shares[..2], [limit / 2, limit / 4], "{limit}");
            assert!(shares[2..].iter().all(|share| *share == least), "{limit}");
        }
        let mut quota = Quota::new(4096);
        let all_have_some = (0..258).all(|id| {
            while quota.take(endpoint(id), 1) {}
            quota.held_by(endpoint(id)) >= 4
        });
        assert!(all_have_some);
        assert_eq!(quota.used(), 4096);
    }

    #[test]
    fn the_share_of_a_number_that_is_used_again_starts_empty() {
        let instance = |ifindex| EndpointInstance {
            id: EndpointId(7),
            client: IpAddr::from([10, 0, 0, 7]),
            ifindex,
        };
        let (before, after) = (Holder::from(instance(3)), Holder::from(instance(4)));
        let mut quota = Quota::new(8);
        while quota.take(before, 1) {}
        assert_eq!(quota.held_by(after), 0);
        assert!(quota.take(after, 1));
        assert_eq!(quota.remove(before), 4);
        assert_eq!(quota.used(), 1);
    }

    #[test]
    fn all_addresses_of_a_pod_count_together() {
        let under = |client: IpAddr| {
            Holder::from(EndpointInstance {
                id: EndpointId(7),
                client,
                ifindex: 3,
            })
        };
        assert_eq!(
            under([10, 0, 0, 7].into()),
            under("fd00::7".parse().unwrap())
        );
    }

    #[test]
    fn a_lower_limit_takes_nothing_away() {
        let mut quota = Quota::new(8);
        assert!(quota.take(endpoint(1), 4));
        quota.set_limit(2);
        assert!(!quota.allows(endpoint(2), 1));
        quota.give_back(endpoint(1), 3);
        assert!(quota.take(endpoint(2), 1));
    }

    #[test]
    fn the_largest_holder_is_found() {
        let mut quota = Quota::new(100);
        assert_eq!(quota.largest(), None);
        quota.add(endpoint(1), 60);
        quota.add(endpoint(2), 70);
        assert_eq!(quota.largest(), Some((endpoint(2), 70)));
        quota.give_back(endpoint(2), 80);
        assert_eq!((quota.held_by(endpoint(2)), quota.used()), (0, 60));
        assert_eq!(quota.largest(), Some((endpoint(1), 60)));
        quota.clear();
        assert_eq!((quota.used(), quota.largest()), (0, None));
    }

    proptest! {
        /// Taking several units at once is the same as taking them one by one, or nothing.
        #[test]
        fn the_rule_holds_for_any_order_of_events(
            limit in 0_usize..200,
            events in prop::collection::vec((0_u16..6, 0_usize..40, any::<bool>()), 0..80),
        ) {
            let mut quota = Quota::new(limit);
            let mut model = [0_usize; 6];
            for (id, units, gives_back) in events {
                let own = usize::from(id);
                if gives_back {
                    model[own] = model[own].saturating_sub(units);
                    quota.give_back(endpoint(id), units);
                } else {
                    let mut after = model;
                    let one_by_one = (0..units).all(|_| {
                        let free = limit - after.iter().sum::<usize>();
                        let allowed = after[own] < free
                            && (free > limit / 4 || after[own] == 0);
                        after[own] += usize::from(allowed);
                        allowed
                    });
                    prop_assert_eq!(quota.take(endpoint(id), units), one_by_one);
                    if one_by_one {
                        model = after;
                    }
                }
                prop_assert_eq!(quota.used(), model.iter().sum::<usize>());
                prop_assert_eq!(quota.held_by(endpoint(id)), model[own]);
                prop_assert!(quota.used() <= limit);
                let most = model.iter().max().copied().filter(|most| *most > 0);
                prop_assert_eq!(quota.largest().map(|(_, held)| held), most);
            }
        }
    }
}
