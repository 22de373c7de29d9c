//! Policy documents of a watched directory.
//!
//! A document that cannot be read is refused and said; its last good version
//! stays in force. Where not even its name can be read, every document that
//! its file held before stays.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use crate::{
    core::event::{Event, SourceEvent},
    policy::parse::{PolicyDocument, PolicyError, parse_documents},
    watched_dir::{self, FileError},
};

/// What the directory held when it was read last.
#[derive(Debug)]
pub struct PolicyDir {
    dir: PathBuf,
    files: BTreeMap<String, File>,
    current: BTreeMap<String, PolicyDocument>,
    rejected: Vec<PolicyError>,
}

/// One file: its last text, and the good documents of it and of earlier texts.
#[derive(Debug, Default)]
struct File {
    text: String,
    good: BTreeMap<String, PolicyDocument>,
    errors: Vec<PolicyError>,
}

impl PolicyDir {
    /// Of `dir`; nothing is read yet.
    pub fn new(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
            files: BTreeMap::new(),
            current: BTreeMap::new(),
            rejected: Vec::new(),
        }
    }

    /// The first full listing.
    pub fn list(&mut self) -> Vec<Event> {
        let mut events = vec![Event::Policies(SourceEvent::Init)];
        events.extend(self.refresh());
        events.push(Event::Policies(SourceEvent::InitDone));
        events
    }

    /// Reads the directory again and says what changed.
    pub fn refresh(&mut self) -> Vec<Event> {
        let mut errors = Vec::new();
        match watched_dir::read(&self.dir) {
            Ok(files) => self.take(files, &mut errors),
            Err(error) => errors.push(PolicyError {
                source_name: self.dir.display().to_string(),
                key: None,
                field: "directory".to_owned(),
                reason: error.to_string(),
                remedy: "make it readable; what was read before stays in force".to_owned(),
            }),
        }
        let mut wanted: BTreeMap<&String, (&String, &PolicyDocument)> = BTreeMap::new();
        for (name, file) in &self.files {
            errors.extend(file.errors.iter().cloned());
            for (key, document) in &file.good {
                match wanted.get(key) {
                    Some((first, _)) => errors.push(PolicyError {
                        source_name: name.clone(),
                        key: Some(key.clone()),
                        field: "metadata.name".to_owned(),
                        reason: format!("{first} has a document of this kind and name already"),
                        remedy: "rename or remove one of the two".to_owned(),
                    }),
                    None => {
                        wanted.insert(key, (name, document));
                    }
                }
            }
        }
        let mut events: Vec<Event> = self
            .current
            .keys()
            .filter(|key| !wanted.contains_key(key))
            .map(|key| Event::Policies(SourceEvent::Delete(key.clone())))
            .collect();
        for (key, (_, document)) in &wanted {
            if self.current.get(*key) != Some(*document) {
                events.push(Event::Policies(SourceEvent::Apply((*document).clone())));
            }
        }
        self.current = wanted
            .into_iter()
            .map(|(key, (_, document))| (key.clone(), document.clone()))
            .collect();
        if errors != self.rejected {
            for error in errors.iter().filter(|error| !self.rejected.contains(error)) {
                tracing::warn!(%error, "policy document refused; its last good version stays in force");
            }
            self.rejected.clone_from(&errors);
            events.push(Event::PoliciesRejected(errors));
        }
        events
    }

    fn take(
        &mut self,
        read: BTreeMap<String, Result<String, FileError>>,
        errors: &mut Vec<PolicyError>,
    ) {
        self.files.retain(|name, _| read.contains_key(name));
        for (name, text) in read {
            let file = self.files.entry(name.clone()).or_default();
            match text {
                Ok(text) if text == file.text => {}
                Ok(text) => file.parse(&name, text),
                Err(error) => errors.push(PolicyError {
                    source_name: name,
                    key: None,
                    field: "file".to_owned(),
                    reason: error.to_string(),
                    remedy: error.remedy().to_owned(),
                }),
            }
        }
    }
}

impl File {
    fn parse(&mut self, name: &str, text: String) {
        let before = std::mem::take(&mut self.good);
        self.errors.clear();
        for document in parse_documents(&text, name) {
            match document {
                Ok(document) => {
                    if self.good.contains_key(&document.key) {
                        self.errors.push(PolicyError {
                            source_name: name.to_owned(),
                            key: Some(document.key),
                            field: "metadata.name".to_owned(),
                            reason: "the file has a document of this kind and name already"
                                .to_owned(),
                            remedy: "rename or remove one of the two".to_owned(),
                        });
                    } else {
                        self.good.insert(document.key.clone(), document);
                    }
                }
                Err(error) => self.errors.push(error),
            }
        }
        let nameless = self.errors.iter().any(|error| error.key.is_none());
        for (key, document) in before {
            let bad = self
                .errors
                .iter()
                .any(|error| error.key.as_ref() == Some(&key));
            if (nameless || bad) && !self.good.contains_key(&key) {
                self.good.insert(key, document);
            }
        }
        self.text = text;
    }
}
