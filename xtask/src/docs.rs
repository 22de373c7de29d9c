//! Files that come from code: a page of the guide, and the packages' files of settings.

use anyhow::Result;

use crate::{process, workspace};

/// Writes the files, by running the tests that fail if the files are out of date.
pub(crate) fn write() -> Result<()> {
    let mut test = workspace::test(&["metrics_page", "command_line_files"]);
    test.env("HOLDFAST_BLESS", "1");
    process::run(test)
}
