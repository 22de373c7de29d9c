//! Where endpoints come from: the endpoint directory, the command line, and the CNI plugin.
//!
//! An endpoint whose document cannot be resolved, or cannot be read, keeps its last policy as
//! long as its host-side interface exists. At a start, the endpoints of the last run are the
//! argument `restored` of [`EndpointBook::open`]. An endpoint is removed when its document is removed or its interface
//! is gone. A document that names a process by number is resolved only once: when the interface is gone,
//! another process may have the number.
//!
//! If the endpoint of a pod cannot be found, or is found at another interface than before and is not under policy there
//! yet, no packet passes the host-side interface of the pod (`Gate`).

mod bridges;
pub mod cli;
pub(crate) mod cni;
pub(crate) mod containers;
pub(crate) mod dir;
mod document;
mod follow;
mod gated;
mod interfaces;
mod kept;
mod left;
mod look;
pub(crate) mod polls;
mod processes;
mod refresh;
mod retries;
pub(crate) mod store;
pub mod taken_in;
mod unread;

pub(crate) use self::document::own_label;
pub use self::document::{EndpointDocument, EndpointError};

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use agent_core::{endpoint::spec::EndpointSpec, source_event::SourceEvent};
use agent_datapath::closed::Gate;
use daemon::lookup::Lookup;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use self::{
    cli::CliFile,
    cni::CniFile,
    gated::Gated,
    interfaces::{Interfaces, NamespaceId, namespace_id},
    look::Looked,
    processes::Processes,
    retries::Retries,
    store::{EndpointStore, Place},
    taken_in::TakenIn,
};
use super::{
    container::{Containers, NamedContainers},
    discover::Netns,
};
use crate::document_dir::DocumentDir;

/// A document that is not in force, and why: for `status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unresolved {
    /// Key of the endpoint that the document describes.
    pub key: String,
    pub reason: String,
}

/// How often the first listing reads all documents, if a document has an error that may go away by itself.
const ATTEMPTS: u32 = 5;
const PAUSE: Duration = Duration::from_millis(200);

/// The longest time between two polls: a namespace may be replaced without a change of the node's
/// interfaces.
const MAX_POLL_INTERVAL: Duration = Duration::from_millis(250);
/// The shortest time between two polls.
const MIN_POLL_INTERVAL: Duration = Duration::from_millis(10);

const ENDED: &str = "the process or the interface that it was added by is gone, and another process \
    may have that number now";

type Deliver = dyn Fn(SourceEvent<EndpointSpec>) + Send + Sync;

/// All endpoint documents, each with its endpoint or the reason why it has none. One event stream
/// for all sources. Calls block (files, rtnetlink), so async workers must not make them.
pub struct EndpointBook {
    state: Mutex<State>,
    deliver: Box<Deliver>,
    /// Lists in the state directory that could not be used, and what became of them.
    damaged: Vec<String>,
}

struct State {
    dir: Option<DocumentDir>,
    file: CliFile,
    store: EndpointStore,
    pods: CniFile,
    documents: BTreeMap<String, EndpointDocument>,
    listing: LastListing,
    marks: Marks,
    found: BTreeMap<String, Found>,
    /// Last known places of endpoints that have a document but are not found now.
    left: BTreeMap<String, Place>,
    containers: Containers,
    /// Why a container could not be looked for.
    containers_failure: Option<String>,
    /// Whether the ports of bridges could not be listed.
    ports_unknown: bool,
    problems: Problems,
    processes: Processes,
    interfaces: Interfaces,
    gated: Gated,
    looked: Looked,
    /// Endpoints that the first listing took as they were, until each is looked at.
    kept: BTreeSet<String>,
    taken_in: TakenIn,
}

/// The directory of documents, as it was read last.
#[derive(Default)]
struct LastListing {
    /// Whether the first listing is not complete yet.
    starting: bool,
    /// Whether the first listing accepts endpoints as another agent left them just now ([`kept`]).
    keeps: bool,
    /// Whether the directory could be read.
    listed: bool,
    /// Files that cannot be read to their end.
    torn: BTreeSet<String>,
    /// Documents that are read and not accepted.
    refused: BTreeSet<String>,
    /// When each file was written last.
    written: BTreeMap<String, SystemTime>,
    /// Containers, bridges and interfaces that documents of the last run named. They count until all
    /// documents are accepted, because a torn or refused document may name them again.
    unread: NamedContainers,
}

/// Documents about which more is known than their text.
#[derive(Default)]
struct Marks {
    /// Documents to resolve again although their interface is still there.
    stale: BTreeSet<String>,
    /// Documents that were written again: the addresses that the pod has now may count.
    rewritten: BTreeSet<String>,
    /// Documents that name a process by number, and whose interface is gone.
    ended: BTreeSet<String>,
}

