//! The relay's objects, encoded: a snapshot for agents that have none, and the changes that follow.
//!
//! No input or output: the caller passes the batches of the watches. Every encoded change exists once in memory, and
//! all agents share it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use agent_core::policy::{
    document::PolicyError,
    parse::parse_object,
    source::cluster::{Batch, Seen},
};
use fqdn_proto::{
    frames::part,
    relay::{Forget, Gone, Listed, Listing, Put, Step, Template, step},
};
use prost::bytes::{Bytes, BytesMut};
use serde_json::Value;

use super::{
    item::{Parts, split},
    log::{LOG_MAX, Log, Portion, TooFarBehind},
};
use crate::refusals::Refusals;

/// Bytes of one frame of a snapshot.
const CHUNK: usize = 256 << 10;

/// An object as a watch gives it to the relay.
#[derive(Debug)]
pub(crate) struct Item {
    parts: Parts,
    /// Why agents will refuse the object; `None` = they will not.
    refused: Option<PolicyError>,
}

/// Reads an object: the fields that the watch kept for agents, and whether agents will refuse them.
pub(super) fn read(object: &Value, key: &str) -> Item {
    Item {
        refused: parse_object(object, key).err(),
        parts: split(key, object.clone()),
    }
}

/// Every object as it is at the position `sequence` of the log, in frames.
#[derive(Debug)]
pub(super) struct Snapshot {
    /// Encoded frames, which all agents share.
    pub(super) frames: Vec<Bytes>,
    /// Position in the log after which the changes follow.
    pub(super) sequence: u64,
    /// How many snapshots this run made before it.
    number: u64,
}

/// The relay's objects, encoded once for all agents.
#[derive(Debug)]
pub(super) struct Record {
    kinds: BTreeMap<&'static str, Kind>,
    templates: Templates,
    log: Log,
    snapshot: Option<Arc<Snapshot>>,
    refusals_changed: bool,
}

#[derive(Debug, Default)]
struct Kind {
    has_listed: bool,
    /// Keys that the list in progress has had so far.
    listing: Option<BTreeSet<String>>,
    objects: BTreeMap<String, Object>,
    refused: BTreeMap<String, PolicyError>,
    /// Keys of objects whose status has to be written if they are accepted.
    marked: BTreeSet<String>,
}

#[derive(Debug)]
struct Object {
    digest: u64,
    /// Number of the object's template; 0 = it has none.
    template: u64,
    /// The encoded step that puts the object.
    put: Bytes,
}

impl Record {
    /// A record of these kinds, before any of them has been listed.
    pub(super) fn new(kinds: impl IntoIterator<Item = &'static str>) -> Self {
        Self::with_log(kinds, LOG_MAX)
    }

    fn with_log(kinds: impl IntoIterator<Item = &'static str>, bytes: usize) -> Self {
        let kinds = kinds.into_iter().map(|kind| (kind, Kind::default()));
        Self {
            kinds: kinds.collect(),
            templates: Templates::default(),
            log: Log::new(bytes),
            snapshot: None,
            refusals_changed: false,
        }
    }

    /// A kind that has not been listed yet. `None`: the objects are complete and may be sent to agents.
    pub(super) fn awaited(&self) -> Option<&'static str> {
        let mut kinds = self.kinds.iter();
        kinds
            .find(|(_, kind)| !kind.has_listed)
            .map(|(kind, _)| *kind)
    }

    /// How many objects of a kind there are.
    pub(super) fn count(&self, kind: &str) -> usize {
        self.kinds.get(kind).map_or(0, |kind| kind.objects.len())
    }

    /// Position after the last change.
    pub(super) fn sequence(&self) -> u64 {
        self.log.sequence()
    }

    /// Whether the log has every change after `sequence`.
    pub(super) fn reaches(&self, sequence: u64) -> bool {
        self.log.reaches(sequence)
    }

    /// The next changes after `sequence`.
    pub(super) fn after(&self, sequence: u64) -> Result<Portion, TooFarBehind> {
        self.log.after(sequence)
    }

    /// Takes what a watch saw.
    pub(super) fn take(&mut self, batch: Batch<Item>) {
        let Some(kind) = self.kinds.get_mut(batch.kind) else {
            return;
        };
        for seen in batch.seen {
            let out = &mut Out {
                templates: &mut self.templates,
                log: &mut self.log,
            };
            self.refusals_changed |= kind.take(seen, out);
        }
    }

    /// The refused and the marked objects, if they changed since the last call and every kind is listed.
    pub(super) fn take_refusals(&mut self) -> Option<Refusals> {
        if self.awaited().is_some() || !std::mem::take(&mut self.refusals_changed) {
            return None;
        }
        let kinds = || self.kinds.values();
        Some(Refusals::of(
            kinds().flat_map(|kind| kind.refused.values()),
            kinds().flat_map(|kind| &kind.marked),
        ))
    }

    /// A snapshot of every object. Successive agents share one snapshot, as long as the log has the
    /// changes that follow it.
    pub(super) fn snapshot(&mut self) -> Arc<Snapshot> {
        if let Some(snapshot) = &self.snapshot
            && self.log.reaches(snapshot.sequence)
        {
            return Arc::clone(snapshot);
        }
        let number = self.snapshot.as_ref().map_or(0, |last| last.number + 1);
        let snapshot = Arc::new(self.encode(number));
        self.snapshot = Some(Arc::clone(&snapshot));
        snapshot
    }

    /// How many snapshots are newer than this one.
    pub(super) fn newer(&self, than: &Snapshot) -> u64 {
        let last = self.snapshot.as_ref().map_or(0, |last| last.number);
        last.saturating_sub(than.number)
    }

    fn encode(&self, number: u64) -> Snapshot {
        let mut frames = Frames::default();
        for template in self.templates.encoded.values() {
            frames.add(&template.step);
        }
        for (name, kind) in &self.kinds {
            let kind_name = (*name).to_owned();
            frames.add(&part_of(step::Step::Listing(Listing {
                kind: kind_name.clone(),
            })));
            for object in kind.objects.values() {
                frames.add(&object.put);
            }
            frames.add(&part_of(step::Step::Listed(Listed { kind: kind_name })));
        }
        Snapshot {
            frames: frames.end(),
            sequence: self.log.sequence(),
            number,
        }
    }
}

