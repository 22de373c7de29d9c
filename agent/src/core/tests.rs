//! The core on a datapath in memory.

mod cuts;
mod failures;
mod ingress;
mod limits;
mod merge;
mod model;
mod oracle;
mod overlaps;
mod reconcile;
mod restart;
mod scenario;
