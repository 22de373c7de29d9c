//! Scans the conntrack maps: finds live connections, counts those of each endpoint, and removes
//! expired entries and entries of endpoints that are gone.
//!
//! The kernel evicts the least recently used entry from a full map, which may be a live
//! connection. So each scan removes expired entries, and no map fills with them.

use std::{
    collections::{HashMap, HashSet},
    hash::Hash,
    net::IpAddr,
};

use shared_maps::{
    conntrack::{
        CtKey, CtValue, DIR_IN, FLAG_ANSWERED, FLAG_RX_CLOSING, FLAG_TX_CLOSING, NAME_ANY4,
        NAME_ANY6, NAME_TCP4, NAME_TCP6, REFUSED, RELATED, SERVICE,
    },
    lxc::{self, FLAG_HOST, LxcKey, LxcValue},
    quota::{self, held_index, held_map},
    user::{Access, Globals, Map, MapError, MapKind, Record, lxc_address},
};

/// Flags of a connection that both sides have closed.
const CLOSED: u16 = FLAG_RX_CLOSING | FLAG_TX_CLOSING;

/// An address of either family, in a key.
trait Address: Copy + Eq + Hash + Into<IpAddr> {}

impl<A: Copy + Eq + Hash + Into<IpAddr>> Address for A {}

/// (endpoint, remote). `daddr` sent the first packet and `saddr` received it.
fn sides<A: Address>(key: &CtKey<A>) -> (IpAddr, IpAddr) {
    let (daddr, saddr) = (key.daddr, key.saddr);
    if key.flags & DIR_IN == 0 {
        (daddr.into(), saddr.into())
    } else {
        (saddr.into(), daddr.into())
    }
}

/// The result of a scan.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// (endpoint, remote) of live connections that leave an endpoint; sorted, without duplicates.
    pub alive: Vec<(IpAddr, IpAddr)>,
    /// Whether every map was read to its end.
    pub complete: bool,
}

/// Scans all maps at `now`, in seconds of CLOCK_MONOTONIC, and removes expired entries. The
/// numbers of connections found for each endpoint count for `valid` seconds.
pub fn scan(maps: &Globals, now: u32, valid: u32) -> Found {
    let mut scan = match Scan::begin(maps, now) {
        Ok(scan) => scan,
        Err(error) => {
            unread(&error);
            return Found::default();
        }
    };
    let reads = [
        scan.through::<[u8; 4]>(NAME_TCP4, held_map(true, false)),
        scan.through::<[u8; 4]>(NAME_ANY4, held_map(false, false)),
        scan.through::<[u8; 16]>(NAME_TCP6, held_map(true, true)),
        scan.through::<[u8; 16]>(NAME_ANY6, held_map(false, true)),
    ];
    let mut complete = true;
    for read in reads {
        complete &= read.unwrap_or_else(|error| {
            unread(&error);
            false
        });
    }
    if complete
        && let Err(error) = scan
            .counts
            .set(&quota::HELD_UNTIL, &now.saturating_add(valid))
    {
        tracing::warn!(%error, "cannot write the connection quotas; endpoints have no quota until that succeeds");
    }
    let mut alive = scan.alive;
    alive.sort_unstable();
    alive.dedup();
    Found { alive, complete }
}

fn unread(error: &MapError) {
    tracing::warn!(%error, "cannot read the conntrack maps; expired addresses stay open until that succeeds");
}

struct Scan<'a> {
    maps: &'a Globals,
    now: u32,
    endpoints: Addresses,
    counts: Map<u32, u32>,
    alive: Vec<(IpAddr, IpAddr)>,
}

impl<'a> Scan<'a> {
    fn begin(maps: &'a Globals, now: u32) -> Result<Self, MapError> {
        let endpoints = Addresses::read(maps)?;
        let counts = maps.path(quota::HELD_NAME);
        Ok(Self {
            maps,
            now,
            endpoints,
            counts: Map::open(&counts, MapKind::Array, Access::ReadWrite)?,
            alive: Vec::new(),
        })
    }

