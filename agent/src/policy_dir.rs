//! Policy documents of a watched directory.
//!
//! A document that cannot be read is refused and reported; its last good version
//! stays in force. Where not even its name can be read, every document that
//! its file held before stays. The last good versions are on disk
//! ([`LastGood`]), so that this holds across a restart, too.
//!
//! A file's documents are removed when the listing lacks the file and the file does not exist. They stay in force if
//! anything else is in its place, or if the directory is gone.

pub mod last_good;

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    hash::{BuildHasher as _, RandomState},
    path::Path,
};

use agent_core::{
    policy::{
        document::{PolicyDocument, PolicyError},
        kinds,
        parse::{parse_value, parse_with_json},
        source::PolicyChange,
    },
    source_event::SourceEvent,
};
use daemon::lookup::Lookup;

use crate::{
    document_dir::DocumentDir,
    policy_dir::last_good::LastGood,
    watched_dir::{self, Stamp},
};

/// Maximum refused documents that are logged one by one.
const LOGGED: usize = 100;

/// Remedy for two documents of one kind and name.
pub const TWICE: &str =
    "rename or remove one of the two; of two EgressFirewalls, put all rules into one";

/// The documents of the directory when it was read last.
#[derive(Debug)]
pub struct PolicyDir {
    dir: DocumentDir,
    files: BTreeMap<String, File>,
    current: BTreeMap<String, PolicyDocument>,
    /// Refused documents in the files that could be read.
    refused: Vec<PolicyError>,
    rejected: Vec<PolicyError>,
    /// Seeds the hashes of texts.
    hash: RandomState,
    last_good: Option<LastGood>,
    /// Whether the directory could not be read.
    unreadable: bool,
    /// Whether, since the first listing, some refused document has no known good version.
    uncertain: bool,
}

/// One file: its last text, and the good documents of this text and of earlier ones.
#[derive(Debug, Default)]
struct File {
    text: Option<Digest>,
    stamp: Option<Stamp>,
    good: BTreeMap<String, Good>,
    errors: Vec<PolicyError>,
    /// Whether the good documents are not on disk yet.
    unsaved: bool,
    /// Whether some refused document of the file has no known good version.
    lacks: bool,
}

/// Length and hash of a text.
type Digest = (usize, u64);

/// A good version of a document.
#[derive(Debug)]
struct Good {
    document: PolicyDocument,
    /// JSON of the fields that the agent reads.
    json: String,
}

impl PolicyDir {
    /// A source for `dir`; nothing is read yet, and nothing is kept across a restart.
    pub fn new(dir: &Path) -> Self {
        Self {
            dir: DocumentDir::new(dir),
            files: BTreeMap::new(),
            current: BTreeMap::new(),
            refused: Vec::new(),
            rejected: Vec::new(),
            hash: RandomState::new(),
            last_good: None,
            unreadable: false,
            uncertain: false,
        }
    }

    /// A source for `dir`, with the good documents that an earlier run stored.
    pub fn with_last_good(dir: &Path, mut last_good: LastGood) -> Self {
        let mut source = Self::new(dir);
        if let Some(stored) = last_good.take_directory() {
            source.dir = stored;
        }
        for (name, values) in last_good.take_found() {
            let mut file = File::default();
            for value in values {
                match parse_value(&value, &name) {
                    Ok(document) => {
                        let json = value.to_string();
                        let good = Good { document, json };
                        file.good.insert(good.document.key.clone(), good);
                    }
                    Err(error) => {
                        tracing::warn!(%error, "this release refuses the last good version of a policy document");
                    }
                }
            }
            source.files.insert(name, file);
        }
        source.last_good = Some(last_good);
        source
    }

    /// Lists all documents for the first time, between `Init` and `InitDone`.
    pub fn list(&mut self) -> Vec<PolicyChange> {
        let mut events = vec![PolicyChange::Document(SourceEvent::Init)];
        let changes = self.refresh();
        self.uncertain = self.lacks();
        events.extend(changes);
        if self.uncertain {
            events.push(PolicyChange::Uncertain(true));
        }
        events.push(PolicyChange::Document(SourceEvent::InitDone));
        events
    }

    /// Whether some refused document has no known good version.
    fn lacks(&self) -> bool {
        self.unreadable && self.files.is_empty() || self.files.values().any(|file| file.lacks)
    }

