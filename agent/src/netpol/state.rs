//! The objects, the policies that follow from them, and how far they are in force.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::{Duration, Instant},
};

use agent_core::policy::document::{PolicyDocument, PolicyError};
use netpol::{
    cache::{Key, Object},
    pipeline::{Commit, Pipeline},
    render::{nft::TooLarge, ruleset::Table},
};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::{
    attached::{Attached, Effect},
    exports::Exports,
    objects,
    owners::Pods,
    surroundings::Surroundings,
    unenforced::Unenforced,
    ways::Ways,
};

/// What the tasks of `netpol run` share. No lock is held across a write to the kernel.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) state: Mutex<State>,
    /// Notified when the state may have changed.
    pub(super) changed: Notify,
    /// Notified when a commit may have changed the exports.
    pub(super) exports_due: Notify,
}

impl Shared {
    /// The state before anything is known. `node` is the name of this node.
    pub(super) fn new(node: &str) -> Self {
        Self {
            state: Mutex::new(State::new(node)),
            changed: Notify::new(),
            exports_due: Notify::new(),
        }
    }
}

/// The state of this node's policies.
#[derive(Debug)]
pub(super) struct State {
    /// Name of this node.
    pub(super) node: String,
    pub(super) pipeline: Pipeline,
    /// Pods of the CNI plugin.
    pub(super) attached: Attached,
    /// Addresses that the runtime took from pods, until their tracked connections are deleted.
    pub(super) freed: BTreeSet<IpAddr>,
    /// Number of changes so far.
    pub(super) generation: u64,
    pub(super) unenforced: Unenforced,
    /// Refused documents.
    pub(super) refused: Vec<PolicyError>,
    /// Whether every source has been listed once.
    is_listed: bool,
    /// Whether the first listing lacks documents of any kind.
    has_gaps: bool,
    /// Whether the first listing lacks a NetworkPolicy or a Pod: one is refused, and has no known good version.
    is_uncertain: bool,
    pub(super) warnings: BTreeMap<String, Vec<String>>,
    pub(super) ways: Ways,
    pub(super) surroundings: Surroundings,
    /// Why the kernel has no tables of family `bridge`.
    pub(super) lacks_frames: Option<String>,
    pub(super) force: Force,
    /// Why the pods of the addresses are not stored.
    pub(super) unstored: Option<String>,
    /// Files for a VPP vswitch; `None` without `--vpp-export-dir`.
    pub(super) exports: Option<Exports>,
    /// The number of the state that was last due to be exported.
    exported: Option<u64>,
    /// When policies that are set aside are considered again even if no policy changes.
    reconsidered: Instant,
}

/// Least time between two such considerations, and the same as a multiple of the time that one takes.
const RECONSIDERED: (Duration, u32) = (Duration::from_secs(10), 20);

/// An enforcer that has not run for this long hangs: a change of a million elements takes a second.
const ALIVE: Duration = Duration::from_secs(60);

/// How far the policies are in force.
#[derive(Debug)]
pub(super) struct Force {
    /// Whether the kernel has had a table of this run.
    pub(super) is_begun: bool,
    /// The last change, and how many elements of sets and maps it had.
    pub(super) changed: Option<(Instant, usize)>,
    /// Why the last change is not in force.
    pub(super) failing: Option<String>,
    /// Number of changes in the table that the kernel accepted last.
    pub(super) accepted: u64,
    /// When the enforcer last ran.
    pub(super) beat: Instant,
}

impl Force {
    /// Whether the enforcer runs.
    pub(super) fn is_alive(&self) -> bool {
        self.beat.elapsed() < ALIVE
    }
}

impl State {
    /// The state before anything is known. `node` is the name of this node.
    pub(super) fn new(node: &str) -> Self {
        Self {
            node: node.to_owned(),
            pipeline: Pipeline::new(node, netpol::render::nft::Limits::default()),
            attached: Attached::new(node),
            freed: BTreeSet::new(),
            generation: 0,
            unenforced: Unenforced::default(),
            refused: Vec::new(),
            is_listed: false,
            has_gaps: false,
            is_uncertain: false,
            warnings: BTreeMap::new(),
            ways: Ways::default(),
            surroundings: Surroundings::default(),
            lacks_frames: None,
            force: Force {
                is_begun: false,
                changed: None,
                failing: None,
                accepted: 0,
                beat: Instant::now(),
            },
            unstored: None,
            exports: None,
            exported: None,
            reconsidered: Instant::now(),
        }
    }

