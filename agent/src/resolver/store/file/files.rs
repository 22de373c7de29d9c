//! The files of the objects, and the latest version of each.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
};

use agent_core::{name_objects::MAX_OBJECTS, source_event::SourceEvent};
use daemon::{
    lookup::{Lookup, present},
    state_file::write_atomic,
};
use dns_policy::name::Fqdn;
use limits::yaml;

use super::Event;
use crate::{
    dir_writers,
    document_dir::DocumentDir,
    resolver::{
        object::{ObjectKey, Read, Resolver, Status, Version},
        store::{Created, StoreError, Updated},
    },
    watched_dir::{self, Stamp},
};

const ENDING: &str = ".yaml";
/// Ending of a file that was set aside.
const ASIDE: &str = ".corrupt";
/// Maximum files that are named because they cannot be looked at.
const MAX_UNSEEN: usize = 16;
/// Maximum bytes of a file.
const MAX_BYTES: u64 = 2 << 20;
/// How the problem of a file that was set aside ends: the remedy.
const DONE_WITH: &str = "remove that file when you do not need it, or repair it and move it back";
const HEADING: &str = "# Written by holdfast-agent, which overwrites changes by hand.\n";

/// The files of the directory.
#[derive(Debug)]
pub(super) struct Files {
    dir: PathBuf,
    listed: DocumentDir,
    namespace: String,
    /// Objects by `metadata.name`, which is the file's name without its ending.
    known: BTreeMap<String, Known>,
    /// Changes that the watch has not sent.
    changes: Vec<Event>,
    /// What is wrong with files, by file name.
    problems: BTreeMap<String, String>,
    /// Files that could not be looked at the last time, and why.
    unseen: Vec<String>,
    /// Files that were set aside, with the reason.
    aside: BTreeMap<String, String>,
    /// Why the directory cannot be written.
    unwritable: Option<String>,
    /// Whether [`Self::unwritable`] changed since changes were last taken.
    is_news: bool,
    leads: bool,
}

/// An object as it was read or written last.
#[derive(Debug)]
struct Known {
    object: Resolver,
    /// `None` if the file may have changed since then without another stamp.
    stamp: Option<Stamp>,
}

impl Files {
    pub(super) fn new(dir: &Path, namespace: &str) -> Self {
        Self {
            dir: dir.to_owned(),
            listed: DocumentDir::new(dir),
            namespace: namespace.to_owned(),
            known: BTreeMap::new(),
            changes: Vec::new(),
            problems: BTreeMap::new(),
            unseen: Vec::new(),
            aside: BTreeMap::new(),
            unwritable: None,
            is_news: false,
            leads: false,
        }
    }

    pub(super) fn set_leads(&mut self, leads: bool) {
        self.leads = leads;
    }

    pub(super) fn objects(&self) -> Vec<Resolver> {
        let known = self.known.values();
        known.map(|known| known.object.clone()).collect()
    }

    /// What is wrong; `scanned` is the result of the last scan. A directory that cannot be used is
    /// one problem.
    pub(super) fn problems(&self, scanned: &Result<(), StoreError>) -> Vec<String> {
        let unusable = match (&self.unwritable, scanned) {
            (Some(why), _) => Some(why.clone()),
            (None, scanned) => scanned.as_ref().err().map(ToString::to_string),
        };
        let of_files = self.problems.values().chain(self.aside.values());
        of_files
            .chain(&self.unseen)
            .cloned()
            .chain(unusable)
            .collect()
    }

    /// Why the directory cannot be written; `None` if it can be written, or if no write was tried.
    pub(super) fn set_unwritable(&mut self, why: Option<StoreError>) {
        let why = why.map(|error| {
            format!(
                "names of EgressFirewalls are looked up and kept in memory only, so that later runs \
                 do not have what this one learned: {error}"
            )
        });
        if self.unwritable != why {
            match &why {
                Some(why) => tracing::warn!("{why}"),
                None => {
                    tracing::info!(dir = %self.dir.display(), "the directory of --resolver-dir can be used again")
                }
            }
            self.unwritable = why;
            self.is_news = true;
        }
    }

