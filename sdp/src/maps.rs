//! Looks up endpoints of clients and identities of servers in the pinned maps.
//!
//! Every look-up reads the map, so only the handle can be stale. [`PinnedMaps::refresh`], which the
//! composition root calls every [`REFRESH`], finds a pin that was replaced, added or removed.
//! Without maps, the tables that a Cilium agent sends are used. For a while, entries that a new map
//! or table lacks are read from the previous one: see `previous`.

pub(crate) mod instances;
mod ipcache;
pub(crate) mod previous;
mod tables;

use std::{
    net::IpAddr,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use arc_swap::{ArcSwap, ArcSwapOption};
use ipnet::IpNet;
use parking_lot::Mutex;
use shared_maps::{
    EndpointId, FAMILY_IPV4, FAMILY_IPV6, IdentityId,
    ipcache::IpcacheKey,
    lxc::{FLAG_HOST, LxcKey, LxcValue},
    user::{Access, Globals, Map, MapError, ipcache_key, lxc_address, lxc_key},
};

pub use self::tables::AgentTables;
use self::{
    instances::{Instance, Instances},
    ipcache::Ipcache,
    previous::{PreviousTables, Settling},
    tables::full_length,
};
use crate::resolve::{QueryClient, Resolver};

/// Interval of the refresh. A stale handle is used for at most twice this time.
pub const REFRESH: Duration = Duration::from_millis(400);

/// Number of refreshes in a row for which a pin may be missing before its handle is dropped: the
/// pin may be about to be replaced.
const MISSES: u8 = 2;

/// A map that is being filled is read completely again after this many times the duration of the
/// last complete read.
const READ_SHARE: u32 = 10;

/// The pinned maps, opened again when their pins change.
#[derive(Debug)]
pub struct PinnedMaps {
    globals: Globals,
    dual_stack: bool,
    open: ArcSwap<Open>,
    refreshing: Mutex<Refreshing>,
    tables: ArcSwapOption<AgentTables>,
    /// Entries of the previous map or table that the present one lacks.
    previous: ArcSwapOption<PreviousTables>,
}

#[derive(Debug, Default)]
struct Refreshing {
    settling: Settling,
    /// Time at which the present map is read completely again, to find the entries that it still
    /// lacks.
    read_again: Option<Instant>,
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

/// State of the maps, for `status`.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct MapsStatus {
    /// Path of the BPF root, `/sys/fs/bpf` by default.
    pub root: String,
    /// Why `cilium_lxc` cannot be read; `None` if it can be.
    pub lxc_problem: Option<String>,
    /// Which of the two ipcache maps is read.
    pub ipcache: Option<String>,
    /// Why the ipcache cannot be read; `None` if it can be.
    pub ipcache_problem: Option<String>,
    /// Whether a Cilium agent's tables are used where a map is missing.
    pub agent_tables: bool,
    /// Number of entries that the present map or table lacks, and for which the previous one is
    /// used.
    pub former_entries: usize,
}

/// Whether a refresh changed the maps that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Same,
    /// A map was opened, re-opened or dropped.
    Reopened,
}

impl PinnedMaps {
    /// Opens the maps that are pinned under the BPF root `root`.
    ///
    /// `dual_stack`: whether the node has both families, which decides the number of the identity
    /// "world".
    pub fn open(root: &Path, dual_stack: bool) -> Self {
        let maps = Self {
            globals: Globals::new(root),
            dual_stack,
            open: ArcSwap::default(),
            refreshing: Mutex::default(),
            tables: ArcSwapOption::empty(),
            previous: ArcSwapOption::empty(),
        };
        maps.refresh();
        maps
    }

    /// Opens pins that are new or were replaced, and closes maps whose pins were removed.
    pub fn refresh(&self) -> Change {
        self.refresh_at(Instant::now())
    }

    fn refresh_at(&self, at: Instant) -> Change {
        let mut refreshing = self.refreshing.lock();
        let before = self.open.load();
        let mut now = Open::clone(&before);
        now.lxc.reopen(self.globals.lxc(Access::ReadOnly), Map::id);
        now.ipcache
            .reopen(Ipcache::open(&self.globals), Ipcache::id);
        let same_ipcache = same_map(&before.ipcache, &now.ipcache);
        let same = same_map(&before.lxc, &now.lxc) && same_ipcache;
        if !same_ipcache {
            // This comes before the use of the new map, because a query must find one of the two.
            self.keep_former_prefixes(&before.ipcache, &mut refreshing);
        }
        self.open.store(Arc::new(now));
        self.release_former(&mut refreshing, at);
        if same { Change::Same } else { Change::Reopened }
    }

