//! Changes of policy, part by part.

use agent_core::{core::Event, policy::document::PolicyDocument, source_event::SourceEvent};

use super::{Spec, World};

impl World {
    pub(super) fn policy(&mut self, slot: usize, spec: Option<Spec>) {
        let key = |document: &PolicyDocument| document.key.clone();
        let before = self.documents.remove(&slot).as_ref().map(key);
        let new = spec.map(|spec| spec.document(slot));
        let stays = new.as_ref().map(key);
        // A policy of another kind is another document.
        if let Some(gone) = before.filter(|before| Some(before) != stays.as_ref()) {
            self.change(slot, SourceEvent::Delete(gone));
        }
        if let Some(document) = new {
            self.end_change();
            self.documents.insert(slot, document.clone());
            self.change(slot, SourceEvent::Apply(document));
        }
    }

    fn change(&mut self, slot: usize, event: SourceEvent<PolicyDocument>) {
        if self.agent && self.synced {
            // Until the change is in force, only what both versions say is required.
            self.applied.remove(&slot);
            self.node.now = self.now;
            self.node.part(Event::Policies(event));
            self.part_ended();
        }
    }

    fn part_ended(&mut self) {
        if !self.node.core.change_in_progress() {
            self.applied = self.documents.clone();
        }
        self.effects();
    }

    pub(super) fn go_on(&mut self) {
        if self.agent && self.node.core.change_in_progress() {
            self.node.now = self.now;
            self.node.part(Event::ContinueChange);
            self.part_ended();
        }
    }

    pub(super) fn end_change(&mut self) {
        while self.agent && self.node.core.change_in_progress() {
            self.go_on();
        }
    }
}
