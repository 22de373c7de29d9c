//! An endpoint as people write it, and what can be wrong with it.

use std::{io, net::IpAddr, path::PathBuf};

use agent_core::{
    endpoint::spec::EndpointSpec,
    labels::{Label, LabelError},
    named_port::{NamedPortError, NamedPorts, is_label},
    policy::mode::PolicyMode,
};
use daemon::{lookup::Lookup, state_file::StateFileError};
use nix::{libc::IFNAMSIZ, net::if_::if_nametoindex};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{cni, dir};
use crate::endpoint::{
    container::ContainerName,
    discover::{Claims, DiscoverError, Discovered, Known, Netns, discover},
};

/// Fields of a document.
const FIELDS: [&str; 11] = [
    "netns",
    "pid",
    "container",
    "interface",
    "bridge",
    "ifname",
    "labels",
    "pod",
    "named-ports",
    "addresses",
    "enable-policy",
];

/// An endpoint as people write it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EndpointDocument {
    /// Network namespace by name in /run/netns, or by absolute path. Exactly one of `netns`,
    /// `pid`, `container`, `interface` and `bridge`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub netns: Option<String>,
    /// Network namespace by a process in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Network namespace by the container that is in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<ContainerName>,
    /// Network namespace by the interface of this host that leads to it; the other end is the pod's interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    /// Every port of this bridge that leads to another namespace and has no other document.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bridge: Option<String>,
    /// Interface inside the namespace; `eth0` if absent.
    #[serde(default = "eth0")]
    pub ifname: String,
    /// Labels, `source:key[=value]`. Exactly one of `labels` and `pod`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<String>,
    /// The pod that the endpoint is, `namespace/name`. The labels and named ports of the endpoint are those of the Pod
    /// document, and change with that document.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// Ports that policies may call by a name, `name=port[/protocol]`.
    #[serde(rename = "named-ports", default, skip_serializing_if = "Vec::is_empty")]
    pub named_ports: Vec<String>,
    /// The only addresses that may count; empty = all addresses of the interface may.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<IpAddr>,
    /// When the endpoint is restricted; `None` = the agent's `--enable-policy` decides.
    #[serde(
        rename = "enable-policy",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub enable_policy: Option<PolicyMode>,
    /// Process of `container`, if it runs; the agent finds it, and no document has this field.
    #[serde(skip)]
    pub process: Option<u32>,
    /// Uid of `pod`; the agent finds it, and no document has this field.
    #[serde(skip)]
    pub uid: Option<String>,
    /// When the agent found a pod that had started without it, in nanoseconds since 1970; no document has this field.
    #[serde(skip)]
    pub taken_in: Option<u64>,
}

/// Which addresses of an interface on a bridge may count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Addresses {
    /// Only addresses that were accepted before.
    Known,
    /// The addresses that the interface has now: the administrator wrote the document or gave the command again.
    Present,
}

/// The result of a look at a pod.
#[derive(Debug)]
pub(super) struct Resolved {
    pub(super) spec: EndpointSpec,
    /// Further interfaces that lead to another namespace.
    pub(super) others: Vec<String>,
    /// Every address of the pod's interface that is not link-local.
    pub(super) present: Vec<IpAddr>,
}

fn is_pod(text: &str) -> bool {
    let part = |part: &str| !part.is_empty() && !part.contains('/');
    let parts = text.split_once('/');
    parts.is_some_and(|(namespace, name)| part(namespace) && part(name))
}

/// Whether the kernel accepts a text as an interface's name (`dev_valid_name`).
fn is_interface_name(name: &str) -> bool {
    let is_refused = |c: char| c == '/' || c == ':' || c.is_whitespace();
    (1..IFNAMSIZ).contains(&name.len()) && !matches!(name, "." | "..") && !name.contains(is_refused)
}

fn eth0() -> String {
    "eth0".to_owned()
}

