//! Loading, attaching and replacing the eBPF programs.
//!
//! ```text
//!  <bpf-root>/holdfast/links/<endpoint>/from_pod_<ifindex>   TCX ingress
//!                                       to_pod_<ifindex>     TCX egress
//!  <bpf-root>/holdfast/links/to_proxy/to_proxy_<ifindex>    TCX ingress
//! ```
//! A link outlives the agent through its pin. A restart loads new programs and
//! puts them into the old links: no packet passes unjudged meanwhile.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use aya::{
    Ebpf, EbpfLoader, include_bytes_aligned,
    programs::{
        LinkOrder, SchedClassifier, TcAttachType,
        links::{FdLink, PinnedLink as LinkPin},
        tc::{SchedClassifierLink, TcAttachOptions},
    },
};
use daemon::steering_program::{self as steering, tail};
use nix::{errno::Errno, net::if_::if_indextoname};
use shared_maps::{
    EndpointId,
    endpoint::{
        DUAL_STACK, EndpointConfig, GLOBAL, HAS_IPV4, HAS_IPV6, NO_LINK_HEADER, TRANSPARENT,
    },
    pin,
    quota::PACKET_INTERVAL,
    user::{Direction, Globals, LinkPlace, PinnedLink, Record, program_name, tcx_chain},
};

use super::{closed, interfaces::Begin, map_query::ProgramFault, plan::Attachment};

/// The programs, built by `cargo xtask bpf`.
static OBJECT: &[u8] = include_bytes_aligned!("../../../bpf/prebuilt/holdfast-bpf.o");

/// The policy map's name in the object.
const POLICY: &str = "POLICY";

