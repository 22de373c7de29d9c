//! Documents of the directory and of the cluster, as one source.
//!
//! A document of the directory is refused if the cluster has an object of the same kind and name: that
//! object takes precedence. Nothing comes out until both sources have been listed.

use std::collections::BTreeMap;

use super::{
    PolicyChange,
    cluster::{Batch, ClusterDocuments, Read},
};
use crate::{
    policy::document::{PolicyDocument, PolicyError},
    source_event::SourceEvent,
};

/// The documents of the directory and of the cluster, as one source.
#[derive(Debug, Default)]
pub struct Merged {
    /// `None` = there is no cluster.
    cluster: Option<ClusterDocuments>,
    directory: BTreeMap<String, PolicyDocument>,
    directory_listed: bool,
    /// What is refused in the directory.
    directory_refused: Vec<PolicyError>,
    directory_uncertain: bool,
    /// Whether both sources have been listed.
    begun: bool,
    /// The refusals that were returned last.
    refused: Vec<PolicyError>,
    /// The uncertainty that was returned last.
    uncertain: bool,
}

impl Merged {
    /// Starts without a cluster, or with one that has not been listed.
    pub fn new(cluster: Option<ClusterDocuments>) -> Self {
        Self {
            cluster,
            ..Self::default()
        }
    }

    /// Notes that there is no directory: only the cluster has to be listed.
    pub fn without_directory(&mut self) {
        self.directory_listed = true;
    }

    /// The documents of the cluster, if there is one.
    pub fn cluster(&self) -> Option<&ClusterDocuments> {
        self.cluster.as_ref()
    }

    pub fn cluster_mut(&mut self) -> Option<&mut ClusterDocuments> {
        self.cluster.as_mut()
    }

    /// Takes changes of the directory. Returns the changes of both sources together, or the same
    /// changes if there is no cluster.
    pub fn directory(&mut self, changes: Vec<PolicyChange>) -> Vec<PolicyChange> {
        if self.cluster.is_none() {
            return changes;
        }
        let mut events = Vec::new();
        for change in changes {
            match change {
                PolicyChange::Document(SourceEvent::Init) => {}
                PolicyChange::Document(SourceEvent::InitDone) => self.directory_listed = true,
                PolicyChange::Document(SourceEvent::Apply(document)) => {
                    let key = document.key.clone();
                    if !self.is_of_cluster(&key) {
                        events.push(SourceEvent::Apply(document.clone()));
                    }
                    self.directory.insert(key, document);
                }
                PolicyChange::Document(SourceEvent::Delete(key)) => {
                    self.directory.remove(&key);
                    if !self.is_of_cluster(&key) {
                        events.push(SourceEvent::Delete(key));
                    }
                }
                PolicyChange::Rejected(errors) => self.directory_refused = errors,
                PolicyChange::Uncertain(uncertain) => self.directory_uncertain = uncertain,
            }
        }
        self.finish(events)
    }

    /// Takes what a watch of the cluster saw.
    pub fn watched(&mut self, batches: Vec<Batch>) -> Vec<PolicyChange> {
        let mut events = Vec::new();
        for batch in batches {
            let Some(cluster) = &mut self.cluster else {
                continue;
            };
            events.extend(cluster.take(batch));
        }
        self.of_cluster(events)
    }

    /// Takes a stored list of the cluster. Returns the kinds for which it is used, and the changes.
    pub fn stand_in(
        &mut self,
        documents: Vec<(String, Read)>,
    ) -> (Vec<&'static str>, Vec<PolicyChange>) {
        let Some(cluster) = &mut self.cluster else {
            return (Vec::new(), Vec::new());
        };
        let (kinds, events) = cluster.stand_in(documents);
        (kinds, self.of_cluster(events))
    }

    fn of_cluster(&mut self, events: Vec<SourceEvent<PolicyDocument>>) -> Vec<PolicyChange> {
        let events = events.into_iter().map(|event| match event {
            // The document of the directory, which was refused until now, is in force again.
            SourceEvent::Delete(key) => match self.directory.get(&key) {
                Some(document) => SourceEvent::Apply(document.clone()),
                None => SourceEvent::Delete(key),
            },
            other => other,
        });
        let events = events.collect();
        self.finish(events)
    }

    fn is_of_cluster(&self, key: &str) -> bool {
        let cluster = self.cluster.as_ref();
        cluster.is_some_and(|cluster| cluster.contains(key))
    }

    /// The changes of one step, with what is refused now.
    fn finish(&mut self, events: Vec<SourceEvent<PolicyDocument>>) -> Vec<PolicyChange> {
        let mut changes: Vec<PolicyChange> = Vec::new();
        let is_complete = self
            .cluster
            .as_ref()
            .is_none_or(ClusterDocuments::is_complete);
        let begins = !self.begun && self.directory_listed && is_complete;
        if begins {
            self.begun = true;
            changes.push(PolicyChange::Document(SourceEvent::Init));
            let of_cluster = self.cluster.as_mut().map(ClusterDocuments::begin);
            let own = self.directory.values();
            let own = own.filter(|document| !self.is_of_cluster(&document.key));
            let all = of_cluster.into_iter().flatten().chain(own.cloned());
            changes.extend(all.map(SourceEvent::Apply).map(PolicyChange::Document));
        } else if self.begun {
            changes.extend(events.into_iter().map(PolicyChange::Document));
        }
        changes.extend(self.refuse());
        let of_cluster = self
            .cluster
            .as_ref()
            .is_some_and(ClusterDocuments::is_uncertain);
        let uncertain = self.directory_uncertain || of_cluster;
        if self.begun && uncertain != self.uncertain {
            self.uncertain = uncertain;
            changes.push(PolicyChange::Uncertain(uncertain));
        }
        if begins {
            changes.push(PolicyChange::Document(SourceEvent::InitDone));
        }
        changes
    }

    /// All that is refused now; `None` if that did not change.
    fn refuse(&mut self) -> Option<PolicyChange> {
        let mut refused = self.directory_refused.clone();
        let doubled = self.directory.values();
        let doubled = doubled.filter(|document| self.is_of_cluster(&document.key));
        refused.extend(doubled.map(|document| PolicyError {
            source_name: document.source.clone(),
            key: Some(document.key.clone()),
            field: "metadata.name".to_owned(),
            reason: "the cluster has an object of this kind and name, which counts".to_owned(),
            remedy: "rename or remove one of the two".to_owned(),
        }));
        let of_cluster = self.cluster.iter().flat_map(ClusterDocuments::refused);
        refused.extend(of_cluster.cloned());
        if refused == self.refused {
            return None;
        }
        self.refused.clone_from(&refused);
        Some(PolicyChange::Rejected(refused))
    }
}

#[cfg(test)]
mod tests;
