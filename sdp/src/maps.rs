//! Who asks and whom: endpoints and identities from the pinned maps.
//!
//! Every look-up reads the map, so there is nothing that could be stale but
//! the handle itself: a pin that was replaced, appeared or went is noticed by
//! [`PinnedMaps::refresh`], which the composition root calls every
//! [`REFRESH`]. Without maps the tables that a Cilium agent sends serve in
//! their place.

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
    path::Path,
    sync::Arc,
    time::Duration,
};

use arc_swap::{ArcSwap, ArcSwapOption};
use ipnet::IpNet;
use parking_lot::Mutex;
use shared_maps::{
    EndpointId, FAMILY_IPV4, FAMILY_IPV6, IdentityId, ipcache,
    ipcache::{IpcacheKey, IpcacheValue, IpcacheValueV1},
    lxc::{FLAG_HOST, LxcKey, LxcValue},
    user::{Access, Globals, Map, MapError, ipcache_key, lxc_key},
};

use crate::resolve::{Resolver, Who};

/// How often the pins are looked at: a stale handle serves at most twice as long.
pub const REFRESH: Duration = Duration::from_millis(400);

/// A pin may be away this many looks in a row (it is being replaced) before its handle is dropped.
const MISSES: u8 = 2;

/// The pinned maps, re-opened as they come and go.
#[derive(Debug)]
pub struct PinnedMaps {
    globals: Globals,
    dual_stack: bool,
    open: ArcSwap<Open>,
    refreshing: Mutex<()>,
    tables: ArcSwapOption<AgentTables>,
}

#[derive(Clone, Debug, Default)]
struct Open {
    lxc: Pin<Map<LxcKey, LxcValue>>,
    ipcache: Pin<Ipcache>,
}

#[derive(Debug)]
struct Pin<M> {
    map: Option<Arc<M>>,
    problem: Option<String>,
    misses: u8,
}

#[derive(Debug)]
enum Ipcache {
    V2(Map<IpcacheKey, IpcacheValue>),
    V1(Map<IpcacheKey, IpcacheValueV1>),
}

/// How the maps are, for people.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct MapsStatus {
    /// Below which BPF root.
    pub root: String,
    /// Why `cilium_lxc` cannot be read, if so.
    pub lxc_problem: Option<String>,
    /// Which of the two ipcache maps is read.
    pub ipcache: Option<String>,
    /// Why the ipcache cannot be read, if so.
    pub ipcache_problem: Option<String>,
    /// Whether a Cilium agent's tables serve where a map is missing.
    pub agent_tables: bool,
}

/// What one look at the pins found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// As before.
    Same,
    /// A map was opened, re-opened or dropped.
    Reopened,
}

impl PinnedMaps {
    /// Of the BPF root `root`; what is pinned there already is opened.
    ///
    /// `dual_stack`: whether the node has both families, which decides the
    /// number of "world".
    pub fn open(root: &Path, dual_stack: bool) -> Self {
        let maps = Self {
            globals: Globals::new(root),
            dual_stack,
            open: ArcSwap::default(),
            refreshing: Mutex::new(()),
            tables: ArcSwapOption::empty(),
        };
        maps.refresh();
        maps
    }

    /// Looks at the pins again.
    pub fn refresh(&self) -> Change {
        let _one_at_a_time = self.refreshing.lock();
        let before = self.open.load();
        let mut now = Open::clone(&before);
        now.lxc.look(self.globals.lxc(Access::ReadOnly), Map::id);
        now.ipcache.look(self.open_ipcache(), Ipcache::id);
        let same = same_map(&before.lxc, &now.lxc) && same_map(&before.ipcache, &now.ipcache);
        self.open.store(Arc::new(now));
        if same { Change::Same } else { Change::Reopened }
    }

    fn open_ipcache(&self) -> Result<Ipcache, MapError> {
        match self.globals.ipcache(Access::ReadOnly) {
            Err(MapError::NotPinned(path)) => match self.globals.ipcache_v1(Access::ReadOnly) {
                Ok(map) => Ok(Ipcache::V1(map)),
                Err(MapError::NotPinned(_)) => Err(MapError::NotPinned(path)),
                Err(error) => Err(error),
            },
            other => other.map(Ipcache::V2),
        }
    }