/// Why programs could not be loaded, attached or detached.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// The kernel refused the object.
    #[error("loading program {program}: {reason}")]
    Load {
        /// The program, or "all".
        program: &'static str,
        /// What the kernel said; a verifier log is cut to its end.
        reason: String,
    },
    /// It could not be attached.
    #[error("attaching program {program} to {place}: {reason}")]
    Attach {
        /// The program.
        program: &'static str,
        /// Where.
        place: String,
        /// What the kernel said.
        reason: String,
    },
    /// A pin could not be made, read or removed.
    #[error("pin {path}: {reason}", path = .path.display())]
    Pin {
        /// The pin.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

/// A program and where it is attached.
#[derive(Clone, Copy)]
pub(super) struct Hook {
    pub(super) program: &'static str,
    pub(super) direction: TcAttachType,
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

impl Hook {
    fn chain(self) -> Direction {
        match self.direction {
            TcAttachType::Egress => Direction::Egress,
            _ => Direction::Ingress,
        }
    }

    /// What is wrong about this program, if something is.
    fn fault(
        self,
        path: &Path,
        ifindex: u32,
        number: Option<u32>,
    ) -> io::Result<Option<ProgramFault>> {
        let program = self.program;
        let chain = tcx_chain(ifindex, self.chain())?;
        let Some(link) = PinnedLink::read(path)? else {
            return Ok(Some(ProgramFault::Unpinned { program }));
        };
        let is_ours = match number {
            Some(number) => link.program == number,
            None => program_name(link.program)? == program,
        };
        let there = Some(LinkPlace::Interface(ifindex, self.chain()));
        let place = chain.iter().position(|attached| attached.link == link.id);
        Ok(match (is_ours, place, chain.first()) {
            _ if link.place != there => Some(ProgramFault::Detached { program }),
            (_, None, _) => Some(ProgramFault::Detached { program }),
            (false, ..) => Some(ProgramFault::Replaced {
                program,
                found: describe(link.program),
            }),
            (_, Some(1..), Some(first)) => Some(ProgramFault::NotFirst {
                program,
                first: describe(first.program),
            }),
            _ => None,
        })
    }
}

fn describe(program: u32) -> String {
    let name = program_name(program).unwrap_or_default();
    match name.as_str() {
        "" => format!("number {program}"),
        name => format!("{name}, number {program}"),
    }
}

/// On interfaces that are no pod's.
const TO_PROXY: Hook = Hook {
    program: "to_proxy",
    direction: TcAttachType::Ingress,
};

/// What each endpoint may take of what endpoints share.
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

/// Names of the queues of unanswered connections in the object.
const UNANSWERED: [&str; 2] = ["UNANSWERED_OUT", "UNANSWERED_IN"];

/// Loads and attaches programs below one BPF root.
#[derive(Clone, Debug)]
pub struct Programs {
    globals: Globals,
    links: PathBuf,
    dual_stack: bool,
    transparent: bool,
    quotas: Quotas,
}

impl Programs {
    /// Below the root of `globals`; `dual_stack` is whether the node has both families,
    /// `transparent` whether proxies send queries under pods' addresses.
    pub fn new(globals: &Globals, dual_stack: bool, transparent: bool, quotas: Quotas) -> Self {
        Self {
            globals: globals.clone(),
            links: globals.root().join(pin::LINKS),
            dual_stack,
            transparent,
            quotas,
        }
    }

    /// Loads an endpoint's programs without attaching them. Its policy map is there already.
    pub fn load(&self, attachment: &Attachment) -> Result<Ebpf, ProgramError> {
        let config = self.config(attachment);
        let policy = self.globals.policy_path(attachment.endpoint);
        let interval = self.quotas.packet_interval().to_ne_bytes();
        let mut loader = EbpfLoader::new();
        loader
            .default_map_pin_directory(self.globals.dir())
            .map_pin_path(POLICY, policy)
            .override_global(GLOBAL, config.as_bytes(), true)
            .override_global(PACKET_INTERVAL, &interval[..], true);
        for queue in UNANSWERED {
            loader.map_max_entries(queue, self.quotas.unanswered);
        }
        let mut ebpf = loader.load(OBJECT).map_err(|error| load("all", &error))?;
        for hook in HOOKS {
            let program: &mut SchedClassifier = program(&mut ebpf, hook.program)?;
            program.load().map_err(|error| load(hook.program, &error))?;
        }
        Ok(ebpf)
    }

    /// Loads an endpoint's programs and attaches them before all others, or puts them into the
    /// links that are there. Opens the interface if it was closed. Gives the numbers of the
    /// programs, in the order of `HOOKS`.
    pub fn attach(&self, attachment: &Attachment) -> Result<[u32; 2], ProgramError> {
        let mut ebpf = self.load(attachment)?;
        let dir = self.dir(attachment.endpoint);
        fs::create_dir_all(&dir).map_err(|error| pinned(&dir, &error))?;
        let mut numbers = [0; 2];
        for (hook, number) in HOOKS.into_iter().zip(&mut numbers) {
            let program: &mut SchedClassifier = program(&mut ebpf, hook.program)?;
            let path = pin_of(&dir, hook, attachment.ifindex);
            put(program, hook, attachment.ifindex, &path, LinkOrder::first())?;
            *number = program
                .info()
                .map_err(|error| load(hook.program, &error))?
                .id();
        }
        self.forget_other_interfaces(&dir, attachment.ifindex)?;
        closed::open(&self.globals, attachment.ifindex)?;
        Ok(numbers)
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
        for (place, hook) in HOOKS.into_iter().enumerate() {
            let number = numbers.and_then(|numbers| numbers.get(place).copied());
            let path = pin_of(&dir, hook, ifindex);
            match hook.fault(&path, ifindex, number) {
                Ok(None) => {}
                Ok(Some(fault)) => faults.push(fault),
                Err(error) if error.raw_os_error() == Some(Errno::ENODEV as i32) => {
                    return vec![ProgramFault::NoInterface(ifindex)];
                }
                Err(error) => faults.push(ProgramFault::Unknown {
                    program: hook.program,
                    reason: error.to_string(),
                }),
            }
        }
        faults
    }

    /// Loads `to_proxy` for interfaces whose packets begin like this.
    pub(super) fn load_to_proxy(&self, begin: Begin) -> Result<Ebpf, ProgramError> {
        let flags = match begin {
            Begin::Ethernet => 0,
            Begin::Ip => NO_LINK_HEADER,
        };
        self.load_without_endpoint(TO_PROXY.program, flags)
    }

    /// Loads a program that is of no endpoint.
    pub(super) fn load_without_endpoint(
        &self,
        name: &'static str,
        flags: u8,
    ) -> Result<Ebpf, ProgramError> {
        let config = EndpointConfig {
            flags,
            ..EndpointConfig::default()
        };
        let mut ebpf = EbpfLoader::new()
            .default_map_pin_directory(self.globals.dir())
            .override_global(GLOBAL, config.as_bytes(), true)
            .load(OBJECT)
            .map_err(|error| load(name, &error))?;
        let loaded: &mut SchedClassifier = program(&mut ebpf, name)?;
        loaded.load().map_err(|error| load(name, &error))?;
        Ok(ebpf)
    }

    /// Attaches what [`Self::load_to_proxy`] has loaded, by the link pinned at `path`.
    pub(super) fn attach_to_proxy(
        ebpf: &mut Ebpf,
        ifindex: u32,
        path: &Path,
    ) -> Result<(), ProgramError> {
        let program = program(ebpf, TO_PROXY.program)?;
        put(program, TO_PROXY, ifindex, path, LinkOrder::first())
    }

    /// Detaches an endpoint's programs. Packets then pass unjudged.
    pub fn detach(&self, endpoint: EndpointId) -> Result<(), ProgramError> {
        let dir = self.dir(endpoint);
        match fs::remove_dir_all(&dir) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(pinned(&dir, &error)),
            _ => Ok(()),
        }
    }

    /// Endpoints that have pinned links.
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

    fn config(&self, attachment: &Attachment) -> EndpointConfig {
        let mut flags = 0;
        for (has, flag) in [
            (attachment.ipv4.is_some(), HAS_IPV4),
            (attachment.ipv6.is_some(), HAS_IPV6),
            (self.dual_stack, DUAL_STACK),
            (self.transparent, TRANSPARENT),
        ] {
            if has {
                flags |= flag;
            }
        }
        let mut config = EndpointConfig {
            identity: attachment.identity.0,
            ifindex: attachment.ifindex,
            ipv6: attachment.ipv6.map_or([0; 16], |ip| ip.octets()),
            ipv4: attachment.ipv4.map_or([0; 4], |ip| ip.octets()),
            id: attachment.endpoint.0,
            mac: attachment.mac,
            gateway_mac: attachment.gateway_mac.unwrap_or_default(),
            flags,
            ..EndpointConfig::default()
        };
        attachment.link.configure(&mut config);
        config
    }

    /// Removes links to interfaces that the endpoint had before (its id may be of another pod's past).
    fn forget_other_interfaces(&self, dir: &Path, ifindex: u32) -> Result<(), ProgramError> {
        let suffix = format!("_{ifindex}");
        for entry in fs::read_dir(dir).map_err(|error| pinned(dir, &error))? {
            let path = entry.map_err(|error| pinned(dir, &error))?.path();
            let current = path
                .file_name()
                .and_then(|name| name.to_str())
                .is_some_and(|name| name.ends_with(&suffix));
            if !current {
                remove(&path)?;
            }
        }
        Ok(())
    }
}

/// Directory of the links of an endpoint.
fn links_of(globals: &Globals, endpoint: EndpointId) -> PathBuf {
    let links = globals.root().join(pin::LINKS);
    links.join(endpoint.0.to_string())
}

fn pin_of(dir: &Path, hook: Hook, ifindex: u32) -> PathBuf {
    dir.join(format!("{}_{ifindex}", hook.program))
}

/// Puts a loaded program into the link pinned at `path`, or makes that link. An endpoint's programs
/// run before others, whose verdict may end the chain.
pub(super) fn put(
    program: &mut SchedClassifier,
    hook: Hook,
    ifindex: u32,
    path: &Path,
    order: LinkOrder,
) -> Result<(), ProgramError> {
    let old = pinned_link(path)?;
    // A link keeps its place in the chain: one that is not the first is replaced.
    let overtaken = hook.program != TO_PROXY.program
        && matches!(
            hook.fault(path, ifindex, None),
            Ok(Some(ProgramFault::NotFirst { .. }))
        );
    if let Some(old) = old.filter(|_| !overtaken) {
        match program.attach_to_link(old) {
            Ok(id) => {
                // The pin holds it; a descriptor of ours would keep it when the pin goes.
                let _held = program.take_link(id);
                return Ok(());
            }
            Err(error) if is_dead(&error) => {
                tracing::debug!(pin = %path.display(), "the interface of the old link was removed");
            }
            Err(error) => return Err(pinned(path, &error)),
        }
    }
    let attach = |place: String, error: &dyn std::error::Error| ProgramError::Attach {
        program: hook.program,
        place,
        reason: tail(error),
    };
    let name = if_indextoname(ifindex)
        .map_err(|error| attach(format!("interface {ifindex}"), &error))?
        .to_string_lossy()
        .into_owned();
    let place = || format!("interface {ifindex} ({name})");
    let id = program
        .attach_with_options(&name, hook.direction, TcAttachOptions::TcxOrder(order))
        .map_err(|error| attach(place(), &error))?;
    let link = program
        .take_link(id)
        .map_err(|error| attach(place(), &error))?;
    let link = FdLink::try_from(link).map_err(|error| attach(place(), &error))?;
    pin_over(link, path)
}

/// The link pinned at `path`. A pin of anything else is an error: what it
/// holds may be at work, and is not ours to take away.
fn pinned_link(path: &Path) -> Result<Option<SchedClassifierLink>, ProgramError> {
    if !path.try_exists().map_err(|error| pinned(path, &error))? {
        return Ok(None);
    }
    LinkPin::from_pin(path)
        .and_then(|old| SchedClassifierLink::try_from(FdLink::from(old)))
        .map(Some)
        .map_err(|error| ProgramError::Pin {
            path: path.to_owned(),
            reason: format!(
                "not a TCX link that can be updated ({}); remove it if nothing uses it",
                tail(&error)
            ),
        })
}

/// Whether an update failed because the link holds nothing any more: its
/// interface is gone, or it was detached by force (`tcx_link_update`).
fn is_dead(error: &aya::programs::ProgramError) -> bool {
    let aya::programs::ProgramError::SyscallError(error) = error else {
        return false;
    };
    error.io_error.raw_os_error() == Some(Errno::ENOLINK as i32)
}

/// Pins a link at `path` and then releases the link that was pinned there before.
fn pin_over(link: FdLink, path: &Path) -> Result<(), ProgramError> {
    steering::pin_over(link, path).map_err(|reason| ProgramError::Pin {
        path: path.to_owned(),
        reason,
    })
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

pub(super) fn remove(path: &Path) -> Result<(), ProgramError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(pinned(path, &error)),
        _ => Ok(()),
    }
}

fn load(program: &'static str, error: &dyn std::error::Error) -> ProgramError {
    ProgramError::Load {
        program,
        reason: tail(error),
    }
}

pub(super) fn pinned(path: &Path, error: &dyn std::error::Error) -> ProgramError {
    ProgramError::Pin {
        path: path.to_owned(),
        reason: tail(error),
    }
}
