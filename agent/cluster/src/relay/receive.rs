//! What an agent does with the frames of a relay: they become batches, as its own watches give them.
//!
//! No input or output. The agent can continue a stream at its position in the stream. It has a position after a whole
//! snapshot and after each change.

use std::{
    collections::BTreeMap,
    hash::{BuildHasher as _, RandomState},
};

use agent_core::{
    high_scale::scope::PodScope,
    policy::{
        parse::parse_object,
        source::cluster::{Batch, Seen},
    },
};
use fqdn_proto::relay::{Frame, Hello, Position, Put, Stale, Step, step};
use serde::{Deserialize, de::IgnoredAny};
use serde_json::Value;

use super::item::join;
use crate::resource::Resource;

/// Why the frames of a relay cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(super) enum FrameError {
    /// The relay does not send a kind of object that this agent needs.
    #[error(
        "the relay has version {version} and no {kind}: update the relays before the agents (the \
         chart's Deployment holdfast-relay), and start both with the same --identity-allocation, and \
         relays with --with-world-cidrs if agents have --high-scale-ipcache"
    )]
    Kind {
        version: String,
        /// Kind that this agent needs and the relay does not send.
        kind: &'static str,
    },
    /// A step before the first Hello.
    #[error("the first step of the stream is not a Hello")]
    NoHello,
    /// An object with a template that was not sent.
    #[error("{key} refers to template {template}, which was not sent")]
    Template { key: String, template: u64 },
    #[error("{what} is not JSON: {reason}")]
    Json {
        /// Key of the object, or the template.
        what: String,
        reason: String,
    },
}

/// What came with a frame.
#[derive(Debug, Default)]
pub(super) struct Received {
    /// Changes of objects, as the agent's own watches would give them.
    pub(super) batches: Vec<Batch>,
    /// Kinds that the relay cannot follow; `None` = this frame does not report them.
    pub(super) view: Option<Vec<Stale>>,
    /// Version of the relay, if this frame begins a stream.
    pub(super) version: Option<String>,
}

/// What the agent has of a relay's stream: its position and its templates.
#[derive(Debug)]
pub(super) struct Receiver {
    /// Kinds that the agent follows; the relay sends others as well.
    resources: &'static [Resource],
    /// Pods that the agent reads; the relay sends all pods.
    pods: PodScope,
    /// The epoch of the relay's run; none before the Hello on this stream.
    epoch: Option<String>,
    position: Option<Position>,
    templates: BTreeMap<u64, Template>,
    /// Computes the digests of objects. It stays when the agent changes to another relay, so that
    /// equal objects keep equal digests.
    hash: RandomState,
}

#[derive(Debug)]
struct Template {
    value: Value,
    digest: u64,
    /// Whether pods of this template are read, whatever node they are on.
    is_kept: bool,
}

