//! A checked handle on one kernel map.

use std::{
    collections::HashSet,
    ffi::CString,
    fmt, io,
    marker::PhantomData,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
};

use super::{MapError, Record, attached, sys};

/// Kernel map types that we use (`enum bpf_map_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapKind {
    /// `BPF_MAP_TYPE_HASH`.
    Hash,
    /// `BPF_MAP_TYPE_ARRAY`.
    Array,
    /// `BPF_MAP_TYPE_PERCPU_ARRAY`.
    PerCpuArray,
    /// `BPF_MAP_TYPE_LRU_HASH`.
    LruHash,
    /// `BPF_MAP_TYPE_LRU_PERCPU_HASH`.
    LruPerCpuHash,
    /// `BPF_MAP_TYPE_LPM_TRIE`.
    LpmTrie,
    /// `BPF_MAP_TYPE_SOCKMAP`.
    SockMap,
    /// Any other, by its kernel number.
    Other(u32),
}

impl MapKind {
    const fn number(self) -> u32 {
        match self {
            Self::Hash => 1,
            Self::Array => 2,
            Self::PerCpuArray => 6,
            Self::LruHash => 9,
            Self::LruPerCpuHash => 10,
            Self::LpmTrie => 11,
            Self::SockMap => 15,
            Self::Other(n) => n,
        }
    }

    const fn is_per_cpu(self) -> bool {
        matches!(self, Self::PerCpuArray | Self::LruPerCpuHash)
    }

    const fn from_number(n: u32) -> Self {
        match n {
            1 => Self::Hash,
            2 => Self::Array,
            6 => Self::PerCpuArray,
            9 => Self::LruHash,
            10 => Self::LruPerCpuHash,
            11 => Self::LpmTrie,
            15 => Self::SockMap,
            n => Self::Other(n),
        }
    }
}

/// Kind and sizes of a map, which are checked when it is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapSpec {
    /// Type of the map in the kernel.
    pub kind: MapKind,
    /// Size of a key, bytes.
    pub key_size: u32,
    /// Size of a value, bytes.
    pub value_size: u32,
}

impl fmt::Display for MapSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} with {}-byte keys and {}-byte values",
            self.kind, self.key_size, self.value_size
        )
    }
}

/// What a handle may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read only. It needs no capability, only read permission on the pin.
    ReadOnly,
    /// Read and write. It needs both permissions on the pin.
    ReadWrite,
}

/// A handle on one kernel map with keys `K` and values `V`.
#[derive(Debug)]
pub struct Map<K, V> {
    fd: OwnedFd,
    name: String,
    id: u32,
    max_entries: u32,
    kind: MapKind,
    types: PhantomData<fn() -> (K, V)>,
}

impl<K: Record, V: Record> Map<K, V> {
    /// Layout of a map of kind `kind` with these types.
    pub fn spec(kind: MapKind) -> MapSpec {
        #[expect(clippy::cast_possible_truncation, reason = "records are small")]
        MapSpec {
            kind,
            key_size: size_of::<K>() as u32,
            value_size: size_of::<V>() as u32,
        }
    }