    pub(super) fn has_changes(&self) -> bool {
        self.is_news || !self.changes.is_empty()
    }

    pub(super) fn take_changes(&mut self) -> Vec<Event> {
        self.is_news = false;
        std::mem::take(&mut self.changes)
    }

    /// All objects, as a listing. Earlier changes are part of it.
    pub(super) fn list_events(&mut self) -> Vec<Event> {
        self.take_changes();
        let objects = self.objects().into_iter().map(SourceEvent::Apply);
        let all = std::iter::once(SourceEvent::Init).chain(objects);
        all.chain([SourceEvent::InitDone]).collect()
    }

    /// Reads the files that changed.
    ///
    /// The agent that leads is the only one that writes: it reads only files that it does not know,
    /// and sets damaged ones aside. Other agents accept changes, and ignore damaged files.
    pub(super) fn scan(&mut self) -> Result<(), StoreError> {
        let dir = self.dir.clone();
        make(&dir).map_err(|error| failed(&dir, &error))?;
        check_owner(&dir).map_err(|error| failed(&dir, &error))?;
        // The agent that leads writes missing files again.
        let has_objects = !self.leads && !self.known.is_empty();
        let names = self.listed.list(has_objects);
        let mut names = names.map_err(|error| {
            let remedy = error.remedy(&dir);
            failed(&dir, &io::Error::other(format!("{error}; {remedy}")))
        })?;
        names.retain(|name| name.ends_with(ENDING));
        self.problems.retain(|file, _| names.contains(file));
        self.find_aside()?;
        self.unseen.clear();
        for file in names.iter().take(MAX_OBJECTS) {
            let seen = self.look_at(file);
            // A file that cannot be looked at must not keep the others from being read.
            if let Err(error) = seen
                && self.unseen.len() < MAX_UNSEEN
            {
                self.unseen.push(error.to_string());
            }
        }
        if names.len() > MAX_OBJECTS {
            self.problems.insert(
                ENDING.to_owned(),
                format!(
                    "{}: has {} objects; the first {MAX_OBJECTS} are read; remove files that no EgressFirewall needs",
                    dir.display(),
                    names.len()
                ),
            );
        }
        let is_gone = |name: &&String| !names.contains(&format!("{name}{ENDING}"));
        let gone: Vec<String> = self.known.keys().filter(is_gone).cloned().collect();
        for name in gone {
            let file = format!("{name}{ENDING}");
            match self.listed.look(&file) {
                Lookup::Gone => self.restore_or_forget(&name)?,
                // The next scan reads it.
                Lookup::Found(()) => {}
                Lookup::Unknown(error) => self
                    .unseen
                    .push(failed(&self.path(&name), &error).to_string()),
            }
        }
        Ok(())
    }

    /// Files that are set aside, by this run or another one. The reason is known only for files of this run.
    fn find_aside(&mut self) -> Result<(), StoreError> {
        let entries = fs::read_dir(&self.dir).map_err(|error| failed(&self.dir, &error))?;
        let files = entries.filter_map(|entry| {
            let entry = entry.ok()?;
            let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
            entry.file_name().into_string().ok().filter(|_| is_file)
        });
        let ending = format!("{ENDING}{ASIDE}");
        let found: BTreeSet<String> = files.filter(|name| name.ends_with(&ending)).collect();
        self.aside.retain(|file, _| found.contains(file));
        for file in found.into_iter().take(MAX_OBJECTS) {
            let path = self.dir.join(&file);
            self.aside.entry(file).or_insert_with(|| {
                format!(
                    "{}: was set aside, because it is not an object; {DONE_WITH}",
                    path.display()
                )
            });
        }
        Ok(())
    }

    fn restore_or_forget(&mut self, name: &str) -> Result<(), StoreError> {
        if self.leads {
            // Without the file, agents that follow would close its addresses until the next write.
            tracing::warn!(file = %self.path(name).display(), "the file was removed by hand; it is written again");
            return match self.known.get(name) {
                Some(known) => self.write(known.object.clone()),
                None => Ok(()),
            };
        }
        if let Some(known) = self.known.remove(name) {
            let key = known.object.key.to_string();
            self.changes.push(SourceEvent::Delete(key));
        }
        Ok(())
    }

