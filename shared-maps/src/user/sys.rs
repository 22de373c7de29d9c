//! All calls of `bpf(2)` and all reads of the clocks.

use std::{
    ffi::CStr,
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

const BPF_MAP_CREATE: libc::c_long = 0;
const BPF_MAP_LOOKUP_ELEM: libc::c_long = 1;
const BPF_MAP_UPDATE_ELEM: libc::c_long = 2;
const BPF_MAP_DELETE_ELEM: libc::c_long = 3;
const BPF_MAP_GET_NEXT_KEY: libc::c_long = 4;
const BPF_OBJ_PIN: libc::c_long = 6;
const BPF_OBJ_GET: libc::c_long = 7;
const BPF_PROG_GET_FD_BY_ID: libc::c_long = 13;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_long = 15;
const BPF_PROG_QUERY: libc::c_long = 16;
const BPF_MAP_UPDATE_BATCH: libc::c_long = 26;
const BPF_LINK_DETACH: libc::c_long = 34;

/// `BPF_NOEXIST`: an update that must not replace.
const BPF_NOEXIST: u64 = 1;
/// `BPF_F_RDONLY`: the descriptor may only read.
pub(super) const BPF_F_RDONLY: u32 = 1 << 3;

/// `union bpf_attr` for map element commands.
#[repr(C)]
#[derive(Default)]
struct ElementAttr {
    map_fd: u32,
    pad: u32,
    key: u64,
    value_or_next_key: u64,
    flags: u64,
}

/// `union bpf_attr` for commands about many elements.
#[repr(C)]
#[derive(Default)]
struct BatchAttr {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    element_flags: u64,
    flags: u64,
}

/// `union bpf_attr` for map creation.
#[repr(C)]
#[derive(Default)]
struct CreateAttr {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
    inner_map_fd: u32,
    numa_node: u32,
    map_name: [u8; 16],
}

/// `union bpf_attr` for pinning and opening pins.
#[repr(C)]
#[derive(Default)]
struct ObjectAttr {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

/// `union bpf_attr` for object information.
#[repr(C)]
#[derive(Default)]
struct InfoAttr {
    bpf_fd: u32,
    info_len: u32,
    info: u64,
}

/// First fields of `struct bpf_map_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MapInfo {
    pub(super) map_type: u32,
    pub(super) id: u32,
    pub(super) key_size: u32,
    pub(super) value_size: u32,
    pub(super) max_entries: u32,
    pub(super) map_flags: u32,
}

/// Head of `struct bpf_link_info`. `place` is the interface of a TCX link, or the inode of a
/// namespace link's network namespace. It is 0 after the link was detached.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LinkInfo {
    pub(super) link_type: u32,
    pub(super) id: u32,
    pub(super) program: u32,
    pad: u32,
    pub(super) place: u32,
    pub(super) attach_type: u32,
}

/// First fields of `struct bpf_prog_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ProgramInfo {
    pub(super) program_type: u32,
    pub(super) id: u32,
    tag: [u8; 8],
    lengths: [u32; 2],
    instructions: [u64; 2],
    load_time: u64,
    created_by: u32,
    maps: u32,
    map_ids: u64,
    pub(super) name: [u8; 16],
}

/// `union bpf_attr` for listing the programs at an attach point.
#[repr(C)]
#[derive(Default)]
struct QueryAttr {
    target: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    program_ids: u64,
    count: u32,
    pad: u32,
    program_flags: u64,
    link_ids: u64,
    link_flags: u64,
    revision: u64,
}

/// `union bpf_attr` for opening an object by its number, and for detaching a link by its descriptor.
#[repr(C)]
#[derive(Default)]
struct IdAttr {
    id: u32,
    next_id: u32,
    open_flags: u32,
}

/// Calls `bpf(2)` with `attr` and its size.
fn bpf<T>(command: libc::c_long, attr: &mut T) -> io::Result<libc::c_long> {
    // SAFETY: `attr` is one of the `#[repr(C)]` prefixes of `union bpf_attr`
    // above, lives across the call, and its size is passed; pointers inside it
    // are checked by the callers below.
    let ret = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            core::ptr::from_mut(attr),
            size_of::<T>(),
        )
    };
    if ret < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(ret)
    }
}

