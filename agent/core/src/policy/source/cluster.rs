//! Documents of the cluster, from watches of its API server.
//!
//! Pure: what the watches see goes in, changes come out. No change comes out until every watch has
//! listed once. A list that is read again is compared with the former one: only the difference
//! comes out. A document is compared by its hash: the document itself is the core's or the book's.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::Arc,
};

use crate::{
    policy::document::{Body, PolicyDocument, PolicyError},
    source_event::SourceEvent,
};

/// Maximum number of refused documents that are logged one by one.
const LOGGED: usize = 100;

/// Value in place of the hash of a stored document.
const STORED: u64 = 0;

/// The namespace whose uid identifies a cluster: every cluster has it, and it cannot be deleted.
const OF_THE_CLUSTER: &str = "Namespace/kube-system";

/// Objects as JSON by document key; `None` = the object is gone.
pub type Changed = BTreeMap<String, Option<Json>>;

/// An object as JSON: a part of a text that the objects of a page share. Texts of their own would
/// leave holes in the heap between the documents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Json {
    text: Arc<str>,
    part: Range<usize>,
}

impl Json {
    /// A part of a text.
    pub fn part(text: &Arc<str>, part: Range<usize>) -> Self {
        let text = Arc::clone(text);
        Self { text, part }
    }

    /// The JSON text of the object.
    pub fn as_str(&self) -> &str {
        self.text.get(self.part.clone()).unwrap_or_default()
    }
}

impl From<String> for Json {
    fn from(text: String) -> Self {
        let part = 0..text.len();
        let text = text.into();
        Self { text, part }
    }
}

/// What a watch saw, in order.
#[derive(Debug)]
pub struct Batch<T = Read> {
    pub kind: &'static str,
    pub seen: Vec<Seen<T>>,
}

/// The document of an object, or why it is refused.
pub type Read = Result<PolicyDocument, PolicyError>;

/// What a watch reports of the objects of its kind.
#[derive(Debug)]
pub enum Seen<T = Read> {
    /// A list of all objects begins.
    Listing,
    /// An object of the list, or one that is new or changed.
    Put {
        key: String,
        /// Hash of what the document is read from.
        digest: u64,
        /// What was read from it.
        document: T,
        /// Whether its status has to be written if it is accepted.
        is_marked: bool,
        /// What it is read from, to be stored; `None` = it is not stored.
        json: Option<Json>,
    },
    /// The object of this key is gone.
    Gone(String),
    /// The list is complete: objects that it did not have are gone.
    Listed,
}

/// What the API server listed of each kind, read and checked.
#[derive(Debug)]
pub struct ClusterDocuments {
    kinds: BTreeMap<&'static str, Kind>,
    /// Whether every kind has been listed.
    complete: bool,
    /// Documents that wait for the first listing to be complete; `None` once the listing was
    /// returned.
    waiting: Option<BTreeMap<String, PolicyDocument>>,
    /// Whether the first listing still has gaps: a policy is refused, and no good version of it is
    /// known.
    uncertain: bool,
    /// Whether the refused documents changed since they were returned last.
    refusals_changed: bool,
    /// Objects that changed since they were returned last; `None` if nothing stores them.
    changed: Option<Changed>,
    /// Uid of the cluster, as the watches saw it.
    uid: Option<Arc<str>>,
    /// Uid of the cluster whose stored list is in use.
    stored_uid: Option<Arc<str>>,
    /// Decides which documents count. Other documents are treated as if they were gone.
    is_read: IsRead,
}

/// Whether a document is in the scope.
pub type Scope = Box<dyn Fn(&PolicyDocument) -> bool + Send>;

/// A scope; `None` = all documents.
#[derive(Default)]
struct IsRead(Option<Scope>);

impl std::fmt::Debug for IsRead {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "some" } else { "all" })
    }
}

impl IsRead {
    fn is(&self, document: &Read) -> bool {
        match (&self.0, document) {
            (Some(scope), Ok(document)) => scope(document),
            _ => true,
        }
    }
}

