//! Loading, attaching and replacing the eBPF programs.
//!
//! ```text
//!  <bpf-root>/holdfast/links/<endpoint>/from_pod_<ifindex>   ingress
//!                                       to_pod_<ifindex>     egress
//!  <bpf-root>/holdfast/links/to_proxy/to_proxy_<ifindex>    ingress
//! ```
//! What is attached outlives the agent ([`super::hook`]). All endpoints have the same two programs,
//! which an agent loads once and puts in place of the old ones: no packet passes unjudged
//! meanwhile. The programs find the endpoint by the packet's interface (`slots`).

mod without_endpoint;

use std::{
    fs, io, iter,
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
};

use agent_core::datapath::{attachment::Attachment, map_query::ProgramFault};
use aya::{
    Ebpf, EbpfLoader, include_bytes_aligned,
    maps::MapData,
    programs::{SchedClassifier, TcAttachType},
};
use daemon::{lookup::present, steering_program::tail};
use nix::errno::Errno;
use parking_lot::Mutex;
use shared_maps::{
    EndpointId,
    endpoint::{
        CONFIGS, DENY_CLOCKS, DUAL_STACK, HIGH_INTERFACES, INTERFACES, NODE_FLAGS, POLICIES,
        PROXY_CLOCKS, QUEUES, TRANSPARENT,
    },
    netfilter::CONNTRACK_LAYOUT,
    pin,
    policy::{PolicyKey, PolicyValue},
    quota::PACKET_INTERVAL,
    tunnel::UNWRAP,
    user::{Globals, Map, MapError, MapKind, MapOfMaps, Record},
};

use super::{
    closed,
    deny_response::DenyResponses,
    filter::{self, Order, Owner},
    group::{self, GROUP},
    hook::{self, Attach, Hook, grouped, pinned, pinned_handles, put, release},
    kernel_layout,
    slots::{SlotMaps, SlotSizes, Slots},
    tunnel::{self, TunnelMode},
};

/// The programs, built by `cargo xtask bpf`.
static OBJECT: &[u8] = include_bytes_aligned!("../../../bpf/prebuilt/holdfast-bpf.o");

/// Why programs could not be loaded, attached or detached.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// The kernel refused the object.
    #[error("loading program {program}: {reason}")]
    Load {
        /// Name of the program or map; `all` if the kernel refused the whole object.
        program: &'static str,
        /// What the kernel said; a verifier log is cut to its end.
        reason: String,
    },
    /// It could not be attached.
    #[error("attaching program {program} to {place}: {reason}")]
    Attach {
        program: &'static str,
        /// The interface, by its number and, if known, its name.
        place: String,
        reason: String,
    },
    /// A map of the programs could not be made or written.
    #[error(transparent)]
    Settings(#[from] MapError),
    /// A pin could not be made, read or removed.
    #[error("pin {path}: {reason}", path = .path.display())]
    Pin { path: PathBuf, reason: String },
}

/// The two programs of an endpoint. First what the pod receives: from the moment that it can send, answers are judged.
const HOOKS: [Hook; 2] = [
    Hook {
        program: "to_pod",
        direction: TcAttachType::Egress,
    },
    Hook {
        program: "from_pod",
        direction: TcAttachType::Ingress,
    },
];

/// Quotas of one endpoint in resources that all endpoints share.
#[derive(Clone, Copy, Debug)]
pub struct Quotas {
    /// Datagrams and new connections to the DNS proxy per second; 0: any number.
    pub dns_packets: u32,
    /// Unanswered connections, in each direction.
    pub unanswered: u32,
}

impl Quotas {
    /// Nanoseconds between two packets to the proxy; 0: no quota.
    fn packet_interval(self) -> u32 {
        1_000_000_000_u32
            .checked_div(self.dns_packets)
            .map_or(0, |interval| interval.max(1))
    }
}

/// What the programs of a node depend on.
#[derive(Clone, Copy, Debug)]
pub struct ProgramSettings {
    /// Whether the node has both families.
    pub dual_stack: bool,
    /// Whether proxies send queries under pods' addresses.
    pub transparent: bool,
    pub responses: DenyResponses,
    /// What each endpoint may take.
    pub quotas: Quotas,
    /// Entries that new policy maps have room for.
    pub policy_entries: u32,
    /// Part of the node in the tunnel between nodes, if it has one.
    pub tunnel: Option<TunnelMode>,
    pub attach: Attach,
}