    /// Keeps the prefixes of the map `gone`, which is no longer read; without a map, the prefixes
    /// of the tables.
    fn keep_former_prefixes(&self, gone: &Pin<Ipcache>, refreshing: &mut Refreshing) {
        let known = match gone.map.as_deref() {
            Some(map) => map.read_whole().inspect_err(|error| {
                tracing::warn!(%error, "cannot read the replaced map; its entries are lost");
            }),
            // The map of a ready agent also has the entries of its tables.
            None if refreshing.settling.is_ready() => return,
            None => Ok(self.tables.load().as_deref().cloned().unwrap_or_default()),
        };
        let mut previous = self.previous.load().as_deref().cloned().unwrap_or_default();
        previous.absorb_prefixes(&known.unwrap_or_default());
        self.keep(previous);
        refreshing.settling.begin();
        refreshing.read_again = None;
    }

    fn keep(&self, previous: PreviousTables) {
        let previous = (!previous.is_empty()).then(|| Arc::new(previous));
        self.previous.store(previous);
    }

    /// Removes previous entries that the present source contradicts. When the agent has settled,
    /// removes all of them.
    fn release_former(&self, refreshing: &mut Refreshing, at: Instant) {
        let Some(previous) = self.previous.load_full() else {
            return;
        };
        if refreshing.settling.is_over(at) {
            tracing::info!(
                entries = previous.lacking(),
                "the agent is ready; entries of its previous run that it did not repeat are removed"
            );
            self.previous.store(None);
            return;
        }
        let open = self.open.load();
        let Some(map) = open.ipcache.map.as_deref() else {
            return;
        };
        if previous.lacking() == 0 || refreshing.read_again.is_some_and(|due| at < due) {
            return;
        }
        let began = Instant::now();
        // A map that cannot be read is read again later. Until then both maps are used.
        if let Ok(now) = map.read_whole() {
            let mut left = PreviousTables::clone(&previous);
            left.compare(&now);
            if left.lacking() != previous.lacking() {
                self.keep(left);
            }
        }
        refreshing.read_again = Some(at + READ_SHARE * began.elapsed());
    }

    /// Replaces the tables that are used where a map is missing.
    pub fn set_agent_tables(&self, tables: AgentTables) {
        let _one_at_a_time = self.refreshing.lock();
        if let Some(previous) = self.previous.load_full()
            && self.open.load().ipcache.map.is_none()
        {
            let mut left = PreviousTables::clone(&previous);
            left.compare(&tables);
            self.tables.store(Some(Arc::new(tables)));
            self.keep(left);
        } else {
            self.tables.store(Some(Arc::new(tables)));
        }
    }

    /// Takes prefixes from before this process started. They are used where the present map or
    /// table has none.
    pub fn add_former(&self, prefixes: impl IntoIterator<Item = (IpNet, IdentityId)>) {
        let mut refreshing = self.refreshing.lock();
        let mut tables = AgentTables::default();
        for (prefix, identity) in prefixes {
            tables.add_prefix(prefix, identity);
        }
        let mut previous = self.previous.load().as_deref().cloned().unwrap_or_default();
        previous.absorb_prefixes(&tables);
        self.keep(previous);
        refreshing.settling.begin();
        refreshing.read_again = None;
    }

    /// Notes that another agent is about to send tables. If tables are in use, their entries are
    /// kept as previous entries.
    pub fn begin_agent_session(&self) {
        let mut refreshing = self.refreshing.lock();
        let Some(tables) = self.tables.load_full() else {
            return;
        };
        let open = self.open.load();
        let mut previous = self.previous.load().as_deref().cloned().unwrap_or_default();
        if open.ipcache.map.is_none() {
            previous.absorb_prefixes(&tables);
        }
        if open.lxc.map.is_none() {
            previous.absorb_endpoints(&tables);
        }
        self.keep(previous);
        refreshing.settling.begin();
    }

    /// Notes whether an agent that has sent rules is connected: it will soon have sent all its
    /// tables.
    pub fn set_agent_ready(&self, ready: bool) {
        self.refreshing.lock().settling.set_ready(ready);
    }

    /// The endpoints of the node; `None` if neither a map nor a table has them.
    pub fn instances(&self) -> Option<Instances> {
        let _one_at_a_time = self.refreshing.lock();
        let mut instances = Instances::new();
        let open = self.open.load();
        if let Some(map) = open.lxc.map.as_deref() {
            let entries = map.entries().ok().filter(|entries| entries.complete)?;
            for (key, value) in entries.found {
                if value.flags & FLAG_HOST == 0
                    && let Some(ip) = lxc_address(&key)
                {
                    let new = || Instance::new(value.ifindex, IdentityId(value.sec_id));
                    let instance = instances
                        .entry(EndpointId(value.lxc_id))
                        .or_insert_with(new);
                    instance.addresses.insert(ip);
                }
            }
            return Some(instances);
        }
        let tables = self.tables.load();
        let tables = tables.as_deref()?;
        tables.instances(&mut instances);
        if let Some(previous) = self.previous.load().as_deref() {
            previous.instances(&mut instances);
        }
        Some(instances)
    }

