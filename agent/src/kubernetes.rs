//! The cluster as policy sees it: pods with their labels and addresses, Services with their
//! backends.
//!
//! ```text
//!  documents (later: watches) ─► book (pods × namespaces, slices × services) ─► PodAt, ServiceAt
//!                                  └─ labels: which of a pod's labels make its identity
//! ```

pub mod book;
pub mod labels;
pub mod pod_at;
pub mod service_at;