/// Where a kind puts its changes.
struct Out<'a> {
    templates: &'a mut Templates,
    log: &'a mut Log,
}

impl Kind {
    /// Takes one thing that a watch saw. Returns whether the refused or the marked objects changed.
    fn take(&mut self, seen: Seen<Item>, out: &mut Out<'_>) -> bool {
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
                ..
            } => {
                let mark_changed = match is_marked {
                    true => self.marked.insert(key.clone()),
                    false => self.marked.remove(&key),
                };
                if let Some(listing) = &mut self.listing {
                    listing.insert(key.clone());
                }
                let refused_before = match document.refused {
                    Some(error) => self.refused.insert(key.clone(), error),
                    None => self.refused.remove(&key),
                };
                let refusal_changed = refused_before.as_ref() != self.refused.get(&key);
                self.put(key, digest, document.parts, out);
                mark_changed || refusal_changed
            }
            Seen::Gone(key) => self.remove(&key, out),
            Seen::Listed => {
                let listed = self.listing.take().unwrap_or_default();
                let gone = self.objects.keys().filter(|key| !listed.contains(*key));
                let gone: Vec<String> = gone.cloned().collect();
                self.has_listed = true;
                let mut changed = false;
                for key in gone {
                    changed |= self.remove(&key, out);
                }
                changed
            }
        }
    }

    fn put(&mut self, key: String, digest: u64, parts: Parts, out: &mut Out<'_>) {
        let before = self.objects.get(&key);
        if before.is_some_and(|before| before.digest == digest) {
            return;
        }
        let template = parts
            .template
            .map_or(0, |json| out.templates.hold(json, out.log));
        let put = part_of(step::Step::Put(Put {
            key: key.clone(),
            template,
            json: parts.own.into_bytes(),
        }));
        let former = before.map(|before| before.template);
        let is_same = before.is_some_and(|before| before.put == put);
        if !is_same {
            out.log.push(put.clone());
        }
        let object = Object {
            digest,
            template,
            put,
        };
        self.objects.insert(key, object);
        if let Some(former) = former {
            out.templates.release(former, out.log);
        }
    }

    /// Removes an object. Returns whether it was refused or marked.
    fn remove(&mut self, key: &str, out: &mut Out<'_>) -> bool {
        if let Some(object) = self.objects.remove(key) {
            let gone = Gone {
                key: key.to_owned(),
            };
            out.log.push(part_of(step::Step::Gone(gone)));
            out.templates.release(object.template, out.log);
        }
        let was_refused = self.refused.remove(key).is_some();
        self.marked.remove(key) || was_refused
    }
}

/// Templates, which are parts that several objects share, by number. A number never gets a second template.
#[derive(Debug, Default)]
struct Templates {
    numbers: BTreeMap<Arc<str>, u64>,
    encoded: BTreeMap<u64, Shared>,
    last: u64,
}

#[derive(Debug)]
struct Shared {
    json: Arc<str>,
    step: Bytes,
    objects: usize,
}

impl Templates {
    /// The number of a template that one more object uses. Adds the template if it is new.
    fn hold(&mut self, json: String, log: &mut Log) -> u64 {
        if let Some(number) = self.numbers.get(json.as_str())
            && let Some(shared) = self.encoded.get_mut(number)
        {
            shared.objects += 1;
            return *number;
        }
        self.last += 1;
        let number = self.last;
        let step = part_of(step::Step::Template(Template {
            number,
            json: json.clone().into_bytes(),
        }));
        log.push(step.clone());
        let json: Arc<str> = json.into();
        self.numbers.insert(Arc::clone(&json), number);
        let shared = Shared {
            json,
            step,
            objects: 1,
        };
        self.encoded.insert(number, shared);
        number
    }

    /// One object stops using a template. Removes the template after its last object.
    fn release(&mut self, number: u64, log: &mut Log) {
        let Some(shared) = self.encoded.get_mut(&number) else {
            return;
        };
        shared.objects -= 1;
        if shared.objects == 0 {
            let json = Arc::clone(&shared.json);
            self.encoded.remove(&number);
            self.numbers.remove(&json);
            log.push(part_of(step::Step::Forget(Forget { number })));
        }
    }
}

/// Frames of about [`CHUNK`] bytes.
#[derive(Default)]
struct Frames {
    full: Vec<Bytes>,
    next: BytesMut,
}

impl Frames {
    fn add(&mut self, part: &Bytes) {
        if !self.next.is_empty() && self.next.len() + part.len() > CHUNK {
            self.full.push(self.next.split().freeze());
        }
        self.next.extend_from_slice(part);
    }

    fn end(mut self) -> Vec<Bytes> {
        if !self.next.is_empty() {
            self.full.push(self.next.freeze());
        }
        self.full
    }
}

fn part_of(step: step::Step) -> Bytes {
    part(Step { step: Some(step) })
}

#[cfg(test)]
#[path = "record_tests.rs"]
mod tests;