/// Why an endpoint document cannot be applied.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    /// The path leads to a process's namespace.
    #[error("netns: {0} is the namespace of a process: write the number of the process as pid")]
    ProcessPath(String),
    /// The document has none or several of `netns`, `pid`, `container`, `interface` and `bridge`.
    #[error("give exactly one of netns, pid, container, interface and bridge")]
    Netns,
    /// A field that only one endpoint can have.
    #[error("{0} is of one endpoint, and a document with bridge is about many: remove it")]
    OfOne(&'static str),
    /// A text that no interface can have as its name.
    #[error(
        "{field}: `{}` names no interface: a name has 1 to 15 bytes, without spaces, slashes and colons",
        name.escape_debug()
    )]
    InterfaceName { field: &'static str, name: String },
    /// A command names a container or an interface.
    #[error(
        "a container or an interface is named by a document in --endpoint-dir, so that it is known before it is there"
    )]
    AddedByName,
    /// The document has neither labels nor a pod.
    #[error(
        "labels is empty; give at least one, for example k8s:app=web, or pod: namespace/name, whose \
         labels it then has"
    )]
    NoLabels,
    /// Labels or named ports are given beside a pod.
    #[error("{0} stands beside pod; remove it: the Pod document has the {0}")]
    BesidePod(&'static str),
    /// The value of `pod` is not `namespace/name`.
    #[error(
        "pod: `{}` is not a pod; write namespace/name, for example shop/web-0",
        .0.escape_debug()
    )]
    Pod(String),
    /// A text that is no label.
    #[error("labels: {0}")]
    Label(#[from] LabelError),
    /// A label that the agent derives from `named-ports`.
    #[error("label {0:?} is reserved: the agent derives it from named-ports; set the ports there")]
    MadeLabel(String),
    /// A label that the agent derives from `enable-policy`.
    #[error("label {0:?} is reserved: the agent derives it from enable-policy; set the mode there")]
    ModeLabel(String),
    /// A label that only the agent gives.
    #[error(
        "label {0:?} is reserved: only the agent gives {1}: labels, and an endpoint with one would pass \
         for what it is not; remove the label, and give one of the endpoint's own, for example \
         k8s:app=web"
    )]
    AgentLabel(String, String),
    /// A named port that cannot be read.
    #[error("named-ports: {0}")]
    NamedPort(#[from] NamedPortError),
    /// The interface is that of a running pod, and the command names another pod or none.
    #[error("interface {ifname} of {netns} is the running pod {pod}'s; give --pod {pod}")]
    OfPod {
        netns: Netns,
        ifname: String,
        pod: String,
    },
    /// Another document has this interface.
    #[error(
        "interface {ifname} of {netns} is already endpoint {other}; {}",
        how_to_resolve(.other)
    )]
    Taken {
        netns: Netns,
        ifname: String,
        /// Key of the endpoint that has the interface.
        other: String,
    },
    /// The interface was not found.
    #[error(transparent)]
    Discover(#[from] DiscoverError),
    /// The list of added endpoints, or of pods, could not be written.
    #[error(transparent)]
    File(#[from] StateFileError),
    /// No endpoint with that key was added.
    #[error(
        "no endpoint {0} was added with `endpoint add`; `endpoint list` shows the keys, and one that \
         begins with `dir/` is removed with its document in --endpoint-dir"
    )]
    NotAdded(String),
    /// The document cannot be read.
    #[error("{0}")]
    Parse(String),
}

/// What to do about an interface that is an endpoint already.
fn how_to_resolve(other: &str) -> String {
    match other {
        other if cni::is_key(other) => {
            "the agent put this pod under policy itself, with the labels of its Pod: remove this \
             document"
                .to_owned()
        }
        other if dir::is_key(other) => {
            "remove the document of that one in --endpoint-dir first".to_owned()
        }
        other => format!("remove that one first (`holdfast-agent endpoint remove {other}`)"),
    }
}

impl EndpointError {
    /// Whether the error shows nothing about the interface, because the look-up itself failed.
    pub(crate) fn shows_nothing(&self) -> bool {
        matches!(self, Self::Discover(error) if error.shows_nothing())
    }

