//! Endpoints that the CNI plugin added: pods, from before their first packet until the container runtime removes
//! them. The agent's list of them survives its restarts, so a pod keeps its policy even if no source of labels
//! answers.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use agent_core::endpoint::spec::EndpointSpec;
use daemon::{
    lookup::Lookup,
    state_file::{self, StateFileError, write_json},
};
use dns_policy::wall_time;
use serde::{Deserialize, Serialize};

use super::{
    Deliver, EndpointBook, EndpointDocument, EndpointError, State, cli, namespace_id, taken_in,
};
use crate::endpoint::discover::{Claims, Discovered, discover};

const VERSION: u32 = 1;
const PREFIX: &str = "cni/";

/// A pod's interface, as the runtime and the plugins before ours describe it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Attachment {
    /// The runtime's name of the pod's sandbox, and the interface in it.
    pub id: AttachmentId,
    /// Path of the network namespace.
    pub netns: PathBuf,
    /// `namespace/name`.
    pub pod: String,
    /// Uid of the pod; `None` if the runtime gives none.
    pub uid: Option<String>,
    /// Addresses that the interface was given.
    pub addresses: Vec<IpAddr>,
}

/// Identifies an attachment by the runtime's name of the sandbox and the interface in it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct AttachmentId {
    container: String,
    ifname: String,
}

impl AttachmentId {
    /// `None` if `container` or `ifname` cannot be a name.
    pub(crate) fn new(container: &str, ifname: &str) -> Option<Self> {
        let is_name = |text: &str, most: usize| {
            (1..=most).contains(&text.len())
                && text
                    .bytes()
                    .all(|byte| byte.is_ascii_graphic() && byte != b'/')
        };
        (is_name(container, 256) && is_name(ifname, 15)).then(|| Self {
            container: container.to_owned(),
            ifname: ifname.to_owned(),
        })
    }

    pub(crate) fn ifname(&self) -> &str {
        &self.ifname
    }

    /// Key of the endpoint: `cni/<container>/<interface>`.
    pub(crate) fn key(&self) -> String {
        format!("{PREFIX}{}/{}", self.container, self.ifname)
    }
}

/// Whether an endpoint is in the list: the plugin added it, or it was found by its pod's address.
pub(super) fn is_key(key: &str) -> bool {
    key.starts_with(PREFIX) || taken_in::is_key(key)
}

/// Why a pod's interface cannot be put under policy.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AttachError {
    /// The agent does not know its endpoints yet.
    #[error("the agent is starting")]
    Starting,
    /// The pod cannot be put under policy yet; with the reason.
    #[error("the pod is not under policy: {0}")]
    Awaited(String),
    /// There is no address whose packets could be judged.
    #[error(
        "the plugins before report no address for {0}; holdfast-cni must be the last entry of the list, \
         behind a plugin that reports the address it sets"
    )]
    NoAddress(String),
    /// The host side is a port of a switch that is not a bridge of the kernel.
    #[error(
        "the node's end of interface {ifname} is a port of {master}, which is no bridge of the kernel \
         (Open vSwitch, for example): packets would pass the policy. holdfast-cni works behind plugins \
         that make routed veth pairs, or veth pairs on a bridge"
    )]
    ForeignMaster {
        ifname: String,
        /// Name of the switch that the node's end is a port of.
        master: String,
    },
    /// The pod has further interfaces, by which packets could pass the policy.
    #[error(
        "the pod has further interfaces to other namespaces ({others}), and only {ifname} can be under \
         policy: remove the plugin that makes them from the chain"
    )]
    FurtherInterfaces {
        ifname: String,
        /// Names of the further interfaces, joined by commas.
        others: String,
    },
    /// The previous plugins' result does not match the pod's interface.
    #[error(
        "the plugins before report address {reported} for {ifname}, which has {present}; holdfast-cni \
         must be the last entry of the list, behind a plugin that reports the address it sets"
    )]
    Address {
        ifname: String,
        /// Address in `prevResult` that the interface does not have.
        reported: IpAddr,
        /// Addresses of the interface, joined by commas.
        present: String,
    },
    /// An error that any endpoint may have.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
}

impl AttachError {
    /// Whether another attempt may succeed within seconds.
    pub(crate) fn is_awaited(&self) -> bool {
        matches!(self, Self::Starting | Self::Awaited(_))
    }
}

/// The file with the list of pods.
#[derive(Clone, Debug)]
pub(super) struct CniFile {
    path: PathBuf,
}

#[derive(Serialize, Deserialize)]
struct Content {
    version: u32,
    endpoints: BTreeMap<String, Record>,
}

#[derive(Serialize, Deserialize)]
struct Record {
    endpoint: EndpointDocument,
    uid: Option<String>,
    /// When the pod was taken in, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    taken_in: Option<String>,
}

