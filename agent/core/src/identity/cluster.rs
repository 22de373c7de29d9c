//! Numbers of the whole cluster: a label set has one number on every node.

mod candidates;

pub use self::candidates::{IdentityRange, RangeError, candidates};
