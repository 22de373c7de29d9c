//! Files of endpoints that commands added, one for each, in a directory that a boot does not empty.
//!
//! While the state directory has a list, that list counts. The state directory is usually below /run: it is empty after
//! a boot, or after the service manager removed it. Then these files are the list.
//!
//! An endpoint of `--endpoint-dir` has a file here only while its interface is gone and its document exists. The
//! file says where the endpoint was found last, so that the next run also closes an interface that takes that place.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs::{self, DirBuilder},
    io,
    net::IpAddr,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
};

use agent_core::endpoint::spec::EndpointSpec;
use agent_datapath::closed::DocumentHash;
use daemon::{
    lookup::present,
    regular_file,
    state_file::{self, Content, sync_dir, write_json},
};
use serde::{Deserialize, Serialize};
use shared_maps::user::boot_id;

use super::{EndpointBook, EndpointDocument, State, cli, cni};
use crate::{
    dir_writers::{foreign_parent, foreign_writer},
    endpoint::container::{EXTENSION as CONTAINERS, NamedContainers},
};

const VERSION: u32 = 1;
const EXTENSION: &str = "json";
/// Maximum characters of an endpoint's key in the name of its file.
const NAMED: usize = 100;

/// Where an endpoint was found last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Place {
    /// The boot on which it was found.
    boot_id: String,
    /// Name of its host-side interface.
    pub(super) interface: String,
    pub(super) addresses: Vec<IpAddr>,
}

impl Place {
    /// Where an endpoint is now; `None` if the boot is not known.
    pub(super) fn of(spec: &EndpointSpec) -> Option<Self> {
        Some(Self {
            boot_id: boot_id().ok()?,
            interface: spec.interface.ifname.clone(),
            addresses: spec.addresses.clone(),
        })
    }

    /// Whether the place is of this boot. After another boot, other pods may have these names and addresses.
    pub(super) fn is_of_this_boot(&self) -> bool {
        boot_id().is_ok_and(|boot_id| boot_id == self.boot_id)
    }
}

/// Content of the file of one endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    version: u32,
    /// The state directory of the agent that wrote the file. Agents with another state directory do not touch the file.
    state_dir: PathBuf,
    key: String,
    endpoint: EndpointDocument,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    place: Option<Place>,
}

/// The files of one agent.
#[derive(Debug, Default)]
pub(super) struct EndpointStore {
    /// `None` = nothing is stored.
    dir: Option<PathBuf>,
    state_dir: PathBuf,
    records: BTreeMap<String, Record>,
    /// Why a file could not be written or removed, by the key of its endpoint.
    failed: BTreeMap<String, String>,
    /// Whether the directory is not used, because another user may write into it.
    is_refused: bool,
    /// Containers that have a document, as of the last write.
    containers: Option<NamedContainers>,
}

impl EndpointStore {
    /// Reads the files in `dir` of the agent with this state directory. A file that cannot be read is set aside and
    /// added to `damaged`; the others count.
    pub(super) fn open(dir: Option<&Path>, state_dir: &Path, damaged: &mut Vec<String>) -> Self {
        let state_dir = fs::canonicalize(state_dir).unwrap_or_else(|_| state_dir.to_owned());
        let mut store = Self {
            dir: dir.map(Path::to_owned),
            state_dir,
            ..Self::default()
        };
        if let Some(why) = store.why_refused() {
            tracing::error!("{why}");
            damaged.push(why);
            store.is_refused = true;
            return store;
        }
        if let Err(error) = store.read(damaged)
            && let Some(dir) = dir
        {
            let text = format!(
                "--endpoint-store {}: {error}; endpoints that commands added before a boot are not \
                 known: make the directory readable, and start the agent again",
                dir.display()
            );
            tracing::error!("{text}");
            damaged.push(text);
        }
        store
    }

    /// The endpoints that were added, by their keys.
    pub(super) fn documents(&self) -> BTreeMap<String, EndpointDocument> {
        let records = self.records.iter().filter(|(key, _)| cli::is_key(key));
        let documents = records.map(|(key, record)| (key.clone(), record.endpoint.clone()));
        documents.collect()
    }