impl CniFile {
    /// Uses the file `cni_endpoints.json` of this state directory.
    pub(super) fn in_dir(state: &Path) -> Self {
        Self {
            path: state.join("cni_endpoints.json"),
        }
    }

    /// Documents by key. If the file is lost, or damaged and set aside, they are made from `restored`, the endpoints
    /// of the last run on this boot, with their labels. The loss is added to `damaged`.
    pub(super) fn read(
        &self,
        restored: &[EndpointSpec],
        damaged: &mut Vec<String>,
    ) -> Result<BTreeMap<String, EndpointDocument>, StateFileError> {
        let mut recover = |why: &str| {
            let documents = recovered(restored);
            let text = format!(
                "{}: the list of pods {why}; the {} of the last run keep the labels that they have until \
                 they are started again",
                self.path.display(),
                documents.len()
            );
            tracing::error!("{text}");
            damaged.push(text);
            if let Err(error) = self.write(documents.iter()) {
                tracing::error!(%error, "the list of pods is not on disk");
                damaged.push(error.to_string());
            }
            documents
        };
        match state_file::read_versioned::<Content>(&self.path, VERSION)? {
            state_file::Content::Found(content) => {
                Ok(content.endpoints.into_iter().map(document).collect())
            }
            // If the last pod had ended, there would be a file with an empty list.
            state_file::Content::Absent if !restored.iter().any(|spec| is_key(&spec.key)) => {
                Ok(BTreeMap::new())
            }
            state_file::Content::Absent => Ok(recover("is missing")),
            state_file::Content::Damaged(damage) => {
                let why = damage.set_aside(", and was set aside as");
                Ok(recover(&why.map_err(StateFileError::io(&self.path))?))
            }
        }
    }

    pub(super) fn write<'a>(
        &self,
        documents: impl Iterator<Item = (&'a String, &'a EndpointDocument)>,
    ) -> Result<(), StateFileError> {
        let endpoints = documents.map(|(key, document)| {
            let record = Record {
                endpoint: document.clone(),
                uid: document.uid.clone(),
                taken_in: document.taken_in.map(wall_time::render),
            };
            (key.clone(), record)
        });
        let content = Content {
            version: VERSION,
            endpoints: endpoints.collect(),
        };
        write_json(&self.path, &content).map_err(StateFileError::io(&self.path))
    }
}

fn document((key, record): (String, Record)) -> (String, EndpointDocument) {
    let uid = record.uid;
    let taken_in = record.taken_in.as_deref().and_then(wall_time::parse);
    (
        key,
        EndpointDocument {
            uid,
            taken_in,
            ..record.endpoint
        },
    )
}

fn recovered(restored: &[EndpointSpec]) -> BTreeMap<String, EndpointDocument> {
    let documents = restored.iter().filter_map(|spec| {
        let ifname = match spec.key.strip_prefix(PREFIX) {
            Some(attachment) => attachment.rsplit_once('/')?.1,
            None => taken_in::ifname_of(&spec.key)?,
        };
        let netns = Some(spec.netns.clone());
        let document = EndpointDocument {
            addresses: spec.addresses.clone(),
            ..cli::document_of(spec, netns, None, ifname)
        };
        Some((spec.key.clone(), document))
    });
    documents.collect()
}

impl EndpointBook {
    /// Puts a pod's interface under policy. It is on disk before the core receives it.
    pub(crate) fn attach(&self, attachment: Attachment) -> Result<EndpointSpec, AttachError> {
        if self.state.lock().listing.starting {
            return Err(AttachError::Starting);
        }
        let Attachment {
            id,
            netns,
            pod,
            uid,
            addresses,
        } = attachment;
        self.state.lock().enter_again(&netns);
        let document = EndpointDocument {
            netns: Some(netns.to_string_lossy().into_owned()),
            ifname: id.ifname.clone(),
            pod: Some(pod),
            addresses: addresses.clone(),
            uid,
            ..EndpointDocument::default()
        };
        let netns = document.check()?;
        let namespace = namespace_id(&netns).found();
        let claims = Claims {
            named: addresses.clone(),
            known: None,
            by_itself: false,
        };
        let found = discover(&netns, &id.ifname, &claims).map_err(EndpointError::from)?;
        check(&found, &id.ifname, &addresses)?;
        let key = id.key();
        let spec = document.spec(&key, &netns, found)?;
        Ok(self.enter(&key, document, &netns, spec, namespace)?)
    }

    /// Removes a pod's interface. Returns false if there is no such endpoint.
    pub(crate) fn detach(&self, id: &AttachmentId) -> Result<bool, EndpointError> {
        self.state.lock().remove_pods(&[id.key()], &*self.deliver)
    }

    /// Removes a pod's interface when the runtime removes it. Returns false if the agent does not know the interface.
    /// From then on the agent does not search for the pod in `netns` by its address.
    pub(crate) fn end(&self, id: &AttachmentId, netns: &Path) -> Result<bool, EndpointError> {
        let mut state = self.state.lock();
        let found = state.taken_in_at(id, netns);
        state.leave(netns);
        let keys: Vec<String> = found.into_iter().chain([id.key()]).collect();
        state.remove_pods(&keys, &*self.deliver)
    }

