//! The last good version of each policy document, on disk: a file that is torn when the agent
//! starts must not open the pods that its documents are about.
//!
//! Each file of the policy directory has a file here, with a number for its name. This file says which directory and
//! which file its documents are from: documents of another directory are not taken.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use daemon::{
    lookup::{Lookup, present},
    state_file::{self, Content, StateFileError, set_aside, write_atomic},
};
use serde::Deserialize;
use serde_json::Value;

use crate::document_dir::DocumentDir;

/// Version of the files that this program writes.
const VERSION: u32 = 1;
/// Directory below the state directory.
const DIRECTORY: &str = "policies";
/// Name of the file in that directory that says where the documents were read from.
const READ_FROM: &str = "directory.json";

/// The stored versions of the documents of one policy directory.
#[derive(Debug)]
pub struct LastGood {
    dir: PathBuf,
    of: String,
    numbers: BTreeMap<String, u32>,
    next: u32,
    found: BTreeMap<String, Vec<Value>>,
    documents: Option<DocumentDir>,
}

#[derive(Deserialize)]
struct Stored {
    directory: String,
    file: String,
    documents: Vec<Value>,
}

impl LastGood {
    /// Reads what the state directory has for the policy directory `of`. A damaged file is set
    /// aside, and what is wrong with it is added to `damaged`.
    pub fn open(
        state: &Path,
        of: &Path,
        damaged: &mut Vec<String>,
    ) -> Result<Self, StateFileError> {
        let dir = state.join(DIRECTORY);
        if let Lookup::Found(found) = Lookup::of_path(fs::metadata(&dir))
            && !found.is_dir()
        {
            let aside = set_aside(&dir).map_err(StateFileError::io(&dir))?;
            damaged.push(format!(
                "{}: is no directory: last good versions of policy documents are lost; set aside as {}; \
                 remove that file",
                dir.display(),
                aside.display()
            ));
        }
        fs::create_dir_all(&dir).map_err(StateFileError::io(&dir))?;
        let mut store = Self {
            of: of.display().to_string(),
            numbers: BTreeMap::new(),
            next: 0,
            found: BTreeMap::new(),
            documents: Some(DocumentDir::stored(of, dir.join(READ_FROM), damaged)),
            dir,
        };
        for (number, path) in numbered_files(&store.dir)? {
            store.next = store.next.max(number.saturating_add(1));
            store.read(number, &path, damaged)?;
        }
        Ok(store)
    }

    /// Reads one file. Removes it if its documents are of another policy directory.
    fn read(
        &mut self,
        number: u32,
        path: &Path,
        damaged: &mut Vec<String>,
    ) -> Result<(), StateFileError> {
        let failed = StateFileError::io(path);
        match state_file::read_versioned::<Stored>(path, VERSION)? {
            Content::Found(stored) if stored.directory == self.of => {
                self.numbers.insert(stored.file.clone(), number);
                self.found.insert(stored.file, stored.documents);
            }
            Content::Found(_) => fs::remove_file(path).map_err(failed)?,
            Content::Absent => {}
            Content::Damaged(damage) => {
                let text = format!(
                    "{}: last good versions of policy documents: {}",
                    path.display(),
                    damage.set_aside("; set aside as").map_err(failed)?
                );
                tracing::error!("{text}");
                damaged.push(text);
            }
        }
        Ok(())
    }

    /// Takes the policy directory as of the last run's reading.
    pub(super) fn take_directory(&mut self) -> Option<DocumentDir> {
        self.documents.take()
    }

    /// Takes what was found at the start: documents by file.
    pub(super) fn take_found(&mut self) -> BTreeMap<String, Vec<Value>> {
        std::mem::take(&mut self.found)
    }

    /// Stores the documents of a file, each as JSON.
    pub(super) fn put<'a>(
        &mut self,
        file: &str,
        documents: impl Iterator<Item = &'a str>,
    ) -> Result<(), StateFileError> {
        let number = self.numbers.get(file).copied().unwrap_or(self.next);
        let quoted = |text: &str| Value::from(text).to_string();
        let documents: Vec<&str> = documents.collect();
        let text = format!(
            "{{\"version\":{VERSION},\"directory\":{},\"file\":{},\"documents\":[{}]}}\n",
            quoted(&self.of),
            quoted(file),
            documents.join(",")
        );
        let path = self.path(number);
        write_atomic(&path, text.as_bytes()).map_err(StateFileError::io(&path))?;
        self.next = self.next.max(number.saturating_add(1));
        self.numbers.insert(file.to_owned(), number);
        Ok(())
    }

    /// Removes what is stored of files that no longer exist.
    pub(super) fn keep_only(&mut self, files: &BTreeSet<&str>) -> Result<(), StateFileError> {
        let gone = |(file, _): &(&String, &u32)| !files.contains(file.as_str());
        let gone: Vec<_> = self.numbers.iter().filter(gone).collect();
        for (file, number) in gone
            .into_iter()
            .map(|(f, n)| (f.clone(), *n))
            .collect::<Vec<_>>()
        {
            let path = self.path(number);
            present(fs::remove_file(&path)).map_err(StateFileError::io(&path))?;
            self.numbers.remove(&file);
        }
        Ok(())
    }

    fn path(&self, number: u32) -> PathBuf {
        self.dir.join(format!("{number}.json"))
    }
}

/// The files of documents, by number.
fn numbered_files(dir: &Path) -> Result<BTreeMap<u32, PathBuf>, StateFileError> {
    let mut paths = BTreeMap::new();
    for entry in fs::read_dir(dir).map_err(StateFileError::io(dir))? {
        let path = entry.map_err(StateFileError::io(dir))?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        let number = name.and_then(|name| name.strip_suffix(".json"));
        if let Some(number) = number.and_then(|number| number.parse::<u32>().ok()) {
            paths.insert(number, path);
        }
    }
    Ok(paths)
}
