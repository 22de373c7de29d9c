//! The life of one query, the same over UDP and TCP.
//!
//! ```text
//!  arrival ─► judged ─► forwarded ─► answered ─► released
//!               │           │            └─► held until the agent has opened the addresses ─► released
//!               └─► refused └─► failed: SERVFAIL, or silence after a timeout
//! ```
//! [`observe`] records each of these steps. The rest of the proxy writes to no counter, log or
//! report of a query by itself.

pub mod observe;
pub mod pending;
mod reports;
mod stopwatch;
