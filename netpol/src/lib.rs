//! NetworkPolicies of Kubernetes (`networking.k8s.io/v1`), read and checked once.
//!
//! ```text
//!  JSON value ─► read ─► policy::NetworkPolicy ─► one compiler for each target
//!                │        (selectors, blocks and ports are valid by construction)
//!                └─► Refusal: field, reason, remedy
//!
//!  pods, namespaces, policies ─► pipeline ─► render::nft: the table that is enforced
//!                                   └─► configurator ─► rules ─► render::tables ─► render::vpp
//! ```
//!
//! The crate does no input or output and has no runtime. A document means the same to every
//! compiler, for example to the agent's, which compiles it to rules over identities. The agent
//! reads documents of other kinds with the same cursor, [`field::Field`].
#![warn(missing_docs)]

pub mod addresses;
pub mod blocks;
pub mod cache;
pub mod configurator;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod contiv;
mod counted;
pub mod explain;
pub mod field;
pub mod group;
pub mod links;
pub mod name;
pub mod node;
pub mod open_ports;
pub mod packet;
pub mod pipeline;
pub mod pod;
mod pod_set;
pub mod policy;
pub mod ports;
pub mod processor;
pub mod read;
pub mod render;
pub mod renderer;
pub mod rule;
pub mod selector;
pub mod set_aside;
pub mod verdict;

pub use self::{field::Refusal, policy::NetworkPolicy, read::read};
