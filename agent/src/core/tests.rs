//! The core on a datapath in memory.

mod failures;
mod oracle;
mod overlaps;
mod restart;
mod scenario;
