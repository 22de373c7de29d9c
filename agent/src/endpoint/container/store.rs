//! Names of containers in the runtimes' own stores.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use daemon::{lookup::present, regular_file};
use dns_policy::wall_time;
use serde::{Deserialize, de::DeserializeOwned};

/// Files of podman's store, in each directory `DRIVER-containers`.
const PODMAN: [&str; 2] = ["containers.json", "volatile-containers.json"];
const DRIVER: &str = "-containers";
/// Two changes within this time may have one timestamp: file timestamps advance with the kernel's tick (10 ms at
/// most).
const SETTLED: Duration = Duration::from_millis(100);

/// The names of one runtime's containers. A file is read again when it has changed.
#[derive(Debug)]
pub(super) struct Names {
    root: PathBuf,
    files: fn(&Path) -> io::Result<Vec<PathBuf>>,
    parse: fn(&[u8]) -> serde_json::Result<Vec<Named>>,
    read: BTreeMap<PathBuf, File>,
}

#[derive(Debug)]
struct File {
    /// `None`: the file changed so shortly before the reading that a later change may give the same version.
    version: Option<Version>,
    containers: Vec<Named>,
}

/// Device, inode, size in bytes, and time of the last change in seconds and nanoseconds.
type Version = (u64, u64, u64, i64, i64);

#[derive(Debug)]
struct Named {
    id: String,
    names: Vec<String>,
}

impl Names {
    /// Names in the store below podman's root directory.
    pub(super) fn of_podman(root: &Path) -> Self {
        Self::of(root, podman_files, |text| {
            let containers: Vec<Podman> = serde_json::from_slice(text)?;
            let named = containers
                .into_iter()
                .map(|Podman { id, names }| Named { id, names });
            Ok(named.collect())
        })
    }

    /// Names in docker's directories of containers.
    pub(super) fn of_docker(root: &Path) -> Self {
        Self::of(root, docker_files, |text| {
            let Docker { id, name } = serde_json::from_slice(text)?;
            let name = name.trim_start_matches('/').to_owned();
            let names = vec![name];
            Ok(vec![Named { id, names }])
        })
    }

    fn of(
        root: &Path,
        files: fn(&Path) -> io::Result<Vec<PathBuf>>,
        parse: fn(&[u8]) -> serde_json::Result<Vec<Named>>,
    ) -> Self {
        Self {
            root: root.to_owned(),
            files,
            parse,
            read: BTreeMap::new(),
        }
    }

    /// The id of the container that has this name now.
    pub(super) fn id_of(&mut self, name: &str) -> io::Result<Option<String>> {
        self.refresh()?;
        let mut all = self.containers();
        let found = all.find(|one| one.names.iter().any(|it| it == name));
        Ok(found.map(|one| one.id.clone()))
    }

    /// The name that a container has now.
    pub(super) fn name_of(&mut self, id: &str) -> io::Result<Option<String>> {
        self.refresh()?;
        let found = self.containers().find(|one| one.id == id);
        Ok(found.and_then(|one| one.names.first().cloned()))
    }

    fn containers(&self) -> impl Iterator<Item = &Named> {
        self.read.values().flat_map(|file| &file.containers)
    }

    fn refresh(&mut self) -> io::Result<()> {
        let files = (self.files)(&self.root)?;
        self.read.retain(|path, _| files.contains(path));
        for path in files {
            let Some(file) = present(fs::metadata(&path))? else {
                self.read.remove(&path);
                continue;
            };
            let version = version(&file);
            if self
                .read
                .get(&path)
                .is_some_and(|read| read.version == Some(version))
            {
                continue;
            }
            let version = is_settled(&file)?.then_some(version);
            let Some(text) = read(&path)? else {
                self.read.remove(&path);
                continue;
            };
            let containers = (self.parse)(&text)
                .map_err(|error| io::Error::other(format!("{}: {error}", path.display())))?;
            self.read.insert(
                path,
                File {
                    version,
                    containers,
                },
            );
        }
        Ok(())
    }
}

fn version(file: &fs::Metadata) -> Version {
    (
        file.dev(),
        file.ino(),
        file.size(),
        file.mtime(),
        file.mtime_nsec(),
    )
}

fn is_settled(file: &fs::Metadata) -> io::Result<bool> {
    let age = wall_time::of_file().duration_since(file.modified()?);
    Ok(age.is_ok_and(|age| age > SETTLED))
}