fn owned(fd: libc::c_long) -> io::Result<OwnedFd> {
    let fd = i32::try_from(fd).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    // SAFETY: the kernel just returned this descriptor to this call only.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn fd_number(fd: BorrowedFd<'_>) -> u32 {
    fd.as_raw_fd().cast_unsigned()
}

pub(super) fn open_pin(path: &CStr, file_flags: u32) -> io::Result<OwnedFd> {
    let mut attr = ObjectAttr {
        pathname: path.as_ptr() as u64,
        bpf_fd: 0,
        file_flags,
    };
    owned(bpf(BPF_OBJ_GET, &mut attr)?)
}

pub(super) fn pin(fd: BorrowedFd<'_>, path: &CStr) -> io::Result<()> {
    let mut attr = ObjectAttr {
        pathname: path.as_ptr() as u64,
        bpf_fd: fd_number(fd),
        file_flags: 0,
    };
    bpf(BPF_OBJ_PIN, &mut attr).map(drop)
}

pub(super) fn create(info: MapInfo, name: &str) -> io::Result<OwnedFd> {
    let mut map_name = [0; 16];
    for (slot, byte) in map_name.iter_mut().take(15).zip(name.bytes()) {
        *slot = byte;
    }
    let mut attr = CreateAttr {
        map_type: info.map_type,
        key_size: info.key_size,
        value_size: info.value_size,
        max_entries: info.max_entries,
        map_flags: info.map_flags,
        map_name,
        ..CreateAttr::default()
    };
    owned(bpf(BPF_MAP_CREATE, &mut attr)?)
}

/// Kinds of object information: plain numbers, for which every bit pattern is valid.
pub(super) trait ObjectInfo: Default {}
impl ObjectInfo for MapInfo {}
impl ObjectInfo for LinkInfo {}
impl ObjectInfo for ProgramInfo {}

/// Information about the object of this descriptor. `T` must be the kind of the object.
pub(super) fn info<T: ObjectInfo>(fd: BorrowedFd<'_>) -> io::Result<T> {
    let mut info = T::default();
    let mut attr = InfoAttr {
        bpf_fd: fd_number(fd),
        #[expect(clippy::cast_possible_truncation, reason = "some dozens of bytes")]
        info_len: size_of::<T>() as u32,
        info: core::ptr::from_mut(&mut info) as u64,
    };
    bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr)?;
    Ok(info)
}

/// Detaches a link. The link itself remains.
pub(super) fn detach_link(fd: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = IdAttr {
        id: fd_number(fd),
        ..IdAttr::default()
    };
    bpf(BPF_LINK_DETACH, &mut attr).map(drop)
}

/// Opens a program by its number.
pub(super) fn open_program(id: u32) -> io::Result<OwnedFd> {
    let mut attr = IdAttr {
        id,
        ..IdAttr::default()
    };
    owned(bpf(BPF_PROG_GET_FD_BY_ID, &mut attr)?)
}

/// Numbers of the programs attached to an interface, and of their links, in running order. At most
/// `N` of them.
pub(super) fn attached<const N: usize>(
    ifindex: u32,
    attach_type: u32,
) -> io::Result<Vec<(u32, u32)>> {
    let (mut programs, mut links) = ([0_u32; N], [0_u32; N]);
    let mut attr = QueryAttr {
        target: ifindex,
        attach_type,
        program_ids: programs.as_mut_ptr() as u64,
        link_ids: links.as_mut_ptr() as u64,
        #[expect(clippy::cast_possible_truncation, reason = "some dozens")]
        count: N as u32,
        ..QueryAttr::default()
    };
    match bpf(BPF_PROG_QUERY, &mut attr) {
        Ok(_) => {}
        // There are more: the kernel returned the first `N`.
        Err(e) if e.raw_os_error() == Some(libc::ENOSPC) => attr.count = u32::MAX,
        Err(e) => return Err(e),
    }
    let count = usize::try_from(attr.count).unwrap_or(N).min(N);
    let both = programs.into_iter().zip(links);
    Ok(both.take(count).collect())
}