/// Uid of the cluster that these documents are of: the uid of its namespace kube-system.
pub fn uid_of_cluster<'a>(
    documents: impl IntoIterator<Item = &'a (String, Read)>,
) -> Option<Arc<str>> {
    let mut documents = documents.into_iter();
    documents.find_map(|(key, document)| uid_in(key, document))
}

/// The uid of the cluster, if this is the document that has it.
fn uid_in(key: &str, document: &Read) -> Option<Arc<str>> {
    match document {
        Ok(PolicyDocument {
            body: Body::Namespace(namespace),
            ..
        }) if key == OF_THE_CLUSTER => namespace.uid.clone(),
        _ => None,
    }
}

#[derive(Debug, Default)]
struct Kind {
    has_listed: bool,
    /// Whether its list is a stored one.
    is_stored: bool,
    /// Keys that the list under way has had.
    listing: Option<BTreeSet<String>>,
    /// Good documents, with their hashes.
    documents: BTreeMap<String, u64>,
    refused: BTreeMap<String, PolicyError>,
    /// Keys of objects whose status has to be written if they are accepted.
    marked: BTreeSet<String>,
}

impl ClusterDocuments {
    /// Documents of these kinds, before any of them has been listed.
    pub fn new(kinds: impl IntoIterator<Item = &'static str>) -> Self {
        let kinds = kinds.into_iter().map(|kind| (kind, Kind::default()));
        Self {
            kinds: kinds.collect(),
            complete: false,
            waiting: Some(BTreeMap::new()),
            uncertain: false,
            refusals_changed: false,
            changed: None,
            uid: None,
            stored_uid: None,
            is_read: IsRead::default(),
        }
    }

    /// The same, with only the documents of a scope.
    pub fn of_scope(self, scope: Scope) -> Self {
        let is_read = IsRead(Some(scope));
        Self { is_read, ..self }
    }

    /// Uid of the cluster, as the watches saw it; `None` = not seen yet.
    pub fn uid(&self) -> Option<&Arc<str>> {
        self.uid.as_ref()
    }

    /// Uid of the cluster whose stored list is in use, if it is not the watched cluster.
    pub fn foreign_list(&self) -> Option<&Arc<str>> {
        let of_another = |stored: &&Arc<str>| self.uid.as_ref().is_some_and(|uid| uid != *stored);
        let stored = self.stored_uid.as_ref().filter(of_another)?;
        let mut kinds = self.kinds.values();
        kinds.any(|kind| kind.is_stored).then_some(stored)
    }

    /// Notes the JSON of objects that change, for [`Self::take_changed`].
    pub fn note_changed(&mut self) {
        self.changed = Some(BTreeMap::new());
    }

    /// Objects that changed since the last call; `None` if an object came without its JSON.
    pub fn take_changed(&mut self) -> Option<Changed> {
        self.changed.as_mut().map(std::mem::take)
    }

    /// Whether every kind has been listed, and none by `stand_in`.
    pub fn is_current(&self) -> bool {
        self.complete && self.kinds.values().all(|kind| !kind.is_stored)
    }

    /// Takes a stored list for each kind that has not been listed. Gives these kinds, and the
    /// changes as [`Self::take`] does.
    pub(crate) fn stand_in(
        &mut self,
        documents: Vec<(String, Read)>,
    ) -> (Vec<&'static str>, Vec<SourceEvent<PolicyDocument>>) {
        let mut events = Vec::new();
        self.stored_uid = uid_of_cluster(&documents);
        for (key, document) in documents {
            let kind = key.split_once('/').map_or(&*key, |(kind, _)| kind);
            if let Some(kind) = self.kinds.get_mut(kind)
                && !kind.has_listed
                // Objects in the list under way are younger.
                && !kind.documents.contains_key(&key)
                && !kind.refused.contains_key(&key)
                && self.is_read.is(&document)
            {
                let (event, refusals_changed) = kind.put(key, STORED, document);
                self.refusals_changed |= refusals_changed;
                events.extend(event);
            }
        }
        let missing = self.kinds.iter_mut().filter(|(_, kind)| !kind.has_listed);
        let stood_in = missing.map(|(name, kind)| {
            kind.has_listed = true;
            kind.is_stored = true;
            *name
        });
        (stood_in.collect(), self.give(events))
    }