/// Reads a file that only root can write. `None`: there is no such file.
pub(super) fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    const OTHERS_WRITE: u32 = 0o022;
    let at =
        |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    let Some(file) = present(fs::metadata(path)).map_err(at)? else {
        return Ok(None);
    };
    let own = nix::unistd::geteuid().as_raw();
    if (file.uid() != 0 && file.uid() != own) || file.mode() & OTHERS_WRITE != 0 {
        return Err(at(io::Error::other(
            "another user may write it: it is not of a runtime of root",
        )));
    }
    let text = regular_file::read(path).map_err(io::Error::from);
    present(text).map_err(at)
}

/// What podman stores about a container.
#[derive(Deserialize)]
struct Podman {
    id: String,
    #[serde(default, deserialize_with = "absent_as_empty")]
    names: Vec<String>,
}

fn absent_as_empty<'de, D: serde::Deserializer<'de>, T: DeserializeOwned + Default>(
    value: D,
) -> Result<T, D::Error> {
    Option::<T>::deserialize(value).map(Option::unwrap_or_default)
}

fn podman_files(root: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in present(fs::read_dir(root))?.into_iter().flatten() {
        let entry = entry?;
        if entry.file_name().to_string_lossy().ends_with(DRIVER) {
            found.extend(PODMAN.map(|file| entry.path().join(file)));
        }
    }
    Ok(found)
}

/// What docker stores about a container.
#[derive(Deserialize)]
struct Docker {
    #[serde(rename = "ID")]
    id: String,
    #[serde(rename = "Name")]
    name: String,
}

fn docker_files(root: &Path) -> io::Result<Vec<PathBuf>> {
    let containers = present(fs::read_dir(root.join("containers")))?;
    let mut found = Vec::new();
    for entry in containers.into_iter().flatten() {
        found.push(entry?.path().join("config.v2.json"));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_that_of_the_store_now() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("overlay-containers");
        let mut names = Names::of_podman(root.path());
        assert_eq!(names.id_of("web").unwrap(), None);
        fs::create_dir(&dir).unwrap();
        let write = |file: &str, text: &str| fs::write(dir.join(file), text).unwrap();
        write(
            "containers.json",
            r#"[{"id":"1","names":["web"],"image":"x"},{"id":"2","names":null}]"#,
        );
        assert_eq!(names.id_of("web").unwrap().as_deref(), Some("1"));
        assert_eq!(names.name_of("2").unwrap(), None);
        write(
            "volatile-containers.json",
            r#"[{"id":"3","names":["job"]}]"#,
        );
        assert_eq!(names.name_of("3").unwrap().as_deref(), Some("job"));
        write("containers.json", r#"[{"id":"1","names":["renamed"]}]"#);
        assert_eq!(names.id_of("web").unwrap(), None);
        assert_eq!(names.name_of("1").unwrap().as_deref(), Some("renamed"));
        write("containers.json", "[{");
        let error = names.id_of("web").unwrap_err().to_string();
        assert!(error.contains("containers.json"), "{error}");
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(names.id_of("renamed").unwrap(), None);
    }

    #[test]
    fn two_changes_within_one_tick_are_both_seen() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("overlay-containers");
        fs::create_dir(&dir).unwrap();
        let path = dir.join("containers.json");
        let mut names = Names::of_podman(root.path());
        let now = wall_time::of_file();
        for name in ["web1", "web2"] {
            fs::write(&path, format!(r#"[{{"id":"1","names":["{name}"]}}]"#)).unwrap();
            let file = fs::File::options().write(true).open(&path).unwrap();
            file.set_modified(now).unwrap();
            assert_eq!(names.name_of("1").unwrap().as_deref(), Some(name));
        }
    }

    #[test]
    fn a_file_that_others_may_write_does_not_count() {
        use std::os::unix::fs::PermissionsExt as _;
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("containers.json");
        fs::write(&path, "[]").unwrap();
        assert!(read(&path).unwrap().is_some());
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains("another user may write it"), "{error}");
    }

    #[test]
    fn docker_names_each_container_in_its_own_file() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("containers/4f");
        fs::create_dir_all(&dir).unwrap();
        let text = r#"{"State":{"Running":true},"ID":"4f","Name":"/web","Config":{}}"#;
        fs::write(dir.join("config.v2.json"), text).unwrap();
        let mut names = Names::of_docker(root.path());
        assert_eq!(names.id_of("web").unwrap().as_deref(), Some("4f"));
    }
}
