//! The core on a datapath in memory.

mod cuts;
mod failures;
mod ingress;
mod kept_later;
mod limits;
mod merge;
mod model;
mod oracle;
mod overlaps;
mod restart;
mod scenario;