/// The fields outside of a pod's template that show whether this agent reads the pod. The other fields are skipped.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Place {
    metadata: OwnMetadata,
    spec: OwnSpec,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct OwnMetadata {
    labels: Option<IgnoredAny>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct OwnSpec {
    node_name: Option<String>,
}

impl Receiver {
    /// A receiver without a position.
    pub(super) fn of(resources: &'static [Resource], pods: PodScope) -> Self {
        Self {
            resources,
            pods,
            epoch: None,
            position: None,
            templates: BTreeMap::new(),
            hash: RandomState::new(),
        }
    }

    /// A stream begins. Gives the position to continue after.
    pub(super) fn begin(&mut self) -> Option<Position> {
        self.epoch = None;
        self.position.clone()
    }

    /// The next stream must begin with a snapshot.
    pub(super) fn forget_position(&mut self) {
        self.position = None;
    }

    /// Takes the next frame of the stream.
    pub(super) fn take(&mut self, frame: Frame) -> Result<Received, FrameError> {
        let mut received = Received::default();
        for step in frame.steps.into_iter().filter_map(|Step { step }| step) {
            self.step(step, &mut received)?;
        }
        if let Some(epoch) = &self.epoch
            && frame.sequence > 0
        {
            self.position = Some(Position {
                epoch: epoch.clone(),
                sequence: frame.sequence,
            });
        }
        Ok(received)
    }

    fn step(&mut self, step: step::Step, received: &mut Received) -> Result<(), FrameError> {
        if let step::Step::Hello(hello) = step {
            received.version = Some(hello.version.clone());
            return self.hello(hello);
        }
        if self.epoch.is_none() {
            return Err(FrameError::NoHello);
        }
        let batches = &mut received.batches;
        match step {
            step::Step::Hello(_) => {}
            step::Step::Template(template) => {
                let value = json(&template.json, || format!("template {}", template.number))?;
                let digest = self.hash.hash_one(&template.json);
                let is_kept = self.pods.keeps(|key| value.pointer(&label(key))?.as_str());
                let template_of = Template {
                    value,
                    digest,
                    is_kept,
                };
                self.templates.insert(template.number, template_of);
            }
            step::Step::Forget(forget) => drop(self.templates.remove(&forget.number)),
            step::Step::Listing(listing) => {
                self.position = None;
                add(batches, self.find(&listing.kind), Seen::Listing);
            }
            step::Step::Listed(listed) => add(batches, self.find(&listed.kind), Seen::Listed),
            step::Step::Gone(gone) => add(batches, self.of_key(&gone.key), Seen::Gone(gone.key)),
            step::Step::Put(put) => {
                let Some(resource) = self.of_key(&put.key) else {
                    return Ok(());
                };
                let seen = self.put(put, resource)?;
                add(batches, Some(resource), seen);
            }
            step::Step::View(view) => received.view = Some(view.stale),
        }
        Ok(())
    }

    fn hello(&mut self, hello: Hello) -> Result<(), FrameError> {
        let has = |resource: &&Resource| hello.kinds.iter().any(|kind| kind == resource.kind);
        if let Some(missing) = self.resources.iter().find(|resource| !has(resource)) {
            return Err(FrameError::Kind {
                version: hello.version,
                kind: missing.kind,
            });
        }
        if !hello.continues {
            self.position = None;
            self.templates.clear();
        }
        self.epoch = Some(hello.epoch);
        Ok(())
    }

    fn find(&self, kind: &str) -> Option<&'static Resource> {
        self.resources.iter().find(|resource| resource.kind == kind)
    }

    fn of_key(&self, key: &str) -> Option<&'static Resource> {
        self.find(key.split('/').next().unwrap_or(key))
    }

    /// Whether the agent may have to read a pod. An agent of a pruned node does not read most pods that a relay sends,
    /// so the JSON of these pods is not parsed into values.
    fn reads(&self, put: &Put, template: Option<&Template>) -> bool {
        let Some(node) = self.pods.node() else {
            return true;
        };
        if template.is_some_and(|template| template.is_kept) {
            return true;
        }
        match serde_json::from_slice::<Place>(&put.json) {
            Ok(place) => {
                place.metadata.labels.is_some() || place.spec.node_name.as_deref() == Some(node)
            }
            // The pod counts as read, so that the error about its JSON names it.
            Err(_) => true,
        }
    }

    fn put(&self, put: Put, resource: &'static Resource) -> Result<Seen, FrameError> {
        let template = match put.template {
            0 => None,
            number => Some(
                self.templates
                    .get(&number)
                    .ok_or_else(|| FrameError::Template {
                        key: put.key.clone(),
                        template: number,
                    })?,
            ),
        };
        if resource.kind == "Pod" && !self.reads(&put, template) {
            return Ok(Seen::Gone(put.key));
        }
        let own = json(&put.json, || put.key.clone())?;
        let of_kind = (resource.kind, resource.version);
        let object = join(&put.key, of_kind, template.map(|one| &one.value), own);
        let digest = (template.map(|one| one.digest), &put.json);
        Ok(Seen::Put {
            digest: self.hash.hash_one(digest),
            document: parse_object(&object, &put.key),
            key: put.key,
            is_marked: false,
            json: Some(object.to_string().into()),
        })
    }
}

/// JSON pointer to a label of a pod.
fn label(key: &str) -> String {
    let key = key.replace('~', "~0").replace('/', "~1");
    format!("/metadata/labels/{key}")
}

/// Adds to the last batch if it is of the same kind. A kind that is not read here is left out.
fn add(batches: &mut Vec<Batch>, resource: Option<&'static Resource>, seen: Seen) {
    let Some(resource) = resource else {
        return;
    };
    match batches.last_mut() {
        Some(batch) if batch.kind == resource.kind => batch.seen.push(seen),
        _ => batches.push(Batch {
            kind: resource.kind,
            seen: vec![seen],
        }),
    }
}

fn json(text: &[u8], what: impl Fn() -> String) -> Result<Value, FrameError> {
    serde_json::from_slice(text).map_err(|error| FrameError::Json {
        what: what(),
        reason: error.to_string(),
    })
}

#[cfg(test)]
#[path = "receive_tests.rs"]
mod tests;