    /// Opens the pin at `path` and checks its shape.
    pub fn open(path: &Path, kind: MapKind, access: Access) -> Result<Self, MapError> {
        let flags = match access {
            Access::ReadOnly => sys::BPF_F_RDONLY,
            Access::ReadWrite => 0,
        };
        let fd = sys::open_pin(&c_path(path)?, flags).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => MapError::NotPinned(path.to_owned()),
            // A file mode that forbids access gives EACCES.
            _ if e.raw_os_error() == Some(libc::EPERM) => MapError::Forbidden(path.to_owned()),
            _ => failed("BPF_OBJ_GET", path.display().to_string(), e),
        })?;
        Self::from_fd(fd, path.to_owned(), kind)
    }

    /// Creates a map without a pin. The map exists as long as a handle or a program uses it.
    pub fn create(
        name: &str,
        kind: MapKind,
        max_entries: u32,
        flags: u32,
    ) -> Result<Self, MapError> {
        let spec = Self::spec(kind);
        let info = sys::MapInfo {
            map_type: kind.number(),
            id: 0,
            key_size: spec.key_size,
            value_size: spec.value_size,
            max_entries,
            map_flags: flags,
        };
        let fd =
            sys::create(info, name).map_err(|e| failed("BPF_MAP_CREATE", name.to_owned(), e))?;
        Self::from_fd(fd, PathBuf::from(name), kind)
    }

    /// Opens the pin at `path`, or creates and pins the map if there is none.
    pub fn open_or_create(
        path: &Path,
        kind: MapKind,
        max_entries: u32,
        flags: u32,
    ) -> Result<Self, MapError> {
        match Self::open(path, kind, Access::ReadWrite) {
            Err(MapError::NotPinned(_)) => {}
            other => return other,
        }
        let name = path
            .file_name()
            .map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default();
        let mut map = Self::create(&name, kind, max_entries, flags)?;
        map.name = path.display().to_string();
        match sys::pin(map.fd.as_fd(), &c_path(path)?) {
            Ok(()) => Ok(map),
            // Another process created it in the meantime.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                Self::open(path, kind, Access::ReadWrite)
            }
            Err(e) => Err(failed("BPF_OBJ_PIN", map.name, e)),
        }
    }

    /// A handle of the map with this descriptor. The map has this shape.
    pub fn of_fd(fd: OwnedFd, name: &str, kind: MapKind) -> Result<Self, MapError> {
        Self::from_fd(fd, PathBuf::from(name), kind)
    }

    fn from_fd(fd: OwnedFd, path: PathBuf, kind: MapKind) -> Result<Self, MapError> {
        let info: sys::MapInfo = sys::info(fd.as_fd())
            .map_err(|e| failed("BPF_OBJ_GET_INFO_BY_FD", path.display().to_string(), e))?;
        let expected = Self::spec(kind);
        let found = MapSpec {
            kind: MapKind::from_number(info.map_type),
            key_size: info.key_size,
            value_size: info.value_size,
        };
        if expected != found {
            return Err(MapError::Layout {
                path,
                expected,
                found,
            });
        }
        Ok(Self {
            fd,
            name: path.display().to_string(),
            id: info.id,
            max_entries: info.max_entries,
            kind,
            types: PhantomData,
        })
    }

    /// Whether the pin at `path` is this map.
    pub fn is_pinned(&self, path: &Path) -> bool {
        attached::is_pinned(path, self.id)
    }

    /// Replaces the pin at `path` with this map.
    pub fn pin_again(&self, path: &Path) -> Result<(), MapError> {
        attached::pin_again(path, self.fd.as_fd())
            .map_err(|e| failed("BPF_OBJ_PIN", path.display().to_string(), e))
    }

    /// The kernel's number of this map. A map that replaced the pin has another number.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Number of entries the map can hold.
    pub fn max_entries(&self) -> u32 {
        self.max_entries
    }

    /// The descriptor, for programs that attach to the map or insert into it.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Looks a key up (longest match in an LPM trie).
    ///
    /// For per-CPU maps use [`Self::get_per_cpu`].
    pub fn get(&self, key: &K) -> Result<Option<V>, MapError> {
        if self.kind.is_per_cpu() {
            return Err(self.wrong_kind("BPF_MAP_LOOKUP_ELEM"));
        }
        let mut value = V::default();
        let bytes = bytes_mut(&mut value);
        match sys::lookup(self.fd.as_fd(), key.as_bytes(), bytes) {
            Ok(true) => Ok(Some(value)),
            Ok(false) => Ok(None),
            Err(e) => Err(failed("BPF_MAP_LOOKUP_ELEM", self.name.clone(), e)),
        }
    }

    /// Looks a key of a per-CPU map up: one value for each possible CPU.
    pub fn get_per_cpu(&self, key: &K) -> Result<Option<Vec<V>>, MapError> {
        if !self.kind.is_per_cpu() {
            return Err(self.wrong_kind("BPF_MAP_LOOKUP_ELEM"));
        }
        // The kernel pads each CPU's value to eight bytes.
        let step = size_of::<V>().next_multiple_of(8);
        let cpus =
            possible_cpus().map_err(|e| failed("BPF_MAP_LOOKUP_ELEM", self.name.clone(), e))?;
        let mut bytes = vec![0; step * cpus];
        match sys::lookup(self.fd.as_fd(), key.as_bytes(), &mut bytes) {
            Ok(true) => Ok(Some(bytes.chunks(step).filter_map(V::from_bytes).collect())),
            Ok(false) => Ok(None),
            Err(e) => Err(failed("BPF_MAP_LOOKUP_ELEM", self.name.clone(), e)),
        }
    }

    fn wrong_kind(&self, call: &'static str) -> MapError {
        let reason = format!("not an operation of a {:?} map", self.kind);
        failed(
            call,
            self.name.clone(),
            io::Error::new(io::ErrorKind::InvalidInput, reason),
        )
    }

    /// Inserts an entry, or replaces its value. Fails for per-CPU maps.
    pub fn set(&self, key: &K, value: &V) -> Result<(), MapError> {
        if self.kind.is_per_cpu() {
            return Err(self.wrong_kind("BPF_MAP_UPDATE_ELEM"));
        }
        sys::update(self.fd.as_fd(), key.as_bytes(), value.as_bytes(), 0).map_err(|e| {
            match e.raw_os_error() {
                Some(libc::E2BIG | libc::ENOSPC) => MapError::Full {
                    map: self.name.clone(),
                },
                _ => failed("BPF_MAP_UPDATE_ELEM", self.name.clone(), e),
            }
        })
    }

    /// Inserts the entry unless the key exists. Returns whether it was inserted.
    pub fn add(&self, key: &K, value: &V) -> Result<bool, MapError> {
        if self.kind.is_per_cpu() {
            return Err(self.wrong_kind("BPF_MAP_UPDATE_ELEM"));
        }
        match sys::add(self.fd.as_fd(), key.as_bytes(), value.as_bytes()) {
            Err(e) if e.raw_os_error() == Some(libc::ENOSPC) => Err(MapError::Full {
                map: self.name.clone(),
            }),
            added => added.map_err(|e| failed("BPF_MAP_UPDATE_ELEM", self.name.clone(), e)),
        }
    }

    /// Removes an entry. Returns whether the key existed.
    pub fn remove(&self, key: &K) -> Result<bool, MapError> {
        sys::delete(self.fd.as_fd(), key.as_bytes())
            .map_err(|e| failed("BPF_MAP_DELETE_ELEM", self.name.clone(), e))
    }

    /// All entries, each key once.
    ///
    /// The kernel restarts the walk from the beginning if the current key is removed. Keys that
    /// were already returned are skipped. After `max_entries` × 4 steps the walk ends, with
    /// [`Entries::complete`] false.
    pub fn entries(&self) -> Result<Entries<K, V>, MapError>
    where
        K: Eq + std::hash::Hash,
    {
        let mut seen = HashSet::new();
        let mut found = Vec::new();
        let mut at: Option<K> = None;
        let limit = u64::from(self.max_entries).saturating_mul(4).max(1024);
        for _ in 0..limit {
            let Some(next) = self.next_key(at.as_ref())? else {
                return Ok(Entries {
                    found,
                    complete: true,
                });
            };
            if seen.insert(next)
                && let Some(value) = self.get(&next)?
            {
                found.push((next, value));
            }
            at = Some(next);
        }
        Ok(Entries {
            found,
            complete: false,
        })
    }

    /// At most `limit` entries after this key, in the map's own order. If the key was removed, the
    /// walk begins at the start. Fewer than `limit` entries: the end was reached.
    pub fn entries_after(&self, after: Option<&K>, limit: usize) -> Result<Vec<(K, V)>, MapError> {
        let mut found = Vec::new();
        let mut at = after.copied();
        while found.len() < limit {
            let Some(next) = self.next_key(at.as_ref())? else {
                break;
            };
            if let Some(value) = self.get(&next)? {
                found.push((next, value));
            }
            at = Some(next);
        }
        Ok(found)
    }

    fn next_key(&self, at: Option<&K>) -> Result<Option<K>, MapError> {
        let mut next = K::default();
        let at = at.map(Record::as_bytes);
        let more = sys::next_key(self.fd.as_fd(), at, bytes_mut(&mut next))
            .map_err(|e| failed("BPF_MAP_GET_NEXT_KEY", self.name.clone(), e))?;
        Ok(more.then_some(next))
    }
}

