//! Changes of policy, cut into parts: between two parts the core handles events of proxies. A change
//! has four stages:
//!
//! 1. Labels of new selectors, under the rules that are in force.
//! 2. The rules, endpoint by endpoint. Each endpoint is under the old or under the new rules, and
//!    addresses have the labels of both.
//! 3. Removal of labels that no policy uses any more.
//! 4. Writing of the DNS rules into files.
//!
//! A stage has one or more parts. Each part is a plan of its own, and changes an endpoint completely or
//! not at all. Proxies keep the former DNS rules until the last part is committed. Mappings that arrive
//! until then get the former revision.

mod node_selectors;
mod policies;

use std::{collections::BTreeMap, sync::Arc};

use ipnet::IpNet;

use super::{flush::RoundSize, plan::Plan, state::State};
use crate::{
    core::{
        plan::Removals,
        state::{
            changes::{Change, Files, Moves, PendingRollout, Stage},
            publication::PlanResult,
        },
    },
    ipcache::{metadata::Claim, owners::Owner},
    labels::LabelSet,
    policy::{document::PolicyDocument, repository::is_about, rule::Rule},
    selector::selector::Selector,
    source_event::SourceEvent,
};

/// Cost of one identity whose entries change in one endpoint's policy map, in units of about ten
/// microseconds ([`super::CoreConfig::work_budget`]).
pub(super) const MARK: usize = 4;
/// Cost of a selector that a change adds or removes.
const SELECTOR: usize = 4;
/// Cost of comparing the rules of a subject.
const SUBJECT: usize = 4;
/// Cost of planning to write the file of an endpoint whose DNS rules changed.
const FILE: usize = 100;

impl State {
    pub(super) fn on_policy(&mut self, event: SourceEvent<PolicyDocument>) {
        match event {
            SourceEvent::Init => self.restoration.policies().begin(),
            SourceEvent::Apply(document) => {
                let key = document.key.clone();
                self.restoration.policies().note(&key);
                let change = (key, Some(Arc::new(document)));
                self.policy.changes_mut().waiting.push_back(change);
            }
            SourceEvent::Delete(key) => self.policy.changes_mut().waiting.push_back((key, None)),
            SourceEvent::InitDone => {
                let seen = self.restoration.policies().end();
                let known = self
                    .policy
                    .repository()
                    .iter()
                    .map(|document| &document.key);
                let gone = known.filter(|key| !seen.contains(*key));
                let gone = gone.map(|key| (key.clone(), None));
                let gone: Vec<_> = gone.collect();
                self.policy.changes_mut().waiting.extend(gone);
            }
        }
    }

    /// Whether a change of policy has parts left.
    pub(super) fn change_in_progress(&self) -> bool {
        let changes = self.policy.changes();
        changes.under_way.is_some()
            || !changes.waiting.is_empty()
            || !matches!(changes.files, Files::Written)
    }

    /// The revision in force: during a change, the one before the change.
    pub(super) fn revision_in_force(&self) -> u64 {
        self.policy
            .changes()
            .before
            .unwrap_or(self.proxies.publication.revision())
    }

    /// Revision of the rules that a file gets now.
    pub(super) fn revision_in_files(&self) -> u64 {
        let rendered = self.policy.changes().rendered;
        rendered.unwrap_or_else(|| self.revision_in_force())
    }

    /// Notes how the plan of a part ended. Returns the result of all parts once the last one has
    /// ended, `None` before.
    pub(super) fn part_ended(&mut self, result: PlanResult) -> Option<PlanResult> {
        if result == PlanResult::Failed {
            self.policy.changes_mut().result = result;
        }
        if self.change_in_progress() {
            return None;
        }
        Some(std::mem::replace(
            &mut self.policy.changes_mut().result,
            PlanResult::Done,
        ))
    }

    /// Plans the next part. Until all sources are complete nothing is planned: the whole change enters
    /// the model at once.
    pub(super) fn change_policy(&mut self, plan: &mut Plan) {
        self.policy.changes_mut().spent = 0;
        while self.change_in_progress() && self.has_room() {
            if let Some(change) = self.policy.changes_mut().under_way.take() {
                self.policy.changes_mut().under_way = self.advance(plan, change);
            } else if let Some((key, new)) = self.policy.changes_mut().waiting.pop_front() {
                self.policy.changes_mut().under_way = self.begin(key, new);
            } else {
                self.change_files(plan);
            }
        }
    }

