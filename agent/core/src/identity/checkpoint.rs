//! The formats of the files that keep identity numbers across restarts.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde::{Deserialize, Serialize};
use shared_maps::IdentityId;

use super::scopes::is_remote_node;
use crate::labels::{Label, LabelSet};

/// Version of `endpoint_identities.json` that this program writes.
const VERSION: u64 = 1;
/// Version of the logic by which this program labels prefixes and endpoints. A number is found again
/// by its label set: sets of another logic would match other prefixes.
const LABEL_LOGIC: u64 = 1;

/// One identity, as both files have it.
#[derive(Serialize, Deserialize)]
struct Entry {
    id: u32,
    labels: LabelMap,
    /// Version of the logic that made the labels; absent = the first one, which is also Cilium's.
    #[serde(skip_serializing_if = "Option::is_none")]
    logic: Option<u64>,
}

/// Labels of a file, by key.
pub(crate) type LabelMap = BTreeMap<String, LabelEntry>;

/// A label of a file.
#[derive(Serialize, Deserialize)]
pub(crate) struct LabelEntry {
    key: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    value: String,
    source: String,
}

#[derive(Deserialize)]
struct EndpointDocument {
    version: u64,
    identities: Vec<Entry>,
}

/// What is wrong with a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// Not JSON, or of another shape.
    #[error("identity checkpoint: {0} (without the file, identities get new numbers)")]
    Json(#[from] serde_json::Error),
    /// Written by a newer version.
    #[error(
        "identity checkpoint has version {0}; this program reads up to {VERSION}: upgrade holdfast-agent"
    )]
    Newer(u64),
    /// Labelled by a newer version's logic.
    #[error(
        "identity checkpoint has label logic {0}; this program reads up to {LABEL_LOGIC}: upgrade holdfast-agent"
    )]
    NewerLogic(u64),
}

/// Renders the whole of `local_allocator_state.json` each time there are new identities, and
/// therefore keeps the texts of its entries.
#[derive(Debug, Default)]
pub struct IdentityFile {
    entries: HashMap<IdentityId, (LabelSet, String)>,
}

impl IdentityFile {
    /// The file with these identities: an array in Cilium's format, which has no
    /// version.
    pub fn render(&mut self, kept: &[(IdentityId, LabelSet)]) -> String {
        let mut text = String::from("[");
        for (id, labels) in kept {
            let known = self.entries.get(id).filter(|(known, _)| known == labels);
            if known.is_none() {
                self.entries
                    .insert(*id, (labels.clone(), spell_entry(*id, labels)));
            }
            if let Some((_, entry)) = self.entries.get(id) {
                text.reserve(entry.len() + 1);
                if text.len() > 1 {
                    text.push(',');
                }
                text.push_str(entry);
            }
        }
        text.push(']');
        if self.entries.len() > 2 * kept.len() + 64 {
            let kept: HashSet<IdentityId> = kept.iter().map(|(id, _)| *id).collect();
            self.entries.retain(|id, _| kept.contains(id));
        }
        text
    }
}

/// Renders `endpoint_identities.json` with these identities.
pub(crate) fn render_endpoints(kept: &[(IdentityId, LabelSet)]) -> String {
    let entries = kept.iter().map(|(id, labels)| spell_entry(*id, labels));
    let entries: Vec<String> = entries.collect();
    let identities = entries.join(",");
    format!("{{\"version\":{VERSION},\"identities\":[{identities}]}}")
}

fn spell_entry(id: IdentityId, labels: &LabelSet) -> String {
    serde_json::to_string(&entry(id, labels)).expect("maps with string keys render as JSON")
}

/// Reads `local_allocator_state.json`: the scopes 0x01 (outside the cluster), 0x02 (other nodes)
/// and 0x03 (Services). Numbers of other scopes are left out.
pub fn parse_local(text: &str) -> Result<Vec<(IdentityId, LabelSet)>, CheckpointError> {
    let entries: Vec<Entry> = serde_json::from_str(text)?;
    let is_known = |id: IdentityId| id.is_local_scope() || is_remote_node(id) || id.is_service();
    read(entries, is_known)
}

/// Reads `endpoint_identities.json`. Numbers of other scopes are left out.
pub(crate) fn parse_endpoints(text: &str) -> Result<Vec<(IdentityId, LabelSet)>, CheckpointError> {
    let document: EndpointDocument = serde_json::from_str(text)?;
    if document.version > VERSION {
        return Err(CheckpointError::Newer(document.version));
    }
    read(document.identities, IdentityId::is_endpoint)
}

