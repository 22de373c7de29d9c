//! The list of pods that the CNI plugin added, on disk: a restart must not open pods whose documents do not have
//! their addresses yet.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
};

use daemon::state_file::{self, StateFileError, write_json};
use netpol::{
    name::PortName,
    pod::{Pod, PodId},
    policy::Protocol,
};
use serde::{Deserialize, Serialize};

use super::attached::AttachedPod;

const VERSION: u32 = 1;

/// The file with the list.
#[derive(Clone, Debug)]
pub(super) struct AttachedFile {
    path: PathBuf,
}

/// The content of the file.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Content {
    version: u32,
    pods: Vec<Record>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Record {
    key: String,
    netns: Option<PathBuf>,
    namespace: String,
    name: String,
    uid: Option<String>,
    addresses: Vec<IpAddr>,
    labels: BTreeMap<String, String>,
    created: Option<u64>,
    ports: Vec<(String, String, u16)>,
}

impl Content {
    pub(super) fn of<'a>(pods: impl Iterator<Item = &'a AttachedPod>) -> Self {
        Self {
            version: VERSION,
            pods: pods.map(Record::of).collect(),
        }
    }
}

impl AttachedFile {
    /// `cni_pods.json` of this state directory.
    pub(super) fn in_dir(state: &Path) -> Self {
        Self {
            path: state.join("cni_pods.json"),
        }
    }

    /// Reads the list. A damaged list is set aside and added to `damaged`.
    pub(super) fn read(
        &self,
        damaged: &mut Vec<String>,
    ) -> Result<Vec<AttachedPod>, StateFileError> {
        match state_file::read_versioned::<Content>(&self.path, VERSION)? {
            state_file::Content::Found(content) => {
                Ok(content.pods.into_iter().map(Record::pod).collect())
            }
            state_file::Content::Absent => Ok(Vec::new()),
            state_file::Content::Damaged(damage) => {
                let why = damage.set_aside(", and was set aside as");
                let why = why.map_err(StateFileError::io(&self.path))?;
                let text = format!(
                    "{}: the list of pods that the CNI plugin added {why}; pods that started just before are open \
                     until the API has their addresses",
                    self.path.display()
                );
                tracing::error!("{text}");
                damaged.push(text);
                Ok(Vec::new())
            }
        }
    }

    /// Reads the list, and leaves a damaged one as it is.
    pub(super) fn look(&self) -> Result<Vec<AttachedPod>, StateFileError> {
        match state_file::read_versioned::<Content>(&self.path, VERSION)? {
            state_file::Content::Found(content) => {
                Ok(content.pods.into_iter().map(Record::pod).collect())
            }
            _ => Ok(Vec::new()),
        }
    }

    pub(super) fn write(&self, content: &Content) -> Result<(), StateFileError> {
        write_json(&self.path, content).map_err(StateFileError::io(&self.path))
    }

    /// Deletes the file: no pod is the plugin's any more.
    pub(super) fn remove(&self) -> Result<(), StateFileError> {
        let removed = daemon::lookup::present(std::fs::remove_file(&self.path));
        removed.map(drop).map_err(StateFileError::io(&self.path))
    }
}

impl Record {
    fn of(attached: &AttachedPod) -> Self {
        let pod = &attached.pod;
        let ports = pod.ports.iter().map(|((name, protocol), number)| {
            (name.to_string(), protocol.as_str().to_owned(), *number)
        });
        Self {
            key: attached.key.clone(),
            netns: attached.netns.clone(),
            namespace: pod.id.namespace.to_string(),
            name: pod.id.name.to_string(),
            uid: attached.uid.as_deref().map(str::to_owned),
            addresses: attached.addresses.clone(),
            labels: pod.labels.clone(),
            created: pod.created,
            ports: ports.collect(),
        }
    }

    fn pod(self) -> AttachedPod {
        let ports = self.ports.iter().filter_map(|(name, protocol, number)| {
            Some(((PortName::new(name)?, Protocol::parse(protocol)?), *number))
        });
        let pod = Pod {
            id: PodId::new(&self.namespace, &self.name),
            labels: self.labels,
            node: None,
            addresses: Vec::new(),
            created: self.created,
            ports: ports.collect(),
        };
        AttachedPod {
            key: self.key,
            netns: self.netns,
            uid: self.uid.map(Arc::from),
            addresses: self.addresses,
            pod: Arc::new(pod),
            since: None,
        }
    }
}