    /// Reads a file that may differ from the object that this agent has of it.
    fn look_at(&mut self, file: &str) -> Result<(), StoreError> {
        let name = file.strip_suffix(ENDING).unwrap_or(file);
        let known = self.known.get(name);
        let path = self.path(name);
        let metadata = present(fs::metadata(&path)).map_err(|error| failed(&path, &error))?;
        let Some(metadata) = metadata else {
            // Removed since the directory was read.
            return Ok(());
        };
        let stamp = Stamp::settled(&metadata);
        if stamp.is_some() && known.is_some_and(|known| known.stamp == stamp) {
            return Ok(());
        }
        let read = match self.read(&path, metadata.len()) {
            Ok(read) => read,
            Err(damage) => return self.damaged(name, &damage),
        };
        if self.leads
            && let Some(known) = self.known.get_mut(name)
        {
            // The next write overwrites changes by hand.
            known.stamp = stamp;
            self.problems.remove(file);
            return Ok(());
        }
        let known = self.known.get(name);
        if let Some(known) = known
            && let Err(error) = known.object.check_successor(&read.object)
        {
            let text = format!("{}: {error}; remove the file", path.display());
            self.problems.insert(file.to_owned(), text);
            return Ok(());
        }
        if known.is_none_or(|known| known.object != read.object) {
            self.changes.push(SourceEvent::Apply(read.object.clone()));
        }
        self.note_flaw(file, read.flaws.first());
        let object = read.object;
        self.known.insert(name.to_owned(), Known { object, stamp });
        Ok(())
    }

    /// Notes which part of a file is not used, if any.
    fn note_flaw(&mut self, file: &str, flaw: Option<&String>) {
        let Some(flaw) = flaw else {
            self.problems.remove(file);
            return;
        };
        let text = format!(
            "{}: {flaw}; this part is ignored until the file is written again",
            self.dir.join(file).display()
        );
        if self.problems.get(file) != Some(&text) {
            tracing::warn!("{text}");
            self.problems.insert(file.to_owned(), text);
        }
    }

    fn read(&self, path: &Path, bytes: u64) -> Result<Read, String> {
        if bytes > MAX_BYTES {
            return Err(format!(
                "has {bytes} bytes; a file of an object may have {MAX_BYTES}"
            ));
        }
        let text = watched_dir::read_file(path).map_err(|error| error.to_string())?;
        let documents = yaml::documents(&text);
        let [document] = documents.as_slice() else {
            return Err(format!("has {} documents instead of one", documents.len()));
        };
        let value = document.value().map_err(|error| error.to_string())?;
        let read = Resolver::read(&value, &self.namespace).map_err(|error| error.to_string())?;
        let key = &read.object.key;
        let expected = self.path(&key.name);
        if key.namespace != self.namespace || expected != path {
            return Err(format!(
                "is the object {key}; only objects of the namespace {} are in this directory, each in the file \
                 of its name",
                self.namespace
            ));
        }
        Ok(read)
    }

    /// A file that is not an object: the agent that leads sets it aside, and writes the object again if
    /// it has it.
    fn damaged(&mut self, name: &str, damage: &str) -> Result<(), StoreError> {
        let file = format!("{name}{ENDING}");
        let path = self.path(name);
        if !self.leads {
            let text = format!("{}: {damage}; it is ignored", path.display());
            self.problems.insert(file, text);
            return Ok(());
        }
        let aside = self.dir.join(format!("{file}{ASIDE}"));
        fs::rename(&path, &aside).map_err(|error| failed(&path, &error))?;
        let text = format!(
            "{}: {damage}; set aside as {}; {DONE_WITH}",
            path.display(),
            aside.display()
        );
        tracing::error!("{text}");
        self.problems.remove(&file);
        self.aside.insert(format!("{file}{ASIDE}"), text);
        match self.known.get(name) {
            Some(known) => self.write(known.object.clone()),
            None => Ok(()),
        }
    }