/// Loads and attaches programs below one BPF root. Clones share what is loaded.
#[derive(Clone)]
pub struct Programs {
    globals: Globals,
    links: PathBuf,
    /// [`DUAL_STACK`], [`TRANSPARENT`], those of [`DenyResponses`] and of [`TunnelMode`].
    node: u32,
    /// Whether they reply to packets that they drop.
    replies: bool,
    /// Whether the node has a mode of the tunnel.
    has_tunnel: bool,
    quotas: Quotas,
    policy_entries: u32,
    attach: Attach,
    object: &'static [u8],
    loaded: Arc<Mutex<Option<Loaded>>>,
}

/// The programs of all endpoints.
struct Loaded {
    /// Whether they read the kernel's connection tracking.
    conntrack: bool,
    ebpf: Ebpf,
    slots: Slots,
}

impl Programs {
    /// Below the root of `globals`.
    pub fn new(globals: &Globals, settings: ProgramSettings) -> Self {
        let ProgramSettings {
            dual_stack,
            transparent,
            responses,
            quotas,
            policy_entries,
            tunnel,
            attach,
        } = settings;
        let flags = [(dual_stack, DUAL_STACK), (transparent, TRANSPARENT)];
        let flags = flags.into_iter().filter(|(has, _)| *has);
        Self {
            globals: globals.clone(),
            links: globals.root().join(pin::LINKS),
            node: u32::from(flags.fold(responses.flags(), |flags, (_, flag)| flags | flag))
                | tunnel.map_or(0, TunnelMode::flags),
            replies: responses != DenyResponses::default() || tunnel == Some(TunnelMode::Full),
            has_tunnel: tunnel.is_some(),
            quotas,
            policy_entries,
            attach,
            object: OBJECT,
            loaded: Arc::default(),
        }
    }

    /// Programs of another build, for a comparison with it. The layouts of its maps must be today's.
    #[must_use]
    pub fn of_object(self, object: &'static [u8]) -> Self {
        Self { object, ..self }
    }

    /// Loads the programs, so that the first endpoint does not wait for them.
    pub fn preload(&self) -> Result<(), ProgramError> {
        self.with_loaded(|loaded| {
            loaded.slots.tidy();
            Ok(())
        })
    }

    /// Runs `with` on the programs of all endpoints, which are loaded if need be.
    fn with_loaded<T>(
        &self,
        with: impl FnOnce(&mut Loaded) -> Result<T, ProgramError>,
    ) -> Result<T, ProgramError> {
        let mut loaded = self.loaded.lock();
        let programs = match loaded.take() {
            Some(programs) => programs,
            None => self.load()?,
        };
        with(loaded.insert(programs))
    }

    /// Loads the programs so that they find the source of packets which this node translated. Where
    /// the kernel does not allow this, they are loaded without it.
    fn load(&self) -> Result<Loaded, ProgramError> {
        let reason = match kernel_layout::read() {
            Ok(layout) => match self.load_for(layout.pack()) {
                Ok(loaded) => return Ok(loaded),
                Err(error) => error.to_string(),
            },
            Err(error) => error.to_string(),
        };
        tracing::warn!(
            reason,
            "programs cannot read the kernel's connection tracking: for ingress policy, packets that \
             this node masquerades come from the world, except those of pods with an interface of their own"
        );
        self.load_for(0)
    }

