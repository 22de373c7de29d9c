//! Files that come from code: a page of the guide, and the packages' files of settings.

use anyhow::Result;

use crate::process;

/// Writes these files. The same tests fail if the files are out of date.
pub(crate) fn write() -> Result<()> {
    let tests = ["--test", "metrics_page", "--test", "command_line_files"];
    let mut test = process::command("cargo", &["test", "--locked", "-p", "holdfast-agent-lib"]);
    test.args(tests).env("HOLDFAST_BLESS", "1");
    process::run(test)
}
