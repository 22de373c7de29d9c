//! Endpoints added by command. Their list survives restarts of the agent.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use agent_core::{
    endpoint::spec::EndpointSpec,
    labels::Label,
    named_port::{NamedPorts, is_label},
    policy::mode::PolicyMode,
};
use daemon::state_file::{self, StateFileError, write_json};
use serde::{Deserialize, Serialize};

use super::EndpointDocument;
use crate::endpoint::discover::Netns;

const VERSION: u32 = 4;
const PREFIX: &str = "cli/";

/// Key of an endpoint added by command.
pub(super) fn key(netns: &Netns, ifname: &str) -> String {
    format!("{PREFIX}{netns}/{ifname}")
}

pub(super) fn is_key(key: &str) -> bool {
    key.starts_with(PREFIX)
}

/// Documents for restored endpoints that were added by command, when their list is lost.
pub(super) fn recovered(restored: &[EndpointSpec]) -> BTreeMap<String, EndpointDocument> {
    let documents = restored.iter().filter_map(|spec| {
        let (netns, ifname) = spec.key.strip_prefix(PREFIX)?.rsplit_once('/')?;
        let pid = netns.strip_prefix("pid-").and_then(|pid| pid.parse().ok());
        let pid = pid.filter(|_| !Netns::Name(netns.to_owned()).path().exists());
        let netns = pid.is_none().then(|| netns.to_owned());
        let document = document_of(spec, netns, pid, ifname);
        Some((spec.key.clone(), document))
    });
    documents.collect()
}

/// A document that gives an endpoint the labels that it already has.
pub(super) fn document_of(
    spec: &EndpointSpec,
    netns: Option<String>,
    pid: Option<u32>,
    ifname: &str,
) -> EndpointDocument {
    let labels = spec.labels.iter();
    let labels = labels.filter_map(|text| Label::parse(text).ok());
    let labels = agent_core::labels::LabelSet::new(labels.collect());
    let own = labels.iter();
    let own = own.filter(|label| !is_label(label) && !PolicyMode::is_label(label));
    EndpointDocument {
        netns,
        pid,
        container: None,
        interface: None,
        bridge: None,
        process: None,
        ifname: ifname.to_owned(),
        labels: own.map(ToString::to_string).collect(),
        // The endpoint keeps its labels of the last run, until it is added again.
        pod: None,
        named_ports: NamedPorts::of(&labels).texts(),
        addresses: Vec::new(),
        enable_policy: PolicyMode::of(&labels),
        uid: None,
        taken_in: None,
    }
}

/// The list of endpoints added by command: `added_endpoints.json` in the state directory.
#[derive(Clone, Debug)]
pub struct CliFile {
    path: PathBuf,
    store: Option<PathBuf>,
}

#[derive(Serialize, Deserialize)]
struct Content {
    version: u32,
    endpoints: BTreeMap<String, EndpointDocument>,
}

impl CliFile {
    /// Uses the file `added_endpoints.json` of this state directory.
    pub fn in_dir(state: &Path) -> Self {
        Self {
            path: state.join("added_endpoints.json"),
            store: None,
        }
    }

    /// Also stores each endpoint in a directory that a boot does not empty.
    pub fn stored_in(self, store: &Path) -> Self {
        Self {
            store: Some(store.to_owned()),
            ..self
        }
    }

    /// The directory that a boot does not empty.
    pub(super) fn store(&self) -> Option<&Path> {
        self.store.as_deref()
    }

