//! A datapath in memory, for tests and benchmarks: the same maps, no kernel.

use std::collections::{BTreeMap, HashMap};

use shared_maps::{
    EndpointId,
    ipcache::{IpcacheKey, IpcacheValue},
    lxc::{LxcKey, LxcValue},
    policy::{PolicyKey, PolicyValue},
    user::Record,
};

use super::{
    map_query::{BATCH, MapEntries, MapQuery, ProgramFault},
    plan::{Datapath, Step, StepError},
};
use crate::datapath::attachment::Attachment;
#[cfg(any(test, feature = "testing"))]
use crate::{identity::endpoint_checkpoint, labels::LabelSet};
use crate::{identity::endpoint_checkpoint::EndpointWrite, ipcache::table::prefix_of};

/// Maps and files in memory, with failures on demand.
#[derive(Debug, Default, Clone)]
pub struct MemoryDatapath {
    pub ipcache: HashMap<IpcacheKey, IpcacheValue>,
    /// Entries of `cilium_lxc`: addresses of local endpoints and of the node.
    pub lxc: HashMap<LxcKey, LxcValue>,
    pub policy: BTreeMap<EndpointId, BTreeMap<PolicyKey, PolicyValue>>,
    /// Text of each endpoint's `ep_config.json`.
    pub files: BTreeMap<EndpointId, String>,
    pub attached: BTreeMap<EndpointId, Attachment>,
    /// Text of `local_allocator_state.json`; `None` = not written.
    pub checkpoint: Option<String>,
    /// Text of `endpoint_identities.json`; `None` = not written.
    pub endpoint_checkpoint: Option<String>,
    /// Text of `endpoint_identities.added`; `None` = not written.
    pub added_endpoint_identities: Option<String>,
    /// Text of `cleaned_names.json`; `None` = not written.
    pub cleaned: Option<String>,
    /// Every step that was carried out, in order.
    pub log: Vec<Step>,
    /// Whether steps are not kept in `log`.
    pub forgetful: bool,
    /// Fails the steps for which this is true.
    pub fail: Option<fn(&Step) -> bool>,
}

#[cfg(any(test, feature = "testing"))]
impl MemoryDatapath {
    /// What a restart reads from the two files of endpoint identities.
    pub fn endpoint_identities(&self) -> Vec<(shared_maps::IdentityId, LabelSet)> {
        let Some(whole) = &self.endpoint_checkpoint else {
            return Vec::new();
        };
        let added = self.added_endpoint_identities.as_deref();
        endpoint_checkpoint::parse(whole, added).expect("the agent wrote both")
    }
}

impl Datapath for MemoryDatapath {
    fn apply(&mut self, step: &Step) -> Result<(), StepError> {
        if self.fail.is_some_and(|fail| fail(step)) {
            return Err(StepError::Map(shared_maps::user::MapError::Full {
                map: "memory".to_owned(),
            }));
        }
        if !self.forgetful {
            self.log.push(step.clone());
        }
        match step {
            Step::Checkpoint(_)
            | Step::CheckpointEndpoints(_)
            | Step::KeepCleaned(_)
            | Step::WriteEndpoint(..)
            | Step::KeepNames(..)
            | Step::RemoveEndpoint(_) => self.write_file(step),
            Step::CreatePolicyMap(id) => {
                self.policy.entry(*id).or_default();
            }
            Step::RemovePolicyMap(id) => {
                self.policy.remove(id);
            }
            Step::SetPolicy(id, key, value) => {
                self.policy_map(*id)?.insert(*key, *value);
            }
            Step::UnsetPolicy(id, key) => {
                self.policy_map(*id)?.remove(key);
            }
            Step::SetLxc(key, value) => {
                self.lxc.insert(*key, *value);
            }
            Step::UnsetLxc(key) => {
                self.lxc.remove(key);
            }
            Step::SetIpcache(key, value) => {
                self.ipcache.insert(*key, *value);
            }
            Step::UnsetIpcache(key) => {
                self.ipcache.remove(key);
            }
            Step::Attach(attachment) => {
                self.attached
                    .insert(attachment.endpoint, attachment.clone());
            }
            Step::Detach(id) => {
                self.attached.remove(id);
            }
        }
        Ok(())
    }

