//! The kernel as a datapath: pinned maps, programs, links.

use std::{
    collections::HashMap,
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
    time::{Duration, Instant},
};

use agent_core::datapath::{
    attachment::Attachment,
    map_query::{BATCH, MapEntries, MapQuery, ProgramFault},
    plan::{Datapath, Step, StepError, Wake},
};
use daemon::{
    command_line::values::whole,
    lookup::present,
    steering_program::{self, SteerError},
};
use shared_maps::{
    EndpointId,
    conntrack::{self, CtKey4, CtKey6, CtValue},
    event::{self, Counter},
    fragment::{self, FragmentKey, FragmentValue},
    ipcache::{self, IpcacheKey, IpcacheValue},
    lxc::{self, LxcKey, LxcValue},
    policy::{self, PolicyKey, PolicyValue},
    policystats::{self, PolicyStatsKey, PolicyStatsValue},
    quota::{self, Limit, QuotaKey},
    redirect, steering,
    user::{Access, Globals, Map, MapError, MapKind, Record, has_tcx, possible_cpus},
};

use super::{
    deny_response::DenyResponses,
    features::Found,
    hook::Attach,
    notes,
    program::{ProgramError, ProgramSettings, Programs, Quotas},
    root::{RootError, make_dirs},
    tunnel::{self, TunnelSettings},
};

/// Pause between two attempts to sweep the notes.
const SWEEP_AGAIN: Duration = Duration::from_secs(2);

/// Maps that the programs of all endpoints share. If a pin were lost, endpoints
/// attached later would not share the map with earlier ones.
pub const SHARED_PINS: [&str; 15] = [
    lxc::NAME,
    ipcache::NAME,
    conntrack::NAME_TCP4,
    conntrack::NAME_ANY4,
    conntrack::NAME_TCP6,
    conntrack::NAME_ANY6,
    policystats::NAME,
    fragment::NAME,
    event::COUNTERS_NAME,
    event::NAME,
    redirect::NAME,
    steering::SLOTS_NAME,
    steering::SOCKS_NAME,
    quota::NAME,
    quota::HELD_NAME,
];

/// Sizes of the maps, entries. The bounds of conntrack and of policy maps are Cilium's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::Args)]
pub struct MapSizes {
    /// Entries of each conntrack map for TCP (1024 to 16777216; Cilium: 524288). It applies when
    /// the map is created. Each entry uses about 160 bytes of memory from the start
    #[arg(long = "bpf-ct-global-tcp-max", value_name = "ENTRIES", default_value_t = MapSizes::default().conntrack_tcp,
          value_parser = whole(1 << 10..=1u32 << 24))]
    pub conntrack_tcp: u32,
    /// Entries of each conntrack map for other protocols (1024 to 16777216; Cilium: 262144). It
    /// applies when the map is created
    #[arg(long = "bpf-ct-global-any-max", value_name = "ENTRIES", default_value_t = MapSizes::default().conntrack_any,
          value_parser = whole(1 << 10..=1u32 << 24))]
    pub conntrack_any: u32,
    /// Entries of the ipcache (64 to 16777216), one for each prefix. It applies when the map is created
    #[arg(long = "bpf-ipcache-map-max", value_name = "ENTRIES", default_value_t = MapSizes::default().ipcache,
          value_parser = whole(64..=1u32 << 24))]
    pub ipcache: u32,
    /// Entries of cilium_lxc (2 to 65535), one for each address of an endpoint. It applies when the map is created
    #[arg(long = "bpf-lxc-map-max", value_name = "ENTRIES", default_value_t = MapSizes::default().lxc,
          value_parser = whole(2..=65535u32))]
    pub lxc: u32,
    /// Entries of each endpoint's policy map (256 to 65536). It applies when the map is created
    #[arg(long = "bpf-policy-map-max", value_name = "ENTRIES", default_value_t = MapSizes::default().policy,
          value_parser = whole(256..=65536u32))]
    pub policy: u32,
    /// Entries of the map `cilium_policystats`.
    #[arg(skip = policystats::MAX_ENTRIES)]
    pub policy_stats: u32,
}

