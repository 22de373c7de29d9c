//! Label sets of this node that lack a CiliumIdentity, and the numbers that arrive for them.

use std::{collections::BTreeMap, sync::Arc};

use super::{Core, event::Effect, state::State};
use crate::{
    endpoint::spec::EndpointSpec,
    identity::cluster::{GivenNumber, WantedIdentities},
    labels::LabelSet,
};

impl Core {
    /// Whether an endpoint waits for a number that the cluster gives its labels.
    pub fn awaits_number(&self, key: &str) -> bool {
        let state = &self.state;
        let mut waiting = state.endpoints.without_identity();
        state.config.cluster_identities.is_some() && waiting.any(|spec| spec.key == key)
    }
}

impl State {
    pub(super) fn on_numbers_given(&mut self, given: &[GivenNumber]) {
        for given in given {
            self.numbers.give(given, self.now);
        }
        self.renumber();
    }

    /// Gives a number of this node to label sets that waited too long for one of the cluster.
    pub(super) fn end_waiting(&mut self) {
        self.numbers.end_waiting(self.now);
        self.renumber();
    }

    /// The list of label sets that lack an object, if it changed.
    pub(super) fn take_wanted_identities(&mut self) -> Option<Effect> {
        if !self.numbers.take_changed() || self.config.cluster_identities.is_none() {
            return None;
        }
        let wanted = self.wanted_identities();
        if wanted == *self.cluster.wanted {
            return None;
        }
        self.cluster.wanted = Arc::new(wanted);
        Some(Effect::WantedIdentities(Arc::clone(&self.cluster.wanted)))
    }

    fn wanted_identities(&self) -> WantedIdentities {
        let mut wanted = BTreeMap::new();
        let present = self
            .endpoints
            .iter()
            .map(|one| (&one.spec, one.labels.clone()));
        let waiting = self.endpoints.without_identity();
        let waiting = waiting.filter_map(|spec| Some((spec, self.endpoint_labels(spec)?.ok()?)));
        for (spec, labels) in present.chain(waiting) {
            self.want(&mut wanted, spec, labels);
        }
        wanted
    }

    fn want(&self, wanted: &mut WantedIdentities, spec: &EndpointSpec, labels: LabelSet) {
        let pod = spec.pod.as_deref();
        let is_of_pod = pod.and_then(|pod| self.cluster.pods.labels_of(pod)) == Some(&labels);
        if let Some(known) = wanted.get_mut(&labels) {
            known.is_of_pod |= is_of_pod;
        } else if let Some(identity) = self.numbers.wanted(&labels, is_of_pod, self.now) {
            wanted.insert(labels, identity);
        }
    }
}