    /// Whether the error may go away by itself within a moment.
    pub(crate) fn is_passing(&self) -> bool {
        matches!(
            self,
            Self::Discover(DiscoverError::Netlink { .. } | DiscoverError::Open { .. })
        )
    }
}

impl EndpointDocument {
    /// Reads a document; `None` if it is empty.
    pub(super) fn read(value: Value) -> Result<Option<Self>, EndpointError> {
        let mut fields = value
            .as_object()
            .into_iter()
            .flat_map(|fields| fields.keys());
        if let Some(word) = fields.find(|field| !FIELDS.contains(&field.as_str())) {
            let remedy = nearest::remedy(word, &FIELDS);
            return Err(EndpointError::Parse(format!(
                "{word}: is an unknown field; {remedy}"
            )));
        }
        let read = Option::deserialize(value);
        read.map_err(|error| EndpointError::Parse(error.to_string()))
    }

    /// Returns the network namespace. Exactly one of `netns`, `pid`, `container` and `interface` must be present.
    pub fn namespace(&self) -> Result<Netns, EndpointError> {
        if self.bridge.is_some()
            && (self.netns.is_some() || self.pid.is_some() || self.container.is_some())
        {
            return Err(EndpointError::Netns);
        }
        match (&self.netns, self.pid, &self.container, &self.interface) {
            (Some(path), None, None, None) if path.starts_with("/proc/") => {
                Err(EndpointError::ProcessPath(path.clone()))
            }
            (Some(path), None, None, None) if path.starts_with('/') => {
                Ok(Netns::Path(PathBuf::from(path)))
            }
            (Some(name), None, None, None) => Ok(Netns::Name(name.clone())),
            (None, Some(pid), None, None) => Ok(Netns::Pid(pid)),
            (None, None, Some(name), None) => Ok(Netns::Container {
                name: name.clone(),
                process: self.process,
            }),
            (None, None, None, Some(interface)) if self.bridge.is_none() => {
                Ok(Netns::Behind(interface.clone()))
            }
            // A document about a bridge is never resolved: each port has a document of its own.
            (None, None, None, None) if self.bridge.is_some() => {
                Ok(Netns::Behind(self.bridge.clone().unwrap_or_default()))
            }
            _ => Err(EndpointError::Netns),
        }
    }

    /// Whether the endpoint is found again by the name of its container or host-side interface, wherever it was before.
    pub(super) fn returns_by_name(&self) -> bool {
        self.container.is_some() || self.interface.is_some()
    }

    /// Whether the container or the interface that the document names is missing.
    pub(super) fn is_awaited(&self) -> bool {
        match &self.interface {
            Some(interface) => {
                Lookup::of_interface(if_nametoindex(interface.as_str()).map_err(io::Error::from))
                    .is_gone()
            }
            None => self.container.is_some() && self.process.is_none(),
        }
    }

    /// The document without the fields that the agent fills in (`process`, `uid`, `taken_in`).
    pub(super) fn as_written(&self) -> Self {
        Self {
            process: None,
            ..self.clone()
        }
    }

    /// Checks what can be checked without the kernel.
    pub(super) fn check(&self) -> Result<Netns, EndpointError> {
        match &self.pod {
            Some(_) if !self.labels.is_empty() => return Err(EndpointError::BesidePod("labels")),
            Some(_) if !self.named_ports.is_empty() => {
                return Err(EndpointError::BesidePod("named-ports"));
            }
            Some(pod) if !is_pod(pod) => return Err(EndpointError::Pod(pod.clone())),
            None if self.labels.is_empty() => return Err(EndpointError::NoLabels),
            Some(_) | None => {}
        }
        for label in &self.labels {
            own_label(label)?;
        }
        for (field, name) in [("interface", &self.interface), ("bridge", &self.bridge)] {
            if let Some(name) = name.as_ref().filter(|name| !is_interface_name(name)) {
                let name = name.clone();
                return Err(EndpointError::InterfaceName { field, name });
            }
        }
        if self.bridge.is_some() && !self.addresses.is_empty() {
            return Err(EndpointError::OfOne("addresses"));
        }
        if self.bridge.is_some() && self.pod.is_some() {
            return Err(EndpointError::OfOne("pod"));
        }
        NamedPorts::parse(&self.named_ports)?;
        self.namespace()
    }