    /// `layout` is a packed [`Layout`](shared_maps::netfilter::Layout), or 0.
    fn load_for(&self, layout: u32) -> Result<Loaded, ProgramError> {
        let has_layout = layout != 0;
        let layout = layout.to_ne_bytes();
        let flags = self.node.to_ne_bytes();
        let interval = self.quotas.packet_interval().to_ne_bytes();
        let mut loader = EbpfLoader::new();
        loader
            .default_map_pin_directory(self.globals.dir())
            .override_global(NODE_FLAGS, &flags[..], true)
            .override_global(PACKET_INTERVAL, &interval[..], true)
            .override_global(CONNTRACK_LAYOUT, &layout[..], true);
        if !self.replies {
            loader.map_max_entries(DENY_CLOCKS, 1);
        }
        self.place_tunnel_maps(&mut loader);
        let mut ebpf = loader
            .load(self.object)
            .map_err(|error| load("all", &error))?;
        let maps = SlotMaps {
            interfaces: map(&ebpf, INTERFACES, MapKind::Array)?,
            high_interfaces: map(&ebpf, HIGH_INTERFACES, MapKind::Hash)?,
            configs: map(&ebpf, CONFIGS, MapKind::Array)?,
            clocks: map(&ebpf, PROXY_CLOCKS, MapKind::Array)?,
            policies: MapOfMaps::new(descriptor(&ebpf, POLICIES)?, POLICIES),
            queues: MapOfMaps::new(descriptor(&ebpf, QUEUES)?, QUEUES),
        };
        for hook in HOOKS {
            let program: &mut SchedClassifier = program(&mut ebpf, hook.program)?;
            program.load().map_err(|error| load(hook.program, &error))?;
        }
        let sizes = SlotSizes {
            policy: self.policy_entries,
            unanswered: self.quotas.unanswered,
        };
        Ok(Loaded {
            conntrack: has_layout,
            ebpf,
            slots: Slots::new(maps, sizes),
        })
    }

    /// The maps of the tunnel are shared by their pins where the node has a mode. Elsewhere nothing of
    /// it exists but maps of one entry, which no program reads.
    fn place_tunnel_maps(&self, loader: &mut EbpfLoader<'_>) {
        for name in tunnel::PINS {
            match self.has_tunnel {
                true => loader.map_pin_path(name, self.globals.path(name)),
                false => loader.map_max_entries(name, 1),
            };
        }
    }

    /// Whether packets of the tunnel are unwrapped.
    pub(super) fn unwraps(&self) -> bool {
        self.node & UNWRAP != 0
    }

    /// Makes a policy map, which is not pinned, for an endpoint that has none.
    pub fn create_policy(
        &self,
        endpoint: EndpointId,
    ) -> Result<Map<PolicyKey, PolicyValue>, ProgramError> {
        self.with_loaded(|loaded| loaded.slots.policy(endpoint).map_err(settings))
    }

    /// Has packets of `interface` judged with an endpoint's settings and policy map, if the
    /// programs are attached there.
    pub fn enter(
        &self,
        attachment: &Attachment,
        interface: u32,
        policy: &Map<PolicyKey, PolicyValue>,
    ) -> Result<(), ProgramError> {
        let endpoint = attachment.endpoint;
        self.with_loaded(|loaded| {
            if let Some(other) = loaded.slots.other(endpoint, interface) {
                if self.is_attached(other, interface) {
                    return Err(ProgramError::Attach {
                        program: "from_pod",
                        place: format!("interface {interface}"),
                        reason: format!("endpoint {other} is behind it"),
                    });
                }
                loaded.slots.remove(other).map_err(settings)?;
            }
            loaded
                .slots
                .enter(endpoint, interface, attachment.config(), policy)
                .map_err(settings)
        })
    }

    /// Runs `with` on `from_pod` or `to_pod`.
    pub fn with_program<T>(
        &self,
        name: &'static str,
        with: impl FnOnce(&mut SchedClassifier) -> T,
    ) -> Result<T, ProgramError> {
        self.with_loaded(|loaded| Ok(with(program(&mut loaded.ebpf, name)?)))
    }