impl Default for MapSizes {
    /// Cilium's defaults, but conntrack of a size for nodes of some gigabytes:
    /// these maps are allocated whole, and the four take about 80 MiB (Cilium's
    /// sizes: 240 MiB).
    fn default() -> Self {
        Self {
            lxc: lxc::MAX_ENTRIES,
            ipcache: ipcache::MAX_ENTRIES,
            policy: policy::MAX_ENTRIES,
            policy_stats: policystats::MAX_ENTRIES,
            conntrack_tcp: conntrack::MAX_ENTRIES_TCP / 4,
            conntrack_any: conntrack::MAX_ENTRIES_ANY / 2,
        }
    }
}

impl MapSizes {
    /// Entries of unanswered connections that each endpoint may have, in each
    /// direction: no more than a 32nd of a conntrack map, so that many endpoints together
    /// displace no other endpoint's connections.
    fn unanswered(self) -> u32 {
        (self.conntrack_tcp.min(self.conntrack_any) / 32).clamp(32, 4096)
    }
}

/// How the kernel datapath is set up.
#[derive(Clone, Debug)]
pub struct KernelConfig {
    /// Root of the BPF file system, or a directory in it.
    pub bpf_root: PathBuf,
    /// Whether the node has IPv4.
    pub ipv4: bool,
    /// Whether the node has IPv6.
    pub ipv6: bool,
    /// Sizes of maps that do not exist yet.
    pub sizes: MapSizes,
    /// Whether proxies send queries under pods' addresses.
    pub transparent: bool,
    /// Whether programs are attached by TCX links where the kernel has them.
    pub tcx: bool,
    /// Datagrams and new connections per second that each endpoint may send to the DNS proxy;
    /// 0: any number.
    pub dns_quota: u32,
    /// Replies to packets that egress policy denies.
    pub deny_responses: DenyResponses,
    /// The tunnel between nodes; `None`: the node has no part in it.
    pub tunnel: Option<TunnelSettings>,
    /// Group of the proxies: it may read what they read and write what they write.
    pub sdp_group: u32,
}

/// Why the kernel datapath cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum SetUpError {
    /// The BPF root cannot be used.
    #[error(transparent)]
    Root(#[from] RootError),
    /// A pin could not be opened to the proxies.
    #[error("{path}: cannot change its group to --sdp-group: {source}", path = .path.display())]
    Share { path: PathBuf, source: io::Error },
    /// A map could not be made, or exists with other sizes or another type.
    #[error(transparent)]
    Map(#[from] MapError),
    /// A program could not be loaded or attached.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// The kernel does not say whether it has TCX.
    #[error(
        "cannot find out whether the kernel has TCX: {0}; the agent needs root, or CAP_BPF and CAP_NET_ADMIN"
    )]
    Tcx(io::Error),
    /// Steering could not be set up.
    #[error("steering: {0}")]
    Steering(#[from] SteerError),
}

/// The kernel: maps, programs and, through another datapath, the files.
pub struct KernelDatapath {
    globals: Globals,
    lxc: Map<LxcKey, LxcValue>,
    ipcache: Map<IpcacheKey, IpcacheValue>,
    quotas: Map<QuotaKey, Counter>,
    held: Map<u32, u32>,
    policies: HashMap<EndpointId, Map<PolicyKey, PolicyValue>>,
    programs: Programs,
    /// Numbers of the programs that this run attached.
    attached: HashMap<EndpointId, [u32; 2]>,
    /// When notes have to be swept at the end of a plan; `None` if no programs were detached.
    sweep_due: Option<Instant>,
    /// Notified after a plan that took an address from an endpoint.
    freed: Option<Wake>,
    /// Whether the plan under way took an address from an endpoint.
    frees: bool,
    /// Number of the steering program.
    steering: u32,
    has_tcx: bool,
    files: Box<dyn Datapath>,
}