    /// Where an endpoint was found on this boot.
    pub(super) fn place(&self, key: &str) -> Option<&Place> {
        let place = self.records.get(key)?.place.as_ref()?;
        place.is_of_this_boot().then_some(place)
    }

    /// The directory; `None` if it is not used.
    pub(super) fn dir(&self) -> Option<&Path> {
        self.dir.as_deref().filter(|_| !self.is_refused)
    }

    /// The file with the processes of endpoints; `None` if nothing is stored.
    pub(super) fn processes(&self) -> Option<PathBuf> {
        Some(processes(self.dir()?, &self.state_dir))
    }

    pub(super) fn keys(&self) -> Vec<String> {
        self.records.keys().cloned().collect()
    }

    /// Keys of endpoints whose files are not as they should be.
    pub(super) fn failed(&self) -> Vec<String> {
        self.failed.keys().cloned().collect()
    }

    /// Stores an endpoint. Without `place`, the stored place stays.
    pub(super) fn set(&mut self, key: &str, endpoint: &EndpointDocument, place: Option<Place>) {
        let Some(dir) = self.dir().map(Path::to_owned) else {
            return;
        };
        let before = self.records.get(key);
        let record = Record {
            version: VERSION,
            state_dir: self.state_dir.clone(),
            key: key.to_owned(),
            endpoint: endpoint.clone(),
            place: place.or_else(|| before?.place.clone()),
        };
        if before == Some(&record) && !self.failed.contains_key(key) {
            return;
        }
        let path = self.path(&dir, key);
        let written = write(&dir, &path, &record).map_err(|error| {
            format!(
                "{}: {error}; endpoint {key} is not known after a boot: free space there, or correct \
                 --endpoint-store",
                path.display()
            )
        });
        self.records.insert(key.to_owned(), record);
        self.note(key, written);
    }

    /// Removes the file of an endpoint. Without a file nothing is done.
    pub(super) fn remove(&mut self, key: &str) {
        let is_stored = self.records.contains_key(key);
        let Some(dir) = self.dir.clone().filter(|_| is_stored) else {
            return;
        };
        let path = self.path(&dir, key);
        let removed = present(fs::remove_file(&path)).and_then(|_| sync_dir(&dir));
        let removed = removed.map_err(|error| {
            format!(
                "{}: {error}; endpoint {key} is added again after a boot: delete the file",
                path.display()
            )
        });
        if removed.is_ok() {
            self.records.remove(key);
        }
        self.note(key, removed);
    }

    /// The names that documents had in the last run.
    pub(super) fn named(&self, damaged: &mut Vec<String>) -> NamedContainers {
        let Some(dir) = self.dir() else {
            return NamedContainers::default();
        };
        NamedContainers::of_file(&containers(dir, &self.state_dir)).unwrap_or_else(|error| {
            let text = format!(
                "{error}: a container whose document is not accepted now may start without policy: see \
                 `holdfast-agent status`, and correct the documents"
            );
            tracing::error!("{text}");
            damaged.push(text);
            NamedContainers::default()
        })
    }

    /// Stores the names that documents have.
    pub(super) fn set_containers(&mut self, named: &NamedContainers) {
        let Some(dir) = self.dir().map(Path::to_owned) else {
            return;
        };
        let path = containers(&dir, &self.state_dir);
        let is_as_it_should_be = match path.exists() {
            true => self.containers.as_ref() == Some(named),
            false => *named == NamedContainers::default(),
        };
        if is_as_it_should_be {
            self.failed.remove(CONTAINERS);
            return;
        }
        let written = make(&dir).and_then(|()| write_json(&path, named));
        let written = written.map_err(|error| {
            format!(
                "{}: {error}; while no agent runs, containers with a document may start without policy: \
                 free space there, or correct --endpoint-store",
                path.display()
            )
        });
        self.containers = written.is_ok().then(|| named.clone());
        self.note(CONTAINERS, written);
    }

