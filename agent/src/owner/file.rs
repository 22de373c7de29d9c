//! What the owner of a node says of itself, in its state directory: a standby reads this even if the owner hangs.

use std::{fs, io, path::Path};

use daemon::state_file::{self, Content, StateFileError, write_json};
use serde::{Deserialize, Serialize};

use super::takeovers::Takeovers;
use crate::config::Settings;

pub(crate) const FILE: &str = "owner.json";
const VERSION: u32 = 1;

/// The content of the file. Files of earlier builds lack the last two fields.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OwnerFile {
    version: u32,
    /// Version of the program that owns the node.
    pub(crate) release: String,
    /// The name that the owner has for this node.
    pub(crate) node: String,
    pub(crate) settings: Settings,
    #[serde(default)]
    pub(crate) run: Run,
    #[serde(default)]
    pub(crate) takeovers: Takeovers,
}

/// The time in which the owner has owned the node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Run {
    /// The boot; empty = not known.
    pub(crate) boot_id: String,
    /// When it began, in nanoseconds from that boot.
    pub(crate) since_ns: u64,
    /// The same instant, RFC 3339.
    pub(crate) since: String,
    /// The owner has looked for each endpoint of its first listing, and the findings are in force.
    pub(crate) looked: bool,
    /// The owner was asked to end.
    pub(crate) stopped: bool,
}

impl OwnerFile {
    pub(crate) fn new(node: &str, settings: Settings, run: Run, takeovers: Takeovers) -> Self {
        Self {
            version: VERSION,
            release: env!("CARGO_PKG_VERSION").to_owned(),
            node: node.to_owned(),
            settings,
            run,
            takeovers,
        }
    }

    /// Replaces the file. If it cannot be written, it is removed: the next owner must not read about an earlier one.
    pub(crate) fn write(&self, state_dir: &Path) -> io::Result<()> {
        let path = state_dir.join(FILE);
        let written = write_json(&path, self);
        if written.is_err() {
            let _absent = fs::remove_file(&path);
        }
        written
    }

    /// `None` if there is no such file, or a damaged one: only the owner writes it.
    ///
    /// # Errors
    /// The file cannot be read, or a newer release wrote it.
    pub(crate) fn read(state_dir: &Path) -> Result<Option<Self>, StateFileError> {
        match state_file::read_versioned(&state_dir.join(FILE), VERSION)? {
            Content::Found(file) => Ok(Some(file)),
            Content::Absent | Content::Damaged(_) => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Option<OwnerFile>, StateFileError> {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FILE), text).unwrap();
        OwnerFile::read(dir.path())
    }

    #[test]
    fn a_file_of_an_earlier_build_says_nothing_about_its_run() {
        let text = r#"{"version":1,"release":"0.1.0","node":"n1","settings":{"bpf-root":["/sys/fs/bpf"]}}"#;
        let file = read(text).unwrap().unwrap();
        assert_eq!((file.release.as_str(), file.node.as_str()), ("0.1.0", "n1"));
        assert_eq!(file.run, Run::default());
        assert!(!file.run.looked && !file.run.stopped);
        assert_eq!(file.takeovers, Takeovers::default());
    }

    #[test]
    fn fields_of_a_later_build_are_skipped_and_a_later_format_is_refused() {
        let text = r#"{"version":1,"release":"9.9.9","node":"n1","settings":{},"more":[1],"run":{"boot_id":"a",
            "since_ns":1,"since":"","looked":true,"stopped":false,"more":2},"takeovers":{"boot_id":"a","more":3}}"#;
        assert!(read(text).unwrap().unwrap().run.looked);
        let error = read(r#"{"version":2,"node":{}}"#).unwrap_err().to_string();
        for part in [
            "owner.json",
            "has version 2",
            "reads up to 1",
            "run the newer release",
        ] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_written_is_not_one_of_an_earlier_owner() {
        let dir = tempfile::tempdir().unwrap();
        let file = OwnerFile::new(
            "n1",
            Settings::default(),
            Run::default(),
            Takeovers::default(),
        );
        file.write(dir.path()).unwrap();
        assert_eq!(OwnerFile::read(dir.path()).unwrap(), Some(file.clone()));
        // A directory in place of the temporary file, as if the disk were full.
        fs::create_dir(dir.path().join("owner.json.new")).unwrap();
        file.write(dir.path()).unwrap_err();
        assert_eq!(OwnerFile::read(dir.path()).unwrap(), None);
    }

    #[test]
    fn a_damaged_file_is_as_none() {
        for text in [
            "",
            "{",
            "[]",
            "null",
            r#"{"version":1}"#,
            r#"{"version":"1"}"#,
            "\u{0}\u{0}",
        ] {
            assert_eq!(read(text).unwrap(), None, "{text:?}");
        }
    }
}