/// Result of a walk over a map with [`Map::entries`].
#[derive(Clone, Debug)]
pub struct Entries<K, V> {
    /// Keys with their values, each key once.
    pub found: Vec<(K, V)>,
    /// False if the walk ended early because entries changed too fast.
    pub complete: bool,
}

fn bytes_mut<T: Record>(value: &mut T) -> &mut [u8] {
    // SAFETY: `T: Record` has no padding and every bit pattern is valid, so
    // its bytes may be both read and overwritten.
    unsafe { core::slice::from_raw_parts_mut(core::ptr::from_mut(value).cast(), size_of::<T>()) }
}

/// Number of CPUs for which the kernel has a value in per-CPU maps.
pub fn possible_cpus() -> io::Result<usize> {
    let list = std::fs::read_to_string("/sys/devices/system/cpu/possible")?;
    last_cpu(&list).map(|last| last + 1).ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("/sys/devices/system/cpu/possible: {list:?} is not a list of CPUs"),
        )
    })
}

/// Last CPU of a list such as `0-3,8`.
fn last_cpu(list: &str) -> Option<usize> {
    list.trim().rsplit([',', '-']).next()?.parse().ok()
}

fn c_path(path: &Path) -> Result<CString, MapError> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| {
        failed(
            "BPF_OBJ_GET",
            path.display().to_string(),
            io::Error::new(io::ErrorKind::InvalidInput, "path contains a NUL byte"),
        )
    })
}

fn failed(call: &'static str, map: String, source: io::Error) -> MapError {
    MapError::Syscall { call, map, source }
}

#[cfg(test)]
mod tests {
    use super::last_cpu;

    #[test]
    fn last_cpu_of_a_list() {
        assert_eq!(last_cpu("0\n"), Some(0));
        assert_eq!(last_cpu("0-1\n"), Some(1));
        assert_eq!(last_cpu("0-3,8-11"), Some(11));
        assert_eq!(last_cpu("0,4"), Some(4));
        assert_eq!(last_cpu(""), None);
    }
}