impl KernelConfig {
    /// Programs with these settings, not loaded yet.
    ///
    /// # Errors
    /// The kernel does not say whether it has TCX.
    pub fn programs(&self) -> Result<Programs, SetUpError> {
        Ok(Programs::new(
            &Globals::new(&self.bpf_root),
            program_settings(self)?,
        ))
    }
}

impl KernelDatapath {
    /// Makes and pins every shared map that is not there yet, and puts the
    /// steering program on this process's network namespace.
    ///
    /// `files` carries out the steps that are about files. Routes are set by
    /// [`super::routing::install`]. Programs of an earlier run stay attached
    /// until [`Step::Attach`] replaces them.
    pub fn prepare(config: &KernelConfig, files: Box<dyn Datapath>) -> Result<Self, SetUpError> {
        Self::prepare_warm(config, files, None)
    }

    /// Like [`Self::prepare`], with programs that were loaded ahead.
    pub fn prepare_warm(
        config: &KernelConfig,
        files: Box<dyn Datapath>,
        loaded: Option<Programs>,
    ) -> Result<Self, SetUpError> {
        let globals = Globals::new(&config.bpf_root);
        make_dirs(&config.bpf_root)?;
        let (lxc, ipcache) = make_maps(&globals, config.sizes)?;
        if config.tunnel.is_some() {
            tunnel::make_maps(&globals)?;
        }
        share(&globals, config.sdp_group)?;
        let programs = match loaded {
            Some(programs) => programs,
            None => config.programs()?,
        };
        if let Err(error) = programs.preload() {
            // Each attempt to attach them logs the error again.
            tracing::error!(%error, "the programs of endpoints cannot be loaded");
        }
        let steering = steering_program::replace(&globals, &[])?;
        Ok(Self {
            lxc,
            ipcache,
            quotas: Map::open_or_create(
                &globals.path(quota::NAME),
                MapKind::LruPerCpuHash,
                quota::MAX_ENTRIES,
                0,
            )?,
            held: Map::open_or_create(
                &globals.path(quota::HELD_NAME),
                MapKind::Array,
                quota::HELD_ENTRIES,
                0,
            )?,
            globals,
            policies: HashMap::new(),
            programs,
            attached: HashMap::new(),
            sweep_due: None,
            freed: None,
            frees: false,
            steering,
            has_tcx: has_tcx().map_err(SetUpError::Tcx)?,
            files,
        })
    }

    /// Number of the steering program.
    pub fn steering(&self) -> u32 {
        self.steering
    }

    /// Maximum number of entries in the ipcache: a map of an earlier run keeps its size.
    pub fn ipcache_max(&self) -> u32 {
        self.ipcache.max_entries()
    }

    /// What was found of the kernel.
    pub fn found(&self) -> Found {
        Found {
            attach: self.programs.attach_by(),
            tcx: self.has_tcx,
            conntrack: self.programs.reads_conntrack(),
        }
    }

    /// The programs below this root.
    pub fn programs(&self) -> &Programs {
        &self.programs
    }

    /// Endpoints whose programs are attached by this run or an earlier one, as their pins show.
    pub fn attached(&self) -> io::Result<Vec<EndpointId>> {
        self.programs.attached()
    }

    fn policy(&mut self, endpoint: EndpointId) -> Result<&Map<PolicyKey, PolicyValue>, MapError> {
        use std::collections::hash_map::Entry;
        match self.policies.entry(endpoint) {
            Entry::Occupied(entry) => Ok(entry.into_mut()),
            Entry::Vacant(entry) => {
                let map = self.globals.policy(endpoint, Access::ReadWrite)?;
                Ok(entry.insert(map))
            }
        }
    }