    /// Files that are not as they should be, and what to do: for `status`.
    pub(super) fn problems(&self) -> impl Iterator<Item = &String> {
        self.failed.values()
    }

    fn note(&mut self, key: &str, result: Result<(), String>) {
        match result {
            Ok(()) => {
                self.failed.remove(key);
            }
            Err(why) => {
                if self.failed.get(key) != Some(&why) {
                    tracing::error!("{why}");
                }
                self.failed.insert(key.to_owned(), why);
            }
        }
    }

    /// Why the directory is refused: a user who may write there could add endpoints, with any labels.
    fn why_refused(&self) -> Option<String> {
        let dir = self.dir.as_ref()?;
        let own = fs::metadata(dir).ok()?;
        let why = foreign_writer(&own, None)
            .or_else(|| foreign_parent(&fs::canonicalize(dir).ok()?).ok()?)?;
        Some(format!(
            "--endpoint-store {}: {why}, and start the agent again; until then endpoints that commands \
             add are not known after a boot",
            dir.display()
        ))
    }

    fn read(&mut self, damaged: &mut Vec<String>) -> io::Result<()> {
        let Some(dir) = self.dir.clone() else {
            return Ok(());
        };
        for entry in present(fs::read_dir(&dir))?.into_iter().flatten() {
            let path = entry?.path();
            if path.extension() != Some(OsStr::new(EXTENSION)) {
                continue;
            }
            match read(&path) {
                Ok(Some(record)) if record.state_dir == self.state_dir => {
                    self.records.insert(record.key.clone(), record);
                }
                Ok(Some(record)) => tracing::info!(
                    file = %path.display(),
                    "the endpoint is of the agent with the state directory {}",
                    record.state_dir.display()
                ),
                Ok(None) => {}
                Err(why) => {
                    tracing::error!("{why}");
                    damaged.push(why);
                }
            }
        }
        Ok(())
    }

    /// The file of an endpoint: a readable part of its key, and a hash.
    fn path(&self, dir: &Path, key: &str) -> PathBuf {
        let of = key.split_once('/').map_or(key, |(_, of)| of);
        let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
        let start = of.len().saturating_sub(NAMED);
        let readable: String = of.chars().skip(start).map(plain).collect();
        let hash = DocumentHash::of(&format!("{}\n{key}", self.state_dir.display()));
        dir.join(format!("{}-{hash}.{EXTENSION}", readable.trim_matches('-')))
    }
}

impl EndpointBook {
    /// Endpoints that are not stored as they should be, and what to do.
    pub(crate) fn not_stored(&self) -> Vec<String> {
        self.state.lock().store.problems().cloned().collect()
    }
}

impl State {
    /// Stores an endpoint that was added by command, or removes it from the store.
    pub(super) fn store_one(&mut self, key: &str) {
        match self.documents.get(key) {
            _ if cni::is_key(key) => {}
            Some(document) if cli::is_key(key) => {
                let place = self.found.get(key).and_then(|found| Place::of(&found.spec));
                self.store.set(key, document, place);
            }
            // An endpoint of another source has a file only while it is not found.
            _ => self.store.remove(key),
        }
    }

    /// Makes the files equal to the list of the last run, because that list counts.
    pub(super) fn store_all(&mut self) {
        let mut keys: BTreeSet<String> = self.documents.keys().cloned().collect();
        keys.extend(self.store.documents().into_keys());
        for key in keys {
            self.store_one(&key);
        }
    }
}

/// Reads a file; `None` if it is gone. A file that cannot be read is set aside, unless a later release wrote it.
fn read(path: &Path) -> Result<Option<Record>, String> {
    let lost = "if `holdfast-agent endpoint list` lacks the endpoint in it, its pod is open: add it again \
                (`holdfast-agent endpoint add`)";
    match state_file::read_versioned(path, VERSION) {
        Ok(Content::Found(record)) => Ok(Some(record)),
        Ok(Content::Absent) => Ok(None),
        Ok(Content::Damaged(damage)) => {
            let why = damage.try_to_set_aside(", set aside as");
            Err(format!("{}: {why}; {lost}", path.display()))
        }
        Err(error) => Err(format!("{error}; {lost}")),
    }
}

