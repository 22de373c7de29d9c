//! Endpoints added by command, remembered across restarts of the agent.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::EndpointDocument;
use crate::{datapath::files::write_atomic, endpoint::discover::Netns};

const VERSION: u32 = 1;
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
        let content = Content {
            version: VERSION,
            endpoints: documents.map(|(k, d)| (k.clone(), d.clone())).collect(),
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
        };
        let key = key(&Netns::Name("pod1".to_owned()), "eth0");
        file.write([(&key, &document)].into_iter()).unwrap();
        assert_eq!(file.read().unwrap()[&key], document);
        fs::write(&file.path, "{\"version\":1,").unwrap();
        assert!(file.read().unwrap().is_empty());
        assert!(dir.path().join("added_endpoints.json.corrupt").exists());
    }
}