    /// Replaces the tables that serve where a map is missing.
    pub fn set_agent_tables(&self, tables: Option<AgentTables>) {
        self.tables.store(tables.map(Arc::new));
    }

    /// Why clients cannot be told apart, if so.
    pub fn problem(&self) -> Option<String> {
        let open = self.open.load();
        if open.lxc.map.is_some() || self.tables.load().is_some() {
            return None;
        }
        Some(
            open.lxc
                .problem
                .clone()
                .unwrap_or_else(|| "cilium_lxc is not open".into()),
        )
    }

    /// How the maps are.
    pub fn status(&self) -> MapsStatus {
        let open = self.open.load();
        MapsStatus {
            root: self.globals.root().display().to_string(),
            lxc_problem: open.lxc.problem.clone(),
            ipcache: open.ipcache.map.as_deref().map(|map| map.name().to_owned()),
            ipcache_problem: open.ipcache.problem.clone(),
            agent_tables: self.tables.load().is_some(),
        }
    }

    /// The entry of an address in `cilium_lxc`; `None` too where the map is missing.
    pub fn lxc_entry(&self, ip: IpAddr) -> Option<LxcValue> {
        let open = self.open.load();
        let map = open.lxc.map.as_deref()?;
        match map.get(&lxc_key(ip)) {
            Ok(entry) => entry,
            Err(error) => {
                tracing::debug!(%error, "look-up failed");
                None
            }
        }
    }

    /// Whether `cilium_lxc` is open.
    pub fn has_lxc(&self) -> bool {
        self.open.load().lxc.map.is_some()
    }
}

impl Resolver for PinnedMaps {
    fn who(&self, client: IpAddr) -> Who {
        match self.lxc_entry(client) {
            Some(entry) if entry.flags & FLAG_HOST != 0 => Who::Host,
            Some(entry) => Who::Endpoint {
                id: EndpointId(entry.lxc_id),
                identity: IdentityId(entry.sec_id),
                ifindex: entry.ifindex,
            },
            None if self.has_lxc() => Who::Unknown,
            None => self
                .tables
                .load()
                .as_deref()
                .map_or(Who::Unknown, |t| t.who(client)),
        }
    }

    fn whom(&self, server: IpAddr) -> IdentityId {
        let full = if server.is_ipv4() { 32 } else { 128 };
        let open = self.open.load();
        let found = match open.ipcache.map.as_deref() {
            Some(map) => map.identity(&ipcache_key(server, full)),
            None => self
                .tables
                .load()
                .as_deref()
                .and_then(|tables| tables.whom(server)),
        };
        let family = if server.is_ipv4() {
            FAMILY_IPV4
        } else {
            FAMILY_IPV6
        };
        found.unwrap_or_else(|| IdentityId::world_of(family, self.dual_stack))
    }
}

impl<M> Default for Pin<M> {
    fn default() -> Self {
        Self {
            map: None,
            problem: None,
            misses: 0,
        }
    }
}

impl<M> Clone for Pin<M> {
    fn clone(&self) -> Self {
        Self {
            map: self.map.clone(),
            problem: self.problem.clone(),
            misses: self.misses,
        }
    }
}

impl<M> Pin<M> {
    fn look(&mut self, opened: Result<M, MapError>, id: impl Fn(&M) -> u32) {
        match opened {
            Ok(map) => {
                if self.map.as_deref().map(&id) != Some(id(&map)) {
                    self.map = Some(Arc::new(map));
                }
                self.problem = None;
                self.misses = 0;
            }
            Err(error) => {
                self.problem = Some(error.to_string());
                self.misses = self.misses.saturating_add(1);
                if self.misses >= MISSES {
                    self.map = None;
                }
            }
        }
    }
}

fn same_map<M>(a: &Pin<M>, b: &Pin<M>) -> bool {
    match (&a.map, &b.map) {
        (Some(a), Some(b)) => Arc::ptr_eq(a, b),
        (None, None) => true,
        _ => false,
    }
}

