//! The steering program and its maps: the first process on the node loads them.
//!
//! holdfast-agent puts its own program in place of any that is pinned. A proxy leaves the program of
//! holdfast-agent in place, and replaces another one only if it differs from its own. Pins keep maps
//! and link alive without a process, so that replicas of any version use the same slots.

use std::{
    error::Error,
    fs, io,
    os::unix::fs::{MetadataExt as _, PermissionsExt},
    path::{Path, PathBuf},
    time::Duration,
};

use aya::{
    Ebpf, EbpfLoader, include_bytes_aligned,
    programs::{
        SkLookup,
        links::{FdLink, PinnedLink as LinkPin},
        loaded_programs,
    },
};
use nix::fcntl::Flock;
use shared_maps::{
    fragment, pin,
    redirect::{self, RedirectKey, RedirectValue},
    steering::{LINK_NAME, SHOWS_INTERFACE, SLOTS, SLOTS_NAME, SOCKS_NAME, SOCKS_PER_SLOT, Slot},
    user::{Globals, LinkPlace, Map, MapError, MapKind, PinnedLink},
};

use crate::{
    lookup::present,
    pins::{self, MayOpen, PinDirError},
};

/// The program, built by `cargo xtask bpf`.
static OBJECT: &[u8] = include_bytes_aligned!("../../bpf/prebuilt/holdfast-steer.o");
const NAME: &str = "steer";
/// Network namespace of this thread. A test may have moved the thread into its own namespace.
const NETNS: &str = "/proc/thread-self/ns/net";
/// Longest part of a verifier log that goes into an error, characters, from its end.
const LOG_TAIL: usize = 1200;
/// In the verifier's log of a kernel before 5.17: the program reads a field that is not there.
const NO_INTERFACE: &str = "invalid bpf_context access";
/// Longest wait for the lock. Loading takes less, so a process that holds the lock for longer
/// hangs.
const LOCKED_FOR: Duration = Duration::from_secs(2);

