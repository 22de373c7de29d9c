//! The load of the promises R1 to R4. Its one argument (JSON, see `holdfast_e2e::traffic::Spec`)
//! says what it sends. It runs until its standard input ends.

use anyhow::{Context, Result};
use holdfast_e2e::traffic;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let spec = arguments
        .next()
        .context("one argument: what to send, as JSON")?;
    traffic::serve(&serde_json::from_str(&spec)?)
}