/// Why documents are not in force, and when each is looked at again.
#[derive(Default)]
struct Problems {
    unresolved: BTreeMap<String, String>,
    retries: Retries,
    /// Whether the last look failed for a reason that may go away by itself.
    passing: bool,
}

/// An endpoint that was found, and whether the core has it.
struct Found {
    spec: EndpointSpec,
    /// The namespace that its document named when it was found; `None` = not known.
    namespace: Option<NamespaceId>,
    delivered: bool,
    /// Whether another document has this interface now.
    superseded: bool,
}

impl EndpointBook {
    /// Opens the book of a directory and reads the list of endpoints added by command. `restored` are the
    /// endpoints of the last run on this boot. `gate` closes interfaces; `None` = no closing. `deliver` gets
    /// the events; it may block while the core is busy.
    pub fn open(
        dir: Option<PathBuf>,
        file: CliFile,
        containers: Containers,
        restored: Vec<EndpointSpec>,
        gate: Option<Box<dyn Gate>>,
        deliver: impl Fn(SourceEvent<EndpointSpec>) + Send + Sync + 'static,
    ) -> Result<Arc<Self>, EndpointError> {
        let pods = CniFile::in_dir(file.dir());
        let mut damaged = Vec::new();
        let store = EndpointStore::open(file.store(), file.dir(), &mut damaged);
        let mut documents = file.read_or_recover(&restored, store.documents(), &mut damaged)?;
        documents.extend(pods.read(&restored, &mut damaged)?);
        let found = restored.into_iter().map(|spec| {
            let found = Found {
                namespace: None,
                delivered: false,
                superseded: false,
                spec,
            };
            (found.spec.key.clone(), found)
        });
        let interfaces = Interfaces::default();
        let unread = store.named(&mut damaged);
        let mut state = State {
            dir: dir.map(|dir| dir::open(&dir, file.dir(), &mut damaged)),
            processes: Processes::open(file.dir(), store.processes(), &mut damaged),
            file,
            store,
            pods,
            marks: Marks {
                stale: documents.keys().cloned().collect(),
                ..Marks::default()
            },
            documents,
            listing: LastListing {
                starting: true,
                unread,
                ..LastListing::default()
            },
            found: found.collect(),
            left: BTreeMap::new(),
            containers,
            containers_failure: None,
            ports_unknown: false,
            problems: Problems::default(),
            gated: Gated::new(gate, interfaces.clone()),
            interfaces,
            looked: Looked::default(),
            kept: BTreeSet::new(),
            taken_in: TakenIn::default(),
        };
        state.store_all();
        Ok(Arc::new(Self {
            state: Mutex::new(state),
            deliver: Box::new(deliver),
            damaged,
        }))
    }

    /// Lists in the state directory that could not be used at the start, and what became of them.
    pub(crate) fn damaged(&self) -> &[String] {
        &self.damaged
    }

    /// Lists all documents for the first time, between `Init` and `InitDone`. Failures that may
    /// pass are retried.
    pub fn list(&self) {
        let begin = Instant::now();
        let mut state = self.state.lock();
        (self.deliver)(SourceEvent::Init);
        for _ in 0..ATTEMPTS {
            state.problems.passing = false;
            state.refresh(&*self.deliver);
            if !state.problems.passing {
                break;
            }
            std::thread::sleep(PAUSE);
        }
        state.listing.starting = false;
        state.listing.keeps = false;
        (self.deliver)(SourceEvent::InitDone);
        tracing::info!(
            endpoints = state.found.len(),
            took = ?begin.elapsed(),
            "the endpoints are listed"
        );
    }

    /// Reads the directory again and tries again what could not be resolved.
    pub fn refresh(&self) {
        self.state.lock().refresh(&*self.deliver);
    }

    /// Looks again for endpoints whose interface is gone or whose namespace was replaced, and for endpoints that are
    /// not found yet, as far as a retry is due. Cheap if nothing changed.
    pub fn follow(&self) {
        let mut state = self.state.lock();
        state.follow_due(&*self.deliver);
        state.look_at_next(&*self.deliver);
        if !state.listing.starting {
            state.store_names();
        }
    }

    /// Like [`Self::follow`], after a change of the node's interfaces or routes: every document that is not resolved is
    /// due.
    pub fn follow_links(&self) {
        let mut state = self.state.lock();
        state.problems.retries.reset();
        state.follow_due(&*self.deliver);
    }

    /// How long [`Self::follow`] may wait.
    pub fn next_poll(&self) -> Duration {
        let due = self.state.lock().problems.retries.next(Instant::now());
        due.map_or(MAX_POLL_INTERVAL, |due| {
            due.clamp(MIN_POLL_INTERVAL, MAX_POLL_INTERVAL)
        })
    }