/// Why the steering program or its maps are not in place.
#[derive(Debug, thiserror::Error)]
pub enum SteerError {
    /// A map is not what it should be, or cannot be made.
    #[error(transparent)]
    Map(#[from] MapError),
    /// A directory of the BPF file system cannot be used.
    #[error(transparent)]
    Directory(#[from] PinDirError),
    /// A directory cannot be locked, or a pin cannot be given to the proxies' group.
    #[error("{path}: {source}", path = .path.display())]
    Files {
        /// The directory, pin or namespace file.
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
    /// The kernel refused the program.
    #[error("program {NAME}: {0}")]
    Program(String),
    /// Pins were removed while the program was loaded, so that it got new maps.
    #[error("program {NAME}: the pins of its maps changed while it was loaded")]
    OtherMaps,
    /// The link could not be pinned.
    #[error("pin {path}: {reason}", path = .path.display())]
    Pin {
        /// Path of the link's pin.
        path: PathBuf,
        /// The error of the kernel, as text.
        reason: String,
    },
}

/// Makes the missing maps and the program, and opens the slots to `group`. Needs root.
///
/// Maps that another process pinned stay: maps of one name have the same layout in all versions. A
/// program stays if it uses these maps, and either is holdfast-agent's or has the code of this one.
pub fn provide(globals: &Globals, group: u32) -> Result<(), SteerError> {
    for dir in [pin::GLOBALS, pin::LINKS] {
        pins::make(globals.root(), dir, MayOpen::Everyone)?;
    }
    let _locked = lock(globals)?;
    let pins = [SLOTS_NAME, SOCKS_NAME].map(|name| globals.path(name));
    let complete = pins.iter().all(|pin| pin.exists()) && link_pin(globals).exists();
    match provide_or_update(globals, group) {
        // A container may lack the privileges of the process that made them.
        Err(error) if complete => {
            tracing::info!(%error, "cannot update the steering program; the present one is used");
            Ok(())
        }
        result => result,
    }
}

fn provide_or_update(globals: &Globals, group: u32) -> Result<(), SteerError> {
    let maps = ids_of_maps(globals)?;
    share(globals, group)?;
    let mut ebpf = load(globals)?;
    let ours = steer(&mut ebpf)?;
    let path = link_pin(globals);
    // Only our agent makes this map.
    let agents = globals.path(fragment::NAME).exists();
    let stays = path.exists()
        && is_good(&path, (ours, maps), agents).unwrap_or_else(|error| {
            tracing::info!(%error, path = %path.display(), "cannot inspect the pinned steering program");
            agents
        });
    if stays {
        return Ok(());
    }
    attach(globals, ours)
}

/// Path of the program's link. While the pin exists, packets are steered.
pub fn link_pin(globals: &Globals) -> PathBuf {
    globals.root().join(pin::LINKS).join(LINK_NAME)
}

/// Whether the program of the link pinned at `path` has these maps and, unless any code will do,
/// the code of `ours`.
fn is_good(
    path: &Path,
    (ours, maps): (&SkLookup, [u32; 3]),
    any_code: bool,
) -> Result<bool, Box<dyn Error>> {
    let link = FdLink::from(LinkPin::from_pin(path)?);
    let of = link.info()?.program_id();
    let pinned = loaded_programs().find(|info| info.as_ref().is_ok_and(|info| info.id() == of));
    let pinned = pinned.ok_or("no such program")??;
    let same_code = any_code || pinned.tag() == ours.info()?.tag();
    let has = pinned.map_ids()?.unwrap_or_default();
    Ok(same_code && maps.iter().all(|id| has.contains(id)))
}

/// Attaches the program to this thread's network namespace, in place of an earlier one if there is
/// one. The maps must exist. Returns the program's id.
///
/// `maps` are the kernel's numbers of maps that the program must use. Loading makes a map whose pin
/// was removed, and a program with such a map would steer to no proxy.
///
/// # Errors
/// [`SteerError::OtherMaps`] if the program was loaded with another map. It is not attached.
pub fn replace(globals: &Globals, maps: &[u32]) -> Result<u32, SteerError> {
    let _locked = lock(globals)?;
    let mut ebpf = load(globals)?;
    let has = ids_of_loaded_maps(&ebpf)?;
    if !maps.iter().all(|id| has.contains(id)) {
        return Err(SteerError::OtherMaps);
    }
    let program = steer(&mut ebpf)?;
    attach(globals, program)?;
    let loaded = program.info().map_err(|error| refused(&error))?;
    Ok(loaded.id())
}

/// Numbers of the maps that loading found or made. The kernel tells those of a program by its number
/// only to a process with CAP_SYS_ADMIN (`BPF_PROG_GET_FD_BY_ID`).
fn ids_of_loaded_maps(ebpf: &Ebpf) -> Result<Vec<u32>, SteerError> {
    use aya::maps::Map::{Array, LruHashMap, SockMap};
    let maps = ebpf.maps().filter_map(|(_, map)| match map {
        Array(data) | LruHashMap(data) | SockMap(data) => Some(data),
        _ => None,
    });
    maps.map(|data| Ok(data.info()?.id()))
        .collect::<Result<_, aya::maps::MapError>>()
        .map_err(|error| refused(&error))
}

/// Fault of the program with this id, which [`replace`] attached. `None` if it steers.
pub fn fault(globals: &Globals, program: u32) -> Option<String> {
    let path = link_pin(globals);
    let link = match PinnedLink::read(&path) {
        Ok(Some(link)) => link,
        Ok(None) => return Some(format!("the pin {} is gone", path.display())),
        Err(error) => return Some(format!("pin {}: {error}", path.display())),
    };
    let own = fs::metadata(NETNS).map(|found| found.ino());
    let place = link.place.map(|place| match place {
        LinkPlace::Namespace(inode) => u64::from(inode),
        LinkPlace::Interface(..) => 0,
    });
    if place.is_none() {
        Some("its link was detached".to_owned())
    } else if own.is_ok_and(|own| place != Some(own)) {
        Some("its link is attached to another network namespace".to_owned())
    } else if link.program != program {
        Some(format!(
            "its link holds program {}, not {program}",
            link.program
        ))
    } else {
        None
    }
}

/// Keeps processes that start together from pinning one over the other. Returns `None` if another
/// process of root held the lock for longer than loading takes: it hangs, and must not delay a
/// start.
fn lock(globals: &Globals) -> Result<Option<Flock<fs::File>>, SteerError> {
    let dir = pins::make(globals.root(), pin::PROGRAMS_LOCK, MayOpen::Owner)?;
    let path = globals.root().join(pin::PROGRAMS_LOCK);
    let locked = pins::lock(dir, LOCKED_FOR).map_err(|source| SteerError::Files {
        path: path.clone(),
        source,
    })?;
    if locked.is_none() {
        tracing::warn!(path = %path.display(), "the lock for loading the steering program is held by another process for too long; loading without it");
    }
    Ok(locked)
}

/// Makes and pins the maps of steering that are not there yet.
pub fn make_maps(globals: &Globals) -> Result<(), MapError> {
    ids_of_maps(globals).map(|_| ())
}

/// Makes the maps of steering that are missing. The result has the ids of all three.
fn ids_of_maps(globals: &Globals) -> Result<[u32; 3], MapError> {
    let entries = redirect::MAX_ENTRIES;
    let path = globals.path(redirect::NAME);
    let redirect =
        Map::<RedirectKey, RedirectValue>::open_or_create(&path, MapKind::LruHash, entries, 0)?;
    let path = globals.path(SLOTS_NAME);
    let slots = Map::<u32, Slot>::open_or_create(&path, MapKind::Array, SLOTS, 0)?;
    // The value of a sockmap is a descriptor on update, a cookie on lookup.
    let path = globals.path(SOCKS_NAME);
    let sockets = SLOTS * SOCKS_PER_SLOT;
    let socks = Map::<u32, u32>::open_or_create(&path, MapKind::SockMap, sockets, 0)?;
    Ok([redirect.id(), slots.id(), socks.id()])
}

/// Gives the proxies' group access to the slots.
pub fn share(globals: &Globals, group: u32) -> Result<(), SteerError> {
    pins::make(globals.root(), pin::SLOTS_LOCK, MayOpen::Group(group))?;
    for name in [SLOTS_NAME, SOCKS_NAME] {
        let path = globals.path(name);
        std::os::unix::fs::chown(&path, None, Some(group))
            .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o660)))
            .map_err(|source| SteerError::Files { path, source })?;
    }
    Ok(())
}

