//! Programs at interfaces of pods of which the state directory has nothing.
//!
//! The files of an earlier run are lost, so the agent does not know which pod has the interface, and which policy
//! the pod has. The pod stays closed: its policy map loses its entries, and its programs stay attached
//! until an endpoint is attached to the interface. If an endpoint is there already, the programs stay
//! as they are until it is attached.

use std::collections::BTreeSet;

use crate::{
    core::{
        plan::{Plan, Undo},
        state::State,
    },
    datapath::plan::Step,
};

impl State {
    /// Closes interfaces whose pod is unknown: their policy maps lose their entries.
    pub(in crate::core) fn close_left(&mut self, plan: &mut Plan) {
        if self.endpoints.left().0.is_empty() {
            return;
        }
        let present = self.endpoints.iter().map(|endpoint| &endpoint.spec);
        let waiting = self.endpoints.waiting().map(|(spec, _)| spec);
        let known = present.chain(waiting).map(|spec| spec.interface.ifindex);
        let known: BTreeSet<u32> = known.collect();
        let left = self.endpoints.left().interfaces();
        let unknown = left.filter(|(_, interfaces)| interfaces.is_disjoint(&known));
        for id in unknown.map(|(id, _)| id).collect::<Vec<_>>() {
            for (key, value) in self.endpoints.left_mut().take_entries(id) {
                let undo = Undo::LeftPolicy(id, key, value);
                self.step(plan, Step::UnsetPolicy(id, key), undo);
            }
        }
    }

    /// Removes the programs that endpoints have replaced at their interfaces.
    pub(in crate::core) fn replace_left(&mut self, plan: &mut Plan) {
        if self.endpoints.left().0.is_empty() {
            return;
        }
        let attached = self.endpoints.iter().filter_map(|endpoint| {
            let attached = endpoint.attached.as_ref()?;
            (*attached == endpoint.attachment()).then_some(attached.ifindex)
        });
        let attached: BTreeSet<u32> = attached.collect();
        let left = self.endpoints.left().interfaces();
        let replaced = left.filter(|(_, interfaces)| interfaces.is_subset(&attached));
        for id in replaced.map(|(id, _)| id).collect::<Vec<_>>() {
            let left = self.endpoints.left_mut().0.remove(&id);
            let interfaces = left.unwrap_or_default().interfaces;
            for ifindex in &interfaces {
                plan.uncover(id, *ifindex);
            }
            self.step(plan, Step::Detach(id), Undo::Left(id, interfaces));
            self.step(plan, Step::RemovePolicyMap(id), Undo::RemovedMap(id));
        }
    }
}
