//! Output of the query log, and the detection that its file was rotated.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::PathBuf,
    time::{Duration, Instant},
};

use super::Target;
use crate::regular_file;

/// Interval at which the output checks whether its file was moved or removed.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The open output, which finds out when its file was moved or removed.
#[derive(Debug)]
pub(super) struct Output {
    sink: Sink,
    /// Whether a write was incomplete, so that the next write must begin with a new line.
    torn: bool,
}

#[derive(Debug)]
enum Sink {
    Stdout,
    Stderr,
    File {
        /// The open file, or why it is not open.
        file: Result<File, String>,
        path: PathBuf,
        looked: Option<Instant>,
    },
}

impl Output {
    /// An output for `target`. A file is not opened yet.
    pub(super) fn new(target: Target) -> Self {
        let sink = match target {
            Target::Stdout => Sink::Stdout,
            Target::Stderr => Sink::Stderr,
            Target::File(path) => Sink::File {
                file: Err("not opened yet".to_owned()),
                path,
                looked: None,
            },
        };
        Self { sink, torn: false }
    }

    /// Writes complete lines. Returns whether that worked, and whether a file that was moved could
    /// be opened again. If it could not, lines still go to the moved file.
    pub(super) fn write(&mut self, lines: &[u8], now: Instant) -> (io::Result<()>, io::Result<()>) {
        let opened = self.follow(now);
        let mend: &[u8] = if self.torn { b"\n" } else { b"" };
        let written = match &mut self.sink {
            Sink::Stdout => put(&mut io::stdout().lock(), mend, lines),
            Sink::Stderr => put(&mut io::stderr().lock(), mend, lines),
            Sink::File { file: Ok(file), .. } => put(file, mend, lines),
            Sink::File { file: Err(why), .. } => {
                return (Err(io::Error::other(why.clone())), Ok(()));
            }
        };
        self.torn = written.is_err();
        (written, opened)
    }

    /// Opens the file if it is not open, or if another file has its name now. Checks this once per
    /// [`POLL_INTERVAL`].
    pub(super) fn follow(&mut self, now: Instant) -> io::Result<()> {
        let Sink::File { file, path, looked } = &mut self.sink else {
            return Ok(());
        };
        if looked.is_some_and(|looked| now.saturating_duration_since(looked) < POLL_INTERVAL) {
            return Ok(());
        }
        *looked = Some(now);
        let same = match file {
            Ok(file) => {
                let ours = file.metadata()?;
                std::fs::symlink_metadata(&*path)
                    .is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino()))
            }
            Err(_) => false,
        };
        if same {
            return Ok(());
        }
        let mut options = OpenOptions::new();
        options.append(true).create(true).mode(0o640);
        match (regular_file::open(path, &mut options), file) {
            (Ok(opened), file) => {
                *file = Ok(opened);
                self.torn = false;
                Ok(())
            }
            (Err(error), Ok(_)) => Err(error),
            (Err(error), Err(why)) => {
                *why = error.to_string();
                Err(error)
            }
        }
    }
}

fn put(to: &mut impl io::Write, mend: &[u8], lines: &[u8]) -> io::Result<()> {
    to.write_all(mend)?;
    to.write_all(lines)?;
    to.flush()
}
