//! The core on a datapath in memory.

mod failures;
mod ingress;
mod limits;
mod oracle;
mod overlaps;
mod restart;
mod scenario;