    /// Reads the directory again and says what changed.
    pub fn refresh(&mut self) -> Vec<PolicyChange> {
        let mut errors = Vec::new();
        let has_documents = self.files.values().any(|file| !file.good.is_empty());
        let names = self.dir.list(has_documents);
        self.unreadable = names.is_err();
        let mut changed = false;
        match names {
            Ok(names) => changed = self.read(names, &mut errors),
            Err(error) => errors.push(PolicyError {
                source_name: self.dir.path().display().to_string(),
                key: None,
                field: "directory".to_owned(),
                reason: error.to_string(),
                remedy: error.remedy(self.dir.path()),
            }),
        }
        self.save(&mut errors);
        let mut events = Vec::new();
        if changed || self.current.is_empty() {
            self.refused.clear();
            let wanted = self.wanted();
            events = self.adopt(wanted);
        }
        errors.extend(self.refused.iter().cloned());
        events.extend(self.reject(errors));
        if self.uncertain && !self.lacks() {
            self.uncertain = false;
            events.push(PolicyChange::Uncertain(false));
        }
        events
    }

    /// The good documents of all files by key. Of two documents with
    /// one key, the one in the first file counts.
    fn wanted(&mut self) -> BTreeMap<String, PolicyDocument> {
        let errors = &mut self.refused;
        let mut wanted: BTreeMap<&String, (&String, &PolicyDocument)> = BTreeMap::new();
        for (name, file) in &self.files {
            errors.extend(file.errors.iter().cloned());
            for (key, Good { document, .. }) in &file.good {
                match wanted.get(key) {
                    Some((first, _)) => errors.push(PolicyError {
                        source_name: name.clone(),
                        key: Some(key.clone()),
                        field: "metadata.name".to_owned(),
                        reason: format!("{first} has a document of this kind and name already"),
                        remedy: TWICE.to_owned(),
                    }),
                    None => {
                        wanted.insert(key, (name, document));
                    }
                }
            }
        }
        wanted
            .into_iter()
            .map(|(key, (_, document))| (key.clone(), document.clone()))
            .collect()
    }

    /// Makes `wanted` the current documents; returns the events of the difference.
    fn adopt(&mut self, wanted: BTreeMap<String, PolicyDocument>) -> Vec<PolicyChange> {
        let deleted = self.current.keys().filter(|key| !wanted.contains_key(*key));
        let deleted = deleted.map(|key| SourceEvent::Delete(key.clone()));
        let changed = wanted.iter();
        let changed = changed.filter(|(key, document)| self.current.get(*key) != Some(*document));
        let applied = changed.map(|(_, document)| SourceEvent::Apply(document.clone()));
        let events = deleted.chain(applied).map(PolicyChange::Document).collect();
        self.current = wanted;
        events
    }

    /// Logs refused documents that were not refused before; `None` if nothing changed.
    fn reject(&mut self, errors: Vec<PolicyError>) -> Option<PolicyChange> {
        if errors == self.rejected {
            return None;
        }
        let known: HashSet<&PolicyError> = self.rejected.iter().collect();
        let mut new = errors.iter().filter(|error| !known.contains(error));
        for error in new.by_ref().take(LOGGED) {
            tracing::warn!(%error, "policy document refused; its last good version, if there is one, remains in force");
        }
        let more = new.count();
        if more > 0 {
            tracing::warn!(more, "further policy documents refused");
        }
        self.rejected.clone_from(&errors);
        Some(PolicyChange::Rejected(errors))
    }

    /// Keeps the good documents of each file on disk.
    fn save(&mut self, errors: &mut Vec<PolicyError>) {
        let Some(last_good) = &mut self.last_good else {
            return;
        };
        let mut failed = None;
        for (name, file) in self.files.iter_mut().filter(|(_, file)| file.unsaved) {
            let documents = file.good.values().map(|good| good.json.as_str());
            match last_good.put(name, documents) {
                Ok(()) => file.unsaved = false,
                Err(error) => failed = Some(error),
            }
        }
        let files: BTreeSet<&str> = self.files.keys().map(String::as_str).collect();
        if let Some(error) = last_good.keep_only(&files).err().or(failed) {
            let reason = format!("last good versions cannot be kept: {error}");
            errors.push(PolicyError {
                source_name: self.dir.path().display().to_string(),
                key: None,
                field: "directory".to_owned(),
                reason,
                remedy: "make the state directory writable: until then a document that is torn \
                         at a restart has no older version"
                    .to_owned(),
            });
        }
    }

