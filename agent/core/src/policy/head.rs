//! Which document a text is: its namespace and its name.

/// Namespace and name of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::policy) struct Head {
    /// Its namespace; `None` = cluster-wide.
    pub(in crate::policy) namespace: Option<String>,
    pub(in crate::policy) name: String,
}
