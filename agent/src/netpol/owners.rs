//! Which pods the addresses of this node belong to, stored for the next run: an address with another pod by then
//! still has tracked connections of the former pod.

use std::{
    collections::BTreeMap,
    io,
    net::IpAddr,
    path::{Path, PathBuf},
};

use daemon::state_file::{read_or_set_aside, write_json};
use serde::{Deserialize, Serialize};

const FILE: &str = "addresses.json";
const VERSION: u32 = 1;

/// The pods of each address, each pod with its creation time.
pub(super) type Pods = BTreeMap<IpAddr, Vec<String>>;

#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Stored {
    version: u32,
    pods: Pods,
}

/// The file of the state directory.
#[derive(Debug)]
pub(super) struct Owners {
    path: PathBuf,
    stored: Pods,
    /// Whether the pods of this run were compared with those of the last run.
    is_compared: bool,
}

impl Owners {
    /// Reads what the last run stored. A file that cannot be used is set aside, and the fault
    /// is added to `damaged`.
    pub(super) fn open(state_dir: &Path, damaged: &mut Vec<String>) -> Self {
        let path = state_dir.join(FILE);
        let read = read_or_set_aside(&path, |bytes| {
            let stored: Stored =
                serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
            match stored.version {
                VERSION => Ok(stored.pods),
                other => Err(format!("version {other} is not {VERSION}")),
            }
        });
        let stored = read.unwrap_or_else(|error| {
            damaged.push(error);
            None
        });
        Self {
            path,
            stored: stored.unwrap_or_default(),
            is_compared: false,
        }
    }

    /// Addresses that had other pods in the last run. Later calls return none.
    pub(super) fn take_changed(&mut self, now: &Pods) -> Vec<IpAddr> {
        if std::mem::replace(&mut self.is_compared, true) {
            return Vec::new();
        }
        let stored = self.stored.iter();
        let changed = stored.filter(|(address, pods)| now.get(*address) != Some(*pods));
        changed.map(|(address, _)| *address).collect()
    }

    /// Whether the pods of the last run were compared.
    pub(super) const fn is_compared(&self) -> bool {
        self.is_compared
    }

    /// Stores the pods of this run, if they differ.
    ///
    /// # Errors
    /// The file cannot be written. The next call tries it again.
    pub(super) fn store(&mut self, now: Pods) -> io::Result<()> {
        if now != self.stored {
            let stored = Stored {
                version: VERSION,
                pods: now,
            };
            write_json(&self.path, &stored)?;
            self.stored = stored.pods;
        }
        Ok(())
    }
}

/// Text for `status` and the log about a failure of [`Self::store`].
pub(super) fn unstored(error: &io::Error) -> String {
    format!(
        "cannot store the pods of this node's addresses in --state-dir: {error}; after a restart, tracked \
         connections of a former pod may stay open; make the directory writable, with free space"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pods(pairs: &[(&str, &str)]) -> Pods {
        let pairs = pairs.iter();
        pairs
            .map(|(address, pod)| (address.parse().unwrap(), vec![(*pod).to_owned()]))
            .collect()
    }

    #[test]
    fn what_could_not_be_stored_is_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let mut owners = Owners::open(&state, &mut Vec::new());
        let now = pods(&[("10.0.0.1", "a")]);
        std::fs::write(&state, "no directory").unwrap();
        let error = owners.store(now.clone()).unwrap_err();
        assert!(unstored(&error).contains("--state-dir"));
        std::fs::remove_file(&state).unwrap();
        std::fs::create_dir(&state).unwrap();
        owners.store(now).unwrap();
        assert!(state.join(FILE).exists());
    }

    #[test]
    fn addresses_with_other_pods_than_in_the_last_run() {
        let dir = tempfile::tempdir().unwrap();
        let mut damaged = Vec::new();
        let mut first = Owners::open(dir.path(), &mut damaged);
        let before = pods(&[("10.0.0.1", "a"), ("10.0.0.2", "b"), ("10.0.0.3", "c")]);
        assert!(first.take_changed(&before).is_empty(), "nothing is stored");
        first.store(before.clone()).unwrap();

        let mut second = Owners::open(dir.path(), &mut damaged);
        let now = pods(&[("10.0.0.1", "a"), ("10.0.0.2", "other"), ("10.0.0.4", "d")]);
        let changed: Vec<String> = second
            .take_changed(&now)
            .iter()
            .map(IpAddr::to_string)
            .collect();
        assert_eq!(changed, ["10.0.0.2", "10.0.0.3"]);
        assert!(second.take_changed(&now).is_empty(), "only once");
        assert!(damaged.is_empty());

        std::fs::write(dir.path().join(FILE), "{").unwrap();
        let mut third = Owners::open(dir.path(), &mut damaged);
        assert!(third.take_changed(&now).is_empty());
        assert_eq!(damaged.len(), 1);
    }
}