fn refused(error: &dyn Error) -> SteerError {
    SteerError::Program(tail(error))
}

/// Loads the program into the kernel; its maps are the pinned ones.
///
/// Before Linux 5.17 it is loaded in a form that does not read by which interface a packet came.
fn load(globals: &Globals) -> Result<Ebpf, SteerError> {
    let refusal = match load_as(globals, Interface::Shown) {
        Ok(ebpf) => return Ok(ebpf),
        Err(refusal) => refusal,
    };
    if !refusal.needs_interface {
        return Err(refusal.error);
    }
    let ebpf = load_as(globals, Interface::Hidden).map_err(|refusal| refusal.error)?;
    tracing::warn!(
        "this kernel does not show to the steering program by which interface a packet came (Linux \
         5.17 does): it trusts the source of packets to DNS servers of this node, and packets that \
         processes of the node send to the proxy's port are dropped at the proxy's sockets"
    );
    Ok(ebpf)
}

/// Whether the kernel lets the program read by which interface a packet came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Interface {
    Shown,
    Hidden,
}

/// Why the program is not loaded.
struct Refusal {
    error: SteerError,
    /// Whether the verifier refused a field of the context.
    needs_interface: bool,
}

impl Refusal {
    fn new(error: &dyn Error) -> Self {
        Self {
            error: refused(error),
            needs_interface: chain(error).contains(NO_INTERFACE),
        }
    }
}

fn load_as(globals: &Globals, interface: Interface) -> Result<Ebpf, Refusal> {
    let shows = u32::from(interface == Interface::Shown).to_ne_bytes();
    let mut ebpf = EbpfLoader::new()
        .default_map_pin_directory(globals.dir())
        .override_global(SHOWS_INTERFACE, &shows[..], true)
        .load(OBJECT)
        .map_err(|error| Refusal::new(&error))?;
    let program = steer(&mut ebpf).map_err(|error| Refusal {
        error,
        needs_interface: false,
    })?;
    program.load().map_err(|error| Refusal::new(&error))?;
    Ok(ebpf)
}

/// The program of the object.
fn steer(ebpf: &mut Ebpf) -> Result<&mut SkLookup, SteerError> {
    ebpf.program_mut(NAME)
        .and_then(|program| program.try_into().ok())
        .ok_or_else(|| SteerError::Program("not in the embedded object".to_owned()))
}

fn attach(globals: &Globals, program: &mut SkLookup) -> Result<(), SteerError> {
    let netns = fs::File::open(NETNS).map_err(|source| SteerError::Files {
        path: NETNS.into(),
        source,
    })?;
    let id = program.attach(netns).map_err(|error| refused(&error))?;
    let link = program.take_link(id).map_err(|error| refused(&error))?;
    // Both programs run until the new pin replaces the old one. They select the same sockets, and
    // the later selection counts.
    let path = link_pin(globals);
    pin_over(link.into(), &path).map_err(|reason| SteerError::Pin { path, reason })
}

/// Pins a link at `path` and then releases the link that was pinned there before.
pub fn pin_over(link: FdLink, path: &Path) -> Result<(), String> {
    let mut next = path.as_os_str().to_owned();
    next.push("_next");
    let next = PathBuf::from(next);
    // A remainder of an interrupted replacement is removed last, because its new link is attached
    // already.
    present(fs::remove_file(&next)).map_err(|error| tail(&error))?;
    link.pin(&next).map_err(|error| tail(&error))?;
    fs::rename(&next, path).map_err(|error| tail(&error))
}

/// An error with its causes. A long text, such as a verifier log, is cut to its end.
pub fn tail(error: &dyn Error) -> String {
    let text = chain(error);
    let length = text.chars().count();
    if length <= LOG_TAIL {
        return text;
    }
    let end: String = text.chars().skip(length - LOG_TAIL).collect();
    format!("...{end}")
}

/// An error with its causes.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}
