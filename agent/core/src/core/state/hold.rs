//! Endpoints of the last run that keep their policy, because the listing of policies has gaps.

use std::{collections::BTreeMap, sync::Arc};

use dns_policy::rule::EndpointRules;
use shared_maps::EndpointId;

/// Why an endpoint does not have the policy of its documents.
pub(crate) const HELD: &str = "its policy of the last run stays in force: a policy document was \
    refused at the start, and no good version of it is known; correct or remove that document \
    (`policy get` names it)";

/// The policy of the last run that is kept while the listing of policies has gaps.
#[derive(Debug, Default)]
pub(crate) struct Hold {
    /// Whether the first listing of policies has gaps.
    pub(crate) uncertain: bool,
    /// DNS rules that files of the last run have; empty once the sources are synced.
    pub(crate) former: BTreeMap<EndpointId, Arc<EndpointRules>>,
    /// Endpoints that keep their former policy, with their DNS rules.
    pub(crate) held: BTreeMap<EndpointId, Arc<EndpointRules>>,
}

impl Hold {
    /// Starts with the DNS rules that the files of the last run have.
    pub(crate) fn new(former: BTreeMap<EndpointId, Arc<EndpointRules>>) -> Self {
        Self {
            former,
            ..Self::default()
        }
    }

    /// Notes that the first listing of policies has gaps.
    pub(crate) fn begin(&mut self) {
        self.uncertain = true;
    }

    /// Whether the listing of policies still has gaps.
    pub(crate) fn is_uncertain(&self) -> bool {
        self.uncertain
    }

    /// Whether an endpoint keeps its previous policy.
    pub(crate) fn has(&self, id: EndpointId) -> bool {
        self.held.contains_key(&id)
    }

    /// DNS rules of an endpoint that keeps its previous policy.
    pub(crate) fn rules_of(&self, id: EndpointId) -> Option<&Arc<EndpointRules>> {
        self.held.get(&id)
    }

    /// Whether no endpoint keeps its previous policy.
    pub(crate) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    pub(crate) fn forget(&mut self, id: EndpointId) {
        self.held.remove(&id);
    }
}
