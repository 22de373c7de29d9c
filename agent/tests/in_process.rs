//! The agent in the process of the test: the core on its thread, a datapath in memory, real gRPC
//! over a unix socket. It needs no root and no kernel maps. Most tests compose only the parts that
//! they need. `whole.rs` starts all of them.
#![expect(clippy::unwrap_used, reason = "tests")]

#[path = "in_process/admin.rs"]
mod admin;
#[path = "in_process/cilium_proxy.rs"]
mod cilium_proxy;
#[path = "in_process/clean.rs"]
mod clean;
#[path = "in_process/flood.rs"]
mod flood;
#[path = "in_process/fqdndata.rs"]
mod fqdndata;
#[path = "in_process/lab.rs"]
mod lab;
#[path = "in_process/liar.rs"]
mod liar;
#[path = "in_process/native.rs"]
mod native;
#[path = "in_process/policy_dir.rs"]
mod policy_dir;
#[path = "in_process/restart.rs"]
mod restart;
#[path = "in_process/whole.rs"]
mod whole;
