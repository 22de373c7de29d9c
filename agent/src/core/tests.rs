//! The core on a datapath in memory.

mod failures;
mod limits;
mod oracle;
mod overlaps;
mod restart;
mod scenario;
