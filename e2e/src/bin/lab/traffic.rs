//! The load for the promises R1 to R4, as specified by `holdfast_e2e::traffic::Spec`. It runs until
//! its standard input ends.

use anyhow::Result;
use clap::Args;
use holdfast_e2e::traffic;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// What to send, as JSON
    spec: String,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    traffic::serve(&serde_json::from_str(&options.spec)?)
}
