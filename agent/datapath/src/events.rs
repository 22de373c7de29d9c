//! Reports of the programs: records of drops and new connections, and counters.

use std::os::fd::{AsRawFd, RawFd};

use aya::maps::{Map as AyaMap, MapData, RingBuf};
use shared_maps::{
    event::{self, Counter, Event, Reason},
    user::{Access, Globals, Map, MapError, MapKind, Record as _},
};

/// The ring buffer could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("ring buffer {path}: {reason}")]
pub struct EventsError {
    path: String,
    reason: String,
}

/// Reads the ring buffer. There must be one reader only: another one would miss the records that it takes.
///
/// The programs wake a waiting reader only when a good part of the buffer is unread, so a reader
/// should also look several times a second.
pub struct EventReader {
    ring: RingBuf<MapData>,
}

impl EventReader {
    /// Opens the pinned ring buffer.
    pub fn open(globals: &Globals) -> Result<Self, EventsError> {
        let path = globals.path(event::NAME);
        let failed = |reason: String| EventsError {
            path: path.display().to_string(),
            reason,
        };
        let data = MapData::from_pin(&path).map_err(|error| failed(error.to_string()))?;
        let map = AyaMap::from_map_data(data).map_err(|error| failed(error.to_string()))?;
        let ring = RingBuf::try_from(map).map_err(|error| failed(error.to_string()))?;
        Ok(Self { ring })
    }

    /// Takes at most `limit` unread records, oldest first.
    pub fn take(&mut self, limit: usize) -> Vec<Event> {
        let mut events = Vec::new();
        while events.len() < limit {
            let Some(item) = self.ring.next() else {
                break;
            };
            events.extend(Event::from_bytes(&item));
        }
        events
    }
}

impl AsRawFd for EventReader {
    fn as_raw_fd(&self) -> RawFd {
        self.ring.as_raw_fd()
    }
}

/// Packets and bytes by reason, summed over the CPUs. They do not go through the ring buffer.
#[derive(Debug)]
pub struct Counters {
    map: Map<u32, Counter>,
}

impl Counters {
    /// Opens the pinned map of counters for reading.
    pub fn open(globals: &Globals) -> Result<Self, MapError> {
        let path = globals.path(event::COUNTERS_NAME);
        Ok(Self {
            map: Map::open(&path, MapKind::PerCpuArray, Access::ReadOnly)?,
        })
    }

    /// The counter of each reason, summed over the CPUs.
    pub fn read(&self) -> Result<Vec<(Reason, Counter)>, MapError> {
        let mut counters = Vec::new();
        for reason in Reason::ALL {
            let values = self.map.get_per_cpu(&u32::from(reason as u8))?;
            let sum = values
                .iter()
                .flatten()
                .fold(Counter::default(), |sum, one| Counter {
                    packets: sum.packets + one.packets,
                    bytes: sum.bytes + one.bytes,
                });
            counters.push((reason, sum));
        }
        Ok(counters)
    }
}