    /// Why clients cannot be distinguished; `None` if they can be.
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

    pub fn status(&self) -> MapsStatus {
        let open = self.open.load();
        MapsStatus {
            root: self.globals.root().display().to_string(),
            lxc_problem: open.lxc.problem.clone(),
            ipcache: open.ipcache.map.as_deref().map(|map| map.name().to_owned()),
            ipcache_problem: open.ipcache.problem.clone(),
            agent_tables: self.tables.load().is_some(),
            former_entries: self
                .previous
                .load()
                .as_deref()
                .map_or(0, |previous| previous.lacking()),
        }
    }

    /// The entry of an address in `cilium_lxc`; `None` also if the map is missing.
    pub fn lxc_entry(&self, ip: IpAddr) -> Option<LxcValue> {
        let open = self.open.load();
        let map = open.lxc.map.as_deref()?;
        match map.get(&lxc_key(ip)) {
            Ok(entry) => entry,
            Err(error) => {
                tracing::debug!(%error, "cannot look up an address in a map");
                None
            }
        }
    }

    pub fn has_lxc(&self) -> bool {
        self.open.load().lxc.map.is_some()
    }
}

impl Resolver for PinnedMaps {
    fn client(&self, client: IpAddr) -> QueryClient {
        match self.lxc_entry(client) {
            Some(entry) if entry.flags & FLAG_HOST != 0 => QueryClient::Host,
            Some(entry) => QueryClient::Endpoint {
                id: EndpointId(entry.lxc_id),
                identity: IdentityId(entry.sec_id),
                ifindex: entry.ifindex,
            },
            None if self.has_lxc() => QueryClient::Unknown,
            None => {
                let previous = self.previous.load();
                let tables = self.tables.load();
                match tables
                    .as_deref()
                    .map_or(QueryClient::Unknown, |t| t.client(client))
                {
                    QueryClient::Unknown => previous
                        .as_deref()
                        .map_or(QueryClient::Unknown, |f| f.client(client)),
                    found => found,
                }
            }
        }
    }

    fn server(&self, server: IpAddr) -> IdentityId {
        // The order matters: a replaced map's entries are kept before the new map is used, and
        // removed last.
        let open = self.open.load();
        let previous = self.previous.load();
        let tables = self.tables.load();
        let now = |limit: u8| match open.ipcache.map.as_deref() {
            Some(map) => map.identity(&masked_key(server, limit)),
            None => tables.as_deref().and_then(|t| t.server(server, limit)),
        };
        let found = match previous.as_deref() {
            Some(previous) => previous.server(server, now),
            None => now(full_length(server)),
        };
        let family = if server.is_ipv4() {
            FAMILY_IPV4
        } else {
            FAMILY_IPV6
        };
        found.unwrap_or_else(|| IdentityId::world_of(family, self.dual_stack))
    }
}

/// Key of the first `length` bits of `ip`.
fn masked_key(ip: IpAddr, length: u8) -> IpcacheKey {
    let masked = IpNet::new(ip, length).map_or(ip, |prefix| prefix.trunc().addr());
    ipcache_key(masked, length)
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
    fn reopen(&mut self, opened: Result<M, MapError>, id: impl Fn(&M) -> u32) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_pins_every_client_is_unknown_and_the_reason_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let maps = PinnedMaps::open(dir.path(), true);
        let client = IpAddr::from([10, 0, 0, 1]);
        assert!(matches!(maps.client(client), QueryClient::Unknown));
        assert_eq!(maps.server(client), IdentityId::WORLD_IPV4);
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
        maps.set_agent_tables(tables);
        assert!(matches!(
            maps.client(client),
            QueryClient::Endpoint {
                id: EndpointId(7),
                ..
            }
        ));
        assert_eq!(maps.server(IpAddr::from([10, 1, 1, 1])), IdentityId(400));
        assert_eq!(maps.server(IpAddr::from([10, 9, 1, 1])), IdentityId(500));
        assert_eq!(maps.server(IpAddr::from([11, 9, 1, 1])), IdentityId::WORLD);
        assert_eq!(maps.server(client), IdentityId(300), "a pod that serves");
        assert_eq!(maps.problem(), None);
    }
}
