//! The core of the agent: from policies, endpoints and mappings to operations of the datapath.
//!
//! ```text
//!  Event ─► core ─► plan (operations in order) ─► commit ─► Effects
//!            │
//!            ├─ policy, selector: which peers may communicate
//!            ├─ fqdn: which addresses a name has
//!            └─ ipcache, identity: which labels, and so which number, a prefix has
//! ```
//!
//! Synchronous, and without input or output: the agent reads, waits and writes.

pub mod checksum;
pub mod core;
pub mod datapath;
pub mod endpoint;
pub mod first_of;
pub mod fqdn;
pub mod high_scale;
pub mod identity;
pub mod ipcache;
pub mod kubernetes;
pub mod labels;
pub mod name_objects;
pub mod named_port;
pub mod policy;
pub mod selector;
pub mod source_event;
pub mod tunnel_mode;
mod users;
