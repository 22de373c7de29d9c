//! Maps whose values are maps.

use std::{
    io,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
};

use super::{MapError, sys};

/// `BPF_MAP_TYPE_QUEUE`.
const QUEUE: u32 = 22;

/// An array whose values are maps (`BPF_MAP_TYPE_ARRAY_OF_MAPS`).
#[derive(Debug)]
pub struct MapOfMaps {
    fd: OwnedFd,
    name: String,
}

impl MapOfMaps {
    /// A handle of the map of maps with this descriptor.
    pub fn new(fd: OwnedFd, name: &str) -> Self {
        Self {
            fd,
            name: name.to_owned(),
        }
    }

    /// Sets all of these entries.
    ///
    /// The kernel waits until no running program uses the former maps: once for this call, not for
    /// each entry. Kernels that take no batches for such a map wait for each entry.
    pub fn set(&self, entries: &[(u32, BorrowedFd<'_>)]) -> Result<(), MapError> {
        let keys: Vec<u32> = entries.iter().map(|(key, _)| *key).collect();
        let maps = entries.iter().map(|(_, map)| map.as_raw_fd());
        let maps: Vec<u32> = maps.map(i32::cast_unsigned).collect();
        match sys::update_all(self.fd.as_fd(), &keys, &maps) {
            Err(error) if takes_no_batch(&error) => self.set_each(&keys, &maps),
            result => result.map_err(|source| self.failed("BPF_MAP_UPDATE_BATCH", source)),
        }
    }

    fn set_each(&self, keys: &[u32], maps: &[u32]) -> Result<(), MapError> {
        for (key, map) in keys.iter().zip(maps) {
            let (key, map) = (key.to_ne_bytes(), map.to_ne_bytes());
            sys::update(self.fd.as_fd(), &key, &map, 0)
                .map_err(|source| self.failed("BPF_MAP_UPDATE_ELEM", source))?;
        }
        Ok(())
    }

    fn failed(&self, call: &'static str, source: io::Error) -> MapError {
        MapError::Syscall {
            call,
            map: self.name.clone(),
            source,
        }
    }
}

/// Whether the kernel takes no batches for a map of maps: seen on 5.10, and not on 6.1.
fn takes_no_batch(error: &io::Error) -> bool {
    const ENOTSUPP: i32 = 524;
    error.raw_os_error() == Some(ENOTSUPP)
}

/// Makes a queue of `entries` items of `size` bytes.
pub fn create_queue(name: &str, size: usize, entries: u32) -> Result<OwnedFd, MapError> {
    let failed = |source| MapError::Syscall {
        call: "BPF_MAP_CREATE",
        map: name.to_owned(),
        source,
    };
    let value_size =
        u32::try_from(size).map_err(|_| failed(io::Error::from(io::ErrorKind::InvalidInput)))?;
    let info = sys::MapInfo {
        map_type: QUEUE,
        value_size,
        max_entries: entries,
        ..sys::MapInfo::default()
    };
    sys::create(info, name).map_err(failed)
}
