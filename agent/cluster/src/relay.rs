//! Relays: a relay reads the objects of a large cluster from the API server, and sends them to hundreds of agents.
//!
//! ```text
//!  API server ─► watch (one for each kind) ─► record ─► serve ══ gRPC, TLS ══► follow ─► receive ─► documents
//!               └──────────── holdfast-agent relay ──────┘                    └─── holdfast-agent run ───┘
//! ```
//!
//! A relay sends objects, not documents: each agent reads and judges the objects itself, with the
//! code that it uses for objects of its own watches. A relay leaves out the fields that no agent
//! reads, the changes that leave nothing to send, and the repetition of what replicas share.

mod bounds;
mod connections;
pub mod credentials;
mod follow;
mod item;
#[cfg(test)]
mod lab;
mod log;
pub mod metrics;
mod paced;
mod places;
mod progress;
mod receive;
mod record;
mod renewal;
mod serve;
pub mod start;
mod stream_error;