    /// State directory that has the file.
    pub(super) fn dir(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("."))
    }

    /// Documents by key, of endpoints that were added and not removed. If the list is lost, the documents in `stored`
    /// take its place. An endpoint of the last run on this boot that is not stored is made again from `restored`. If
    /// only the list was lost, and not the whole state directory, the loss is added to `damaged`.
    pub(super) fn read_or_recover(
        &self,
        restored: &[EndpointSpec],
        stored: BTreeMap<String, EndpointDocument>,
        damaged: &mut Vec<String>,
    ) -> Result<BTreeMap<String, EndpointDocument>, StateFileError> {
        let of_last_run = restored.iter().filter(|spec| is_key(&spec.key)).count();
        let why = match self.read()? {
            state_file::Content::Found(content) => return Ok(content.endpoints),
            state_file::Content::Damaged(damage) => {
                let set_aside = damage.set_aside(", and was set aside as");
                Some(set_aside.map_err(StateFileError::io(&self.path))?)
            }
            // If the last endpoint had been removed, there would be a file with an empty list.
            state_file::Content::Absent if of_last_run > 0 => Some("is missing".to_owned()),
            state_file::Content::Absent if stored.is_empty() => return Ok(stored),
            // No endpoint was added, or the file is lost.
            state_file::Content::Absent => None,
        };
        let from_store = stored.len();
        let mut documents = recovered(restored);
        documents.retain(|key, _| !stored.contains_key(key));
        let made = documents.len();
        documents.extend(stored);
        if let Some(why) = why {
            let text = format!(
                "{}: the list of added endpoints {why}; {from_store} endpoints are read from \
                 --endpoint-store, and {made} of the last run are added again with the labels that they \
                 have: remove those that are not wanted (`endpoint remove`)",
                self.path.display(),
            );
            tracing::error!("{text}");
            damaged.push(text);
        } else {
            tracing::info!(
                endpoints = from_store,
                "the state directory has no list of added endpoints; they are read from --endpoint-store"
            );
        }
        if let Err(error) = self.write(documents.iter()) {
            tracing::error!(%error, "the list of added endpoints is not on disk");
            damaged.push(error.to_string());
        }
        Ok(documents)
    }

    fn read(&self) -> Result<state_file::Content<Content>, StateFileError> {
        state_file::read_versioned(&self.path, VERSION)
    }

    pub(super) fn write<'a>(
        &self,
        documents: impl Iterator<Item = (&'a String, &'a EndpointDocument)>,
    ) -> Result<(), StateFileError> {
        let endpoints: BTreeMap<_, _> = documents.map(|(k, d)| (k.clone(), d.clone())).collect();
        let content = Content {
            version: VERSION,
            endpoints,
        };
        write_json(&self.path, &content).map_err(StateFileError::io(&self.path))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use agent_core::endpoint::spec::PodInterface;

    use super::*;

    fn documents(file: &CliFile) -> BTreeMap<String, EndpointDocument> {
        let read = file.read_or_recover(&[], BTreeMap::new(), &mut Vec::new());
        read.unwrap()
    }

    #[test]
    fn written_files_are_read_back_and_damaged_ones_set_aside() {
        let dir = tempfile::tempdir().unwrap();
        let file = CliFile::in_dir(dir.path());
        assert!(matches!(file.read(), Ok(state_file::Content::Absent)));
        let document = EndpointDocument {
            netns: Some("pod1".to_owned()),
            ifname: "eth0".to_owned(),
            labels: vec!["k8s:app=web".to_owned()],
            ..EndpointDocument::default()
        };
        let named = EndpointDocument {
            named_ports: vec!["http=80/TCP".to_owned()],
            ..document.clone()
        };
        let addressed = EndpointDocument {
            addresses: vec!["10.0.0.7".parse().unwrap()],
            ..document.clone()
        };
        let always = EndpointDocument {
            enable_policy: Some(PolicyMode::Always),
            ..document.clone()
        };
        let of_pod = EndpointDocument {
            labels: Vec::new(),
            pod: Some("shop/web-0".to_owned()),
            ..document.clone()
        };
        let key = key(&Netns::Name("pod1".to_owned()), "eth0");
        for document in [document, named, addressed, always, of_pod] {
            file.write([(&key, &document)].into_iter()).unwrap();
            assert_eq!(documents(&file)[&key], document);
        }
        fs::write(&file.path, "{\"version\":1,").unwrap();
        assert_eq!(documents(&file), BTreeMap::new());
        assert!(dir.path().join("added_endpoints.json.corrupt").exists());
    }

    #[test]
    fn a_lost_list_is_made_again_from_the_endpoints_of_the_last_run() {
        let spec = |key: &str| EndpointSpec {
            key: key.to_owned(),
            labels: vec![
                "k8s:app=web".to_owned(),
                "gen:io.cilium.k8s.named-ports=http.TCP.80".to_owned(),
                PolicyMode::Always.label().to_string(),
            ],
            interface: PodInterface {
                ifindex: 7,
                ifname: "lxc7".to_owned(),
                mac: [0; 6],
                node_mac: [0; 6],
                on_bridge: false,
                link: Default::default(),
            },
            addresses: vec!["10.0.0.7".parse().unwrap()],
            netns: "pod1".to_owned(),
            pod: None,
            pod_uid: None,
        };
        let specs = ["cli/pod1/eth0", "cli/pid-77/eth1", "dir/a.yaml"].map(spec);
        // A lost list is made again; a list without endpoints does not count as lost.
        let dir = tempfile::tempdir().unwrap();
        let file = CliFile::in_dir(dir.path());
        for (is_lost, found) in [(true, 2), (false, 2)] {
            let mut damaged = Vec::new();
            let documents = file
                .read_or_recover(&specs, BTreeMap::new(), &mut damaged)
                .unwrap();
            assert_eq!((documents.len(), !damaged.is_empty()), (found, is_lost));
        }
        file.write(std::iter::empty()).unwrap();
        let mut damaged = Vec::new();
        assert!(
            file.read_or_recover(&specs, BTreeMap::new(), &mut damaged)
                .unwrap()
                .is_empty()
        );
        fs::remove_file(dir.path().join("added_endpoints.json")).unwrap();
        let never = file
            .read_or_recover(&specs[2..], BTreeMap::new(), &mut damaged)
            .unwrap();
        assert!(never.is_empty() && damaged.is_empty(), "{damaged:?}");
        let documents = recovered(&specs);
        let keys: Vec<&String> = documents.keys().collect();
        assert_eq!(keys, ["cli/pid-77/eth1", "cli/pod1/eth0"]);
        let process = &documents["cli/pid-77/eth1"];
        assert_eq!((process.pid, &process.netns), (Some(77), &None));
        let named = &documents["cli/pod1/eth0"];
        assert_eq!(named.netns.as_deref(), Some("pod1"));
        assert_eq!(named.labels, ["k8s:app=web"]);
        assert_eq!(named.named_ports, ["http=80/TCP"]);
        assert_eq!(named.enable_policy, Some(PolicyMode::Always));
        for (key, document) in &documents {
            let netns = document.check().unwrap();
            assert_eq!(super::key(&netns, &document.ifname), *key);
        }
    }
}
