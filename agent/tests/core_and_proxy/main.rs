//! The core of the agent together with parts of the proxy: neither depends on the other, and the
//! agent depends on both.
#![expect(clippy::unwrap_used, reason = "tests")]

mod endpoint_file;
mod model;