/// A line of `endpoint_identities.added`, with its line break.
pub(crate) fn line(id: IdentityId, labels: &LabelSet) -> String {
    spell_entry(id, labels) + "\n"
}

/// Inverse of [`line`], without the line break. `None` for a number of another scope.
pub(crate) fn parse_line(line: &str) -> Result<Option<(IdentityId, LabelSet)>, CheckpointError> {
    let entry: Entry = serde_json::from_str(line)?;
    Ok(read(vec![entry], IdentityId::is_endpoint)?.pop())
}

fn entry(id: IdentityId, labels: &LabelSet) -> Entry {
    Entry {
        id: id.0,
        labels: spell(labels),
        logic: None,
    }
}

/// Labels as Cilium's files have them: an object by key.
pub(crate) fn spell(labels: &LabelSet) -> LabelMap {
    let mut map = LabelMap::new();
    for label in labels.iter() {
        let entry = LabelEntry {
            key: label.key().to_owned(),
            value: label.value().to_owned(),
            source: label.source().to_owned(),
        };
        // Two sources may use one key.
        let mut key = label.key().to_owned();
        if map.contains_key(&key) {
            key = format!("{}:{}", label.source(), label.key());
        }
        map.insert(key, entry);
    }
    map
}

/// Reads labels that [`spell`] wrote; the keys of the object are ignored.
pub(crate) fn unspell(map: &LabelMap) -> LabelSet {
    let labels = map
        .values()
        .map(|l| Label::new(&l.source, &l.key, &l.value));
    LabelSet::new(labels.collect())
}

/// Identity numbers with their label sets.
pub type Identities = Vec<(IdentityId, LabelSet)>;

fn read(
    entries: Vec<Entry>,
    keep: impl Fn(IdentityId) -> bool,
) -> Result<Identities, CheckpointError> {
    let kept = entries
        .into_iter()
        .filter(|entry| keep(IdentityId(entry.id)));
    kept.map(|entry| match entry.logic {
        Some(logic) if logic > LABEL_LOGIC => Err(CheckpointError::NewerLogic(logic)),
        _ => Ok((IdentityId(entry.id), unspell(&entry.labels))),
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_and_scopes() {
        let labels = LabelSet::parse(&["fqdn:*.cilium.io", "reserved:world-ipv4"]).unwrap();
        let pod = LabelSet::parse(&["k8s:app=web"]).unwrap();
        let local = vec![(IdentityId::LOCAL_MIN, labels)];
        let mut file = IdentityFile::default();
        assert_eq!(parse_local(&file.render(&local)).unwrap(), local);
        // Another label set has the number now.
        let local = vec![(IdentityId::LOCAL_MIN, pod.clone())];
        assert_eq!(parse_local(&file.render(&local)).unwrap(), local);
        assert_eq!(file.render(&[]), "[]");
        let pods = vec![(IdentityId(256), pod)];
        let text = render_endpoints(&pods);
        assert_eq!(parse_endpoints(&text).unwrap(), pods);
    }

    #[test]
    fn reads_ciliums_file() {
        let text = r#"[{"id":16777217,"labels":{"cidr:10.0.0.0/8":{"key":"10.0.0.0/8","source":"cidr"}}},
            {"id":33554433,"labels":{"remote-node":{"key":"remote-node","source":"reserved"}}},
            {"id":300,"labels":{"app":{"key":"app","value":"web","source":"k8s"}}}]"#;
        let read = parse_local(text).unwrap();
        assert_eq!(read.len(), 2);
        assert_eq!(read[1].0, IdentityId(33_554_433));
        assert_eq!(read[0].1.texts(), ["cidr:10.0.0.0/8"]);
    }

    #[test]
    fn labels_of_a_newer_logic_are_refused_by_name() {
        let text = r#"[{"id":16777217,"labels":{},"logic":2}]"#;
        let error = parse_local(text).unwrap_err();
        assert!(matches!(error, CheckpointError::NewerLogic(2)), "{error}");
    }

    #[test]
    fn refuses_newer_and_torn() {
        assert!(parse_endpoints(r#"{"version":2,"identities":[]}"#).is_err());
        assert!(parse_local("[{").is_err());
    }
}
