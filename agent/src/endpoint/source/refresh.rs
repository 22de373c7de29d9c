//! Reading the directory of documents again, and resolving the documents that are not *settled*: whose endpoint is not
//! found, or has another interface or namespace than before.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::SystemTime,
};

use super::{Deliver, EndpointDocument, EndpointError, State, cli, dir};
use crate::{document_dir::DocumentDir, endpoint::discover::bridge};

impl State {
    /// Reads the directory again, and resolves every document that is not settled.
    pub(super) fn refresh(&mut self, deliver: &Deliver) {
        for key in self.store.failed() {
            if cli::is_key(&key) {
                self.store_one(&key);
            }
        }
        if let Some(mut dir) = self.dir.take() {
            self.reread(&mut dir);
            self.dir = Some(dir);
        }
        self.record_names();
        self.locate_containers();
        self.expand_bridges();
        self.forget_ended_pods(deliver);
        let unwanted = self.found.keys().filter(|key| !self.is_wanted(key));
        for key in unwanted.cloned().collect::<Vec<_>>() {
            self.forget(&key, deliver);
        }
        let bridged = bridge::ports().ok();
        for key in self.documents.keys().cloned().collect::<Vec<_>>() {
            let found = self.found.get(&key);
            let is_in_place = found.is_some_and(|found| {
                let is_bridged =
                    |ports: &BTreeSet<u32>| ports.contains(&found.spec.interface.ifindex);
                found.is_settled(&self.interfaces, self.documents.get(&key))
                    && bridged
                        .as_ref()
                        .is_none_or(|ports| is_bridged(ports) == found.spec.interface.on_bridge)
            });
            let is_settled = is_in_place
                && (self.kept.contains(&key)
                    || !self.marks.stale.contains(&key)
                    || self.keep_as_found(&key, deliver));
            if !is_settled {
                self.follow(&key, deliver);
            }
        }
        // These endpoints have documents that cannot be read now.
        let kept = self
            .found
            .keys()
            .filter(|key| !self.documents.contains_key(*key));
        for key in kept.cloned().collect::<Vec<_>>() {
            self.follow(&key, deliver);
        }
        self.forget_unwanted();
    }

    fn reread(&mut self, dir: &mut DocumentDir) {
        let known = self.documents.keys().chain(self.found.keys());
        let read = match dir::read(dir, known) {
            Ok(read) => read,
            Err(error) => {
                let path = dir.path();
                let reason = format!("the directory {error}; {}", error.remedy(path));
                self.note(&path.display().to_string(), &reason);
                return;
            }
        };
        self.listing.listed = true;
        self.listing.torn = read.torn;
        let refused = read.documents.iter().filter(|(_, read)| read.is_err());
        self.listing.refused = refused.map(|(key, _)| key.clone()).collect();
        let listed: BTreeSet<String> = read.documents.keys().cloned().collect();
        let documents = std::mem::take(&mut self.documents);
        self.documents = documents
            .into_iter()
            .filter(|(key, _)| {
                let torn = || self.listing.torn.contains(dir::file_of(key));
                !dir::is_key(key) || listed.contains(key) || torn()
            })
            .collect();
        self.problems
            .unresolved
            .retain(|key, _| self.documents.contains_key(key) || listed.contains(key));
        let written = std::mem::replace(&mut self.listing.written, read.written);
        let touched = self.touched(&read.documents, &written);
        for key in touched {
            self.marks.rewritten.insert(key.clone());
            self.marks.stale.insert(key);
        }
        for (key, document) in read.documents {
            match document {
                Ok(mut document) => {
                    document.process = self.documents.get(&key).and_then(|before| before.process);
                    self.replace(key, document);
                }
                Err(error) => self.note(&key, &error.to_string()),
            }
        }
        self.marks
            .stale
            .retain(|key| self.documents.contains_key(key));
        self.marks
            .rewritten
            .retain(|key| self.documents.contains_key(key));
        self.marks
            .ended
            .retain(|key| self.documents.contains_key(key));
    }

    /// Documents of files that were written again without a change of any document. `before` has the
    /// time when each file was written, as of the last reading.
    fn touched(
        &self,
        documents: &BTreeMap<String, Result<EndpointDocument, EndpointError>>,
        before: &BTreeMap<String, SystemTime>,
    ) -> Vec<String> {
        // If a document of the file changed, that change does not approve the addresses that pods have taken meanwhile.
        let is_changed = |(key, document): &(&String, &Result<EndpointDocument, _>)| {
            let before = self.documents.get(*key);
            document.as_ref().ok() != before.map(EndpointDocument::as_written).as_ref()
        };
        let changed = documents.iter().filter(is_changed);
        let changed: BTreeSet<&str> = changed.map(|(key, _)| dir::file_of(key)).collect();
        let is_touched = |file: &str| {
            let times = before.get(file).zip(self.listing.written.get(file));
            times.is_some_and(|(before, now)| before != now) && !changed.contains(file)
        };
        let accepted = documents.iter().filter(|(_, document)| document.is_ok());
        let keys = accepted.map(|(key, _)| key);
        let touched = keys.filter(|key| is_touched(dir::file_of(key)));
        touched.cloned().collect()
    }

    /// Stores a document of the directory. The old version stays in force until this one is resolved.
    fn replace(&mut self, key: String, document: EndpointDocument) {
        if self.documents.get(&key) == Some(&document) {
            return;
        }
        let pid = document.pid;
        let before = self.documents.insert(key.clone(), document);
        if before.is_some_and(|before| before.pid != pid) {
            self.marks.ended.remove(&key);
        }
        self.kept.remove(&key);
        self.marks.stale.insert(key);
    }
}