    /// Removes the interfaces that the runtime does not have. Returns their number.
    pub(crate) fn detach_others(
        &self,
        valid: &BTreeSet<AttachmentId>,
    ) -> Result<usize, EndpointError> {
        let valid: BTreeSet<String> = valid.iter().map(AttachmentId::key).collect();
        let mut state = self.state.lock();
        let gone = state.documents.keys();
        // The agent does not know the runtime's names of pods that were found by address. Such a pod is removed with
        // its namespace.
        let gone = gone.filter(|key| key.starts_with(PREFIX) && !valid.contains(*key));
        let gone: Vec<String> = gone.cloned().collect();
        state.remove_pods(&gone, &*self.deliver)?;
        Ok(gone.len())
    }
}

impl State {
    /// Removes pods whose namespace and interface are certainly gone: the runtime removed them while no agent
    /// answered.
    pub(super) fn forget_ended_pods(&mut self, deliver: &Deliver) {
        let is_gone = |key: &String, document: &EndpointDocument| {
            let netns = document.netns.as_deref();
            is_key(key)
                && netns.is_some_and(|netns| Lookup::of_path(fs::metadata(netns)).is_gone())
                && self.still_there(key).is_none()
        };
        let gone = self.documents.iter();
        let gone = gone.filter(|(key, document)| is_gone(key, document));
        let gone: Vec<String> = gone.map(|(key, _)| key.clone()).collect();
        if gone.is_empty() {
            return;
        }
        if let Err(error) = self.remove_pods(&gone, deliver) {
            tracing::warn!(%error, "pods that have ended stay in the list");
        }
    }

    fn remove_pods(&mut self, keys: &[String], deliver: &Deliver) -> Result<bool, EndpointError> {
        let removed = keys
            .iter()
            .filter_map(|key| self.documents.remove_entry(key));
        let removed: Vec<_> = removed.collect();
        if removed.is_empty() {
            return Ok(false);
        }
        if let Err(error) = self.save_pods() {
            self.documents.extend(removed);
            return Err(error);
        }
        for (key, _) in &removed {
            self.problems.unresolved.remove(key);
            self.marks.stale.remove(key);
            self.problems.retries.forget(key);
            self.forget(key, deliver);
        }
        self.forget_unwanted();
        Ok(true)
    }

    pub(super) fn save_pods(&self) -> Result<(), EndpointError> {
        let pods = self.documents.iter().filter(|(key, _)| is_key(key));
        Ok(self.pods.write(pods)?)
    }
}

fn check(found: &Discovered, ifname: &str, addresses: &[IpAddr]) -> Result<(), AttachError> {
    if let Some(master) = &found.foreign_master {
        return Err(AttachError::ForeignMaster {
            ifname: ifname.to_owned(),
            master: master.clone(),
        });
    }
    if !found.others.is_empty() {
        return Err(AttachError::FurtherInterfaces {
            ifname: ifname.to_owned(),
            others: found.others.join(", "),
        });
    }
    let mut reported = addresses.iter();
    match reported.find(|address| !found.present.contains(address)) {
        None => Ok(()),
        Some(reported) => {
            let present: Vec<String> = found.present.iter().map(ToString::to_string).collect();
            Err(AttachError::Address {
                ifname: ifname.to_owned(),
                reported: *reported,
                present: present.join(", "),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use agent_core::endpoint::spec::PodInterface;

    #[test]
    fn a_port_of_open_vswitch_and_a_pod_with_another_way_out_are_refused_by_name() {
        let address: IpAddr = "10.0.0.7".parse().unwrap();
        let found = Discovered {
            interface: PodInterface {
                ifindex: 7,
                ifname: "veth7".to_owned(),
                mac: [2, 0, 0, 0, 0, 7],
                node_mac: [2, 0, 0, 0, 1, 7],
                on_bridge: false,
                link: Default::default(),
            },
            addresses: vec![address],
            present: vec![address],
            others: Vec::new(),
            foreign_master: None,
        };
        let refusal = |found: &Discovered| {
            let checked = check(found, "eth0", &[address]);
            checked.err().map(|error| error.to_string())
        };
        assert_eq!(refusal(&found), None);
        let of_switch = Discovered {
            foreign_master: Some("ovs-system".to_owned()),
            ..found.clone()
        };
        let says = refusal(&of_switch).unwrap();
        assert!(
            says.contains("interface eth0 is a port of ovs-system")
                && says.contains("Open vSwitch"),
            "{says}"
        );
        let two = Discovered {
            others: vec!["net1".to_owned()],
            ..found
        };
        let says = refusal(&two).unwrap();
        assert!(
            says.contains("net1") && says.contains("only eth0"),
            "{says}"
        );
    }
}
