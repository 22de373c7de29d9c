//! Pods that ran before the agent, or started without it: their network namespaces are found by the
//! pods' addresses.
//!
//! ```text
//!  pods of this node (API) that have no endpoint ─┐
//!                                                 ├─► same address: endpoint netns/<file>
//!  eth0 in each namespace of --cni-netns-dir ─────┘
//! ```
//! The agent looks into a namespace only while a pod has no endpoint, and only if the namespace has none. The new
//! endpoint is recorded like those of the CNI plugin, and is removed by the same events. The code calls this *taking
//! in* a pod.

mod search;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    net::IpAddr,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use agent_core::kubernetes::local_pods::{LocalPod, LocalPods};
use daemon::lookup::Lookup;
use dns_policy::wall_time;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::{
    EndpointBook, EndpointDocument, Found, NamespaceId, State, cni::AttachmentId, namespace_id,
    retries::Retries,
};
use crate::endpoint::discover::Netns;

const PREFIX: &str = "netns/";
/// The interface of a pod, in every container runtime of Kubernetes.
const IFNAME: &str = "eth0";
/// A pod may be without an endpoint for this long: its object and its interface come one after the other.
const UNMANAGED_AFTER: Duration = Duration::from_secs(10);

/// Where pods without an endpoint are looked for.
#[derive(Clone, Debug)]
pub(crate) struct PodSource {
    /// The pods of this node.
    pub(crate) pods: watch::Receiver<Arc<LocalPods>>,
    /// Directory of network namespaces; `None` = pods are not taken in.
    pub(crate) netns_dir: Option<PathBuf>,
}

/// A pod of this node that is not under policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unmanaged {
    /// `namespace/name`.
    pub(crate) pod: Arc<str>,
    /// Why it has no endpoint, with the remedy.
    pub(crate) reason: String,
}

/// A pod of this node that ran before it was under policy: its first packets were not judged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartedOpen {
    /// `namespace/name`.
    pub pod: String,
    /// When the agent put it under policy, RFC 3339; `None` = it is not under policy yet.
    pub until: Option<String>,
}

/// Looks for the network namespaces of pods that have no endpoint.
#[derive(Debug, Default)]
pub(super) struct TakenIn {
    source: Option<PodSource>,
    lacking: BTreeMap<Arc<str>, Lacking>,
    /// Namespaces that were looked into, by file.
    looked_into: BTreeMap<String, LookedInto>,
    /// Namespaces from which the runtime removed the pod, by file. A namespace's number alone does not identify the
    /// namespace: when it is gone, the next namespace gets its number.
    removed: BTreeMap<String, NamespaceId>,
    retries: Retries,
}

/// A pod without an endpoint.
#[derive(Debug)]
struct Lacking {
    since: Instant,
    reason: String,
}

/// A namespace that was looked into.
#[derive(Debug)]
struct LookedInto {
    namespace: NamespaceId,
    /// Addresses of the interface in the namespace.
    addresses: Vec<IpAddr>,
}

/// Whether an endpoint was found by its pod's address.
pub(super) fn is_key(key: &str) -> bool {
    key.starts_with(PREFIX)
}

/// The interface of an endpoint that was found by its pod's address; `None` for any other endpoint.
pub(super) fn ifname_of(key: &str) -> Option<&'static str> {
    is_key(key).then_some(IFNAME)
}

fn key(file: &str) -> String {
    format!("{PREFIX}{file}")
}

impl EndpointBook {
    /// Looks for pods of this source from now on.
    pub(crate) fn take_in_from(&self, source: PodSource) {
        self.state.lock().taken_in.source = Some(source);
    }

    /// Pods of this node that have had no endpoint for ten seconds.
    pub(crate) fn unmanaged(&self) -> Vec<Unmanaged> {
        let state = self.state.lock();
        let lacking = state.taken_in.lacking.iter();
        let lacking = lacking.filter(|(_, lacking)| lacking.since.elapsed() >= UNMANAGED_AFTER);
        let unmanaged = lacking.map(|(pod, lacking)| Unmanaged {
            pod: Arc::clone(pod),
            reason: lacking.reason.clone(),
        });
        unmanaged.collect()
    }