    /// Whether every kind has been listed.
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// Whether there is a document of this key.
    pub(crate) fn contains(&self, key: &str) -> bool {
        let kind = key.split_once('/').map_or(key, |(kind, _)| kind);
        let kind = self.kinds.get(kind);
        kind.is_some_and(|kind| kind.documents.contains_key(key))
    }

    /// The first listing; after it, changes come out. Pods are first, because slices name them.
    pub fn begin(&mut self) -> Vec<PolicyDocument> {
        let waiting = self.waiting.take().unwrap_or_default();
        let is_pod = |document: &PolicyDocument| matches!(document.body, Body::Pod(_));
        let (mut all, others): (Vec<_>, _) = waiting.into_values().partition(is_pod);
        all.extend::<Vec<_>>(others);
        all
    }

    /// Every document that is refused now.
    pub fn refused(&self) -> impl Iterator<Item = &PolicyError> {
        self.kinds.values().flat_map(|kind| kind.refused.values())
    }

    /// Every object whose status has to be written if it is accepted.
    pub fn marked(&self) -> impl Iterator<Item = &String> {
        self.kinds.values().flat_map(|kind| &kind.marked)
    }

    /// How many documents of a kind there are.
    pub fn count(&self, kind: &str) -> usize {
        self.kinds.get(kind).map_or(0, |kind| kind.documents.len())
    }

    /// Whether the refused documents changed since the last call.
    pub fn take_refusals_changed(&mut self) -> bool {
        std::mem::take(&mut self.refusals_changed)
    }

    /// Whether the first listing has gaps: a policy is refused, and no good version of it is known.
    pub(crate) fn is_uncertain(&self) -> bool {
        self.uncertain
    }

    /// Takes what a watch saw. Gives the changes of documents; until [`Self::begin`] there are none.
    pub fn take(&mut self, batch: Batch) -> Vec<SourceEvent<PolicyDocument>> {
        let mut events = Vec::new();
        let Some(kind) = self.kinds.get_mut(batch.kind) else {
            return events;
        };
        for seen in batch.seen {
            let seen = match seen {
                Seen::Put { key, document, .. } if !self.is_read.is(&document) => Seen::Gone(key),
                other => other,
            };
            if matches!(&seen, Seen::Put { json: None, .. }) {
                self.changed = None;
            }
            if let Seen::Put { key, document, .. } = &seen
                && let Some(uid) = uid_in(key, document)
            {
                self.uid = Some(uid);
            }
            self.refusals_changed |= kind.take(seen, &mut events, self.changed.as_mut());
        }
        self.give(events)
    }

    /// Returns the changes, or keeps them as long as they wait for the first listing.
    fn give(
        &mut self,
        events: Vec<SourceEvent<PolicyDocument>>,
    ) -> Vec<SourceEvent<PolicyDocument>> {
        match self.complete {
            true => self.uncertain &= self.lacks(),
            false => {
                self.complete = self.kinds.values().all(|kind| kind.has_listed);
                self.uncertain = self.complete && self.lacks();
            }
        }
        let Some(waiting) = &mut self.waiting else {
            return events;
        };
        for event in events {
            match event {
                SourceEvent::Apply(document) => {
                    waiting.insert(document.key.clone(), document);
                }
                SourceEvent::Delete(key) => drop(waiting.remove(&key)),
                SourceEvent::Init | SourceEvent::InitDone => {}
            }
        }
        Vec::new()
    }

    /// Whether a policy is refused of which no good version is known.
    fn lacks(&self) -> bool {
        let policies = self.kinds.iter().filter(|(kind, _)| is_policy(kind));
        let mut policies = policies.map(|(_, kind)| kind);
        policies.any(|kind| {
            let mut refused = kind.refused.keys();
            refused.any(|key| !kind.documents.contains_key(key))
        })
    }
}

/// Whether documents of a kind restrict endpoints, or are parts of those that do.
fn is_policy(kind: &str) -> bool {
    kind.ends_with("NetworkPolicy")
        || kind == crate::policy::cidr_group::KIND
        || kind == crate::policy::egress_firewall::KIND
}

