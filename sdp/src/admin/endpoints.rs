//! The endpoints that people may name: those with rules, and those with a file from the agent.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufReader, Read as _},
    net::IpAddr,
    path::Path,
};

use dns_policy::endpoint_name::{EndpointNames, NoEndpoint, called};
use serde::Deserialize;
use shared_maps::EndpointId;

use crate::{
    regular_file,
    resolve::{QueryClient, Resolver as _},
    restore,
    shared_state::Shared,
};

/// Names and addresses of an endpoint, from its file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Named {
    #[serde(rename = "HoldfastKey")]
    key: String,
    #[serde(rename = "ContainerNetnsPath")]
    place: String,
    #[serde(rename = "IfName")]
    interface: String,
    #[serde(rename = "K8sPodName")]
    pod: String,
    #[serde(rename = "K8sNamespace")]
    namespace: String,
    #[serde(rename = "IPv4")]
    ipv4: String,
    #[serde(rename = "IPv6")]
    ipv6: String,
}

impl Named {
    fn pod(&self) -> Option<String> {
        (!self.pod.is_empty()).then(|| format!("{}/{}", self.namespace, self.pod))
    }

    /// Its addresses.
    pub(super) fn addresses(&self) -> Vec<IpAddr> {
        let texts = [&self.ipv4, &self.ipv6].into_iter();
        texts.filter_map(|text| text.parse().ok()).collect()
    }
}

/// The endpoint to which `text` refers.
pub(super) fn endpoint(shared: &Shared, text: &str) -> Result<(EndpointId, Named), NoEndpoint> {
    let mut all = files(&shared.config.state_dir);
    for id in shared.policy.load().endpoints() {
        all.entry(id.0).or_default();
    }
    if let Ok(address) = text.parse()
        && let QueryClient::Endpoint { id, .. } = shared.maps.client(address)
    {
        return Ok((id, all.remove(&id.0).unwrap_or_default()));
    }
    one_of(&all, text)
}

fn one_of(all: &BTreeMap<u16, Named>, text: &str) -> Result<(EndpointId, Named), NoEndpoint> {
    let pods: Vec<Option<String>> = all.values().map(Named::pod).collect();
    let named = all.iter().zip(&pods).map(|((id, named), pod)| {
        let names = EndpointNames {
            id: *id,
            key: &named.key,
            pod: pod.as_deref(),
            place: &named.place,
            interface: &named.interface,
            addresses: named.addresses(),
        };
        ((*id, named), names)
    });
    match called(text, named).as_slice() {
        [] => Err(NoEndpoint::Unknown(text.to_owned())),
        [(id, named)] => Ok((EndpointId(*id), (*named).clone())),
        several => Err(NoEndpoint::Ambiguous {
            text: text.to_owned(),
            found: several
                .iter()
                .map(|(id, named)| format!("{id} ({})", named.key))
                .collect(),
        }),
    }
}

/// The endpoint of every file that can be read. `status` lists the other files.
fn files(state_dir: &Path) -> BTreeMap<u16, Named> {
    let directories = restore::directories(&state_dir.join("state")).unwrap_or_default();
    let named = directories.into_iter().filter_map(|(id, candidates)| {
        let mut named = candidates.iter().filter_map(|directory| {
            let path = directory.join(restore::FILE_NAME);
            let file = regular_file::open(&path, fs::OpenOptions::new().read(true)).ok()?;
            serde_json::from_reader(BufReader::new(file.take(restore::LARGEST))).ok()
        });
        Some((id, named.next()?))
    });
    named.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_called_by_what_its_file_says() {
        let dir = tempfile::tempdir().unwrap();
        let write = |id: u16, text: &str| {
            let directory = dir.path().join("state").join(id.to_string());
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join(restore::FILE_NAME), text).unwrap();
        };
        write(
            7,
            r#"{"ID": 7, "IPv4": "10.0.0.7", "IPv6": "", "K8sPodName": "web-1", "K8sNamespace": "shop",
                "HoldfastKey": "cni/abc/eth0", "DNSHistory": [{"fqdn": "a."}]}"#,
        );
        write(
            8,
            r#"{"ID": 8, "ContainerNetnsPath": "podman/db", "HoldfastKey": "dir/c1.yaml"}"#,
        );
        write(9, "{");
        let found = |text: &str| {
            let found = one_of(&files(dir.path()), text);
            found.map(|(id, _)| id.0).map_err(|error| error.to_string())
        };
        for (text, id) in [
            ("7", 7),
            ("shop/web-1", 7),
            ("web-1", 7),
            ("10.0.0.7", 7),
            ("cni/abc/eth0", 7),
            ("c1", 8),
            ("podman/db", 8),
            ("db", 8),
        ] {
            assert_eq!(found(text), Ok(id), "{text}");
        }
        for text in ["9", "shop/db", "10.0.0.8"] {
            let error = found(text).unwrap_err();
            assert!(
                error.contains(text) && error.contains("endpoint list"),
                "{error}"
            );
        }
    }
}
