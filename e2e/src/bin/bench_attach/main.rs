//! `cargo xtask bench attach`: how long it takes to put a pod under policy on a node with many.

mod steps;

use anyhow::Result;
use clap::Parser;

/// Attaching the programs of many endpoints.
#[derive(Debug, Parser)]
struct Options {
    /// Endpoints
    #[arg(long, default_value_t = 250)]
    endpoints: u16,
}

fn main() -> Result<()> {
    let options = Options::parse();
    steps::measure(options.endpoints)
}