    /// Number of interfaces that are closed until their endpoint is found.
    pub fn closed_interfaces(&self) -> usize {
        self.state.lock().gated.len()
    }

    /// Why the agent cannot look for interfaces of endpoints, and what happens to endpoints meanwhile.
    pub(crate) fn blind(&self) -> Option<String> {
        let failure = self.state.lock().interfaces.failure()?;
        Some(format!(
            "the agent cannot see whether interfaces of endpoints are there ({failure}): every \
             endpoint stays as it is until it can; see LimitNOFILE= of its unit, and the log"
        ))
    }

    /// Adds an endpoint by command. It is on disk before the core receives it.
    pub fn add(&self, document: EndpointDocument) -> Result<EndpointSpec, EndpointError> {
        let netns = document.check()?;
        if document.returns_by_name() || document.bridge.is_some() {
            return Err(EndpointError::AddedByName);
        }
        let key = cli::key(&netns, &document.ifname);
        let namespace = namespace_id(&netns).found();
        // The operator means the process that has this number now, and the addresses that the pod has
        // now.
        let spec = document.resolve(&key, None)?;
        self.enter(&key, document, &netns, spec, namespace)
    }

    /// Writes an endpoint that was found to disk, and then sends it to the core.
    fn enter(
        &self,
        key: &str,
        mut document: EndpointDocument,
        netns: &Netns,
        spec: EndpointSpec,
        namespace: Option<NamespaceId>,
    ) -> Result<EndpointSpec, EndpointError> {
        let mut state = self.state.lock();
        let former = state.former(key, &document, netns, spec.interface.ifindex)?;
        let of_before = former
            .as_ref()
            .and_then(|former| state.documents.get(former));
        document.taken_in = document.taken_in.or_else(|| of_before?.taken_in);
        let pid = document.pid;
        let former = former.or_else(|| state.replaced_by(key, &document, &spec));
        let replaced = state.documents.insert(key.to_owned(), document);
        let removed = former.and_then(|former| state.documents.remove_entry(&former));
        let saved = state.save(key);
        let saved = saved.and_then(|()| match &removed {
            Some((former, _)) => state.save(former),
            None => Ok(()),
        });
        if let Err(error) = saved {
            match replaced {
                Some(before) => state.documents.insert(key.to_owned(), before),
                None => state.documents.remove(key),
            };
            state.documents.extend(removed);
            return Err(error);
        }
        state.processes.found(key, pid);
        state.settle_document(key, spec.interface.ifindex);
        state.found.insert(
            key.to_owned(),
            Found {
                spec: spec.clone(),
                namespace,
                delivered: true,
                superseded: false,
            },
        );
        state.left.remove(key);
        state.store_one(key);
        (self.deliver)(SourceEvent::Apply(spec.clone()));
        if let Some((former, _)) = removed {
            // The core now has the endpoint under its new key.
            state.forget(&former, &*self.deliver);
            state.problems.unresolved.remove(&former);
            state.marks.stale.remove(&former);
            state.problems.retries.forget(&former);
            state.forget_unwanted();
        }
        Ok(spec)
    }

    /// Removes an endpoint that was added by command.
    pub fn remove(&self, key: &str) -> Result<(), EndpointError> {
        let mut state = self.state.lock();
        if !cli::is_key(key) || state.documents.remove(key).is_none() {
            return Err(EndpointError::NotAdded(key.to_owned()));
        }
        state.save(key)?;
        state.problems.unresolved.remove(key);
        state.marks.stale.remove(key);
        state.problems.retries.forget(key);
        state.forget(key, &*self.deliver);
        state.forget_unwanted();
        Ok(())
    }

    /// Why interfaces of documents are open although they are not endpoints yet.
    pub(crate) fn open_names(&self) -> Option<String> {
        self.state.lock().gated.names_failure()
    }

    /// Containers and interfaces of documents that do not exist; each is put under policy when it appears.
    pub(crate) fn awaited(&self) -> Vec<String> {
        let state = self.state.lock();
        let documents = state.documents.iter();
        let awaited = documents
            .filter(|(key, document)| document.is_awaited() && !state.found.contains_key(*key));
        let names = awaited
            .filter_map(|(key, document)| Some(format!("{} ({key})", document.namespace().ok()?)));
        names.collect()
    }

    /// Documents that are not in force, and why.
    pub fn unresolved(&self) -> Vec<Unresolved> {
        let state = self.state.lock();
        let unresolved = state.problems.unresolved.iter();
        let unresolved = unresolved.map(|(key, reason)| Unresolved {
            key: key.clone(),
            reason: reason.clone(),
        });
        unresolved.collect()
    }
}

