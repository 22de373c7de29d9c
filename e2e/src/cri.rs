//! Debian's containerd on the lab's node, which gets requests over CRI as from the kubelet.
//!
//! ```text
//!  test ─CRI─► containerd ─► base plugins ─► holdfast-cni ─► agent
//!              └► runc ─► the pod's first process, which sends at once ─► world: Sent
//! ```

mod client;
mod documents;
mod image;
mod message;
mod network;
mod node;
mod nspawn;
mod podman;
mod sent;

pub use client::Loaded;
pub use documents::{
    allowed_server, describe, describe_on_node, endpoints, only_allowed_server,
    only_allowed_server_by_address,
};
pub use network::{Base, SUBNET};
pub use node::{CriNode, PodName, Sandbox, Started};
pub use nspawn::Machine;
pub use podman::Podman;
pub use sent::{ALLOWED, FORBIDDEN, Sent};
