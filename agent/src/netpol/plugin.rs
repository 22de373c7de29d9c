//! Requests of the CNI plugin: an ADD is answered when the kernel has the pod's chains.

use std::{collections::BTreeSet, fs, path::Path, sync::Arc, time::Duration};

use daemon::{lookup::Lookup, state_file::StateFileError};
use netpol::pod::{Pod, PodId};
use parking_lot::Mutex;
use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;

use super::{
    attached::AttachedPod,
    attached_file::{AttachedFile, Content},
    state::{Shared, State},
};
use crate::{
    cni::enforcement::{Enforcement, PodStanding},
    endpoint::source::{
        EndpointError,
        cni::{AttachError, Attachment, AttachmentId},
    },
    runner::CoreAway,
};

/// Pause between two looks for pods that the runtime removed without a request.
const LOOK: Duration = Duration::from_secs(10);

/// The pods of the plugin. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct PluginPods {
    shared: Arc<Shared>,
    /// Locked while the file is written, so that writes follow each other.
    file: Arc<Mutex<AttachedFile>>,
}

impl PluginPods {
    /// Takes the pods of earlier runs from the file.
    ///
    /// # Errors
    /// The file can be neither read nor set aside.
    pub(super) fn open(
        shared: Arc<Shared>,
        file: AttachedFile,
        damaged: &mut Vec<String>,
    ) -> Result<Self, StateFileError> {
        let pods = file.read(damaged)?;
        shared.state.lock().take_in(pods);
        Ok(Self {
            shared,
            file: Arc::new(Mutex::new(file)),
        })
    }

    /// Removes pods whose namespace is gone: the runtime removed them, and its request did not arrive.
    pub(super) async fn forget_ended(self, stop: CancellationToken) {
        loop {
            let pods = self.clone();
            let forgotten = spawn_blocking(move || pods.remove_ended()).await;
            if let Ok(Err(error)) = forgotten {
                tracing::warn!(%error, "pods that have ended stay in the list");
            }
            let pause = tokio::time::sleep(LOOK);
            if stop.run_until_cancelled(pause).await.is_none() {
                return;
            }
        }
    }

    fn remove_ended(&self) -> Result<usize, EndpointError> {
        let pods: Vec<AttachedPod> = self.shared.state.lock().attached.pods().cloned().collect();
        let is_gone = |pod: &AttachedPod| pod.netns.as_deref().is_some_and(is_gone);
        let gone = pods.into_iter().filter(is_gone);
        let gone: BTreeSet<String> = gone.map(|pod| pod.key).collect();
        self.remove(|pod| gone.contains(&pod.key))
    }

    fn remove(&self, is_gone: impl Fn(&AttachedPod) -> bool) -> Result<usize, EndpointError> {
        let file = self.file.lock();
        let (gone, left): (Vec<AttachedPod>, Vec<_>) = {
            let state = self.shared.state.lock();
            state.attached.pods().cloned().partition(is_gone)
        };
        if gone.is_empty() {
            return Ok(0);
        }
        file.write(&Content::of(left.iter()))?;
        let count = gone.len();
        let gone: BTreeSet<String> = gone.into_iter().map(|pod| pod.key).collect();
        self.shared.state.lock().detach(&gone);
        self.shared.changed.notify_one();
        Ok(count)
    }
}

impl Enforcement for PluginPods {
    fn attach(&self, attachment: Attachment) -> Result<(), AttachError> {
        let key = attachment.id.key();
        let file = self.file.lock();
        let content = {
            let mut state = self.shared.state.lock();
            state.attach(attachment)?;
            Content::of(state.attached.pods())
        };
        if let Err(error) = file.write(&content) {
            self.shared.state.lock().detach(&BTreeSet::from([key]));
            return Err(EndpointError::from(error).into());
        }
        self.shared.changed.notify_one();
        Ok(())
    }

    fn key_of(&self, id: &AttachmentId, _netns: Option<&Path>) -> String {
        id.key()
    }

    async fn standing(&self, key: &str) -> Result<PodStanding, CoreAway> {
        Ok(self.shared.state.lock().standing(key))
    }

    fn detach(&self, id: &AttachmentId) -> Result<usize, EndpointError> {
        let key = id.key();
        self.remove(|pod| pod.key == key)
    }

    fn end(&self, id: &AttachmentId, _netns: &Path) -> Result<usize, EndpointError> {
        self.detach(id)
    }