impl Ipcache {
    fn id(&self) -> u32 {
        match self {
            Self::V2(map) => map.id(),
            Self::V1(map) => map.id(),
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::V2(_) => ipcache::NAME,
            Self::V1(_) => ipcache::NAME_V1,
        }
    }

    fn identity(&self, key: &IpcacheKey) -> Option<IdentityId> {
        let found = match self {
            Self::V2(map) => map.get(key).map(|found| found.map(|v| v.sec_identity)),
            Self::V1(map) => map.get(key).map(|found| found.map(|v| v.sec_identity)),
        };
        found
            .inspect_err(|error| tracing::debug!(%error, "look-up failed"))
            .ok()
            .flatten()
            .map(IdentityId)
    }
}

/// Endpoints and prefixes as a Cilium agent sent them over FQDNData.
#[derive(Debug, Default)]
pub struct AgentTables {
    endpoints: HashMap<IpAddr, (EndpointId, IdentityId)>,
    prefixes: HashMap<IpNet, IdentityId>,
    lengths: BTreeSet<u8>,
}

impl AgentTables {
    /// Adds an address of a local endpoint.
    pub fn add_endpoint(&mut self, ip: IpAddr, id: EndpointId, identity: IdentityId) {
        self.endpoints.insert(ip, (id, identity));
    }

    /// Adds a prefix; host bits are cleared.
    pub fn add_prefix(&mut self, prefix: IpNet, identity: IdentityId) {
        self.lengths.insert(prefix.prefix_len());
        self.prefixes.insert(prefix.trunc(), identity);
    }

    fn who(&self, client: IpAddr) -> Who {
        match self.endpoints.get(&client) {
            Some((id, identity)) => Who::Endpoint {
                id: *id,
                identity: *identity,
                ifindex: 0,
            },
            None => Who::Unknown,
        }
    }

    /// A local endpoint is whom it is said to be, whatever prefix covers it.
    fn whom(&self, server: IpAddr) -> Option<IdentityId> {
        if let Some((_, identity)) = self.endpoints.get(&server) {
            return Some(*identity);
        }
        self.lengths.iter().rev().find_map(|len| {
            let prefix = IpNet::new(server, *len).ok()?.trunc();
            self.prefixes.get(&prefix).copied()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_pins_everyone_is_unknown_and_the_reason_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let maps = PinnedMaps::open(dir.path(), true);
        let client = IpAddr::from([10, 0, 0, 1]);
        assert!(matches!(maps.who(client), Who::Unknown));
        assert_eq!(maps.whom(client), IdentityId::WORLD_IPV4);
        let problem = maps.problem().unwrap();
        assert!(problem.contains("cilium_lxc"), "{problem}");
        assert_eq!(maps.refresh(), Change::Same);
    }

    #[test]
    fn an_agents_tables_serve_in_place_of_missing_maps() {
        let dir = tempfile::tempdir().unwrap();
        let maps = PinnedMaps::open(dir.path(), false);
        let client = IpAddr::from([10, 0, 0, 1]);
        let mut tables = AgentTables::default();
        tables.add_endpoint(client, EndpointId(7), IdentityId(300));
        tables.add_prefix("10.0.0.9/8".parse().unwrap(), IdentityId(400));
        tables.add_prefix("10.9.0.0/16".parse().unwrap(), IdentityId(500));
        maps.set_agent_tables(Some(tables));
        assert!(matches!(
            maps.who(client),
            Who::Endpoint {
                id: EndpointId(7),
                ..
            }
        ));
        assert_eq!(maps.whom(IpAddr::from([10, 1, 1, 1])), IdentityId(400));
        assert_eq!(maps.whom(IpAddr::from([10, 9, 1, 1])), IdentityId(500));
        assert_eq!(maps.whom(IpAddr::from([11, 9, 1, 1])), IdentityId::WORLD);
        assert_eq!(maps.whom(client), IdentityId(300), "a pod that serves");
        assert_eq!(maps.problem(), None);
    }
}
