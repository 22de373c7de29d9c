//! A fixed piece of work that runs between the measured pieces of work. A measured time, divided by
//! the time of this work, is the same on a busy machine as on a quiet one.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::hint::black_box;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

const NAMES: usize = 20_000;
/// Number of addresses of each name in the table.
const ADDRESSES: usize = 8;

/// Work of the same kind as an update: hashing names, sorting addresses, allocating strings.
pub(crate) struct Calibration {
    table: HashMap<String, BTreeMap<Ipv4Addr, String>, BuildHasherDefault<DefaultHasher>>,
    next: u32,
}

impl Calibration {
    pub(crate) fn new() -> Self {
        let mut calibration = Self {
            table: HashMap::default(),
            next: 0,
        };
        calibration.run(NAMES * ADDRESSES);
        calibration
    }

    /// Runs `units` units of work. Returns the time that they took.
    pub(crate) fn run(&mut self, units: usize) -> Duration {
        let start = Instant::now();
        for _ in 0..units {
            self.unit();
        }
        start.elapsed()
    }

    fn unit(&mut self) {
        self.next = self.next.wrapping_add(1);
        // A step that is prime to the number of names, so that successive names are not neighbours
        // in memory.
        let name = (self.next as usize).wrapping_mul(7919) % NAMES;
        let addresses = self.table.entry(format!("{name}.example.com")).or_default();
        let address = Ipv4Addr::from_bits(self.next.wrapping_mul(0x9e37_79b1));
        addresses.insert(address, address.to_string());
        if addresses.len() > ADDRESSES {
            black_box(addresses.pop_first());
        }
    }
}
