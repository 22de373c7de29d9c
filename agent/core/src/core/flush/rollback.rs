//! After a failed step, the model has again the state that the datapath had before the step.
//!
//! The plan owns one [`Undo`] for each step. Undoing the failed steps, the last one first, leaves
//! the planned state of each map equal to what the datapath holds, and marks the rest to be
//! planned again.

use shared_maps::{
    EndpointId, IdentityId,
    policy::{PolicyKey, PolicyValue},
};

use crate::core::{
    plan::{Plan, Undo},
    state::{State, retry::RETRY},
};

impl State {
    /// Undoes a failed step: the datapath still has the previous entry.
    pub(in crate::core) fn rollback(&mut self, plan: &mut Plan, undo: Undo) {
        let later = self.now.plus_secs(RETRY);
        match undo {
            Undo::Checkpoint => {
                self.numbers.undo_checkpoint();
            }
            Undo::Cleaned => self.learned.closed.undo_save(),
            Undo::File(id, before) => {
                let unsaved = plan.take_undurable(id);
                self.files.undo_write(id, before, unsaved, later);
                self.endpoints.mark_mut(id);
            }
            Undo::Names(id, number) => {
                self.on_names_unwritten(id, number, "not begun".to_owned());
            }
            Undo::RemovedFile(id) => self.files.restore_left(id),
            Undo::CreatedMap(id) => {
                if let Some(endpoint) = self.endpoints.mark_mut(id) {
                    endpoint.policy_map = None;
                }
            }
            Undo::RemovedMap(id) => match self.endpoints.get_leaving_mut(id) {
                Some(endpoint) => {
                    endpoint.policy_map.get_or_insert_default();
                }
                None => {
                    self.endpoints.restore_orphan(id);
                }
            },
            Undo::Policy(id, key, before) => self.rollback_policy(id, key, before),
            Undo::Left(id, interfaces) => {
                self.endpoints.left_mut().add(id, interfaces, Vec::new());
            }
            Undo::LeftPolicy(id, key, value) => self.endpoints.left_mut().keep(id, key, value),
            Undo::Lxc(key, before) => self.lxc.rollback(key, before),
            Undo::Ipcache(prefix, before) => {
                self.ipcache.realise(prefix, before);
                self.retry.add(prefix);
            }
            Undo::Attached(id, before) => {
                if let Some(endpoint) = self.endpoints.mark_mut(id) {
                    endpoint.attached = before;
                } else if let Some(endpoint) = self.endpoints.get_leaving_mut(id) {
                    endpoint.attached = before;
                } else {
                    self.endpoints.restore_orphan(id);
                }
            }
        }
    }

    fn rollback_policy(&mut self, id: EndpointId, key: PolicyKey, before: Option<PolicyValue>) {
        let Some(endpoint) = self.endpoints.mark_mut(id) else {
            return;
        };
        let peer = IdentityId(key.sec_label);
        if let Some(map) = &mut endpoint.policy_map {
            map.put(key, before);
        }
        endpoint.dirty_peers.add([peer]);
        endpoint.policy_revision = 0;
    }
}
