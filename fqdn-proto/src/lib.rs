//! Messages and services between the agent and its DNS proxies, and between relays and agents. No
//! logic.
//!
//! The code under `gen/` is committed, so that no build needs a protobuf
//! compiler; `tests/bootstrap.rs` fails when it drifts from `proto/`.
#![warn(missing_docs)]
#![forbid(unsafe_code)]

/// Messages and services between agent and proxy, generated from
/// `proto/holdfast/fqdn/v1/fqdn.proto`.
#[rustfmt::skip]
#[path = "gen/holdfast.fqdn.v1.rs"]
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, reason = "generated code")]
pub mod native;

pub mod encoded;
pub mod frames;

/// The service of relays (`proto/holdfast/relay/v1/relay.proto`).
#[rustfmt::skip]
#[path = "gen/holdfast.relay.v1.rs"]
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, reason = "generated code")]
pub mod relay;

/// The service of Cilium agents (`proto/standalonednsproxy/fqdndata.proto`).
#[rustfmt::skip]
#[path = "gen/standalonednsproxy.rs"]
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, reason = "generated code")]
pub mod fqdndata;
