//! The state directory: per-endpoint files and the identity checkpoint.
//!
//! Files are replaced in one step. To one of them text is also appended; its reader accepts a torn end.

pub mod background;

use std::{
    fs::{self, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use agent_core::{
    datapath::plan::{Datapath, Step, StepError},
    identity::endpoint_checkpoint::EndpointWrite,
};
use daemon::{
    lookup::present,
    regular_file::NO_WAIT,
    state_file::{sync_dir, write_atomic},
};
use shared_maps::EndpointId;

/// Name of an endpoint's file in its directory.
pub const ENDPOINT_FILE: &str = "ep_config.json";
/// Name of the identity checkpoint.
pub(crate) const CHECKPOINT_FILE: &str = "local_allocator_state.json";
/// Name of the checkpoint of endpoint identities.
pub(crate) const ENDPOINT_CHECKPOINT_FILE: &str = "endpoint_identities.json";
/// Name of the file with what was added to that checkpoint since.
pub(crate) const ADDED_ENDPOINTS_FILE: &str = "endpoint_identities.added";
/// Name of the file with the names that the agent was asked to forget.
pub(crate) const CLEANED_FILE: &str = "cleaned_names.json";

/// The directory `<state-dir>/state`: a directory for each endpoint, and the checkpoints of
/// identities.
#[derive(Clone, Debug)]
pub struct StateFiles {
    dir: PathBuf,
}

impl StateFiles {
    /// Opens `dir`, which is created if need be.
    pub fn open(dir: &Path) -> io::Result<Self> {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o770)
            .create(dir)?;
        Ok(Self {
            dir: dir.to_owned(),
        })
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn endpoint_dir(&self, endpoint: EndpointId) -> PathBuf {
        self.dir.join(endpoint.0.to_string())
    }

    /// Path of the identity checkpoint.
    pub fn checkpoint(&self) -> PathBuf {
        self.dir.join(CHECKPOINT_FILE)
    }

    /// Path of the checkpoint of endpoint identities.
    pub fn endpoint_checkpoint(&self) -> PathBuf {
        self.dir.join(ENDPOINT_CHECKPOINT_FILE)
    }

    /// Path of the file with what was added to the checkpoint of endpoint identities.
    pub fn added_endpoint_identities(&self) -> PathBuf {
        self.dir.join(ADDED_ENDPOINTS_FILE)
    }

    /// Path of the file with the names that the agent was asked to forget.
    pub fn cleaned(&self) -> PathBuf {
        self.dir.join(CLEANED_FILE)
    }

    /// Carries out a step of files; `None` if the step is not about files.
    pub fn carry_out(&self, step: &Step) -> Option<Result<(), StepError>> {
        match step {
            Step::Checkpoint(text) => Some(written(&self.checkpoint(), text)),
            Step::CheckpointEndpoints(write) => Some(self.write_endpoint_identities(write)),
            Step::KeepCleaned(text) => Some(written(&self.cleaned(), text)),
            Step::WriteEndpoint(endpoint, text) => Some(self.write_endpoint(*endpoint, text)),
            Step::KeepNames(endpoint, _, text) => {
                Some(self.write_endpoint(*endpoint, &text.make()))
            }
            Step::RemoveEndpoint(endpoint) => Some(self.remove_endpoint(*endpoint)),
            _ => None,
        }
    }

    fn write_endpoint_identities(&self, write: &EndpointWrite) -> Result<(), StepError> {
        let added = self.added_endpoint_identities();
        match write {
            EndpointWrite::Whole(text) => written(&self.endpoint_checkpoint(), text),
            EndpointWrite::FirstAdded(text) => written(&added, text),
            EndpointWrite::Added(text) => {
                append(&added, text.as_bytes()).map_err(|source| StepError::File {
                    path: added,
                    source,
                })
            }
        }
    }

    fn write_endpoint(&self, endpoint: EndpointId, text: &str) -> Result<(), StepError> {
        let dir = self.endpoint_dir(endpoint);
        let made = match fs::DirBuilder::new().mode(0o770).create(&dir) {
            Ok(()) => sync_dir(&self.dir),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            Err(e) => Err(e),
        };
        made.map_err(|source| StepError::File {
            path: dir.clone(),
            source,
        })?;
        written(&dir.join(ENDPOINT_FILE), text)
    }

    fn remove_endpoint(&self, endpoint: EndpointId) -> Result<(), StepError> {
        let dir = self.endpoint_dir(endpoint);
        let removed = present(fs::remove_dir_all(&dir)).and_then(|_| sync_dir(&self.dir));
        removed.map_err(|source| StepError::File { path: dir, source })
    }
}

/// The files' part of a datapath: it ignores steps that are not about files.
impl Datapath for StateFiles {
    fn apply(&mut self, step: &Step) -> Result<(), StepError> {
        self.carry_out(step).unwrap_or(Ok(()))
    }
}

/// Appends to a file that exists. After an error a part of the text may be there.
fn append(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options
        .append(true)
        .custom_flags(NO_WAIT.bits())
        .open(path)?;
    file.write_all(text)?;
    file.sync_data()
}

fn written(path: &Path, text: &str) -> Result<(), StepError> {
    write_atomic(path, text.as_bytes()).map_err(|source| StepError::File {
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use nix::{sys::stat::Mode, unistd::mkfifo};

    use super::*;

    #[test]
    fn steps_reach_the_files_and_removal_is_repeatable() {
        let dir = tempfile::tempdir().unwrap();
        let files = StateFiles::open(&dir.path().join("state")).unwrap();
        let endpoint = EndpointId(7);
        files
            .carry_out(&Step::WriteEndpoint(endpoint, "{}".to_owned()))
            .unwrap()
            .unwrap();
        assert_eq!(
            fs::read(files.endpoint_dir(endpoint).join(ENDPOINT_FILE)).unwrap(),
            b"{}"
        );
        files
            .carry_out(&Step::Checkpoint("[]".to_owned()))
            .unwrap()
            .unwrap();
        assert_eq!(fs::read(files.checkpoint()).unwrap(), b"[]");
        for _ in 0..2 {
            files
                .carry_out(&Step::RemoveEndpoint(endpoint))
                .unwrap()
                .unwrap();
            assert!(!files.endpoint_dir(endpoint).exists());
        }
        assert!(files.carry_out(&Step::CreatePolicyMap(endpoint)).is_none());
    }

    #[test]
    fn additions_need_the_file_that_they_are_appended_to() {
        let dir = tempfile::tempdir().unwrap();
        let files = StateFiles::open(&dir.path().join("state")).unwrap();
        let write = |write| files.carry_out(&Step::CheckpointEndpoints(write)).unwrap();
        let more = EndpointWrite::Added("more\n".to_owned());
        write(EndpointWrite::Whole("[]".to_owned())).unwrap();
        assert!(write(more.clone()).is_err(), "nothing to append to");
        let path = files.added_endpoint_identities();
        mkfifo(&path, Mode::S_IRWXU).unwrap();
        assert!(write(more.clone()).is_err(), "a pipe without a reader");
        fs::remove_file(path).unwrap();
        write(EndpointWrite::FirstAdded("first\n".to_owned())).unwrap();
        write(more.clone()).unwrap();
        write(more).unwrap();
        assert_eq!(fs::read(files.endpoint_checkpoint()).unwrap(), b"[]");
        let added = fs::read_to_string(files.added_endpoint_identities()).unwrap();
        assert_eq!(added, "first\nmore\nmore\n");
    }
}
