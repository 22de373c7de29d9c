//! The revision of the policy, and which DNS rules proxies have.
//!
//! Owns the rules that the agent itself judges mappings by (the checked ones), those that proxies were
//! last given (the published ones), and marks for those that are out of date. It keeps one
//! invariant: proxies never have a rule that the agent does not judge by, and they get no rule before
//! the datapath has the policy that the rule depends on.

use std::{collections::BTreeMap, sync::Arc};

use dns_policy::{
    rule::{EndpointRules, RulesOf},
    table::{PolicyHandle, Question},
    verdict::Verdict,
};
use shared_maps::EndpointId;

use crate::core::event::{Effect, RulesUpdate};

/// After this many failed plans in a row, rules are published although the plans failed. A full map is a normal
/// condition, and proxies must still get new restrictions.
const MAX_FAILED_PLANS: u32 = 3;

/// DNS rules by endpoint; endpoints without any are left out.
pub(crate) type Rules = BTreeMap<EndpointId, Arc<EndpointRules>>;

/// How the plans of an event, or of a whole change of policy, ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum PlanResult {
    /// Every step was carried out.
    #[default]
    Done,
    Failed,
}

/// The revision of the policy, and the DNS rules that were checked and published.
#[derive(Debug)]
pub(crate) struct Publication {
    revision: u64,
    checker: PolicyHandle,
    checked: Rules,
    checked_revision: u64,
    /// `None` before the first publication.
    published: Option<Rules>,
    published_revision: u64,
    /// Whether subjects or their endpoints changed since rules were last checked.
    is_stale: bool,
    /// Whether the checked rules changed since files were last compared with them.
    files_are_stale: bool,
    /// Whether the checked rules changed since rules were last published.
    is_unpublished: bool,
    failed_plans: u32,
}

impl Default for Publication {
    fn default() -> Self {
        Self {
            revision: 0,
            checker: PolicyHandle::new(),
            checked: Rules::new(),
            checked_revision: 0,
            published: None,
            published_revision: 0,
            is_stale: true,
            files_are_stale: false,
            is_unpublished: false,
            failed_plans: 0,
        }
    }
}

impl Publication {
    /// The revision of the policy.
    pub(crate) fn revision(&self) -> u64 {
        self.revision
    }

    /// The revision that proxies have.
    pub(crate) fn published_revision(&self) -> u64 {
        self.published_revision
    }

    pub(crate) fn begin_revision(&mut self) {
        self.revision += 1;
    }

    /// Begins revision 1, the first one even of a node without policies.
    pub(crate) fn begin_first_revision(&mut self) {
        self.revision = self.revision.max(1);
    }

    /// Notes that subjects or their endpoints changed: the rules have to be checked.
    pub(crate) fn mark_stale(&mut self) {
        self.is_stale = true;
    }

    /// Whether rules have to be checked; they count as checked from now on.
    pub(crate) fn take_stale(&mut self) -> bool {
        std::mem::take(&mut self.is_stale)
    }

    /// Whether files have to be compared with the rules; they count as compared from now on.
    pub(crate) fn take_stale_files(&mut self) -> bool {
        std::mem::take(&mut self.files_are_stale)
    }

    /// Whether the checked rules allow a question.
    pub(crate) fn allows(&self, question: &Question<'_>) -> bool {
        matches!(self.checker.load().check(question), Verdict::Allow)
    }

    /// The agent judges by these rules from now on. If they differ from the former ones, a revision begins.
    pub(crate) fn check(&mut self, current: Rules) {
        let (changed, removed) = difference(&self.checked, &current);
        if !changed.is_empty() || !removed.is_empty() {
            self.files_are_stale = true;
            self.is_unpublished = true;
            if self.revision == self.checked_revision {
                self.revision += 1;
            }
            // A name or pattern that cannot be compiled was refused by the policy reader.
            let _errors = self.checker.apply(&changed, &removed);
            self.checked = current;
        }
        self.checked_revision = self.revision;
    }

    /// Counts plans that failed in a row.
    pub(crate) fn note(&mut self, result: PlanResult) {
        self.failed_plans = match result {
            PlanResult::Done => 0,
            PlanResult::Failed => self.failed_plans + 1,
        };
    }

    /// Gives the rules that proxies may have now; nothing while the datapath lacks the policy that they
    /// depend on.
    pub(crate) fn publish(&mut self) -> Vec<Effect> {
        let waits = (1..MAX_FAILED_PLANS).contains(&self.failed_plans);
        let first = self.published.is_none();
        if waits || !(self.is_unpublished || first) {
            return Vec::new();
        }
        self.is_unpublished = false;
        let published = self.published.get_or_insert_default();
        let (changed, removed) = difference(published, &self.checked);
        if changed.is_empty() && removed.is_empty() && !first {
            return Vec::new();
        }
        published.clone_from(&self.checked);
        self.published_revision = self.revision;
        let update = RulesUpdate {
            revision: self.revision,
            changed,
            removed,
        };
        let mut effects = vec![Effect::Rules(update)];
        if first {
            effects.push(Effect::SnapshotReady);
        }
        effects
    }
}

fn difference(old: &Rules, new: &Rules) -> (Vec<RulesOf>, Vec<EndpointId>) {
    let same = |one: &Arc<EndpointRules>, other: &Arc<EndpointRules>| {
        Arc::ptr_eq(one, other) || one == other
    };
    let changed = new
        .iter()
        .filter(|(id, rules)| !old.get(id).is_some_and(|old| same(old, rules)))
        .map(|(id, rules)| RulesOf {
            endpoint: *id,
            rules: (**rules).clone(),
        });
    let removed = old.keys().filter(|id| !new.contains_key(id)).copied();
    (changed.collect(), removed.collect())
}