fn write(dir: &Path, path: &Path, record: &Record) -> io::Result<()> {
    make(dir)?;
    write_json(path, record)
}

/// Makes the directory, once there is something to store.
pub(super) fn make(dir: &Path) -> io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    dir.parent().map_or(Ok(()), sync_dir)
}

/// The file of processes. Its extension is not that of an endpoint's file.
fn processes(dir: &Path, state_dir: &Path) -> PathBuf {
    let agent = DocumentHash::of(&state_dir.display().to_string());
    dir.join(format!("{agent}.processes"))
}

fn containers(dir: &Path, state_dir: &Path) -> PathBuf {
    let agent = DocumentHash::of(&state_dir.display().to_string());
    dir.join(format!("{agent}.{CONTAINERS}"))
}

/// Removes the files of the agent with this state directory, and the directory if it is then empty. Returns the
/// number of endpoints' files.
pub(crate) fn remove_all(dir: &Path, state_dir: &Path) -> io::Result<usize> {
    let state_dir = fs::canonicalize(state_dir).unwrap_or_else(|_| state_dir.to_owned());
    let Some(entries) = present(fs::read_dir(dir))? else {
        return Ok(0);
    };
    let mut count = 0;
    for entry in entries {
        let path = entry?.path();
        let bytes = regular_file::look(&path).found();
        let record = bytes.and_then(|bytes| serde_json::from_slice::<Record>(&bytes).ok());
        if record.is_some_and(|record| record.state_dir == state_dir) {
            fs::remove_file(&path)?;
            count += 1;
        }
    }
    let _absent = fs::remove_file(processes(dir, &state_dir));
    let _absent = fs::remove_file(containers(dir, &state_dir));
    // Not empty: another agent has files there.
    let _left = fs::remove_dir(dir);
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(netns: &str) -> EndpointDocument {
        EndpointDocument {
            netns: Some(netns.to_owned()),
            ifname: "eth0".to_owned(),
            labels: vec!["k8s:app=web".to_owned()],
            ..EndpointDocument::default()
        }
    }

    fn place(boot_id: String) -> Place {
        Place {
            boot_id,
            interface: "veth0".to_owned(),
            addresses: vec!["10.88.0.7".parse().unwrap()],
        }
    }

    struct Agent {
        dir: tempfile::TempDir,
        state: PathBuf,
    }

    impl Agent {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let state = dir.path().join("run");
            fs::create_dir(&state).unwrap();
            Self { dir, state }
        }

        fn store(&self) -> PathBuf {
            self.dir.path().join("lib/endpoints")
        }

        fn open(&self, state: &Path) -> (EndpointStore, Vec<String>) {
            let mut damaged = Vec::new();
            let store = EndpointStore::open(Some(&self.store()), state, &mut damaged);
            (store, damaged)
        }
    }

    #[test]
    fn endpoints_are_read_back_except_those_that_are_removed_or_of_another_agent() {
        let agent = Agent::new();
        let (mut store, damaged) = agent.open(&agent.state);
        assert!(damaged.is_empty() && !agent.store().exists(), "{damaged:?}");
        store.set("cli/a/eth0", &document("a"), None);
        store.set("cli//run/netns/b/eth0", &document("/run/netns/b"), None);
        store.set("cli/c/eth0", &document("c"), None);
        store.remove("cli/c/eth0");
        let (other, _) = agent.open(agent.dir.path());
        assert_eq!(other.documents(), BTreeMap::new());
        let (read, damaged) = agent.open(&agent.state);
        assert!(damaged.is_empty(), "{damaged:?}");
        assert_eq!(read.documents(), store.documents());
        assert_eq!(read.keys(), ["cli//run/netns/b/eth0", "cli/a/eth0"]);
        assert_eq!(remove_all(&agent.store(), agent.dir.path()).unwrap(), 0);
        assert_eq!(remove_all(&agent.store(), &agent.state).unwrap(), 2);
        assert!(!agent.store().exists());
    }

    #[test]
    fn a_place_counts_on_the_boot_on_which_it_was_found_and_stays_until_there_is_another() {
        let agent = Agent::new();
        let (mut store, _) = agent.open(&agent.state);
        let now = place(boot_id().unwrap());
        store.set("cli/a/eth0", &document("a"), Some(now.clone()));
        store.set("cli/a/eth0", &document("a"), None);
        let (mut read, _) = agent.open(&agent.state);
        assert_eq!(read.place("cli/a/eth0"), Some(&now));
        let before = place("of another boot".to_owned());
        read.set("cli/a/eth0", &document("a"), Some(before));
        assert_eq!(read.place("cli/a/eth0"), None);
    }

    #[test]
    fn damaged_files_and_those_of_a_later_release_are_named_and_the_others_are_read() {
        let agent = Agent::new();
        let (mut store, _) = agent.open(&agent.state);
        for netns in ["a", "b", "c"] {
            store.set(&format!("cli/{netns}/eth0"), &document(netns), None);
        }
        let path = |netns: &str| store.path(&agent.store(), &format!("cli/{netns}/eth0"));
        fs::write(path("a"), "{\"version\":1,").unwrap();
        fs::write(path("b"), "{\"version\":2,\"what\":\"is new\"}").unwrap();
        let (read, mut damaged) = agent.open(&agent.state);
        assert_eq!(read.keys(), ["cli/c/eth0"]);
        damaged.sort();
        let name = |netns| path(netns).display().to_string();
        assert!(damaged[0].contains(&name("a")), "{damaged:?}");
        assert!(damaged[1].contains(&name("b")) && damaged[1].contains("newer release"));
        assert!(!path("a").exists() && path("b").exists());
    }

    #[test]
    fn a_directory_that_others_may_write_to_is_not_used_and_one_that_cannot_be_written_is_named() {
        use std::os::unix::fs::PermissionsExt as _;

        let agent = Agent::new();
        fs::create_dir_all(agent.store()).unwrap();
        fs::set_permissions(agent.store(), fs::Permissions::from_mode(0o777)).unwrap();
        let (mut store, damaged) = agent.open(&agent.state);
        assert!(damaged[0].contains("chmod o-w"), "{damaged:?}");
        store.set("cli/a/eth0", &document("a"), None);
        assert_eq!(fs::read_dir(agent.store()).unwrap().count(), 0);

        fs::remove_dir(agent.store()).unwrap();
        let (mut store, _) = agent.open(&agent.state);
        fs::write(agent.store(), "a file").unwrap();
        store.set("cli/a/eth0", &document("a"), None);
        let problems: Vec<&String> = store.problems().collect();
        assert!(problems[0].contains("cli/a/eth0"), "{problems:?}");
        fs::remove_file(agent.store()).unwrap();
        store.set("cli/a/eth0", &document("a"), None);
        assert_eq!(store.problems().count(), 0);
    }

    #[test]
    fn what_documents_name_is_written_again_after_its_file_was_deleted() {
        let agent = Agent::new();
        let (mut store, mut damaged) = agent.open(&agent.state);
        let none = NamedContainers::default();
        store.set_containers(&none);
        assert!(!agent.store().exists());
        let bridges = std::iter::once("br0".to_owned());
        let named = NamedContainers::of(std::iter::empty(), bridges, std::iter::empty());
        let path = containers(&agent.store(), &store.state_dir);
        for _ in 0..2 {
            store.set_containers(&named);
            assert_eq!(store.named(&mut damaged), named);
            fs::remove_file(&path).unwrap();
        }
        fs::write(&path, "{").unwrap();
        assert_eq!(store.named(&mut damaged), none);
        assert!(
            damaged[0].contains("may start without policy"),
            "{damaged:?}"
        );
    }
}
