//! Changes that are not planned yet.

use std::{collections::VecDeque, sync::Arc};

use ipnet::IpNet;
use shared_maps::{EndpointId, IdentityId};

use crate::{
    core::{plan::Removals, state::publication::PlanResult},
    policy::document::PolicyDocument,
};

/// Changes of policy that are not in force yet.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// Keys of documents and their new versions; `None` removes the document.
    pub(crate) waiting: VecDeque<(String, Option<Arc<PolicyDocument>>)>,
    pub(crate) under_way: Option<Change>,
    pub(crate) files: Files,
    /// Revision of the rules that proxies keep until the changes are in force.
    pub(crate) before: Option<u64>,
    /// Revision of the DNS rules that files get meanwhile, once the rules are rendered.
    pub(crate) rendered: Option<u64>,
    /// How the plans of all parts so far ended.
    pub(crate) result: PlanResult,
    /// Work done since the part began, in units.
    pub(crate) spent: usize,
}

impl Changes {
    /// Counts work that was done, in units.
    pub(crate) fn spend(&mut self, units: usize) {
        self.spent += units;
    }
}

/// The change of a policy document that is under way.
#[derive(Debug)]
pub(crate) struct Change {
    pub(crate) key: String,
    pub(crate) old: Option<Arc<PolicyDocument>>,
    pub(crate) new: Option<Arc<PolicyDocument>>,
    pub(crate) stage: Stage,
    pub(crate) moves: Moves,
}

#[derive(Debug)]
pub(crate) enum Stage {
    /// How many selectors of the new document are registered, from the first one on.
    Labels(usize),
    Rules(PendingRollout),
    /// How many selectors of the old document are unregistered, from the first one on.
    Leftovers(usize),
}

/// Subjects whose endpoints still have the old rules.
#[derive(Debug)]
pub(crate) struct PendingRollout {
    pub(crate) subjects: Vec<IdentityId>,
    /// Endpoints of the last rendered subject that still have the old entries.
    pub(crate) endpoints: Vec<EndpointId>,
    /// Peer identities whose entries differ for the last rendered subject.
    pub(crate) peers: Vec<IdentityId>,
    pub(crate) deferred: Removals,
}

/// Prefixes that a stage resolves, in order.
#[derive(Debug, Default)]
pub(crate) struct Moves {
    pub(crate) prefixes: Vec<IpNet>,
    pub(crate) done: usize,
    pub(crate) deferred: Removals,
}

/// Files of endpoints whose DNS rules changed.
#[derive(Debug, Default)]
pub(crate) enum Files {
    #[default]
    Written,
    /// All rules are in the maps.
    Due,
    Left(Vec<EndpointId>),
}