    /// Puts a document in the place of its former version.
    pub(super) fn put(&mut self, document: PolicyDocument) {
        self.unenforced.put(&document.key);
        match objects::object(&document.body) {
            Some(Object::Pod(pod)) => {
                let effects = self.attached.put(pod, objects::uid(&document.body));
                self.carry_out(effects);
            }
            Some(object) => self.pipeline.put(object),
            None => {}
        }
        self.generation += 1;
        match document.warnings.is_empty() {
            true => self.warnings.remove(&document.key),
            false => self.warnings.insert(document.key, document.warnings),
        };
    }

    /// Removes the document of a key.
    pub(super) fn remove(&mut self, key: &str) {
        self.unenforced.remove(key);
        self.warnings.remove(key);
        match objects::key(key) {
            Some(Key::Pod(id)) => {
                let effect = self.attached.remove(&id);
                self.carry_out([effect]);
            }
            Some(key) => self.pipeline.remove(&key),
            None => {}
        }
        self.generation += 1;
    }

    /// Changes the pipeline's pods, so that they are what the CNI plugin and the documents together say.
    pub(super) fn carry_out(&mut self, effects: impl IntoIterator<Item = Effect>) {
        for effect in effects {
            match effect {
                Effect::Put(pod) => self.pipeline.put(Object::Pod(pod)),
                Effect::Remove(id) => self.pipeline.remove(&Key::Pod(id)),
            }
        }
        self.generation += 1;
    }

    /// Takes the documents that are refused now.
    pub(super) fn refuse(&mut self, errors: Vec<PolicyError>) {
        self.refused = errors;
        self.is_uncertain &= self.lacks();
    }

    /// Notes whether the first listing lacks documents: they are refused, and no good version is known.
    pub(super) fn set_gaps(&mut self, has_gaps: bool) {
        self.has_gaps = has_gaps;
        self.is_uncertain &= self.lacks();
    }

    /// Notes that every source has been listed.
    pub(super) fn set_listed(&mut self) {
        self.is_listed = true;
        self.is_uncertain = self.lacks();
    }

    /// Whether a NetworkPolicy or a pod may be missing: it, or a file that may contain one, is refused, and no good
    /// version is known.
    fn lacks(&self) -> bool {
        self.refused.iter().any(|error| match &error.key {
            Some(key) => match objects::key(key) {
                Some(Key::Policy(id)) => self.pipeline.cache().policy(&id).is_none(),
                Some(Key::Pod(id)) => self.pipeline.cache().pod(&id).is_none(),
                _ => false,
            },
            None => self.has_gaps,
        })
    }

    /// Whether every source has been listed.
    pub(super) fn is_listed(&self) -> bool {
        self.is_listed
    }

    /// Whether the objects are known well enough to change the table of the last run.
    pub(super) fn is_known(&self) -> bool {
        self.is_listed && !self.is_uncertain
    }