    /// Pods of this node that ran before they were under policy.
    pub(crate) fn started_open(&self) -> Vec<StartedOpen> {
        let unmanaged = self.unmanaged().into_iter();
        let mut all: BTreeMap<String, Option<String>> =
            unmanaged.map(|pod| (pod.pod.to_string(), None)).collect();
        let state = self.state.lock();
        for (key, document) in &state.documents {
            if let Some(pod) = &document.pod
                && (is_key(key) || document.taken_in.is_some())
                && state.found.contains_key(key)
            {
                all.insert(pod.clone(), document.taken_in.map(wall_time::render));
            }
        }
        let all = all.into_iter();
        all.map(|(pod, until)| StartedOpen { pod, until }).collect()
    }

    /// Key of the endpoint of an attachment. If the endpoint was found by its pod's address, the key is that of the
    /// namespace.
    pub(crate) fn key_of(&self, id: &AttachmentId, netns: Option<&Path>) -> String {
        let state = self.state.lock();
        let own = id.key();
        if state.documents.contains_key(&own) {
            return own;
        }
        let found = netns.and_then(|netns| state.taken_in_at(id, netns));
        found.unwrap_or(own)
    }
}

impl State {
    /// Key of the endpoint that was found at an attachment's interface.
    pub(super) fn taken_in_at(&self, id: &AttachmentId, netns: &Path) -> Option<String> {
        let namespace = namespace_id(&Netns::Path(netns.to_owned())).found()?;
        let mut found = self.found.iter();
        let found = found.find(|(key, found)| {
            is_key(key) && found.namespace == Some(namespace) && id.ifname() == IFNAME
        });
        found.map(|(key, _)| key.clone())
    }

    /// Notes that the runtime removed the pod from a namespace. The namespace itself exists for a little longer.
    pub(super) fn leave(&mut self, netns: &Path) {
        let left = namespace_id(&Netns::Path(netns.to_owned())).found();
        let source = self.taken_in.source.as_ref();
        let dir = source.and_then(|source| source.netns_dir.as_deref());
        // Without the directory no pod is taken in.
        let Some(Ok(present)) = dir.map(namespaces_in) else {
            return;
        };
        let removed = &mut self.taken_in.removed;
        removed.retain(|file, namespace| present.may_be(file, *namespace));
        removed.extend(
            present
                .found
                .into_iter()
                .filter(|(_, namespace)| left == Some(*namespace)),
        );
    }

    /// Notes that the runtime adds a pod in a namespace.
    pub(super) fn enter_again(&mut self, netns: &Path) {
        let there = namespace_id(&Netns::Path(netns.to_owned())).found();
        let removed = &mut self.taken_in.removed;
        removed.retain(|_, namespace| there != Some(*namespace));
    }

    /// Records which pods have no endpoint. Returns those that may be looked for.
    fn follow_lacking(&mut self, pods: &LocalPods) -> LocalPods {
        let (mut lacking, mut wanted) = (BTreeMap::new(), LocalPods::new());
        for (name, pod) in pods {
            let mut documents = self.documents.iter();
            let document = documents.find(|(_, document)| is_of(document, name, pod));
            let reason = match document {
                Some((key, _)) if self.found.contains_key(key) => continue,
                Some((key, _)) => self.problems.unresolved.get(key).cloned(),
                None => match self.holder(pod) {
                    Some((_, None)) => continue,
                    Some((key, Some(other))) => Some(format!(
                        "its address is that of endpoint {key}, which is pod {other}: delete one of \
                         the pods"
                    )),
                    None => {
                        wanted.insert(Arc::clone(name), pod.clone());
                        None
                    }
                },
            };
            let before = self.taken_in.lacking.remove(name);
            let (since, before) = before.map_or_else(
                || (Instant::now(), NOT_LOOKED_FOR.to_owned()),
                |before| (before.since, before.reason),
            );
            let reason = reason.unwrap_or(before);
            lacking.insert(Arc::clone(name), Lacking { since, reason });
        }
        self.taken_in.lacking = lacking;
        wanted
    }

