//! Whether the files of `--vpp-export-dir` match the policies.

use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use super::model::ExportsView;

/// State of the exported files.
#[derive(Debug)]
pub(super) struct Exports {
    directory: PathBuf,
    /// When a file was written last.
    written: Option<Instant>,
    problems: Vec<String>,
}

impl Exports {
    /// Nothing is written yet.
    pub(super) fn new(directory: &Path) -> Self {
        Self {
            directory: directory.to_owned(),
            written: None,
            problems: Vec::new(),
        }
    }

    /// Notes an attempt, and logs its new problems.
    pub(super) fn note(&mut self, has_written: bool, problems: Vec<String>) {
        for problem in problems.iter().filter(|one| !self.problems.contains(one)) {
            tracing::error!("{problem}");
        }
        if has_written {
            self.written = Some(Instant::now());
        }
        self.problems = problems;
    }

    /// Why files do not match the policies.
    pub(super) fn problems(&self) -> impl Iterator<Item = String> {
        self.problems.iter().cloned()
    }

    /// The state of the files for `status`.
    pub(super) fn view(&self) -> ExportsView {
        ExportsView {
            directory: self.directory.display().to_string(),
            written_seconds: self.written.map(|at| at.elapsed().as_secs()),
        }
    }
}
