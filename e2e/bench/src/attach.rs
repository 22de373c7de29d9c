//! `cargo xtask bench attach`: how long it takes to put a pod under policy on a node with many
//! pods.

mod adds;
mod steps;

use anyhow::Result;
use clap::Args;

/// Attaching the programs of many endpoints.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Endpoints
    #[arg(long, default_value_t = 250)]
    endpoints: u16,
    /// Pods that the CNI plugin starts one after the other
    #[arg(long, default_value_t = 130)]
    pods: u8,
    /// Pods that it then starts at once
    #[arg(long, default_value_t = 110)]
    at_once: u8,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    steps::measure(options.endpoints)?;
    adds::measure(options.pods, options.at_once)
}
