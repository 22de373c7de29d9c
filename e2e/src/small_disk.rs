//! A disk that a test can fill.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

use crate::shell;

/// A disk of 256 KiB at a directory, unmounted when dropped.
#[derive(Debug)]
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    pub fn at(path: &Path) -> Result<Self> {
        let text = path.display().to_string();
        shell::run(
            "mount",
            &["-t", "tmpfs", "-o", "size=256k,mode=755", "tmpfs", &text],
        )?;
        Ok(Self(path.to_owned()))
    }

    /// Fills it. Files that exist stay.
    pub fn fill(&self) -> Result<()> {
        let full = fs::write(self.filler(), vec![0; 1 << 20]);
        let error = full.err().context("the disk is larger than it should be")?;
        ensure!(error.kind() == ErrorKind::StorageFull, "{error}");
        Ok(())
    }

    /// Removes what [`Self::fill`] wrote.
    pub fn empty(&self) -> Result<()> {
        Ok(fs::remove_file(self.filler())?)
    }

    fn filler(&self) -> PathBuf {
        self.0.join("filler")
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let path = self.0.display().to_string();
        // Lazily: a program of a failed test may still have a file open.
        if let Err(error) = shell::run("umount", &["-l", &path]) {
            eprintln!("left behind: {path}: {error:#}");
        }
    }
}