    /// Scans one map. Returns whether it was read to its end.
    fn through<A: Address>(&mut self, name: &str, number: u32) -> Result<bool, MapError>
    where
        CtKey<A>: Record,
    {
        let path = self.maps.path(name);
        let map: Map<CtKey<A>, CtValue> = Map::open(&path, MapKind::LruHash, Access::ReadWrite)?;
        let entries = map.entries()?;
        let ids = self.endpoints.ids.iter();
        let mut held: HashMap<u16, u32> = ids.map(|endpoint| (*endpoint, 0)).collect();
        let mut used = 0;
        let mut left = Vec::new();
        for (key, value) in &entries.found {
            // As in the programs, an entry lives to the end of its last second.
            if value.lifetime < self.now {
                // The entry may be in use again meanwhile.
                if map.get(key)?.is_some_and(|value| value.lifetime < self.now) {
                    map.remove(key)?;
                }
                continue;
            }
            used += 1;
            let (endpoint, remote) = sides(key);
            if self.endpoints.have_lost(endpoint, value) {
                left.push(*key);
                continue;
            }
            // A flow that policy refuses must not keep an expired address allowed.
            let refused = value.last_rx_report != 0 && value.last_tx_report == REFUSED;
            if !refused && key.flags & (DIR_IN | RELATED | SERVICE) == 0 {
                self.alive.push((endpoint, remote));
            }
            let answered = value.flags & FLAG_ANSWERED != 0 && value.flags & CLOSED != CLOSED;
            if answered
                && let Some(endpoint) = self.endpoints.of.get(&endpoint)
                && let Some(held) = held.get_mut(endpoint)
            {
                *held += 1;
            }
        }
        self.remove_left(&map, &left)?;
        for (endpoint, held) in held {
            self.counts.set(&held_index(endpoint, number), &held)?;
        }
        let free = map.max_entries().saturating_sub(used);
        self.counts.set(&held_index(0, number), &free)?;
        Ok(entries.complete)
    }

    /// Removes entries that belong to no endpoint. An endpoint may have been added during the walk.
    fn remove_left<A: Address>(
        &mut self,
        map: &Map<CtKey<A>, CtValue>,
        left: &[CtKey<A>],
    ) -> Result<(), MapError>
    where
        CtKey<A>: Record,
    {
        if left.is_empty() {
            return Ok(());
        }
        self.endpoints = Addresses::read(self.maps)?;
        for key in left {
            let value = map.get(key)?;
            if value.is_some_and(|value| self.endpoints.have_lost(sides(key).0, &value)) {
                map.remove(key)?;
            }
        }
        Ok(())
    }
}

/// The endpoints of this node, from the table that the programs read.
#[derive(Default)]
struct Addresses {
    of: HashMap<IpAddr, u16>,
    ids: HashSet<u16>,
}

impl Addresses {
    fn read(maps: &Globals) -> Result<Self, MapError> {
        let lxc: Map<LxcKey, LxcValue> =
            Map::open(&maps.path(lxc::NAME), MapKind::Hash, Access::ReadOnly)?;
        let mut found = Self::default();
        for (key, value) in lxc.entries()?.found {
            if value.flags & FLAG_HOST == 0 {
                found
                    .of
                    .extend(lxc_address(&key).map(|ip| (ip, value.lxc_id)));
                found.ids.insert(value.lxc_id);
            }
        }
        Ok(found)
    }

    /// Whether the connection belongs to an endpoint that is gone, or that no longer has the
    /// address. Link-local addresses are in no table.
    /// If the table has no endpoint, nothing counts as lost: it may be another table.
    fn have_lost(&self, endpoint: IpAddr, value: &CtValue) -> bool {
        if self.ids.is_empty() {
            return false;
        }
        let is_owner = |id: &u16| value.last_rx_report == u32::from(*id);
        match endpoint {
            IpAddr::V6(ip) if ip.is_unicast_link_local() => !self.ids.iter().any(is_owner),
            _ => !self.of.get(&endpoint).is_some_and(is_owner),
        }
    }
}

#[cfg(test)]
mod tests {
    use shared_maps::conntrack::{CtKey4, DIR_OUT};

    use super::*;

    #[test]
    fn the_endpoint_is_on_the_side_of_the_direction() {
        let mut key = CtKey4 {
            daddr: [10, 0, 0, 1],
            saddr: [192, 0, 2, 1],
            flags: DIR_OUT,
            ..CtKey4::default()
        };
        let (pod, remote) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([192, 0, 2, 1]));
        assert_eq!(sides(&key), (pod, remote));
        key.flags = DIR_IN;
        assert_eq!(sides(&key), (remote, pod));
    }

    #[test]
    fn a_connection_is_lost_if_its_endpoint_has_the_address_no_longer() {
        let pod = IpAddr::from([10, 0, 0, 1]);
        let near: IpAddr = "fe80::a".parse().unwrap();
        let endpoints = Addresses {
            of: HashMap::from([(pod, 7)]),
            ids: HashSet::from([7]),
        };
        // Address, owner, whether it is lost.
        let rows = [
            (pod, 7, false),
            (pod, 8, true),
            (IpAddr::from([10, 0, 0, 2]), 7, true),
            (near, 7, false),
            (near, 8, true),
        ];
        for (address, owner, lost) in rows {
            let value = CtValue {
                last_rx_report: owner,
                ..CtValue::default()
            };
            assert_eq!(
                endpoints.have_lost(address, &value),
                lost,
                "{address} {owner}"
            );
        }
    }
}
