//! Attached programs and pinned objects, read from the kernel.

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::{Path, PathBuf},
};

use super::sys::{self, LinkInfo, MapInfo, ProgramInfo};

const LINK_TYPE_NETNS: u32 = 5;
const LINK_TYPE_TCX: u32 = 11;
const TCX_INGRESS: u32 = 46;
const TCX_EGRESS: u32 = 47;
/// Most programs that are read from one chain. The kernel allows no more.
const CHAIN: usize = 64;

crate::words! {
    /// One of the two chains of an interface.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Direction {
        /// Packets that the interface receives.
        Ingress => "ingress",
        /// Packets that the interface sends.
        Egress => "egress",
    }
}

impl Direction {
    const fn attach_type(self) -> u32 {
        match self {
            Self::Ingress => TCX_INGRESS,
            Self::Egress => TCX_EGRESS,
        }
    }
}

/// A program in a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attached {
    /// The kernel's number of the program.
    pub program: u32,
    /// Number of the link that attaches it; 0: none.
    pub link: u32,
}

/// A link as its pin has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinnedLink {
    /// The kernel's number of the link.
    pub id: u32,
    /// The kernel's number of the program that it attaches.
    pub program: u32,
    /// Where it is attached. `None` if it was detached or has another kind of target.
    pub place: Option<LinkPlace>,
}

/// Where a link is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkPlace {
    /// To an interface, by its number.
    Interface(u32, Direction),
    /// To a network namespace, by its inode.
    Namespace(u32),
}

/// A pinned object that attaches a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pinned {
    /// A link, which attaches its program.
    Link(PinnedLink),
    /// A program, by its number. Something else attaches it.
    Program(u32),
}

impl Pinned {
    /// Reads the object pinned at `path`; `None` if there is no pin.
    pub fn read(path: &Path) -> io::Result<Option<Self>> {
        let Some(fd) = open_if_pinned(path)? else {
            return Ok(None);
        };
        let kind = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
        match kind.to_str() {
            Some("anon_inode:bpf_link" | "anon_inode:bpf-link") => {
                PinnedLink::of(&fd).map(|link| Some(Self::Link(link)))
            }
            Some("anon_inode:bpf-prog") => {
                let info: ProgramInfo = sys::info(fd.as_fd())?;
                Ok(Some(Self::Program(info.id)))
            }
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{} is neither a link nor a program", kind.display()),
            )),
        }
    }
}

impl PinnedLink {
    /// Reads the link pinned at `path`; `None` if there is no pin. A pin of another object is an
    /// error.
    pub fn read(path: &Path) -> io::Result<Option<Self>> {
        match Pinned::read(path)? {
            None => Ok(None),
            Some(Pinned::Link(link)) => Ok(Some(link)),
            Some(Pinned::Program(_)) => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the pin holds a program, not a link",
            )),
        }
    }

    fn of(fd: &OwnedFd) -> io::Result<Self> {
        let info: LinkInfo = sys::info(fd.as_fd())?;
        let place = match (info.link_type, info.attach_type, info.place) {
            (_, _, 0) => None,
            (LINK_TYPE_TCX, TCX_INGRESS, at) => Some(LinkPlace::Interface(at, Direction::Ingress)),
            (LINK_TYPE_TCX, TCX_EGRESS, at) => Some(LinkPlace::Interface(at, Direction::Egress)),
            (LINK_TYPE_NETNS, _, at) => Some(LinkPlace::Namespace(at)),
            _ => None,
        };
        Ok(Self {
            id: info.id,
            program: info.program,
            place,
        })
    }
}

/// Opens the object pinned at `path`; `None` if there is no pin.
fn open_if_pinned(path: &Path) -> io::Result<Option<OwnedFd>> {
    match sys::open_pin(&c_path(path)?, 0) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some),
    }
}

/// Detaches the link pinned at `path`, as `bpftool link detach` does. The pin and the link remain,
/// without effect.
pub fn detach_pinned(path: &Path) -> io::Result<()> {
    let fd = sys::open_pin(&c_path(path)?, 0)?;
    sys::detach_link(fd.as_fd())
}

/// Whether the kernel has TCX, which came with Linux 6.6.
pub fn has_tcx() -> io::Result<bool> {
    // The loopback interface is the first of every network namespace.
    match sys::attached::<1>(1, TCX_INGRESS) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(false),
        // Without an answer there is an error later, at the attempt to attach.
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(true),
        found => found.map(|_| true),
    }
}

/// Whether this thread may open pinned maps with the privileges that it has. Before Linux 5.19 that
/// needs CAP_BPF, unless `kernel.unprivileged_bpf_disabled` is 0; a seccomp filter may forbid it too.
pub fn may_open_pins() -> bool {
    // No object has this path, so that there is an error in any case.
    let outcome = sys::open_pin(c"", sys::BPF_F_RDONLY);
    outcome.map_or_else(|error| error.raw_os_error() != Some(libc::EPERM), |_| true)
}

/// Pins a program at `path`, in place of what is pinned there.
pub fn pin_program(path: &Path, program: BorrowedFd<'_>) -> io::Result<()> {
    pin_again(path, program)
}

/// Programs of an interface's chain, in running order.
pub fn tcx_chain(ifindex: u32, direction: Direction) -> io::Result<Vec<Attached>> {
    let found = sys::attached::<CHAIN>(ifindex, direction.attach_type())?;
    let chain = found.into_iter();
    Ok(chain
        .map(|(program, link)| Attached { program, link })
        .collect())
}

/// Name of a program, from its author.
pub fn program_name(id: u32) -> io::Result<String> {
    let fd = sys::open_program(id)?;
    let info: ProgramInfo = sys::info(fd.as_fd())?;
    let name = info.name.split(|byte| *byte == 0).next();
    Ok(String::from_utf8_lossy(name.unwrap_or_default()).into_owned())
}

/// A map of any kind that stays open and whose pin can be restored.
#[derive(Debug)]
pub struct HeldPin {
    path: PathBuf,
    fd: OwnedFd,
    id: u32,
}

impl HeldPin {
    /// Opens the map pinned at `path`; `None` if there is no pin.
    pub fn open(path: &Path) -> io::Result<Option<Self>> {
        let Some(fd) = open_if_pinned(path)? else {
            return Ok(None);
        };
        let info: MapInfo = sys::info(fd.as_fd())?;
        Ok(Some(Self {
            path: path.to_owned(),
            fd,
            id: info.id,
        }))
    }

    /// Path of the pin in the BPF file system.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The kernel's number of the map.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Whether the pin still is this map.
    pub fn is_pinned(&self) -> bool {
        is_pinned(&self.path, self.id)
    }

    /// Replaces the pin with this map. Owner and mode of the new pin are those of the process.
    pub fn pin_again(&self) -> io::Result<()> {
        pin_again(&self.path, self.fd.as_fd())
    }
}

/// Whether the pin at `path` is the map with this number.
pub(super) fn is_pinned(path: &Path, id: u32) -> bool {
    let found = || {
        let fd = sys::open_pin(&c_path(path)?, sys::BPF_F_RDONLY)?;
        sys::info::<MapInfo>(fd.as_fd())
    };
    found().is_ok_and(|info| info.id == id)
}

/// Replaces the pin at `path` with an object.
pub(super) fn pin_again(path: &Path, object: BorrowedFd<'_>) -> io::Result<()> {
    let mut next = path.as_os_str().to_owned();
    next.push("_next");
    let next = PathBuf::from(next);
    match std::fs::remove_file(&next) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    sys::pin(object, &c_path(&next)?)?;
    std::fs::rename(&next, path)
}

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "path contains a NUL byte"))
}
