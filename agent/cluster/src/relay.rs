//! Relays: one reads the objects of a large cluster from the API server, and sends them to hundreds
//! of agents.
//!
//! ```text
//!  API server ─► watch (one for each kind) ─► record ─► serve ══ gRPC, TLS ══► follow ─► receive ─► documents
//!               └──────────── holdfast-agent relay ──────┘                    └─── holdfast-agent run ───┘
//! ```
//!
//! The cut is before documents are read: each agent reads and judges the objects itself, with the
//! code that it uses for those of its own watches. A relay leaves out the fields that no agent
//! reads, the changes that leave nothing to send, and the repetition of what replicas share.

#[cfg(feature = "kubernetes")]
mod bounds;
#[cfg(feature = "kubernetes")]
mod connections;
#[cfg(feature = "kubernetes")]
mod credentials;
#[cfg(feature = "kubernetes")]
mod dial;
#[cfg(feature = "kubernetes")]
mod follow;
#[cfg(feature = "kubernetes")]
mod item;
#[cfg(test)]
#[cfg(feature = "kubernetes")]
mod lab;
#[cfg(feature = "kubernetes")]
mod log;
#[cfg(feature = "kubernetes")]
pub mod metrics;
#[cfg(feature = "kubernetes")]
mod paced;
#[cfg(feature = "kubernetes")]
mod places;
#[cfg(feature = "kubernetes")]
mod progress;
#[cfg(feature = "kubernetes")]
mod receive;
#[cfg(feature = "kubernetes")]
mod record;
#[cfg(feature = "kubernetes")]
mod renewal;
#[cfg(feature = "kubernetes")]
mod serve;
pub mod settings;
#[cfg(feature = "kubernetes")]
pub mod start;
#[cfg(not(feature = "kubernetes"))]
#[path = "relay/no_start.rs"]
pub mod start;
#[cfg(feature = "kubernetes")]
mod stream_error;