    /// Whether the part under way may do more.
    pub(super) fn has_room(&self) -> bool {
        !self.restoration.is_synced() || self.policy.changes().spent < self.config.work_budget
    }

    fn begin(&mut self, key: String, new: Option<Arc<PolicyDocument>>) -> Option<Change> {
        let old = self.policy.repository().get(&key).cloned();
        if old == new {
            return None;
        }
        self.policy
            .changes_mut()
            .before
            .get_or_insert(self.proxies.publication.revision());
        self.proxies.publication.begin_revision();
        let stage = Stage::Labels(0);
        let moves = Moves::default();
        if let Some((owner, labels)) = new.as_deref().map(|new| self.says(new)) {
            for (prefix, labels) in labels {
                self.ipcache
                    .claim(prefix, owner.clone(), Claim::Labels(labels));
            }
        }
        Some(Change {
            key,
            old,
            new,
            stage,
            moves,
        })
    }

    /// Works on the change until the budget is used up or the stage ends. `None` after stage 3: `change_files` does
    /// stage 4 when no change is left.
    fn advance(&mut self, plan: &mut Plan, mut change: Change) -> Option<Change> {
        if matches!(change.stage, Stage::Leftovers(0)) && change.moves.prefixes.is_empty() {
            self.unclaim_blocks(&change);
        }
        let next = match &mut change.stage {
            Stage::Labels(registered) => {
                let all = self.each_selector(change.new.as_ref(), registered, Self::register);
                if all {
                    self.relabel_if_synced();
                }
                self.note_moves(&mut change.moves);
                let all = all && self.move_some(plan, &mut change.moves);
                all.then(|| Stage::Rules(self.replace(&change)))
            }
            Stage::Rules(behindhand) => {
                let new = change.new.as_deref();
                let all = self.change_rules(plan, &change.key, new, behindhand);
                all.then_some(Stage::Leftovers(0))
            }
            Stage::Leftovers(unregistered) => {
                let all = self.each_selector(change.old.as_ref(), unregistered, Self::unregister);
                if all {
                    self.relabel_if_synced();
                }
                self.note_moves(&mut change.moves);
                if all && self.move_some(plan, &mut change.moves) {
                    self.policy.changes_mut().files = Files::Due;
                    return None;
                }
                None
            }
        };
        if let Some(next) = next {
            change.stage = next;
        }
        Some(change)
    }

    /// Adds or removes selectors of a document. Returns true after the last selector.
    fn each_selector(
        &mut self,
        document: Option<&Arc<PolicyDocument>>,
        done: &mut usize,
        each: fn(&mut Self, &Selector),
    ) -> bool {
        let rules = document.into_iter().flat_map(|document| document.rules());
        for selector in rules.flat_map(Rule::selectors).skip(*done) {
            if !self.has_room() {
                return false;
            }
            each(self, selector);
            *done += 1;
            self.policy.changes_mut().spend(SELECTOR);
        }
        true
    }

    /// Labels the addresses of names that firewalls use, once all names of the previous run are read.
    fn relabel_if_synced(&mut self) {
        if self.restoration.is_synced() {
            self.relabel_resolved();
        }
    }

    /// Notes prefixes whose labels changed.
    fn note_moves(&mut self, moves: &mut Moves) {
        if self.restoration.is_synced() {
            moves.prefixes.extend(self.ipcache.take_dirty());
        }
    }

    /// Gives the noted prefixes their identities, once all of them are noted. Returns true if no
    /// prefix is left.
    fn move_some(&mut self, plan: &mut Plan, moves: &mut Moves) -> bool {
        if !self.restoration.is_synced() {
            return true;
        }
        if moves.done == 0 {
            self.in_order(&mut moves.prefixes);
        }
        loop {
            let left = moves.prefixes.get(moves.done..).unwrap_or_default();
            moves.done += self.round(plan, left, &mut moves.deferred, RoundSize::WithinBudget);
            if moves.done >= moves.prefixes.len() {
                let moves = std::mem::take(moves);
                self.plan_removals(plan, moves.deferred);
                return true;
            }
            if !self.has_room() {
                return false;
            }
        }
    }

