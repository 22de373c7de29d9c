//! Changes of policy, part by part.

use super::{Spec, World};
use crate::{
    core::{Event, tests::oracle::document},
    source_event::SourceEvent,
};

impl World {
    pub(super) fn policy(&mut self, slot: usize, spec: Option<Spec>) {
        let event = match spec {
            Some(spec) => {
                let document = document(&format!("p{slot}"), spec.text());
                self.documents.insert(slot, document.clone());
                SourceEvent::Apply(document)
            }
            None => {
                self.documents.remove(&slot);
                SourceEvent::Delete(format!("CiliumNetworkPolicy/default/p{slot}"))
            }
        };
        if self.agent && self.synced {
            // Until the change is in force: what both versions say.
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
