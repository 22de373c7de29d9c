//! The one door to `bpf(2)` and the clocks.

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
const BPF_OBJ_GET_INFO_BY_FD: libc::c_long = 15;

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

/// Head of `struct bpf_map_info`.
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

/// Calls `bpf(2)` with `attr`.
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
    // SAFETY: the kernel just returned this descriptor to us and to nobody else.
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

pub(super) fn info(fd: BorrowedFd<'_>) -> io::Result<MapInfo> {
    let mut info = MapInfo::default();
    let mut attr = InfoAttr {
        bpf_fd: fd_number(fd),
        #[expect(clippy::cast_possible_truncation, reason = "24 bytes")]
        info_len: size_of::<MapInfo>() as u32,
        info: core::ptr::from_mut(&mut info) as u64,
    };
    bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr)?;
    Ok(info)
}

/// `key` and `value` must be of the map's sizes, which [`super::Map`] checked.
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

/// `key` and `value` must be of the map's sizes, which [`super::Map`] checked.
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

/// Sizes as for [`update`]; says whether the key was absent and is there now.
pub(super) fn add(fd: BorrowedFd<'_>, key: &[u8], value: &[u8]) -> io::Result<bool> {
    match update(fd, key, value, BPF_NOEXIST) {
        Ok(()) => Ok(true),
        Err(e) if e.raw_os_error() == Some(libc::EEXIST) => Ok(false),
        Err(e) => Err(e),
    }
}

/// `key` must be of the map's size, which [`super::Map`] checked.
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

/// `key` and `next` must be of the map's size, which [`super::Map`] checked.
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

/// CLOCK_MONOTONIC in nanoseconds: what `bpf_ktime_get_ns` reads.
pub fn monotonic_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC)
}

/// CLOCK_BOOTTIME in nanoseconds: monotonic, and goes on while suspended.
pub fn boottime_ns() -> u64 {
    clock_ns(libc::CLOCK_BOOTTIME)
}