    /// Reads the files that may have changed, one after the other. Returns whether documents may have changed with
    /// them.
    fn read(&mut self, names: BTreeSet<String>, errors: &mut Vec<PolicyError>) -> bool {
        let before = self.files.len();
        let dir = &self.dir;
        self.files.retain(|name, _| {
            let looked = match names.contains(name) {
                true => return true,
                false => dir.look(name),
            };
            if let Lookup::Unknown(error) = &looked {
                errors.push(unread(
                    name,
                    error.to_string(),
                    "make it readable, or delete it",
                ));
            }
            !looked.is_gone()
        });
        let mut changed = self.files.len() != before;
        for name in names {
            let path = self.dir.path().join(&name);
            let file = self.files.entry(name.clone()).or_default();
            let stamp = Stamp::of(&path);
            if stamp.is_some() && file.stamp == stamp {
                continue;
            }
            file.stamp = None;
            match watched_dir::read_file(&path) {
                Ok(text) => {
                    let digest = (text.len(), self.hash.hash_one(&text));
                    if file.text != Some(digest) {
                        file.parse(&name, &text);
                        file.text = Some(digest);
                        changed = true;
                    }
                    file.stamp = stamp;
                }
                Err(error) => {
                    file.lacks = file.good.is_empty();
                    errors.push(unread(&name, error.to_string(), error.remedy()));
                }
            }
        }
        changed
    }
}

/// A file that cannot be read; its last good version stays in force.
fn unread(name: &str, reason: String, remedy: &str) -> PolicyError {
    PolicyError {
        source_name: name.to_owned(),
        key: None,
        field: "file".to_owned(),
        reason,
        remedy: remedy.to_owned(),
    }
}

impl File {
    fn parse(&mut self, name: &str, text: &str) {
        let before = std::mem::take(&mut self.good);
        let known = !before.is_empty();
        self.errors.clear();
        if text.trim().is_empty() && !before.is_empty() {
            self.errors.push(PolicyError {
                source_name: name.to_owned(),
                key: None,
                field: "file".to_owned(),
                reason: "is empty, and had documents".to_owned(),
                remedy: "write them again, or delete the file to remove them".to_owned(),
            });
        }
        self.read_documents(name, text);
        let nameless = self.errors.iter().any(|error| error.key.is_none());
        let same = |key: &String, good: &Good| {
            let now = self.good.get(key);
            now.is_some_and(|now| now.json == good.json)
        };
        let mut unsaved =
            self.good.len() != before.len() || !before.iter().all(|(key, good)| same(key, good));
        let bad = self.errors.iter().filter_map(|error| error.key.as_ref());
        let bad: HashSet<&String> = bad.collect();
        // A document of a kind that is not read may be a known document with a misspelt kind: it has the same name.
        let others = bad.iter().filter_map(|key| name_of_other(key));
        let others: HashSet<&str> = others.collect();
        for (key, good) in before {
            let name = key.split_once('/').map_or("", |(_, name)| name);
            let in_default = name.strip_prefix("default/");
            let is_bad = nameless
                || bad.contains(&key)
                || others.contains(name)
                || in_default.is_some_and(|name| others.contains(name));
            if is_bad && !self.good.contains_key(&key) {
                self.good.insert(key, good);
                unsaved = true;
            }
        }
        let unknown = |error: &PolicyError| match &error.key {
            Some(key) => name_of_other(key).is_none() && !self.good.contains_key(key),
            None => !known,
        };
        self.lacks = self.errors.iter().any(unknown);
        self.unsaved |= unsaved;
    }
}

impl File {
    /// The good documents of the text, and the errors of the others.
    fn read_documents(&mut self, name: &str, text: &str) {
        for document in parse_with_json(text, name) {
            let (document, json) = match document {
                Ok(document) => document,
                Err(error) => {
                    self.errors.push(error);
                    continue;
                }
            };
            if self.good.contains_key(&document.key) {
                self.errors.push(PolicyError {
                    source_name: name.to_owned(),
                    key: Some(document.key),
                    field: "metadata.name".to_owned(),
                    reason: "the file has a document of this kind and name already".to_owned(),
                    remedy: TWICE.to_owned(),
                });
                continue;
            }
            let key = document.key.clone();
            self.good.insert(key, Good { document, json });
        }
    }
}

/// Namespace and name in the key of a document whose kind is not read.
fn name_of_other(key: &str) -> Option<&str> {
    let (kind, name) = key.split_once('/')?;
    (!kinds::is_read(kind)).then_some(name)
}