    fn detach_others(&self, valid: &BTreeSet<AttachmentId>) -> Result<usize, EndpointError> {
        let valid: BTreeSet<String> = valid.iter().map(AttachmentId::key).collect();
        self.remove(|pod| !valid.contains(&pod.key))
    }

    async fn settle(&self) -> Result<(), CoreAway> {
        Ok(())
    }
}

/// Whether a namespace that was seen is certainly gone. False if this process does not see its directory.
fn is_gone(netns: &Path) -> bool {
    netns.parent().is_some_and(is_seen) && Lookup::of_path(fs::metadata(netns)).is_gone()
}

fn is_seen(path: &Path) -> bool {
    Lookup::of_path(fs::metadata(path)).found().is_some()
}

impl State {
    /// Takes pods that the plugin added in an earlier run.
    pub(super) fn take_in(&mut self, pods: Vec<AttachedPod>) {
        for pod in pods {
            let effects = self.attached.attach(pod, Vec::new());
            self.carry_out(effects);
        }
    }

    fn attach(&mut self, attachment: Attachment) -> Result<(), AttachError> {
        if !self.is_listed() {
            return Err(AttachError::Starting);
        }
        if let Some(why) = self.waits() {
            return Err(AttachError::Awaited(format!(
                "the table of the last run stays: {why}"
            )));
        }
        if attachment.addresses.is_empty() {
            return Err(AttachError::NoAddress(attachment.id.ifname().to_owned()));
        }
        let id = PodId::parse(&attachment.pod)
            .ok_or_else(|| EndpointError::Pod(attachment.pod.clone()))?;
        let uid = attachment.uid.as_deref().map(Arc::from);
        let elsewhere = self.pipeline.cache().pod(&id);
        let known = self.attached.document(&id, uid.as_ref(), elsewhere);
        let pod = known.map_err(|error| AttachError::Awaited(error.to_string()))?;
        let attached = AttachedPod {
            key: attachment.id.key(),
            netns: is_seen(&attachment.netns).then_some(attachment.netns),
            uid,
            addresses: attachment.addresses,
            pod,
            since: None,
        };
        self.ways.forget(&attached.addresses);
        let others = self.with_addresses_of(&attached);
        if !others.is_empty() {
            self.freed.extend(&attached.addresses);
        }
        let effects = self.attached.attach(attached, others);
        self.carry_out(effects);
        Ok(())
    }

    /// Other pods that have one of its addresses, by their documents.
    fn with_addresses_of(&self, attached: &AttachedPod) -> Vec<Arc<Pod>> {
        let shares = |pod: &&Arc<Pod>| {
            let mut own = pod.addresses.iter();
            pod.id != attached.pod.id && own.any(|address| attached.addresses.contains(address))
        };
        self.pipeline
            .cache()
            .pods()
            .filter(shares)
            .cloned()
            .collect()
    }

    fn detach(&mut self, keys: &BTreeSet<String>) {
        let (gone, effects) = self.attached.detach(|pod| keys.contains(&pod.key));
        self.freed
            .extend(gone.iter().flat_map(|pod| pod.addresses.iter()));
        self.carry_out(effects);
    }

    /// How far the pod of an attachment is under policy.
    fn standing(&mut self, key: &str) -> PodStanding {
        let (waits, generation) = (self.waits(), self.generation);
        let Some(pod) = self.attached.by_key(key) else {
            return PodStanding::Absent;
        };
        if let Some(why) = waits {
            return PodStanding::Waiting(why.to_owned());
        }
        if let Some(problem) = self.surroundings.problems.first() {
            return PodStanding::Waiting(problem.clone());
        }
        if pod
            .addresses
            .iter()
            .any(|address| self.freed.contains(address))
        {
            let why = "tracked connections of an earlier pod with its address are not deleted yet";
            return PodStanding::Incomplete(Some(why.to_owned()));
        }
        let failing = PodStanding::Incomplete(self.force.failing.clone());
        let policies = self.pipeline.pods().get(&pod.pod.id);
        let has = |address| policies.is_some_and(|pod| pod.addresses.contains(address));
        if !pod.addresses.iter().all(has) {
            return failing;
        }
        let mut obstacles = pod.addresses.iter();
        if let Some(why) = obstacles.find_map(|address| self.ways.obstacle(*address)) {
            return PodStanding::Incomplete(Some(why));
        }
        match self.force.accepted >= *pod.since.get_or_insert(generation) {
            true => PodStanding::InForce(None),
            false => failing,
        }
    }
}

#[cfg(test)]
mod tests;