    /// Attaches an endpoint's programs before all others, or puts them into the links that are
    /// there. Opens the interface if it was closed. Gives the numbers of the programs, in the order
    /// of `HOOKS`.
    pub fn attach(
        &self,
        attachment: &Attachment,
        policy: &Map<PolicyKey, PolicyValue>,
    ) -> Result<[u32; 2], ProgramError> {
        // First the settings: from the moment that a program is attached, it finds them.
        self.enter(attachment, attachment.ifindex, policy)?;
        let dir = self.dir(attachment.endpoint);
        fs::create_dir_all(&dir).map_err(|error| pinned(&dir, &error))?;
        let numbers = self.with_loaded(|loaded| {
            let mut numbers = [0; 2];
            let mut refused = None;
            for (hook, number) in HOOKS.into_iter().zip(&mut numbers) {
                let program: &mut SchedClassifier = program(&mut loaded.ebpf, hook.program)?;
                let path = pin_of(&dir, hook, attachment.ifindex);
                let how = (hook, self.attach);
                if let Err(error) = put(program, how, attachment.ifindex, &path, Order::First) {
                    // The other direction is restricted all the same.
                    refused.get_or_insert(error);
                    continue;
                }
                *number = program
                    .info()
                    .map_err(|error| load(hook.program, &error))?
                    .id();
            }
            if let Some(error) = refused {
                return Err(error);
            }
            // From now on a packet that the programs have not seen is dropped.
            group::join(attachment.ifindex).map_err(|error| grouped(attachment.ifindex, &error))?;
            self.forget_other_interfaces(&dir, attachment.ifindex)?;
            self.forget_unpinned(attachment.ifindex)?;
            loaded.slots.settle(attachment.endpoint).map_err(settings)?;
            Ok(numbers)
        })?;
        closed::open(&self.globals, attachment.ifindex)?;
        Ok(numbers)
    }

    /// Whether the packets of the endpoint's interface find its settings.
    pub fn has_settings(&self, endpoint: EndpointId) -> Result<bool, ProgramError> {
        self.with_loaded(|loaded| loaded.slots.is_in_force(endpoint).map_err(settings))
    }

    /// Number of lost slots for settings: no endpoint has them, and none can get them. For tests.
    pub fn lost_slots(&self) -> Result<usize, ProgramError> {
        self.with_loaded(|loaded| Ok(loaded.slots.lost()))
    }

    /// Whether a program of this endpoint is attached to an interface.
    fn is_attached(&self, endpoint: EndpointId, interface: u32) -> bool {
        let dir = self.dir(endpoint);
        HOOKS.into_iter().any(|hook| {
            let place = hook::place(&pin_of(&dir, hook, interface));
            // One that cannot be read may be at work.
            place.map_or(true, |place| place == Some((interface, hook.chain())))
        })
    }

    /// What is wrong about an endpoint's programs, as the kernel has them. `numbers`: what
    /// [`Self::attach`] gave; without them any program of the right name will do.
    pub fn faults(
        globals: &Globals,
        endpoint: EndpointId,
        ifindex: u32,
        numbers: Option<[u32; 2]>,
    ) -> Vec<ProgramFault> {
        let dir = links_of(globals, endpoint);
        let mut faults = Vec::new();
        let of_group =
            group::has(ifindex).map(|has| (!has).then_some(ProgramFault::OutOfGroup(GROUP)));
        let of_group = iter::once(("the interface's group", of_group));
        let of_hooks = HOOKS.into_iter().enumerate().map(|(place, hook)| {
            let number = numbers.and_then(|numbers| numbers.get(place).copied());
            let path = pin_of(&dir, hook, ifindex);
            (hook.program, hook.fault(&path, ifindex, number))
        });
        for (program, fault) in of_group.chain(of_hooks) {
            match fault {
                Ok(fault) => faults.extend(fault),
                Err(error) if error.raw_os_error() == Some(Errno::ENODEV as i32) => {
                    return vec![ProgramFault::NoInterface(ifindex)];
                }
                Err(error) => faults.push(ProgramFault::Unknown {
                    program,
                    reason: error.to_string(),
                }),
            }
        }
        faults
    }

    /// Detaches an endpoint's programs. Packets then pass unjudged.
    pub fn detach(&self, endpoint: EndpointId) -> Result<(), ProgramError> {
        let dir = self.dir(endpoint);
        // Programs that stay attached would drop every packet, because the endpoint's settings are
        // gone at once.
        for pin in fs::read_dir(&dir).into_iter().flatten().flatten() {
            release(&pin.path())?;
        }
        present(fs::remove_dir_all(&dir)).map_err(|error| pinned(&dir, &error))?;
        match self.loaded.lock().as_ref() {
            Some(loaded) => loaded.slots.remove(endpoint).map_err(settings),
            None => Ok(()),
        }
    }

