//! When programs are attached.
//!
//! After a restart most interfaces still have the programs of the earlier run. These judge by the policy maps that this
//! run writes. The replacement of programs takes the kernel some 16 ms for each endpoint. So the programs are replaced
//! one endpoint after the other after the sync, and mappings and policies do not wait for all of them. If an endpoint's
//! attachment changed, or if a program is missing, new programs are attached with the plan of the change.

use shared_maps::EndpointId;

use crate::{
    core::{
        plan::{Plan, Undo},
        state::State,
    },
    datapath::plan::Step,
    endpoint::endpoint::Endpoint,
};

impl State {
    /// Plans the programs of endpoints that have none yet, or whose attachment changed.
    pub(super) fn plan_attach(&mut self, plan: &mut Plan) {
        let lacking = self.endpoints.dirty();
        let lacking = lacking.filter(|endpoint| self.lacks_programs(endpoint));
        let lacking: Vec<_> = lacking
            .filter(|endpoint| !endpoint.is_judged_by_former_programs())
            .map(|endpoint| endpoint.id)
            .collect();
        for id in lacking {
            self.attach(plan, id);
        }
    }

    /// Plans the programs of one endpoint that still has those of the earlier run.
    pub(in crate::core) fn replace_programs(&mut self, plan: &mut Plan) {
        let next = self.former_programs().next().map(|endpoint| endpoint.id);
        if let Some(id) = next {
            self.attach(plan, id);
        }
    }

    /// Whether programs of the earlier run are to be replaced.
    pub(in crate::core) fn has_former_programs(&self) -> bool {
        self.restoration.is_synced() && self.former_programs().next().is_some()
    }

    fn former_programs(&self) -> impl Iterator<Item = &Endpoint> {
        let former = self.endpoints.former();
        former.filter(|endpoint| self.lacks_programs(endpoint))
    }

    fn lacks_programs(&self, endpoint: &Endpoint) -> bool {
        endpoint.policy_map.is_some()
            && self.files.exists(endpoint.id)
            && !endpoint.restored
            && endpoint.attached.as_ref() != Some(&endpoint.attachment())
    }

    fn attach(&mut self, plan: &mut Plan, id: EndpointId) {
        self.endpoints.end_former(id);
        let Some(endpoint) = self.endpoints.get_mut(id) else {
            return;
        };
        // If the step fails, it is tried again like any other step.
        endpoint.former_programs = None;
        let attachment = endpoint.attachment();
        let before = endpoint.attached.replace(attachment.clone());
        self.step(plan, Step::Attach(attachment), Undo::Attached(id, before));
    }
}