    fn create_policy_map(&mut self, endpoint: EndpointId) -> Result<(), ProgramError> {
        let path = self.globals.policy_path(endpoint);
        let map = match Map::open(&path, MapKind::LpmTrie, Access::ReadWrite) {
            Err(MapError::NotPinned(_)) => {
                let map = self.programs.create_policy(endpoint)?;
                map.pin_again(&path)?;
                map
            }
            opened => opened?,
        };
        self.policies.insert(endpoint, map);
        Ok(())
    }

    /// Makes the programs judge packets of `interface` as packets of an endpoint, if the programs run there.
    pub fn enter(&mut self, attachment: &Attachment, interface: u32) -> Result<(), ProgramError> {
        let programs = self.programs.clone();
        programs.enter(attachment, interface, self.policy(attachment.endpoint)?)
    }

    fn attach(&mut self, attachment: &Attachment) -> Result<(), ProgramError> {
        let endpoint = attachment.endpoint;
        self.keep_policy_pin(endpoint)?;
        let programs = self.programs.clone();
        let numbers = programs.attach(attachment, self.policy(endpoint)?)?;
        self.attached.insert(endpoint, numbers);
        Ok(())
    }

    /// Puts the pin of a policy map that is open back, so that programs are loaded with this map.
    fn keep_policy_pin(&self, endpoint: EndpointId) -> Result<(), MapError> {
        let path = self.globals.policy_path(endpoint);
        match self.policies.get(&endpoint) {
            Some(map) if !map.is_pinned(&path) => map.pin_again(&path),
            _ => Ok(()),
        }
    }

    fn program_faults(&self, wanted: &Attachment) -> Vec<ProgramFault> {
        let id = wanted.endpoint;
        let numbers = self.attached.get(&id).copied();
        let mut faults = Programs::faults(&self.globals, id, wanted.ifindex, numbers);
        if numbers.is_some() {
            match self.programs.has_settings(id) {
                Ok(true) => {}
                Ok(false) => faults.push(ProgramFault::NoSettings),
                Err(error) => faults.push(ProgramFault::Unknown {
                    program: "from_pod",
                    reason: error.to_string(),
                }),
            }
        }
        let path = self.globals.policy_path(id);
        if self
            .policies
            .get(&id)
            .is_some_and(|map| !map.is_pinned(&path))
        {
            faults.push(ProgramFault::PolicyPin);
        }
        faults
    }

    fn remove_policy_map(&mut self, endpoint: EndpointId) -> Result<(), StepError> {
        self.policies.remove(&endpoint);
        self.forget_quotas(endpoint)?;
        let path = self.globals.policy_path(endpoint);
        present(fs::remove_file(&path)).map_err(|source| StepError::File { path, source })?;
        Ok(())
    }
}

impl KernelDatapath {
    /// Forgets an endpoint's quotas, so that the next endpoint with its number begins with full ones.
    fn forget_quotas(&self, endpoint: EndpointId) -> Result<(), MapError> {
        for limit in Limit::ALL {
            self.quotas.remove(&QuotaKey {
                endpoint: endpoint.0,
                limit: limit as u8,
                pad: 0,
            })?;
        }
        for map in 0..quota::HELD_MAPS {
            self.held.set(&quota::held_index(endpoint.0, map), &0)?;
        }
        Ok(())
    }
}

