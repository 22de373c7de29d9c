//! The objects, and the history that watches read.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::kind::Kind;

/// Number of changes of one kind that are kept. Older changes are compacted.
const HISTORY: usize = 20_000;
/// Revision of an empty store.
const FIRST_REVISION: u64 = 1000;

/// Namespace (empty if the kind has none) and name.
pub(super) type Key = (String, String);

/// One change of one object.
#[derive(Clone, Debug)]
pub(super) struct Change {
    pub(super) revision: u64,
    /// The object before the change; `None` if the change created it.
    pub(super) before: Option<Arc<Value>>,
    /// The object after the change; `None` if the change deleted it.
    pub(super) after: Option<Arc<Value>>,
}

/// Every object of every kind.
#[derive(Debug)]
pub(super) struct Store {
    kinds: Vec<Arc<Kind>>,
    tables: BTreeMap<String, Table>,
    revision: u64,
    /// Newest revision, for watches that wait.
    changed: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Table {
    objects: BTreeMap<Key, Arc<Value>>,
    changes: VecDeque<Change>,
    /// Changes up to this revision are no longer kept.
    compacted: u64,
}

impl Store {
    pub(super) fn new(kinds: Vec<Kind>) -> Self {
        Self {
            kinds: kinds.into_iter().map(Arc::new).collect(),
            tables: BTreeMap::new(),
            revision: FIRST_REVISION,
            changed: watch::Sender::new(FIRST_REVISION),
        }
    }

    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    /// A receiver that gets the newest revision after each change.
    pub(super) fn subscribe(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    pub(super) fn kinds(&self) -> &[Arc<Kind>] {
        &self.kinds
    }

    /// The kind of a URL.
    pub(super) fn kind(&self, group: &str, version: &str, plural: &str) -> Option<Arc<Kind>> {
        let mut kinds = self.kinds.iter();
        kinds.find(|kind| kind.is(group, version, plural)).cloned()
    }

    /// The kind with this id: plural, or plural.group. A plural alone is enough.
    pub(super) fn kind_named(&self, id: &str) -> Result<Arc<Kind>> {
        let mut kinds = self.kinds.iter();
        let kind = kinds.find(|kind| kind.id() == id || kind.plural == id);
        kind.cloned()
            .with_context(|| format!("the API server of the test serves no kind {id:?}"))
    }

    /// The kind of a document.
    pub(super) fn kind_of(&self, object: &Value) -> Result<Arc<Kind>> {
        let (version, name) = (&object["apiVersion"], &object["kind"]);
        let mut kinds = self.kinds.iter();
        kinds
            .find(|kind| version == kind.api_version().as_str() && name == kind.kind.as_str())
            .cloned()
            .with_context(|| format!("the API server of the test serves no kind {version} {name}"))
    }

    /// Adds a kind, as an installed CRD does.
    pub(super) fn add_kind(&mut self, kind: Kind) {
        self.kinds.retain(|each| each.id() != kind.id());
        self.kinds.push(Arc::new(kind));
    }

    /// Removes a kind and its objects.
    pub(super) fn remove_kind(&mut self, kind: &Kind) {
        self.kinds.retain(|each| each.id() != kind.id());
        self.tables.remove(&kind.id());
    }

    pub(super) fn get(&self, kind: &Kind, key: &Key) -> Option<Arc<Value>> {
        self.tables.get(&kind.id())?.objects.get(key).cloned()
    }

    /// Objects of a kind whose keys come after `after`, in the order of their keys.
    pub(super) fn objects<'a>(
        &'a self,
        kind: &Kind,
        after: Option<&'a Key>,
    ) -> impl Iterator<Item = (&'a Key, &'a Arc<Value>)> {
        let objects = self.tables.get(&kind.id()).map(|table| &table.objects);
        objects.into_iter().flat_map(move |objects| match after {
            Some(after) => objects.range((Bound::Excluded(after), Bound::Unbounded)),
            None => objects.range::<Key, _>(..),
        })
    }