impl Kind {
    /// Adds what changed to `events`. Gives whether the refused documents changed.
    fn take(
        &mut self,
        seen: Seen,
        events: &mut Vec<SourceEvent<PolicyDocument>>,
        mut changed: Option<&mut Changed>,
    ) -> bool {
        match seen {
            Seen::Listing => {
                self.listing = Some(BTreeSet::new());
                false
            }
            Seen::Put {
                key,
                digest,
                document,
                is_marked,
                json,
            } => {
                let mark_changed = self.mark(&key, is_marked);
                if let Some(listing) = &mut self.listing {
                    listing.insert(key.clone());
                }
                // A refused version does not replace a good one, not on disk either.
                let good = self.documents.get(&key);
                let has_good = good.is_some_and(|digest| *digest != STORED);
                let noted = changed.filter(|_| document.is_ok() || !has_good);
                let noted = noted.map(|changed| (changed, key.clone()));
                let (event, refusals_changed) = self.put(key, digest, document);
                if (event.is_some() || refusals_changed || self.is_stored)
                    && let Some((changed, key)) = noted
                {
                    changed.insert(key, json);
                }
                events.extend(event);
                mark_changed || refusals_changed
            }
            Seen::Gone(key) => {
                if self.documents.remove(&key).is_some() {
                    events.push(SourceEvent::Delete(key.clone()));
                }
                let was_refused = self.refused.remove(&key).is_some();
                let was_marked = self.marked.remove(&key);
                if let Some(changed) = &mut changed {
                    changed.insert(key, None);
                }
                was_marked || was_refused
            }
            Seen::Listed => self.end_list(events, changed),
        }
    }

    /// Removes what the complete list does not have. Returns whether the refused documents changed.
    fn end_list(
        &mut self,
        events: &mut Vec<SourceEvent<PolicyDocument>>,
        mut changed: Option<&mut Changed>,
    ) -> bool {
        let listed = self.listing.take().unwrap_or_default();
        let before = self.refused.len() + self.marked.len();
        if let Some(changed) = &mut changed {
            let known = self.documents.keys().chain(self.refused.keys());
            let gone = known.filter(|key| !listed.contains(*key));
            changed.extend(gone.map(|key| (key.clone(), None)));
        }
        self.refused.retain(|key, _| listed.contains(key));
        self.marked.retain(|key| listed.contains(key));
        self.documents.retain(|key, _| {
            let stays = listed.contains(key);
            if !stays {
                events.push(SourceEvent::Delete(key.clone()));
            }
            stays
        });
        self.has_listed = true;
        self.is_stored = false;
        self.refused.len() + self.marked.len() != before
    }

    /// Notes whether the status of an object has to be written if it is accepted. Returns whether that
    /// changed.
    fn mark(&mut self, key: &str, is_marked: bool) -> bool {
        match is_marked {
            true => self.marked.insert(key.to_owned()),
            false => self.marked.remove(key),
        }
    }

    /// Puts a version of a document in the place of the former one. Gives the change, and whether
    /// the refused documents changed.
    fn put(
        &mut self,
        key: String,
        digest: u64,
        document: Read,
    ) -> (Option<SourceEvent<PolicyDocument>>, bool) {
        match document {
            Ok(document) => {
                let was_refused = self.refused.remove(&key).is_some();
                let before = match self.documents.get_mut(&key) {
                    Some(known) => Some(std::mem::replace(known, digest)),
                    // A copy of the key: any remaining part of a freed object would keep a whole
                    // page of the heap.
                    None => self.documents.insert(key.as_str().to_owned(), digest),
                };
                if before == Some(digest) {
                    return (None, was_refused);
                }
                (Some(SourceEvent::Apply(document)), was_refused)
            }
            Err(error) => {
                if self.refused.get(&key) == Some(&error) {
                    return (None, false);
                }
                if self.refused.len() < LOGGED {
                    tracing::warn!(%error, "object of the cluster refused; its last good version, if there is one, remains in force");
                }
                self.refused.insert(key, error);
                (None, true)
            }
        }
    }
}

#[cfg(test)]
mod tests;