    /// The key of the endpoint that has an address of a pod, and the pod of this endpoint.
    fn holder(&self, pod: &LocalPod) -> Option<(&String, Option<&String>)> {
        let mut found = self.found.iter().filter(|(_, found)| !found.superseded);
        let has = |found: &Found| {
            let mut addresses = found.spec.addresses.iter();
            addresses.any(|address| pod.addresses.contains(address))
        };
        let (key, found) = found.find(|(_, found)| has(found))?;
        Some((key, found.spec.pod.as_ref()))
    }

    /// Files of namespaces that belong to no endpoint, and from which the runtime removed no pod.
    fn free_namespaces(&mut self, dir: &Path) -> Result<BTreeMap<String, NamespaceId>, String> {
        let failed = |error: io::Error| {
            format!(
                "the directory of network namespaces {} cannot be read: {error}; correct \
                 --cni-netns-dir, or mount that directory of the node",
                dir.display()
            )
        };
        let present = namespaces_in(dir).map_err(failed)?;
        let TakenIn {
            looked_into,
            removed,
            retries,
            lacking,
            ..
        } = &mut self.taken_in;
        retries.retain(|key| match key.strip_prefix(PREFIX) {
            Some(file) => present.found.contains_key(file),
            None => lacking.contains_key(key),
        });
        looked_into.retain(|file, looked_into| present.may_be(file, looked_into.namespace));
        removed.retain(|file, namespace| present.may_be(file, *namespace));
        let mut files = present.found;
        let held = self.found.values().filter(|found| !found.superseded);
        let held: BTreeSet<NamespaceId> = held.filter_map(|found| found.namespace).collect();
        files.retain(|file, namespace| !held.contains(namespace) && !removed.contains_key(file));
        Ok(files)
    }
}

/// Files of a directory of network namespaces.
#[derive(Debug, Default)]
struct Present {
    /// Files that are network namespaces.
    found: BTreeMap<String, NamespaceId>,
    /// Files that could not be looked at.
    unknown: BTreeSet<String>,
}

impl Present {
    /// False only if it is certain that the file is no longer this namespace.
    fn may_be(&self, file: &str, namespace: NamespaceId) -> bool {
        self.found.get(file) == Some(&namespace) || self.unknown.contains(file)
    }
}

/// Files of network namespaces in a directory. Other files are left out: opening a FIFO, for example, would block.
fn namespaces_in(dir: &Path) -> io::Result<Present> {
    let of_namespaces = fs::metadata("/proc/self/ns/net")?.dev();
    let mut present = Present::default();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        match Lookup::of_path(fs::metadata(entry.path())) {
            Lookup::Found(file) if file.dev() == of_namespaces => {
                present.found.insert(name, (file.dev(), file.ino()));
            }
            Lookup::Found(_) | Lookup::Gone => {}
            Lookup::Unknown(error) => {
                tracing::debug!(file = name, %error, "cannot look at a network namespace");
                present.unknown.insert(name);
            }
        }
    }
    Ok(present)
}

const NOT_LOOKED_FOR: &str = "no endpoint was added for it; add one (`holdfast-agent endpoint add \
    --pod NAMESPACE/NAME --netns …`), or let the agent find pods with --cni-netns-dir";

/// Whether a document is about this pod, and not about a former pod of the same name.
fn is_of(document: &EndpointDocument, name: &str, pod: &LocalPod) -> bool {
    let same = match (&document.uid, &pod.uid) {
        (Some(of_document), Some(of_pod)) => **of_document == **of_pod,
        _ => true,
    };
    document.pod.as_deref() == Some(name) && same
}