    fn read_entries(&mut self, query: &MapQuery) -> Result<MapEntries, StepError> {
        let policy = |id: &EndpointId| self.policy.get(id).ok_or_else(|| no_map(*id));
        Ok(match query {
            MapQuery::IpcacheAfter(key) => {
                MapEntries::Ipcache(after(self.ipcache.iter(), key.as_ref()))
            }
            MapQuery::IpcacheAt(keys) => {
                let find = |key: &IpcacheKey| (*key, self.covering(key));
                MapEntries::Ipcache(keys.iter().map(find).collect())
            }
            MapQuery::PolicyAfter(id, key) => {
                MapEntries::Policy(*id, after(policy(id)?.iter(), key.as_ref()))
            }
            MapQuery::PolicyAt(id, keys) => {
                let map = policy(id)?;
                let find = |key: &PolicyKey| (*key, map.get(key).copied());
                MapEntries::Policy(*id, keys.iter().map(find).collect())
            }
            MapQuery::LxcAfter(key) => MapEntries::Lxc(after(self.lxc.iter(), key.as_ref())),
            MapQuery::LxcAt(keys) => {
                let find = |key: &LxcKey| (*key, self.lxc.get(key).copied());
                MapEntries::Lxc(keys.iter().map(find).collect())
            }
            MapQuery::Programs(wanted) => {
                let faults = |wanted: &Attachment| match self.attached.get(&wanted.endpoint) {
                    Some(found) if found == wanted => Vec::new(),
                    _ => vec![ProgramFault::Detached {
                        program: "from_pod",
                    }],
                };
                MapEntries::Programs(wanted.iter().map(|a| (a.endpoint, faults(a))).collect())
            }
            MapQuery::Nothing => MapEntries::Nothing,
        })
    }
}

impl MemoryDatapath {
    /// Carries out a step that is about a file of the state directory.
    fn write_file(&mut self, step: &Step) {
        match step {
            Step::Checkpoint(text) => self.checkpoint = Some(text.clone()),
            Step::CheckpointEndpoints(EndpointWrite::Whole(text)) => {
                self.endpoint_checkpoint = Some(text.clone());
            }
            Step::CheckpointEndpoints(EndpointWrite::FirstAdded(text)) => {
                self.added_endpoint_identities = Some(text.clone());
            }
            Step::CheckpointEndpoints(EndpointWrite::Added(text)) => {
                let added = self.added_endpoint_identities.get_or_insert_default();
                added.push_str(text);
            }
            Step::KeepCleaned(text) => self.cleaned = Some(text.clone()),
            Step::WriteEndpoint(id, text) => {
                self.files.insert(*id, text.clone());
            }
            Step::KeepNames(id, _, text) => {
                self.files.insert(*id, text.make());
            }
            Step::RemoveEndpoint(id) => {
                self.files.remove(id);
            }
            _ => {}
        }
    }

    fn policy_map(
        &mut self,
        id: EndpointId,
    ) -> Result<&mut BTreeMap<PolicyKey, PolicyValue>, StepError> {
        self.policy.get_mut(&id).ok_or_else(|| no_map(id))
    }

    /// The entry of the longest prefix that covers the prefix of the key.
    fn covering(&self, key: &IpcacheKey) -> Option<IpcacheValue> {
        let wanted = prefix_of(key)?;
        let covers = |(key, value): (&IpcacheKey, &IpcacheValue)| {
            let prefix = prefix_of(key).filter(|prefix| prefix.contains(&wanted))?;
            Some((prefix.prefix_len(), *value))
        };
        let found = self.ipcache.iter().filter_map(covers);
        found.max_by_key(|(len, _)| *len).map(|(_, value)| value)
    }
}

fn after<'a, K: Record, V: Copy + 'a>(
    entries: impl Iterator<Item = (&'a K, &'a V)>,
    key: Option<&K>,
) -> Vec<(K, Option<V>)> {
    let later = entries.filter(|(k, _)| key.is_none_or(|key| k.as_bytes() > key.as_bytes()));
    let mut found: Vec<_> = later.map(|(k, v)| (*k, Some(*v))).collect();
    found.sort_unstable_by(|(one, _), (other, _)| one.as_bytes().cmp(other.as_bytes()));
    found.truncate(BATCH);
    found
}

fn no_map(endpoint: EndpointId) -> StepError {
    StepError::Program {
        endpoint,
        reason: "its policy map was not created".to_owned(),
    }
}
