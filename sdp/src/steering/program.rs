//! The program that steers, and its maps: loaded by whoever comes first.
//!
//! holdfast-agent puts its own in place of whatever is there; a proxy beneath
//! another agent only where nothing is. Maps and link outlive both by their
//! pins, so that replicas of any age meet in the same slots.

use std::{
    error::Error,
    fmt, fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use aya::{
    EbpfLoader, include_bytes_aligned,
    programs::{SkLookup, links::FdLink},
};
use nix::fcntl::{Flock, FlockArg};
use shared_maps::{
    pin,
    redirect::{self, RedirectKey, RedirectValue},
    steering::{LINK_NAME, SLOTS, SLOTS_NAME, SOCKS_NAME, SOCKS_PER_SLOT, Slot},
    user::{Globals, Map, MapError, MapKind},
};

/// The program, built by `cargo xtask bpf`.
static OBJECT: &[u8] = include_bytes_aligned!("../../../bpf/prebuilt/holdfast-steer.o");
const NAME: &str = "steer";
/// Network namespace of this thread: a test may have put it into one of its own.
const NETNS: &str = "/proc/thread-self/ns/net";
/// Longest part of a verifier log that goes into an error, characters, from its end.
const LOG_TAIL: usize = 1200;

/// Why nothing steers.
#[derive(Debug, thiserror::Error)]
pub enum SteerError {
    /// A map is not what it should be, or cannot be made.
    #[error(transparent)]
    Map(#[from] MapError),
    /// A directory of the BPF file system cannot be made, locked or given to the proxies' group.
    #[error("{path}: {source}", path = .path.display())]
    Files {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The kernel refused the program.
    #[error("program {NAME}: {0}")]
    Program(String),
    /// Its link could not be pinned.
    #[error("pin {path}: {reason}", path = .path.display())]
    Pin {
        /// The pin.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

/// Makes what is missing of maps and program, and opens the slots to `group`. Needs root.
///
/// What another process pinned stays: all versions of a map's name have one layout.
pub fn provide(globals: &Globals, group: u32) -> Result<(), SteerError> {
    let links = globals.root().join(pin::LINKS);
    for path in [globals.dir(), links.clone()] {
        fs::create_dir_all(&path).map_err(|source| SteerError::Files { path, source })?;
    }
    let _locked = lock(globals)?;
    if links.join(LINK_NAME).exists() {
        return Ok(());
    }
    make_maps(globals)?;
    share(globals, group)?;
    attach(globals)
}

/// Puts the program on this thread's network namespace, in place of an earlier one if there is
/// one. The maps must be there.
pub fn replace(globals: &Globals) -> Result<(), SteerError> {
    let _locked = lock(globals)?;
    attach(globals)
}

/// Processes that start together must not pin one over the other.
fn lock(globals: &Globals) -> Result<Flock<fs::File>, SteerError> {
    let path = globals.root().join(pin::LINKS);
    let failed = |source| SteerError::Files {
        path: path.clone(),
        source,
    };
    let dir = fs::File::open(&path).map_err(failed)?;
    Flock::lock(dir, FlockArg::LockExclusive).map_err(|(_, errno)| failed(errno.into()))
}

/// Makes and pins the maps of steering that are not there yet.
pub fn make_maps(globals: &Globals) -> Result<(), MapError> {
    let entries = redirect::MAX_ENTRIES;
    let path = globals.path(redirect::NAME);
    Map::<RedirectKey, RedirectValue>::open_or_create(&path, MapKind::LruHash, entries, 0)?;
    let path = globals.path(SLOTS_NAME);
    Map::<u32, Slot>::open_or_create(&path, MapKind::Array, SLOTS, 0)?;
    // The value of a sockmap is a descriptor on update, a cookie on lookup.
    let path = globals.path(SOCKS_NAME);
    let sockets = SLOTS * SOCKS_PER_SLOT;
    Map::<u32, u32>::open_or_create(&path, MapKind::SockMap, sockets, 0)?;
    Ok(())
}

/// Lets the proxies' group take slots.
pub fn share(globals: &Globals, group: u32) -> Result<(), SteerError> {
    for name in [SLOTS_NAME, SOCKS_NAME] {
        let path = globals.path(name);
        std::os::unix::fs::chown(&path, None, Some(group))
            .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o660)))
            .map_err(|source| SteerError::Files { path, source })?;
    }
    Ok(())
}

fn attach(globals: &Globals) -> Result<(), SteerError> {
    let refused = |error: &dyn Error| SteerError::Program(tail(error));
    let mut ebpf = EbpfLoader::new()
        .default_map_pin_directory(globals.dir())
        .load(OBJECT)
        .map_err(|error| refused(&error))?;
    let program: &mut SkLookup = ebpf
        .program_mut(NAME)
        .and_then(|program| program.try_into().ok())
        .ok_or_else(|| SteerError::Program("not in the embedded object".to_owned()))?;
    program.load().map_err(|error| refused(&error))?;
    let netns = fs::File::open(NETNS).map_err(|source| SteerError::Files {
        path: NETNS.into(),
        source,
    })?;
    let id = program.attach(netns).map_err(|error| refused(&error))?;
    let link = program.take_link(id).map_err(|error| refused(&error))?;
    // Both programs run until the new pin replaces the old one: they
    // select alike, and the later selection holds.
    let path = globals.root().join(pin::LINKS).join(LINK_NAME);
    pin_over(link.into(), &path).map_err(|reason| SteerError::Pin { path, reason })
}

/// Pins a link in place of what is pinned at `path`, which is let go only then.
pub fn pin_over(link: FdLink, path: &Path) -> Result<(), String> {
    let mut next = path.as_os_str().to_owned();
    next.push("_next");
    let next = PathBuf::from(next);
    // One that was left here halfway goes last too: the new link is attached already.
    match fs::remove_file(&next) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(tail(&error)),
        _ => {}
    }
    link.pin(&next).map_err(|error| tail(&error))?;
    fs::rename(&next, path).map_err(|error| tail(&error))
}

/// An error with its causes; of a long one (a verifier log) the end.
pub fn tail(error: &dyn Error) -> String {
    struct Chain<'a>(&'a dyn Error);
    impl fmt::Display for Chain<'_> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "{}", self.0)?;
            let mut source = self.0.source();
            while let Some(error) = source {
                write!(f, ": {error}")?;
                source = error.source();
            }
            Ok(())
        }
    }
    let text = Chain(error).to_string();
    let length = text.chars().count();
    if length <= LOG_TAIL {
        return text;
    }
    let end: String = text.chars().skip(length - LOG_TAIL).collect();
    format!("...{end}")
}