impl Datapath for KernelDatapath {
    fn apply(&mut self, step: &Step) -> Result<(), StepError> {
        match step {
            Step::Checkpoint(_)
            | Step::CheckpointEndpoints(_)
            | Step::KeepCleaned(_)
            | Step::WriteEndpoint(..)
            | Step::KeepNames(..)
            | Step::RemoveEndpoint(_) => self.files.apply(step),
            Step::CreatePolicyMap(endpoint) => self
                .create_policy_map(*endpoint)
                .map_err(|error| failed(*endpoint, &error)),
            Step::RemovePolicyMap(endpoint) => self.remove_policy_map(*endpoint),
            Step::SetPolicy(endpoint, key, value) => Ok(self.policy(*endpoint)?.set(key, value)?),
            Step::UnsetPolicy(endpoint, key) => {
                self.policy(*endpoint)?.remove(key)?;
                Ok(())
            }
            Step::SetLxc(key, value) => Ok(self.lxc.set(key, value)?),
            Step::UnsetLxc(key) => {
                self.frees = true;
                self.lxc.remove(key)?;
                Ok(())
            }
            Step::SetIpcache(key, value) => Ok(self.ipcache.set(key, value)?),
            Step::UnsetIpcache(key) => {
                self.ipcache.remove(key)?;
                Ok(())
            }
            Step::Attach(attachment) => self
                .attach(attachment)
                .map_err(|error| failed(attachment.endpoint, &error)),
            Step::Detach(endpoint) => {
                self.attached.remove(endpoint);
                self.sweep_due = Some(Instant::now());
                self.programs
                    .detach(*endpoint)
                    .map_err(|error| failed(*endpoint, &error))
            }
        }
    }

    fn tell_freed_addresses(&mut self, freed: Wake) {
        self.freed = Some(freed);
    }

    fn end_plan(&mut self) {
        if std::mem::take(&mut self.frees)
            && let Some(freed) = &self.freed
        {
            freed();
        }
        if self.sweep_due.is_none_or(|due| due > Instant::now()) {
            return;
        }
        self.sweep_due = None;
        if let Err(error) = notes::sweep(&self.globals, &self.lxc) {
            tracing::warn!(
                %error,
                "entries for redirected connections of removed endpoints could not be removed; \
                 the agent tries again"
            );
            self.sweep_due = Some(Instant::now() + SWEEP_AGAIN);
        }
    }

    fn read_entries(&mut self, query: &MapQuery) -> Result<MapEntries, StepError> {
        Ok(match query {
            MapQuery::IpcacheAfter(key) => MapEntries::Ipcache(after(&self.ipcache, key.as_ref())?),
            MapQuery::IpcacheAt(keys) => MapEntries::Ipcache(at(&self.ipcache, keys)?),
            MapQuery::PolicyAfter(endpoint, key) => {
                MapEntries::Policy(*endpoint, after(self.policy(*endpoint)?, key.as_ref())?)
            }
            MapQuery::PolicyAt(endpoint, keys) => {
                MapEntries::Policy(*endpoint, at(self.policy(*endpoint)?, keys)?)
            }
            MapQuery::LxcAfter(key) => MapEntries::Lxc(after(&self.lxc, key.as_ref())?),
            MapQuery::LxcAt(keys) => MapEntries::Lxc(at(&self.lxc, keys)?),
            MapQuery::Programs(wanted) => {
                let faults = |wanted: &Attachment| (wanted.endpoint, self.program_faults(wanted));
                MapEntries::Programs(wanted.iter().map(faults).collect())
            }
            MapQuery::Nothing => MapEntries::Nothing,
        })
    }
}

fn failed(endpoint: EndpointId, error: &ProgramError) -> StepError {
    StepError::Program {
        endpoint,
        reason: error.to_string(),
    }
}

fn after<K: Record, V: Record>(
    map: &Map<K, V>,
    key: Option<&K>,
) -> Result<Vec<(K, Option<V>)>, MapError> {
    let entries = map.entries_after(key, BATCH)?;
    Ok(entries.into_iter().map(|(k, v)| (k, Some(v))).collect())
}

fn at<K: Record, V: Record>(map: &Map<K, V>, keys: &[K]) -> Result<Vec<(K, Option<V>)>, MapError> {
    keys.iter().map(|key| Ok((*key, map.get(key)?))).collect()
}

