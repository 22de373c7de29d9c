//! NetworkPolicies of Kubernetes (`networking.k8s.io/v1`), read and checked once.
//!
//! ```text
//!  JSON value ─► read ─► policy::NetworkPolicy ─► one compiler for each target
//!                │        (selectors, blocks and ports are valid by construction)
//!                └─► Refusal: field, reason, remedy
//! ```
//!
//! The crate does no input or output and has no runtime. The document means the same to every
//! compiler: the agent compiles it to rules over identities. The agent reads documents of other
//! kinds with the same cursor, [`field::Field`].
#![warn(missing_docs)]

pub mod addresses;
pub mod blocks;
pub mod configurator;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod contiv;
pub mod field;
pub mod name;
pub mod packet;
pub mod pod;
pub mod policy;
pub mod ports;
pub mod read;
pub mod render;
pub mod renderer;
pub mod rule;
pub mod selector;
pub mod verdict;

pub use self::{field::Refusal, policy::NetworkPolicy, read::read};