/// `key` and `value` must have the map's sizes, which [`super::Map`] checked.
pub(super) fn lookup(fd: BorrowedFd<'_>, key: &[u8], value: &mut [u8]) -> io::Result<bool> {
    let mut attr = ElementAttr {
        map_fd: fd_number(fd),
        key: key.as_ptr() as u64,
        value_or_next_key: value.as_mut_ptr() as u64,
        ..ElementAttr::default()
    };
    match bpf(BPF_MAP_LOOKUP_ELEM, &mut attr) {
        Ok(_) => Ok(true),
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(e) => Err(e),
    }
}

/// `key` and `value` must have the map's sizes, which [`super::Map`] checked.
pub(super) fn update(fd: BorrowedFd<'_>, key: &[u8], value: &[u8], flags: u64) -> io::Result<()> {
    let mut attr = ElementAttr {
        map_fd: fd_number(fd),
        key: key.as_ptr() as u64,
        value_or_next_key: value.as_ptr() as u64,
        flags,
        ..ElementAttr::default()
    };
    bpf(BPF_MAP_UPDATE_ELEM, &mut attr).map(drop)
}

/// Updates elements of a map with keys and values of four bytes.
pub(super) fn update_all(fd: BorrowedFd<'_>, keys: &[u32], values: &[u32]) -> io::Result<()> {
    let count = u32::try_from(keys.len().min(values.len()))
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    if count == 0 {
        return Ok(());
    }
    let mut attr = BatchAttr {
        keys: keys.as_ptr() as u64,
        values: values.as_ptr() as u64,
        count,
        map_fd: fd_number(fd),
        ..BatchAttr::default()
    };
    bpf(BPF_MAP_UPDATE_BATCH, &mut attr).map(drop)
}

/// Sizes as for [`update`]. Returns whether the entry was inserted, that is, the key was absent.
pub(super) fn add(fd: BorrowedFd<'_>, key: &[u8], value: &[u8]) -> io::Result<bool> {
    match update(fd, key, value, BPF_NOEXIST) {
        Ok(()) => Ok(true),
        Err(e) if e.raw_os_error() == Some(libc::EEXIST) => Ok(false),
        Err(e) => Err(e),
    }
}

/// `key` must have the map's size, which [`super::Map`] checked.
pub(super) fn delete(fd: BorrowedFd<'_>, key: &[u8]) -> io::Result<bool> {
    let mut attr = ElementAttr {
        map_fd: fd_number(fd),
        key: key.as_ptr() as u64,
        ..ElementAttr::default()
    };
    match bpf(BPF_MAP_DELETE_ELEM, &mut attr) {
        Ok(_) => Ok(true),
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(e) => Err(e),
    }
}

/// `key` and `next` must have the map's size, which [`super::Map`] checked.
pub(super) fn next_key(
    fd: BorrowedFd<'_>,
    key: Option<&[u8]>,
    next: &mut [u8],
) -> io::Result<bool> {
    let mut attr = ElementAttr {
        map_fd: fd_number(fd),
        key: key.map_or(0, |k| k.as_ptr() as u64),
        value_or_next_key: next.as_mut_ptr() as u64,
        ..ElementAttr::default()
    };
    match bpf(BPF_MAP_GET_NEXT_KEY, &mut attr) {
        Ok(_) => Ok(true),
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(e) => Err(e),
    }
}

fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is a valid timespec for the kernel to fill.
    let ret = unsafe { libc::clock_gettime(clock, &raw mut now) };
    assert_eq!(ret, 0, "the clocks used here exist on every Linux");
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// CLOCK_MONOTONIC in nanoseconds, the clock of `bpf_ktime_get_ns`.
pub fn monotonic_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC)
}

/// CLOCK_BOOTTIME in nanoseconds: monotonic, and continues while the machine is suspended.
pub fn boottime_ns() -> u64 {
    clock_ns(libc::CLOCK_BOOTTIME)
}
