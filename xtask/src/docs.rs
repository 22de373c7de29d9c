//! Pages of the guide that come from code.

use anyhow::Result;

use crate::process;

/// Writes the pages; the same test fails if they are out of date.
pub(crate) fn write() -> Result<()> {
    let args = [
        "test",
        "--locked",
        "-p",
        "holdfast-agent",
        "--test",
        "metrics_page",
    ];
    let mut test = process::command("cargo", &args);
    test.env("HOLDFAST_BLESS", "1");
    process::run(test)
}