impl State {
    /// Writes the list that has this key.
    fn save(&mut self, key: &str) -> Result<(), EndpointError> {
        if cni::is_key(key) {
            return self.save_pods();
        }
        let added = self.documents.iter().filter(|(key, _)| cli::is_key(key));
        self.file.write(added)?;
        self.store_one(key);
        Ok(())
    }

    /// The endpoint that the one with this key replaces: it has the same interface, and the agent
    /// found its pod by its address (`taken_in`). Any other endpoint with this interface is an error.
    fn former(
        &self,
        key: &str,
        document: &EndpointDocument,
        netns: &Netns,
        ifindex: u32,
    ) -> Result<Option<String>, EndpointError> {
        let Some(other) = self.other_with(ifindex, key) else {
            return Ok(None);
        };
        if !taken_in::is_key(&other) || taken_in::is_key(key) {
            return Err(EndpointError::Taken {
                netns: netns.clone(),
                ifname: document.ifname.clone(),
                other,
            });
        }
        match self.documents.get(&other) {
            Some(former) if cli::is_key(key) && former.pod != document.pod => {
                Err(EndpointError::OfPod {
                    netns: netns.clone(),
                    ifname: document.ifname.clone(),
                    pod: former.pod.clone().unwrap_or_default(),
                })
            }
            _ => Ok(Some(other)),
        }
    }

    /// Another endpoint that has this interface. An endpoint whose document is to be resolved again does not count.
    fn other_with(&self, ifindex: u32, key: &str) -> Option<String> {
        let mut others = self.found.iter().filter(|(other, found)| {
            found.spec.interface.ifindex == ifindex
                && *other != key
                && (!bridges::is_key(other) || bridges::is_key(key))
                && !found.superseded
                && !self.marks.stale.contains(*other)
                && self.is_wanted(other)
        });
        others.next().map(|(other, _)| other.clone())
    }

    /// Whether an endpoint has a document, or may have one in a file that cannot be read.
    fn is_wanted(&self, key: &str) -> bool {
        self.documents.contains_key(key)
            || (bridges::is_key(key) && self.ports_unknown)
            || (dir::is_key(key)
                && self.dir.is_some()
                && (!self.listing.listed
                    || self.listing.refused.contains(key)
                    || self.listing.torn.contains(dir::file_of(key))))
    }

    /// The endpoint as it was found, unless its interface is certainly gone.
    fn still_there(&self, key: &str) -> Option<EndpointSpec> {
        let found = self.found.get(key).filter(|found| !found.superseded)?;
        let is_gone = self.interface_of(found).is_gone();
        (!is_gone).then(|| found.spec.clone())
    }

    /// Whether an endpoint's interface exists. An interface with the same number and another name
    /// is the same one, renamed, if it has the endpoint's programs.
    fn interface_of(&self, found: &Found) -> Lookup<()> {
        let ifindex = found.spec.interface.ifindex;
        match self.interfaces.name(ifindex) {
            Lookup::Found(name) if name == found.spec.interface.ifname => Lookup::Found(()),
            Lookup::Found(_) if self.gated.is_under_policy(ifindex) => Lookup::Found(()),
            Lookup::Found(_) | Lookup::Gone => Lookup::Gone,
            Lookup::Unknown(error) => Lookup::Unknown(error),
        }
    }

    /// Whether a document names a process by number, and another process may have that number now.
    ///
    /// - If the endpoint was found by this number: true once its interface is gone.
    /// - If it was not found in this run and a command added it: true unless the process is
    ///   certainly the same as when the endpoint was added.
    /// - Any other endpoint: true if it has the mark `ended`.
    fn has_ended(&self, key: &str, document: &EndpointDocument) -> bool {
        let Some(pid) = document.pid else {
            return false;
        };
        let netns = Netns::Pid(pid).to_string();
        let found = self.found.get(key);
        match found.filter(|found| found.spec.netns == netns) {
            Some(found) => self.interfaces.name(found.spec.interface.ifindex).is_gone(),
            None => {
                let is_added = cli::is_key(key) && !self.processes.is_known(key, pid);
                is_added || self.marks.ended.contains(key)
            }
        }
    }

    /// Whether the namespace that a document names is certainly gone.
    fn is_namespace_gone(&self, key: &str, document: &EndpointDocument) -> bool {
        if document.bridge.is_some() {
            return true;
        }
        if document.returns_by_name() {
            return document.is_awaited();
        }
        let is_gone = |netns: Netns| Lookup::of_path(fs::metadata(netns.path())).is_gone();
        self.has_ended(key, document) || document.namespace().is_ok_and(is_gone)
    }
}

#[cfg(test)]
mod tests;
