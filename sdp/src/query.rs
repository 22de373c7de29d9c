//! The life of one query, the same over UDP and TCP.
//!
//! ```text
//!  arrival ─► judged ─► forwarded ─► answered ─► released
//!               │           │            └─► held until the agent has opened the addresses ─► released
//!               └─► refused └─► failed: SERVFAIL, or silence after a timeout
//! ```
//! `observe` records each of these steps. UDP and TCP themselves count only what concerns their
//! sockets: bytes, and messages that belong to no query.

pub(crate) mod observe;
pub mod pending;
mod reports;
mod stopwatch;
