//! Whether this standby could take over: it reads the owner's files, from a copy, and the owner's maps with the code that
//! it would use then.
//!
//! Reading sets damaged files aside, so that the owner's own files are not read. The copy is beside the standby's socket.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
};

use agent_core::tunnel_mode::Stage;
use agent_datapath::files::{ENDPOINT_FILE, StateFiles};
use dns_policy::boot_time::BootTime;
use parking_lot::Mutex;
use shared_maps::user::Globals;

use crate::{
    admin::standby::socket,
    config::Config,
    epoch::{self, StateDirError},
    high_scale::{self, StageError},
    restore::{self, RestoreError},
};

/// Endings of files that are not the state: those that were set aside, and those that are being written.
const NO_STATE: [&str; 2] = ["corrupt", "new"];
/// Objects of the cluster, which may be many. A takeover can do without them.
const CLUSTER: &str = "cluster.json";

/// Why this standby would not take over well.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotReady {
    #[error("its programs do not fit the owner's maps, or are not loaded: {0}")]
    Programs(String),
    #[error("another request makes it read the owner's files just now")]
    Busy,
    #[error("the owner's files cannot be copied to {path}: {source}", path = .path.display())]
    Copy { path: PathBuf, source: io::Error },
    #[error(transparent)]
    State(#[from] RestoreError),
    #[error(transparent)]
    Starts(#[from] StateDirError),
    #[error(transparent)]
    Stage(#[from] StageError),
    #[error("it would lose files of the owner that it cannot read: {0}")]
    Damaged(String),
}

/// What is needed to read as at a takeover.
#[derive(Debug)]
pub(super) struct Trial {
    bpf_root: PathBuf,
    state: PathBuf,
    copy: PathBuf,
    /// Step of `--high-scale-ipcache` at which this standby would start, and whether it may leave others out.
    stage: (Stage, bool),
    /// Why the programs are not loaded.
    programs: Option<String>,
    one: Mutex<()>,
}

impl Trial {
    /// `programs` is the reason if they could not be loaded.
    pub(super) fn new(config: &Config, programs: Option<String>) -> Self {
        let root = &config.flags.bpf_root;
        let mut copy = socket(&config.flags.admin_socket).into_os_string();
        copy.push(".copy");
        Self {
            bpf_root: fs::canonicalize(root).unwrap_or_else(|_| root.clone()),
            state: config.state(),
            copy: copy.into(),
            stage: (
                config.flags.high_scale.stage(),
                config.flags.high_scale.high_scale_force,
            ),
            programs,
            one: Mutex::new(()),
        }
    }

    /// Blocks while it reads. The error names the owner's files.
    pub(super) fn run(&self) -> Result<(), String> {
        self.read().map_err(|error| {
            let copy = self.copy.display().to_string();
            error
                .to_string()
                .replace(&copy, &self.state.display().to_string())
        })
    }

    fn read(&self) -> Result<(), NotReady> {
        let _one = self.one.try_lock().ok_or(NotReady::Busy)?;
        if let Some(reason) = &self.programs {
            return Err(NotReady::Programs(reason.clone()));
        }
        let copy = Copy::of(&self.state, &self.copy).map_err(|source| NotReady::Copy {
            path: self.copy.clone(),
            source,
        })?;
        epoch::check(&copy.0)?;
        let (stage, is_forced) = self.stage;
        if let Some(damaged) = high_scale::check(&copy.0, stage, is_forced)? {
            return Err(NotReady::Damaged(damaged));
        }
        let files = StateFiles::open(&copy.0).map_err(|source| NotReady::Copy {
            path: self.copy.clone(),
            source,
        })?;
        let found = restore::read(&files, &Globals::new(&self.bpf_root), BootTime::now())?;
        if !found.damaged.is_empty() {
            return Err(NotReady::Damaged(found.damaged.join("; ")));
        }
        Ok(())
    }
}

/// A directory with copies, removed when dropped.
struct Copy(PathBuf);

impl Copy {
    fn of(state: &Path, to: &Path) -> io::Result<Self> {
        remove(to)?;
        DirBuilder::new().mode(0o700).create(to)?;
        let copy = Self(to.to_owned());
        for entry in fs::read_dir(state)? {
            let entry = entry?;
            let name = entry.file_name();
            let to = to.join(&name);
            if entry.file_type()?.is_dir() {
                let from = entry.path().join(ENDPOINT_FILE);
                if name.to_string_lossy().parse::<u16>().is_ok() && from.exists() {
                    DirBuilder::new().mode(0o700).create(&to)?;
                    copy_present(&from, &to.join(ENDPOINT_FILE))?;
                }
            } else if is_state(&entry.path()) {
                copy_present(&entry.path(), &to)?;
            }
        }
        Ok(copy)
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.0) {
            tracing::warn!(path = %self.0.display(), %error, "a copy of the owner's files is left behind");
        }
    }
}

fn remove(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The owner may remove a file meanwhile.
fn copy_present(from: &Path, to: &Path) -> io::Result<()> {
    match fs::copy(from, to) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn is_state(path: &Path) -> bool {
    let ending = path.extension().and_then(|ending| ending.to_str());
    let is_cluster = path
        .file_name()
        .is_some_and(|name| name.to_string_lossy().starts_with(CLUSTER));
    !is_cluster && !ending.is_some_and(|ending| NO_STATE.contains(&ending))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trial(dir: &Path) -> Trial {
        Trial {
            bpf_root: dir.join("bpf"),
            state: dir.join("state"),
            copy: dir.join("copy"),
            stage: (Stage::Unset, false),
            programs: None,
            one: Mutex::new(()),
        }
    }

    #[test]
    fn files_that_cannot_be_read_are_named_and_stay_as_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        fs::create_dir_all(state.join("7")).unwrap();
        for (file, text, says) in [
            ("epoch.json", r#"{"version":9}"#, "has version 9"),
            ("cleaned_names.json", "{", "it would lose files"),
            ("7/ep_config.json", "{", "it would lose files"),
            ("local_allocator_state.json", "{", "it would lose files"),
        ] {
            let path = state.join(file);
            fs::write(&path, text).unwrap();
            let error = trial(dir.path()).run().unwrap_err();
            assert!(error.contains(says), "{file}: {error}");
            assert!(error.contains(&path.display().to_string()), "{error}");
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
            assert!(!dir.path().join("copy").exists());
            fs::remove_file(&path).unwrap();
        }
    }

    #[test]
    fn programs_that_are_not_loaded_and_a_trial_that_runs_are_reasons() {
        let dir = tempfile::tempdir().unwrap();
        let mut trial = trial(dir.path());
        let held = trial.one.lock();
        assert!(trial.run().unwrap_err().contains("another request"));
        drop(held);
        trial.programs = Some("cilium_lxc is not pinned".to_owned());
        let error = trial.run().unwrap_err();
        assert!(error.ends_with("cilium_lxc is not pinned"), "{error}");
    }

    #[test]
    fn what_a_killed_trial_left_is_replaced_and_other_files_are_not_copied() {
        let dir = tempfile::tempdir().unwrap();
        let (state, copy) = (dir.path().join("state"), dir.path().join("copy"));
        fs::create_dir_all(copy.join("old")).unwrap();
        fs::create_dir_all(state.join("policies")).unwrap();
        for file in [
            "epoch.json",
            "epoch.json.new",
            "a.json.corrupt",
            "cluster.json",
            "cluster.json.partial",
        ] {
            fs::write(state.join(file), "{}").unwrap();
        }
        let copied = Copy::of(&state, &copy).unwrap();
        let names = fs::read_dir(&copied.0).unwrap();
        let names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["epoch.json"]);
        drop(copied);
        assert!(!copy.exists());
    }
}
