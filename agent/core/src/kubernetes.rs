//! The cluster as policy sees it: pods with their labels and addresses, Services with their
//! backends.
//!
//! ```text
//!  documents ─► book (pods × namespaces, slices × services) ─► PodAt, ServiceAt
//!               labels: which of a pod's labels make its identity
//! ```

pub mod book;
pub mod external_ips;
pub mod labels;
pub mod local_pods;
pub mod node_interfaces;
pub(crate) mod pod_at;
pub(crate) mod service_at;
pub mod unattended;