    /// Stores an object under a new revision and returns it as stored.
    pub(super) fn put(&mut self, kind: &Kind, mut object: Value) -> Result<Arc<Value>> {
        let key = key_of(kind, &object)?;
        self.revision += 1;
        let revision = self.revision;
        let table = self.tables.entry(kind.id()).or_default();
        let before = table.objects.get(&key).cloned();
        let metadata = object["metadata"].as_object_mut();
        let metadata = metadata.context("metadata is no object")?;
        metadata.insert("resourceVersion".into(), json!(revision.to_string()));
        let kept = |field: &str| {
            let before = before
                .as_ref()
                .map(|before| before["metadata"][field].clone());
            before.filter(|value| !value.is_null())
        };
        let uid = kept("uid").unwrap_or_else(|| json!(uid(revision)));
        metadata.entry("uid").or_insert(uid);
        let created = kept("creationTimestamp");
        let created =
            created.unwrap_or_else(|| json!(Timestamp::now().strftime("%FT%TZ").to_string()));
        metadata.entry("creationTimestamp").or_insert(created);
        let object = Arc::new(object);
        table.objects.insert(key, object.clone());
        self.record(kind, before, Some(object.clone()));
        Ok(object)
    }

    /// Removes an object and returns its last state.
    pub(super) fn delete(&mut self, kind: &Kind, key: &Key) -> Option<Arc<Value>> {
        let table = self.tables.get_mut(&kind.id())?;
        let before = table.objects.remove(key)?;
        self.revision += 1;
        let mut last = (*before).clone();
        last["metadata"]["resourceVersion"] = json!(self.revision.to_string());
        let last = Arc::new(last);
        self.record(kind, Some(last.clone()), None);
        Some(last)
    }

    fn record(&mut self, kind: &Kind, before: Option<Arc<Value>>, after: Option<Arc<Value>>) {
        let revision = self.revision;
        let table = self.tables.entry(kind.id()).or_default();
        if table.changes.len() == HISTORY
            && let Some(oldest) = table.changes.pop_front()
        {
            table.compacted = oldest.revision;
        }
        table.changes.push_back(Change {
            revision,
            before,
            after,
        });
        self.changed.send_replace(revision);
    }

    /// Changes of a kind after `revision`, at most `limit`. If the history does not reach back that
    /// far, the error is the oldest revision to which it does.
    pub(super) fn changes(
        &self,
        kind: &Kind,
        revision: u64,
        limit: usize,
    ) -> Result<Vec<Change>, u64> {
        let Some(table) = self.tables.get(&kind.id()) else {
            return Ok(Vec::new());
        };
        if revision < table.compacted {
            return Err(table.compacted);
        }
        let from = table.changes.partition_point(|c| c.revision <= revision);
        Ok(table
            .changes
            .iter()
            .skip(from)
            .take(limit)
            .cloned()
            .collect())
    }

    /// Fails if the history of a kind lacks changes after `revision`, with the same error as
    /// [`Self::changes`].
    pub(super) fn reaches(&self, kind: &Kind, revision: u64) -> Result<(), u64> {
        self.changes(kind, revision, 0).map(|_| ())
    }

    /// Forgets the history of a kind: all its revisions so far are then too old for a watch.
    pub(super) fn compact(&mut self, kind: &Kind) {
        self.revision += 1;
        let revision = self.revision;
        let table = self.tables.entry(kind.id()).or_default();
        table.changes.clear();
        table.compacted = revision;
        self.changed.send_replace(revision);
    }
}

/// Key of an object. It is an error if the namespace does not fit the kind.
pub(super) fn key_of(kind: &Kind, object: &Value) -> Result<Key> {
    let metadata = &object["metadata"];
    let name = metadata["name"].as_str().context("no metadata.name")?;
    let namespace = metadata["namespace"].as_str().unwrap_or_default();
    ensure!(
        kind.namespaced != namespace.is_empty(),
        "{} {name}: metadata.namespace is {namespace:?}",
        kind.kind
    );
    Ok((namespace.to_owned(), name.to_owned()))
}

fn uid(revision: u64) -> String {
    format!("00000000-0000-4000-8000-{revision:012x}")
}