    /// Why the table of the last run is not changed yet.
    pub(super) fn waits(&self) -> Option<&'static str> {
        if !self.is_listed {
            return Some("not every kind of object has been listed yet");
        }
        self.is_uncertain.then_some(
            "a NetworkPolicy or Pod is refused and no good version of it is known; correct it or remove it",
        )
    }

    /// Whether the state has changed since the last call.
    pub(super) fn are_exports_due(&mut self) -> bool {
        self.exported.replace(self.generation) != Some(self.generation)
    }

    /// Changes of the table since the last call. Logs the policies that are set aside from now on.
    pub(super) fn commit(&mut self) -> Result<Commit, TooLarge> {
        let (before, begin) = (self.pipeline.set_aside().clone(), Instant::now());
        let is_due = !before.is_empty() && self.reconsidered <= begin;
        if is_due {
            self.pipeline.reconsider();
        }
        let commit = self.pipeline.commit();
        let now = self.pipeline.set_aside();
        if is_due || before.len() != now.len() {
            let pause = (begin.elapsed() * RECONSIDERED.1).max(RECONSIDERED.0);
            self.reconsidered = Instant::now() + pause;
        }
        for (policy, why) in now.iter().filter(|(id, _)| !before.contains_key(id)) {
            tracing::error!("{}", why.problem(policy));
        }
        for policy in before.keys().filter(|id| !now.contains_key(id)) {
            tracing::info!(%policy, "the NetworkPolicy is not set aside any more");
        }
        commit
    }

    /// The tables as of the last call of [`Self::commit`], of each family that the kernel has.
    pub(super) fn tables(&self) -> Vec<Table> {
        let mut tables = vec![self.pipeline.table()];
        if self.lacks_frames.is_none() {
            tables.push(self.pipeline.frames());
        }
        tables
    }

    /// Addresses of the pods of this node, with the addresses that the CNI plugin just added.
    pub(super) fn addresses(&self) -> BTreeSet<IpAddr> {
        let pods = self.pipeline.pods().values();
        let pods = pods.flat_map(|pod| pod.addresses.iter());
        let attached = self.attached.pods().flat_map(|pod| pod.addresses.iter());
        pods.chain(attached).copied().collect()
    }

    /// The pods of this node that claim each address, each pod with its creation time.
    pub(super) fn owners(&self) -> Pods {
        let cache = self.pipeline.cache();
        let mut owners = Pods::new();
        for (id, pod) in self.pipeline.pods() {
            let created = cache
                .pod(id)
                .and_then(|pod| pod.created)
                .unwrap_or_default();
            for address in &pod.addresses {
                let pods = owners.entry(*address).or_default();
                pods.push(format!("{id} {created}"));
            }
        }
        owners
    }

    /// Takes the ways to pods as they were found.
    pub(super) fn set_ways(&mut self, ways: Ways) {
        self.pipeline.set_interfaces(ways.interfaces());
        self.pipeline.set_links(ways.links());
        self.ways = ways;
        self.generation += 1;
    }

    /// Why pods on bridges can send past policy.
    pub(super) fn open_to_frames(&self) -> Option<String> {
        let lacks = self.lacks_frames.as_ref()?;
        self.ways.bridging().map(|_| {
            format!(
                "pods on a bridge are open to each other for frames with VLAN tags, which no rule sees: {lacks}; \
                 use a kernel with CONFIG_NF_TABLES_BRIDGE, or a network that routes its pods"
            )
        })
    }

    /// Whether the kernel has the table of the documents.
    pub(super) fn is_in_force(&self) -> bool {
        self.is_known() && self.force.is_begun && self.force.failing.is_none()
    }

    /// Whether policy is in force as the documents say.
    pub(super) fn is_ready(&self) -> bool {
        self.is_in_force()
            && self.surroundings.problems.is_empty()
            && self.open_to_frames().is_none()
    }
}

#[cfg(test)]
mod tests {
    use agent_core::policy::parse::parse_documents;

    use super::*;

    fn refused(key: &str) -> PolicyError {
        PolicyError {
            source_name: "cluster".to_owned(),
            key: Some(key.to_owned()),
            field: "spec".to_owned(),
            reason: "is missing".to_owned(),
            remedy: "add it".to_owned(),
        }
    }

    #[test]
    fn a_refused_policy_without_a_good_version_keeps_the_table_of_the_last_run() {
        let mut state = State::new("n1");
        assert!(state.waits().unwrap().contains("listed"));
        state.refuse(vec![refused("NetworkPolicy/shop/web")]);
        state.set_listed();
        assert!(!state.is_known());
        assert!(state.waits().unwrap().contains("refused"));
        let policy = "{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy,
            metadata: {name: web, namespace: shop}, spec: {podSelector: {}}}";
        for document in parse_documents(policy, "cluster") {
            state.put(document.unwrap());
        }
        state.refuse(Vec::new());
        assert!(state.is_known());
        // Later refusals do not count: a good version of `web` is known, and `new` may never have been in force.
        state.refuse(vec![
            refused("NetworkPolicy/shop/web"),
            refused("NetworkPolicy/shop/new"),
        ]);
        assert!(state.is_known());
    }

    #[test]
    fn a_refused_policy_of_another_kind_keeps_nothing() {
        let mut state = State::new("n1");
        state.refuse(vec![refused("CiliumNetworkPolicy/shop/web")]);
        state.set_listed();
        assert!(state.is_known());
    }
}
