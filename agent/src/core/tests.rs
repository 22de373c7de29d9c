//! The core on a datapath in memory.

mod breaker;
mod chunks;
mod claimed_addresses;
mod cuts;
mod enable_policy;
mod failures;
mod hold;
mod holders;
mod ingress;
mod interleaved;
mod kept_later;
mod killed;
mod known;
mod labels_model;
mod limits;
mod merge;
mod model;
mod named_ports;
mod network_policies;
mod oracle;
mod overlaps;
mod rebinding;
mod reconcile;
mod restart;
mod scenario;
mod upgrade;
