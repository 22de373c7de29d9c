//! `observe`: what the datapath says about packets.

use anyhow::{Result, bail};

use crate::config::args::ObserveArgs;

/// Prints events.
pub async fn run(args: &ObserveArgs) -> Result<()> {
    let _ = args;
    bail!("observe is not available in this release; `bpf ct list` shows connections")
}