    /// Whether the programs read the kernel's connection tracking. False before they are loaded.
    pub fn reads_conntrack(&self) -> bool {
        let loaded = self.loaded.lock();
        loaded.as_ref().is_some_and(|loaded| loaded.conntrack)
    }

    pub fn attach_by(&self) -> Attach {
        self.attach
    }

    /// Endpoints that have pinned programs.
    pub fn attached(&self) -> io::Result<Vec<EndpointId>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.links)? {
            let name = entry?.file_name();
            found.extend(name.to_str().and_then(|id| id.parse().ok()).map(EndpointId));
        }
        Ok(found)
    }

    fn dir(&self, endpoint: EndpointId) -> PathBuf {
        links_of(&self.globals, endpoint)
    }

    /// Removes filters of the interface that no pin records: those of an agent whose pins were
    /// removed, with settings and maps that nothing updates.
    fn forget_unpinned(&self, ifindex: u32) -> Result<(), ProgramError> {
        let mut known = None;
        for hook in HOOKS {
            let owner = Owner::of(self.globals.root());
            let removed = filter::remove_ours(ifindex, hook.chain(), &owner, |filter| {
                let known = known.get_or_insert_with(|| pinned_handles(&self.links));
                !known.contains(&filter.handle)
            });
            removed.map_err(|error| ProgramError::Attach {
                program: hook.program,
                place: format!("interface {ifindex}"),
                reason: format!("cannot remove a filter of an earlier agent: {error}"),
            })?;
        }
        Ok(())
    }

    /// Removes programs from interfaces that the endpoint, or an earlier pod with the same endpoint id, had before.
    fn forget_other_interfaces(&self, dir: &Path, ifindex: u32) -> Result<(), ProgramError> {
        let suffix = format!("_{ifindex}");
        for entry in fs::read_dir(dir).map_err(|error| pinned(dir, &error))? {
            let path = entry.map_err(|error| pinned(dir, &error))?.path();
            let current = path
                .file_name()
                .and_then(|name| name.to_str())
                .is_some_and(|name| name.ends_with(&suffix));
            if !current {
                release(&path)?;
            }
        }
        Ok(())
    }
}

/// A map of loaded programs.
fn map<K: Record, V: Record>(
    ebpf: &Ebpf,
    name: &'static str,
    kind: MapKind,
) -> Result<Map<K, V>, ProgramError> {
    Map::of_fd(descriptor(ebpf, name)?, name, kind).map_err(settings)
}

fn descriptor(ebpf: &Ebpf, name: &'static str) -> Result<OwnedFd, ProgramError> {
    use aya::maps::Map::{Array, ArrayOfMaps, HashMap};
    let data: Option<&MapData> = match ebpf.map(name) {
        Some(Array(data) | ArrayOfMaps(data) | HashMap(data)) => Some(data),
        _ => None,
    };
    let data = data.ok_or_else(|| ProgramError::Load {
        program: name,
        reason: "the embedded object has no such map; rebuild it (cargo xtask bpf)".to_owned(),
    })?;
    let descriptor = data.fd().as_fd().try_clone_to_owned();
    descriptor.map_err(|error| load(name, &error))
}

fn settings(error: MapError) -> ProgramError {
    ProgramError::Settings(error)
}

/// Directory of the links of an endpoint.
fn links_of(globals: &Globals, endpoint: EndpointId) -> PathBuf {
    let links = globals.root().join(pin::LINKS);
    links.join(endpoint.0.to_string())
}

fn pin_of(dir: &Path, hook: Hook, ifindex: u32) -> PathBuf {
    dir.join(format!("{}_{ifindex}", hook.program))
}

pub(super) fn program<'a, P>(
    ebpf: &'a mut Ebpf,
    name: &'static str,
) -> Result<&'a mut P, ProgramError>
where
    &'a mut P: TryFrom<&'a mut aya::programs::Program>,
{
    ebpf.program_mut(name)
        .and_then(|program| program.try_into().ok())
        .ok_or_else(|| ProgramError::Load {
            program: name,
            reason: "the embedded object has no such program; rebuild it (cargo xtask bpf)"
                .to_owned(),
        })
}

pub(super) fn load(program: &'static str, error: &dyn std::error::Error) -> ProgramError {
    ProgramError::Load {
        program,
        reason: tail(error),
    }
}
