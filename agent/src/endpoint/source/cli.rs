//! Endpoints added by command, remembered across restarts of the agent.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::EndpointDocument;
use crate::{datapath::files::write_atomic, endpoint::discover::Netns};

/// Version of a file in which an endpoint has named ports; without any it is 1.
const VERSION: u32 = 2;
const PREFIX: &str = "cli/";

/// Key of an endpoint added by command.
pub(super) fn key(netns: &Netns, ifname: &str) -> String {
    format!("{PREFIX}{netns}/{ifname}")
}

pub(super) fn is_key(key: &str) -> bool {
    key.starts_with(PREFIX)
}

/// Trouble with the file.
#[derive(Debug, thiserror::Error)]
pub enum CliFileError {
    /// Reading or writing failed.
    #[error("{path}: {source}", path = .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is of a later release.
    #[error("{path} is of version {found}, this program reads up to {VERSION}; run the newer release, or move the file away", path = .path.display())]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
}

/// The file.
#[derive(Clone, Debug)]
pub struct CliFile {
    path: PathBuf,
}

#[derive(Serialize, Deserialize)]
struct Content {
    version: u32,
    endpoints: BTreeMap<String, EndpointDocument>,
}

impl CliFile {
    /// In the state directory.
    pub fn in_dir(state: &Path) -> Self {
        Self {
            path: state.join("added_endpoints.json"),
        }
    }

    /// Documents by key. A damaged file is set aside, said, and counts as empty.
    pub(super) fn read(&self) -> Result<BTreeMap<String, EndpointDocument>, CliFileError> {
        let failed = |source| CliFileError::Io {
            path: self.path.clone(),
            source,
        };
        let bytes = match fs::read(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
            other => other.map_err(failed)?,
        };
        match serde_json::from_slice::<Content>(&bytes) {
            Ok(content) if content.version > VERSION => Err(CliFileError::Newer {
                path: self.path.clone(),
                found: content.version,
            }),
            Ok(content) => Ok(content.endpoints),
            Err(error) => {
                let aside = self.path.with_extension("json.corrupt");
                tracing::error!(
                    path = %self.path.display(), aside = %aside.display(), %error,
                    "list of added endpoints is damaged and set aside; add them again"
                );
                fs::rename(&self.path, aside).map_err(failed)?;
                Ok(BTreeMap::new())
            }
        }
    }

    pub(super) fn write<'a>(
        &self,
        documents: impl Iterator<Item = (&'a String, &'a EndpointDocument)>,
    ) -> Result<(), CliFileError> {
        let endpoints: BTreeMap<_, _> = documents.map(|(k, d)| (k.clone(), d.clone())).collect();
        let named = endpoints.values().any(|d| !d.named_ports.is_empty());
        let content = Content {
            version: if named { VERSION } else { 1 },
            endpoints,
        };
        serde_json::to_vec_pretty(&content)
            .map_err(io::Error::from)
            .and_then(|text| write_atomic(&self.path, &text))
            .map_err(|source| CliFileError::Io {
                path: self.path.clone(),
                source,
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_damage_is_set_aside() {
        let dir = tempfile::tempdir().unwrap();
        let file = CliFile::in_dir(dir.path());
        assert!(file.read().unwrap().is_empty());
        let document = EndpointDocument {
            netns: Some("pod1".to_owned()),
            pid: None,
            ifname: "eth0".to_owned(),
            labels: vec!["k8s:app=web".to_owned()],
            named_ports: Vec::new(),
        };
        let key = key(&Netns::Name("pod1".to_owned()), "eth0");
        file.write([(&key, &document)].into_iter()).unwrap();
        assert_eq!(file.read().unwrap()[&key], document);
        let version = || {
            let text = fs::read(&file.path).unwrap();
            serde_json::from_slice::<Content>(&text).unwrap().version
        };
        assert_eq!(version(), 1);
        let named = EndpointDocument {
            named_ports: vec!["http=80/TCP".to_owned()],
            ..document
        };
        file.write([(&key, &named)].into_iter()).unwrap();
        assert_eq!(file.read().unwrap()[&key], named);
        assert_eq!(version(), 2, "an older release must not drop the names");
        fs::write(&file.path, "{\"version\":1,").unwrap();
        assert!(file.read().unwrap().is_empty());
        assert!(dir.path().join("added_endpoints.json.corrupt").exists());
    }
}