/// Lets the proxies' group read endpoints and identities, and take steering slots.
pub(super) fn share(globals: &Globals, group: u32) -> Result<(), SetUpError> {
    for name in [lxc::NAME, ipcache::NAME] {
        let path = globals.path(name);
        std::os::unix::fs::chown(&path, None, Some(group))
            .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o640)))
            .map_err(|source| SetUpError::Share { path, source })?;
    }
    Ok(steering_program::share(globals, group)?)
}

type LocalMaps = (Map<LxcKey, LxcValue>, Map<IpcacheKey, IpcacheValue>);

/// How the programs are loaded and attached.
fn program_settings(config: &KernelConfig) -> Result<ProgramSettings, SetUpError> {
    let quotas = Quotas {
        dns_packets: config.dns_quota,
        unanswered: config.sizes.unanswered(),
    };
    let has_tcx = has_tcx().map_err(SetUpError::Tcx)?;
    let attach = match config.tcx && has_tcx {
        true => Attach::Tcx,
        false => Attach::Filter,
    };
    Ok(ProgramSettings {
        dual_stack: config.ipv4 && config.ipv6,
        transparent: config.transparent,
        responses: config.deny_responses,
        quotas,
        policy_entries: config.sizes.policy,
        tunnel: config.tunnel.as_ref().map(|tunnel| tunnel.mode),
        attach,
    })
}

/// Makes what is missing and checks what is there. The ring buffer has no
/// keys: the program loader makes it.
fn make_maps(globals: &Globals, sizes: MapSizes) -> Result<LocalMaps, MapError> {
    use MapKind::{Hash, LpmTrie, LruHash, LruPerCpuHash, PerCpuArray};

    fn make<K: Record, V: Record>(
        globals: &Globals,
        name: &str,
        kind: MapKind,
        entries: u32,
        flags: u32,
    ) -> Result<Map<K, V>, MapError> {
        let map = Map::open_or_create(&globals.path(name), kind, entries, flags)?;
        if map.max_entries() != entries {
            tracing::warn!(
                map = name,
                has = map.max_entries(),
                wanted = entries,
                "the map of an earlier run is used, with its entries; a new size applies \
                 after a reboot, or after its pin is removed while no agent runs"
            );
        }
        Ok(map)
    }

    let g = globals;
    let (tcp, any) = (sizes.conntrack_tcp, sizes.conntrack_any);
    make::<CtKey4, CtValue>(g, conntrack::NAME_TCP4, LruHash, tcp, 0)?;
    make::<CtKey4, CtValue>(g, conntrack::NAME_ANY4, LruHash, any, 0)?;
    make::<CtKey6, CtValue>(g, conntrack::NAME_TCP6, LruHash, tcp, 0)?;
    make::<CtKey6, CtValue>(g, conntrack::NAME_ANY6, LruHash, any, 0)?;
    make::<PolicyStatsKey, PolicyStatsValue>(
        g,
        policystats::NAME,
        LruPerCpuHash,
        policy_stats_entries(sizes.policy_stats),
        policystats::FLAGS,
    )?;
    make::<FragmentKey, FragmentValue>(g, fragment::NAME, LruHash, fragment::MAX_ENTRIES, 0)?;
    make::<u32, Counter>(g, event::COUNTERS_NAME, PerCpuArray, event::COUNTERS, 0)?;
    steering_program::make_maps(g)?;
    let lxc = make(g, lxc::NAME, Hash, sizes.lxc, lxc::FLAGS)?;
    let ipcache = make(g, ipcache::NAME, LpmTrie, sizes.ipcache, ipcache::FLAGS)?;
    Ok((lxc, ipcache))
}

/// The kernel wants a multiple of the possible CPUs for LRU lists per CPU.
fn policy_stats_entries(wanted: u32) -> u32 {
    let cpus = possible_cpus()
        .ok()
        .and_then(|cpus| u32::try_from(cpus).ok())
        .unwrap_or(1);
    (wanted / cpus).max(1) * cpus
}