    pub(super) fn get(&mut self, key: &ObjectKey) -> Result<Option<Resolver>, StoreError> {
        self.look_at(&format!("{}{ENDING}", key.name))?;
        let known = self.known.get(&key.name);
        let known = known.filter(|known| &known.object.key == key);
        Ok(known.map(|known| known.object.clone()))
    }

    pub(super) fn create(&mut self, key: &ObjectKey, name: &Fqdn) -> Result<Created, StoreError> {
        self.check_leads()?;
        if self.get(key)?.is_some() {
            return Ok(Created::Exists);
        }
        let object = Resolver {
            key: key.clone(),
            version: Version("1".to_owned()),
            name: name.clone(),
            status: Status::default(),
        };
        self.write(object.clone())?;
        Ok(Created::Done(object))
    }

    pub(super) fn update(
        &mut self,
        key: &ObjectKey,
        version: &Version,
        status: Status,
    ) -> Result<Updated, StoreError> {
        self.check_leads()?;
        let Some(mut object) = self.get(key)? else {
            return Ok(Updated::Gone);
        };
        if &object.version != version {
            return Ok(Updated::Conflict);
        }
        let number = version.0.parse::<u64>().unwrap_or(0);
        object.version = Version(number.saturating_add(1).to_string());
        object.status = status;
        let version = object.version.clone();
        self.write(object)?;
        Ok(Updated::Done(version))
    }

    pub(super) fn delete(&mut self, key: &ObjectKey) -> Result<(), StoreError> {
        self.check_leads()?;
        let path = self.path(&key.name);
        present(fs::remove_file(&path)).map_err(|error| failed(&path, &error))?;
        if self.known.remove(&key.name).is_some() {
            self.changes.push(SourceEvent::Delete(key.to_string()));
        }
        Ok(())
    }

    fn check_leads(&self) -> Result<(), StoreError> {
        match self.leads {
            true => Ok(()),
            false => {
                let text = format!("another agent writes {}", self.dir.display());
                Err(StoreError::Refused(text))
            }
        }
    }

    fn write(&mut self, object: Resolver) -> Result<(), StoreError> {
        let path = self.path(&object.key.name);
        let text = serde_yaml_ng::to_string(&object.document())
            .map_err(|error| StoreError::Refused(format!("{}: {error}", object.key)))?;
        let text = format!("{HEADING}{text}");
        write_atomic(&path, text.as_bytes()).map_err(|error| failed(&path, &error))?;
        self.changes.push(SourceEvent::Apply(object.clone()));
        let name = object.key.name.clone();
        self.problems.remove(&format!("{name}{ENDING}"));
        let stamp = None;
        self.known.insert(name, Known { object, stamp });
        Ok(())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}{ENDING}"))
    }
}

/// Refuses a directory that another user can write into or replace. Such a user could open addresses, and could make
/// the agent write where a link leads.
pub(super) fn check_owner(dir: &Path) -> io::Result<()> {
    let there = fs::symlink_metadata(dir)?;
    let reason = match there.is_dir() {
        false => Some("it is not a directory".to_owned()),
        true => dir_writers::foreign_writer(&there, None).map(str::to_owned),
    };
    let parent = || -> io::Result<Option<String>> {
        let why = dir_writers::foreign_parent(dir)?;
        Ok(why.map(|why| format!("of the directory above: {why}")))
    };
    let reason = match reason {
        Some(reason) => Some(reason),
        None => parent()?,
    };
    match reason {
        Some(reason) => Err(io::Error::new(io::ErrorKind::PermissionDenied, reason)),
        None => Ok(()),
    }
}

/// Makes the directory of the files if it is not there.
pub(super) fn make(dir: &Path) -> io::Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

pub(super) fn failed(path: &Path, error: &io::Error) -> StoreError {
    StoreError::Unavailable(format!(
        "{}: {error}; give a --resolver-dir that the agent can read and write, on a disk with room",
        path.display()
    ))
}