    /// Finds the interface of the document. `before` is where the endpoint was found last, if that interface is still
    /// there.
    pub(super) fn resolve(
        &self,
        key: &str,
        before: Option<&EndpointSpec>,
    ) -> Result<EndpointSpec, EndpointError> {
        Ok(self.look(key, before, Addresses::Known)?.spec)
    }

    /// Like [`Self::resolve`]. Also gives everything else that the agent sees when it looks at the pod.
    pub(super) fn look(
        &self,
        key: &str,
        before: Option<&EndpointSpec>,
        addresses: Addresses,
    ) -> Result<Resolved, EndpointError> {
        let netns = self.check()?;
        let claims = Claims {
            named: self.addresses.clone(),
            by_itself: self.returns_by_name(),
            known: before
                .filter(|_| addresses == Addresses::Known)
                .map(|before| Known {
                    ifindex: before.interface.ifindex,
                    addresses: before.addresses.clone(),
                    link_locals: before.interface.link.pod.clone(),
                    mac: before.interface.mac,
                }),
        };
        let mut found = discover(&netns, &self.ifname, &claims)?;
        let is_elsewhere =
            |before: &&EndpointSpec| before.interface.ifindex != found.interface.ifindex;
        let elsewhere = before.filter(is_elsewhere);
        if let (Netns::Pid(_), Some(before)) = (&netns, elsewhere) {
            // Another process has the number now, but the namespace of the process that the document meant still
            // exists.
            return Ok(Resolved {
                spec: self.relabelled(before.clone())?,
                others: Vec::new(),
                present: Vec::new(),
            });
        }
        Ok(Resolved {
            others: std::mem::take(&mut found.others),
            present: std::mem::take(&mut found.present),
            spec: self.spec(key, &netns, found)?,
        })
    }

    /// The endpoint at an interface that was found.
    pub(super) fn spec(
        &self,
        key: &str,
        netns: &Netns,
        found: Discovered,
    ) -> Result<EndpointSpec, EndpointError> {
        Ok(EndpointSpec {
            key: key.to_owned(),
            labels: self.all_labels()?,
            interface: found.interface,
            addresses: found.addresses,
            netns: netns.to_string(),
            pod: self.pod.clone(),
            pod_uid: self.uid.clone(),
        })
    }

    /// An endpoint that cannot be found again, with the labels that this document gives it.
    pub(super) fn relabelled(&self, before: EndpointSpec) -> Result<EndpointSpec, EndpointError> {
        if self.check()?.to_string() != before.netns {
            return Ok(before);
        }
        Ok(EndpointSpec {
            labels: self.all_labels()?,
            pod: self.pod.clone(),
            pod_uid: self.uid.clone(),
            ..before
        })
    }

    /// The document's labels, and the labels that the agent derives from `named-ports` and `enable-policy`.
    fn all_labels(&self) -> Result<Vec<String>, EndpointError> {
        let mut made = NamedPorts::parse(&self.named_ports)?.labels();
        made.extend(self.enable_policy.map(PolicyMode::label));
        let made = made.iter().map(ToString::to_string);
        Ok(self.labels.iter().cloned().chain(made).collect())
    }
}

/// A label that an endpoint may be given.
pub(crate) fn own_label(text: &str) -> Result<Label, EndpointError> {
    let label = Label::parse(text)?;
    if is_label(&label) {
        return Err(EndpointError::MadeLabel(text.to_owned()));
    }
    if PolicyMode::is_label(&label) {
        return Err(EndpointError::ModeLabel(text.to_owned()));
    }
    if label.is_given_by_agent() {
        let source = label.source().to_owned();
        return Err(EndpointError::AgentLabel(text.to_owned(), source));
    }
    Ok(label)
}
