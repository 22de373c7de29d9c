//! The standalone DNS proxy (SDP) as a library.
//!
//! ```text
//!  packet ─► listener ─► proxy (query) ─► wire::query ─► resolve (who, whom) ─► policy::table
//!                          │                                          allowed │
//!                          │                                     upstream ◄───┘
//!                          └─► proxy (answer) ─► wire::answer ─► mapping ─► reply
//!                                                                  │ gRPC, or in process
//!                                                                  ▼ agent
//!  backwards only as data: rule snapshots (link → policy::table), results and leases (link → mapping)
//! ```

mod arena;
pub mod listener;
pub mod mapping;
pub mod name;
pub mod pattern;
pub mod policy;
pub mod proxy;
pub mod resolve;
mod socket;
mod steering;
mod upstream;
pub mod wire;
