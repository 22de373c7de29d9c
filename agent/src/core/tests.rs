//! The core on a datapath in memory.

mod scenario;
