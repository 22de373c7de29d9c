//! Where endpoints come from: the endpoint directory and the command line.

pub mod cli;
pub mod dir;

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use nix::net::if_::if_indextoname;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use self::cli::{CliFile, CliFileError};
use super::discover::{DiscoverError, Netns, bridge, discover};
use crate::{
    core::event::{EndpointSpec, SourceEvent},
    labels::Label,
    named_port::{NamedPortError, NamedPorts, is_label},
};

/// An endpoint as people write it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EndpointDocument {
    /// Network namespace by name. Exactly one of `netns` and `pid`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub netns: Option<String>,
    /// Network namespace by a process in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Interface inside the namespace.
    #[serde(default = "eth0")]
    pub ifname: String,
    /// Labels, `source:key[=value]`.
    pub labels: Vec<String>,
    /// Ports that policies may call by a name, `name=port[/protocol]`.
    #[serde(rename = "named-ports", default, skip_serializing_if = "Vec::is_empty")]
    pub named_ports: Vec<String>,
}

fn eth0() -> String {
    "eth0".to_owned()
}

/// What is wrong with an endpoint document, or in the way of it.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    /// Neither or both of `netns` and `pid`.
    #[error("name the network namespace by exactly one of netns and pid")]
    Netns,
    /// No labels.
    #[error("labels is empty; give at least one, for example k8s:app=web")]
    NoLabels,
    /// A label without a key.
    #[error("label {0:?} has no key; write source:key=value, for example k8s:app=web")]
    Label(String),
    /// A label that says what `named-ports` is there to say.
    #[error("label {0:?} is made of named-ports by the agent; name the ports there")]
    MadeLabel(String),
    /// A named port that cannot be read.
    #[error("named-ports: {0}")]
    NamedPort(#[from] NamedPortError),
    /// Another document has this interface.
    #[error("interface {ifname} of {netns} is already endpoint {other}; remove that one first")]
    Taken {
        /// The namespace.
        netns: Netns,
        /// The interface.
        ifname: String,
        /// Key of the other.
        other: String,
    },
    /// The interface was not found.
    #[error(transparent)]
    Discover(#[from] DiscoverError),
    /// The list of added endpoints could not be written.
    #[error(transparent)]
    File(#[from] CliFileError),
    /// No endpoint of that key was added.
    #[error("no endpoint {0} was added with `endpoint add`; `endpoint list` shows the keys")]
    NotAdded(String),
    /// The document cannot be read.
    #[error("{0}")]
    Parse(String),
}

impl EndpointDocument {
    /// The namespace it names.
    pub fn namespace(&self) -> Result<Netns, EndpointError> {
        match (&self.netns, self.pid) {
            (Some(name), None) => Ok(Netns::Name(name.clone())),
            (None, Some(pid)) => Ok(Netns::Pid(pid)),
            _ => Err(EndpointError::Netns),
        }
    }

    /// Checks what can be checked without the kernel.
    fn check(&self) -> Result<Netns, EndpointError> {
        if self.labels.is_empty() {
            return Err(EndpointError::NoLabels);
        }
        for label in &self.labels {
            let key = label.split_once(':').map_or(label.as_str(), |(_, key)| key);
            if key.split('=').next().is_none_or(str::is_empty) {
                return Err(EndpointError::Label(label.clone()));
            }
            if Label::parse(label).is_ok_and(|label| is_label(&label)) {
                return Err(EndpointError::MadeLabel(label.clone()));
            }
        }
        NamedPorts::parse(&self.named_ports)?;
        self.namespace()
    }

    fn resolve(&self, key: &str) -> Result<EndpointSpec, EndpointError> {
        let netns = self.check()?;
        let found = discover(&netns, &self.ifname)?;
        let named = NamedPorts::parse(&self.named_ports)?.labels();
        let named = named.iter().map(ToString::to_string);
        Ok(EndpointSpec {
            key: key.to_owned(),
            labels: self.labels.iter().cloned().chain(named).collect(),
            ifindex: found.ifindex,
            ifname: found.ifname,
            addresses: found.addresses,
            mac: found.mac,
            node_mac: found.node_mac,
            on_bridge: found.on_bridge,
            netns: netns.to_string(),
        })
    }
}

/// A document that is not in force, and why: for `status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unresolved {
    /// Its key.
    pub key: String,
    /// Why.
    pub reason: String,
}

/// An endpoint that the first listing lacks loses its policy: what may pass is tried again.
const ATTEMPTS: u32 = 5;
const PAUSE: Duration = Duration::from_millis(200);

type Deliver = dyn Fn(SourceEvent<EndpointSpec>) + Send + Sync;

/// All endpoint documents with what became of each. One event stream for both
/// sources. Calls block (files, rtnetlink): never from an async worker.
pub struct EndpointBook {
    state: Mutex<State>,
    deliver: Box<Deliver>,
}

struct State {
    dir: Option<PathBuf>,
    file: CliFile,
    documents: BTreeMap<String, EndpointDocument>,
    resolved: BTreeMap<String, EndpointSpec>,
    unresolved: BTreeMap<String, String>,
    /// The last look failed for a reason that may pass.
    passing: bool,
}

impl EndpointBook {
    /// Of a directory and the list of endpoints added by command, which is
    /// read here. `deliver` gets the events; it may block while the core is busy.
    pub fn open(
        dir: Option<PathBuf>,
        file: CliFile,
        deliver: impl Fn(SourceEvent<EndpointSpec>) + Send + Sync + 'static,
    ) -> Result<Arc<Self>, EndpointError> {
        let documents = file.read()?;
        Ok(Arc::new(Self {
            state: Mutex::new(State {
                dir,
                file,
                documents,
                resolved: BTreeMap::new(),
                unresolved: BTreeMap::new(),
                passing: false,
            }),
            deliver: Box::new(deliver),
        }))
    }

    /// The first full listing.
    pub fn list(&self) {
        let mut state = self.state.lock();
        (self.deliver)(SourceEvent::Init);
        for _ in 0..ATTEMPTS {
            state.passing = false;
            state.refresh(&*self.deliver);
            if !state.passing {
                break;
            }
            std::thread::sleep(PAUSE);
        }
        (self.deliver)(SourceEvent::InitDone);
    }

    /// Reads the directory again and tries again what could not be resolved.
    pub fn refresh(&self) {
        self.state.lock().refresh(&*self.deliver);
    }

    /// Adds one by command; it is on disk before the core hears of it.
    pub fn add(&self, document: EndpointDocument) -> Result<EndpointSpec, EndpointError> {
        let netns = document.check()?;
        let key = cli::key(&netns, &document.ifname);
        let spec = document.resolve(&key)?;
        let mut state = self.state.lock();
        if let Some(other) = state.other_with(spec.ifindex, &key) {
            return Err(EndpointError::Taken {
                netns,
                ifname: document.ifname,
                other,
            });
        }
        state.documents.insert(key.clone(), document);
        state.save()?;
        state.unresolved.remove(&key);
        state.resolved.insert(key, spec.clone());
        (self.deliver)(SourceEvent::Apply(spec.clone()));
        Ok(spec)
    }

    /// Removes one that was added by command.
    pub fn remove(&self, key: &str) -> Result<(), EndpointError> {
        let mut state = self.state.lock();
        if !cli::is_key(key) || state.documents.remove(key).is_none() {
            return Err(EndpointError::NotAdded(key.to_owned()));
        }
        state.save()?;
        state.unresolved.remove(key);
        if state.resolved.remove(key).is_some() {
            (self.deliver)(SourceEvent::Delete(key.to_owned()));
        }
        Ok(())
    }

    /// What is not in force.
    pub fn unresolved(&self) -> Vec<Unresolved> {
        let state = self.state.lock();
        state
            .unresolved
            .iter()
            .map(|(key, reason)| Unresolved {
                key: key.clone(),
                reason: reason.clone(),
            })
            .collect()
    }
}

impl State {
    fn save(&self) -> Result<(), EndpointError> {
        let added = self.documents.iter().filter(|(key, _)| cli::is_key(key));
        Ok(self.file.write(added)?)
    }

    fn other_with(&self, ifindex: u32, key: &str) -> Option<String> {
        self.resolved
            .values()
            .find(|spec| spec.ifindex == ifindex && spec.key != key)
            .map(|spec| spec.key.clone())
    }

    fn refresh(&mut self, deliver: &Deliver) {
        if let Some(dir) = self.dir.clone() {
            self.reread(&dir, deliver);
        }
        let on_bridges = bridge::ports().ok();
        let same_place = |spec: &EndpointSpec| {
            let ports = on_bridges.as_ref();
            ports.is_none_or(|ports| ports.contains(&spec.ifindex) == spec.on_bridge)
        };
        for (key, document) in self.documents.clone() {
            let spec = self.resolved.get(&key);
            let settled = spec.is_some_and(|spec| still_there(spec) && same_place(spec));
            if !settled {
                self.try_again(&key, &document, deliver);
            }
        }
    }

    fn reread(&mut self, dir: &std::path::Path, deliver: &Deliver) {
        let read = match dir::read(dir) {
            Ok(read) => read,
            Err(error) => {
                tracing::warn!(dir = %dir.display(), %error, "cannot read the endpoint directory; keeping what was read before");
                return;
            }
        };
        let gone: Vec<String> = self
            .documents
            .keys()
            .filter(|key| !cli::is_key(key) && !read.contains_key(*key))
            .cloned()
            .collect();
        for key in gone {
            self.documents.remove(&key);
            self.unresolved.remove(&key);
            if self.resolved.remove(&key).is_some() {
                deliver(SourceEvent::Delete(key));
            }
        }
        self.unresolved
            .retain(|key, _| self.documents.contains_key(key) || read.contains_key(key));
        for (key, document) in read {
            match document {
                Ok(document) if self.documents.get(&key) == Some(&document) => {}
                Ok(document) => {
                    self.documents.insert(key.clone(), document);
                    // Resolved anew by the caller; the old version stays until then.
                    if let Some(spec) = self.resolved.get_mut(&key) {
                        spec.ifindex = 0;
                    }
                }
                Err(error) => self.note(&key, &error),
            }
        }
    }

    fn try_again(&mut self, key: &str, document: &EndpointDocument, deliver: &Deliver) {
        let resolved =
            document
                .resolve(key)
                .and_then(|spec| match self.other_with(spec.ifindex, key) {
                    Some(other) => Err(EndpointError::Taken {
                        netns: document.namespace()?,
                        ifname: document.ifname.clone(),
                        other,
                    }),
                    None => Ok(spec),
                });
        match resolved {
            Ok(spec) => {
                self.unresolved.remove(key);
                self.resolved.insert(key.to_owned(), spec.clone());
                deliver(SourceEvent::Apply(spec));
            }
            Err(error) => {
                self.note(key, &error);
                self.passing |= matches!(
                    error,
                    EndpointError::Discover(
                        DiscoverError::Netlink { .. } | DiscoverError::Enter { .. }
                    )
                );
                let gone = matches!(
                    error,
                    EndpointError::Discover(
                        DiscoverError::NoNetns(_)
                            | DiscoverError::NoInterface { .. }
                            | DiscoverError::NoPeer { .. }
                    )
                );
                if gone && self.resolved.remove(key).is_some() {
                    deliver(SourceEvent::Delete(key.to_owned()));
                }
            }
        }
    }

    fn note(&mut self, key: &str, error: &EndpointError) {
        let reason = error.to_string();
        if self.unresolved.get(key) != Some(&reason) {
            tracing::warn!(endpoint = key, %reason, "endpoint is not in force");
            self.unresolved.insert(key.to_owned(), reason);
        }
    }
}

/// Whether the host-side interface is still the one that was found.
fn still_there(spec: &EndpointSpec) -> bool {
    if_indextoname(spec.ifindex).is_ok_and(|name| name.to_str() == Ok(spec.ifname.as_str()))
}
