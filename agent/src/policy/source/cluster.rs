//! Documents of the cluster, from watches of its API server.
//!
//! Pure: what the watches see goes in, changes come out. None come out until every watch has listed
//! once. A list that is read again is compared with the former one: only the difference comes out.
//! A document is compared by its hash: the document itself is the core's or the book's.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    policy::document::{Body, PolicyDocument, PolicyError},
    source_event::SourceEvent,
};

/// Refused documents that are logged one by one.
const LOGGED: usize = 100;

/// What a watch saw, in order.
#[derive(Debug)]
pub struct Batch<T = Read> {
    /// Kind of the objects.
    pub kind: &'static str,
    /// What it saw.
    pub seen: Vec<Seen<T>>,
}

/// The document of an object, or why it is refused.
pub type Read = Result<PolicyDocument, PolicyError>;

/// What a watch sees.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "nearly all are of the large one")]
pub enum Seen<T = Read> {
    /// A list begins.
    Listing,
    /// An object of the list, or one that is new or changed.
    Put {
        /// Key of its document.
        key: String,
        /// Hash of what the document is read from.
        digest: u64,
        /// What was read from it.
        document: T,
        /// Its status says that it is refused.
        is_marked: bool,
    },
    /// The object of this key is gone.
    Gone(String),
    /// The list is complete.
    Listed,
}

/// The documents of the cluster.
#[derive(Debug)]
pub(crate) struct ClusterDocuments {
    kinds: BTreeMap<&'static str, Kind>,
    /// Every kind has been listed.
    complete: bool,
    /// Documents that wait for the first listing to be complete; none once it was given.
    waiting: Option<BTreeMap<String, PolicyDocument>>,
    /// Since then a policy is refused of which no good version is known.
    uncertain: bool,
    /// The refused documents changed since they were returned last.
    refusals_changed: bool,
}

#[derive(Debug, Default)]
struct Kind {
    has_listed: bool,
    /// Keys that the list under way has had.
    listing: Option<BTreeSet<String>>,
    /// Good documents, with their hashes.
    documents: BTreeMap<String, u64>,
    refused: BTreeMap<String, PolicyError>,
    /// Keys of objects whose status says that they are refused.
    marked: BTreeSet<String>,
}

impl ClusterDocuments {
    /// Of these kinds; none has been listed.
    pub(crate) fn new(kinds: impl IntoIterator<Item = &'static str>) -> Self {
        let kinds = kinds.into_iter().map(|kind| (kind, Kind::default()));
        Self {
            kinds: kinds.collect(),
            complete: false,
            waiting: Some(BTreeMap::new()),
            uncertain: false,
            refusals_changed: false,
        }
    }

    /// Whether every kind has been listed.
    pub(crate) fn is_complete(&self) -> bool {
        self.complete
    }

    /// Whether there is a document of this key.
    pub(crate) fn contains(&self, key: &str) -> bool {
        let kind = key.split_once('/').map_or(key, |(kind, _)| kind);
        let kind = self.kinds.get(kind);
        kind.is_some_and(|kind| kind.documents.contains_key(key))
    }

    /// The first listing; after it, changes come out. Pods are first, because slices name them.
    pub(crate) fn begin(&mut self) -> Vec<PolicyDocument> {
        let waiting = self.waiting.take().unwrap_or_default();
        let is_pod = |document: &PolicyDocument| matches!(document.body, Body::Pod(_));
        let (mut all, others): (Vec<_>, _) = waiting.into_values().partition(is_pod);
        all.extend::<Vec<_>>(others);
        all
    }

    /// Every document that is refused now.
    pub(crate) fn refused(&self) -> impl Iterator<Item = &PolicyError> {
        self.kinds.values().flat_map(|kind| kind.refused.values())
    }

    /// Every object whose status says that it is refused.
    pub(crate) fn marked(&self) -> impl Iterator<Item = &String> {
        self.kinds.values().flat_map(|kind| &kind.marked)
    }

    /// How many documents of a kind there are.
    pub(crate) fn count(&self, kind: &str) -> usize {
        self.kinds.get(kind).map_or(0, |kind| kind.documents.len())
    }

    /// Whether the refused documents changed since the last call.
    pub(crate) fn take_refusals_changed(&mut self) -> bool {
        std::mem::take(&mut self.refusals_changed)
    }

    /// Whether the first listing has gaps: a policy is refused, and no good version of it is known.
    pub(crate) fn is_uncertain(&self) -> bool {
        self.uncertain
    }

    /// Takes what a watch saw. Gives the changes of documents; until [`Self::begin`] there are none.
    pub(crate) fn take(&mut self, batch: Batch) -> Vec<SourceEvent<PolicyDocument>> {
        let mut events = Vec::new();
        let Some(kind) = self.kinds.get_mut(batch.kind) else {
            return events;
        };
        for seen in batch.seen {
            self.refusals_changed |= kind.take(seen, &mut events);
        }
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
    kind.ends_with("NetworkPolicy") || kind == crate::policy::cidr_group::KIND
}

impl Kind {
    /// Adds what changed to `events`. Gives whether the refused documents changed.
    fn take(&mut self, seen: Seen, events: &mut Vec<SourceEvent<PolicyDocument>>) -> bool {
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
            } => {
                let mark_changed = self.mark(&key, is_marked);
                if let Some(listing) = &mut self.listing {
                    listing.insert(key.clone());
                }
                let (event, refusals_changed) = self.put(key, digest, document);
                events.extend(event);
                mark_changed || refusals_changed
            }
            Seen::Gone(key) => {
                if self.documents.remove(&key).is_some() {
                    events.push(SourceEvent::Delete(key.clone()));
                }
                let was_refused = self.refused.remove(&key).is_some();
                self.marked.remove(&key) || was_refused
            }
            Seen::Listed => self.end_list(events),
        }
    }

    /// What the complete list does not have is gone. Gives whether the refused documents changed.
    fn end_list(&mut self, events: &mut Vec<SourceEvent<PolicyDocument>>) -> bool {
        let listed = self.listing.take().unwrap_or_default();
        let before = self.refused.len() + self.marked.len();
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
        self.refused.len() + self.marked.len() != before
    }

    /// Notes whether the status says that an object is refused. Gives whether that is news.
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
                if self.documents.insert(key, digest) == Some(digest) {
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
