//! The cluster as policy sees it: pods with their labels and addresses, Services with their
//! backends.
//!
//! ```text
//!  documents (later: watches) ─► book (pods × namespaces, slices × services) ─► PodAt, ServiceAt
//!                                  └─ labels: which of a pod's labels make its identity
//! ```

pub(crate) mod book;
pub(crate) mod external_ips;
pub(crate) mod labels;
pub(crate) mod pod_at;
pub(crate) mod service_at;
