//! The ipcache: which labels a prefix has, and so which identity.

pub mod metadata;
pub mod owners;
pub(crate) mod resolve;
pub mod table;
pub mod trie;
