//! The services for DNS proxies: the native one on a unix socket, Cilium's on
//! loopback. Generated types are used in this module only.

pub(crate) mod bounded;
pub mod convert;
pub mod fqdndata;
pub(crate) mod holder;
pub(crate) mod mappings;
pub mod peer;
pub(crate) mod rules;
pub mod server;