    /// Replaces the old rules by the new ones. A subject keeps the old rules until the returned
    /// rollout reaches it.
    fn replace(&mut self, change: &Change) -> PendingRollout {
        self.policy.put_document(&change.key, change.new.as_ref());
        self.note_dns_servers(change.old.as_deref(), change.new.as_deref());
        let subjects = self.policy.subjects().rev().filter(|(_, subject)| {
            let mut documents = change.old.iter().chain(&change.new);
            documents.any(|document| is_about(document, subject.labels()))
        });
        PendingRollout {
            subjects: subjects.map(|(id, _)| id).collect(),
            endpoints: Vec::new(),
            peers: Vec::new(),
            deferred: Removals::new(),
        }
    }

    /// True if no endpoint remains to be changed.
    fn change_rules(
        &mut self,
        plan: &mut Plan,
        key: &str,
        new: Option<&PolicyDocument>,
        left: &mut PendingRollout,
    ) -> bool {
        while self.has_room() {
            if let Some(id) = left.endpoints.pop() {
                self.policy.changes_mut().spend(1 + MARK * left.peers.len());
                if let Some(endpoint) = self.endpoints.mark_mut(id) {
                    endpoint.dirty_peers.add(left.peers.iter().copied());
                }
            } else if let Some(identity) = left.subjects.pop() {
                let revision = self.proxies.publication.revision();
                left.peers = self.policy.change_subject(identity, key, new, revision);
                self.policy.changes_mut().spend(SUBJECT + left.peers.len());
                if let Some(subject) = self.policy.subject(identity) {
                    left.endpoints.extend(subject.endpoints().iter().rev());
                }
            } else {
                break;
            }
        }
        if self.restoration.is_synced() {
            self.round(plan, &[], &mut left.deferred, RoundSize::WithinBudget);
        }
        let all = left.endpoints.is_empty() && left.subjects.is_empty();
        if all {
            self.plan_removals(plan, std::mem::take(&mut left.deferred));
        }
        all
    }

    /// The labels that a document gives to prefixes, and the owner that claims them.
    pub(super) fn says(&self, document: &PolicyDocument) -> (Owner, BTreeMap<IpNet, LabelSet>) {
        let own = self.config.node_name.as_deref();
        let (source, labels) = document.labels(own, &|key| self.cluster.nodes.asks_for(key));
        (Owner::Object(source, document.key.as_str().into()), labels)
    }

    fn unclaim_blocks(&mut self, change: &Change) {
        let Some(old) = change.old.as_deref() else {
            return;
        };
        let (owner, old) = self.says(old);
        let new = change.new.as_deref().map(|new| self.says(new));
        let kept = |prefix: &&IpNet| {
            let new = new.as_ref();
            new.is_some_and(|(_, labels)| labels.contains_key(*prefix))
        };
        for prefix in old.keys().filter(|prefix| !kept(prefix)) {
            self.ipcache.unclaim(*prefix, &owner);
        }
    }

    /// Renders DNS rules, and writes the files of endpoints whose rules changed.
    fn change_files(&mut self, plan: &mut Plan) {
        let mut left = match std::mem::take(&mut self.policy.changes_mut().files) {
            Files::Left(left) => left,
            Files::Written => Vec::new(),
            Files::Due if !self.restoration.is_synced() => Vec::new(),
            Files::Due => {
                self.refresh_dns();
                self.policy.changes_mut().rendered = Some(self.proxies.publication.revision());
                self.with_outdated_files()
            }
        };
        while self.has_room()
            && let Some(id) = left.pop()
        {
            self.policy.changes_mut().spend(FILE);
            let endpoint = self.endpoints.get(id);
            if endpoint.is_some_and(|endpoint| endpoint.policy_map.is_some()) {
                self.refresh_file(plan, id);
            }
        }
        if left.is_empty() {
            self.policy.changes_mut().before = None;
            self.policy.changes_mut().rendered = None;
        } else {
            self.policy.changes_mut().files = Files::Left(left);
        }
    }
}
