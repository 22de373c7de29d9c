//! Changes of documents for the pipeline.

use std::sync::Arc;

use agent_core::{policy::source::PolicyChange, source_event::SourceEvent};

use super::state::Shared;
use crate::document_source::{Consumer, Gone};

/// Puts changes into the state, and wakes the enforcer.
#[derive(Debug)]
pub(super) struct NetpolFeed(pub(super) Arc<Shared>);

impl Consumer for NetpolFeed {
    type Output = ();

    fn take(&mut self, changes: Vec<PolicyChange>) {
        let mut state = self.0.state.lock();
        for change in changes {
            match change {
                PolicyChange::Document(SourceEvent::Init) => {}
                PolicyChange::Document(SourceEvent::Apply(document)) => state.put(document),
                PolicyChange::Document(SourceEvent::Delete(key)) => state.remove(&key),
                PolicyChange::Document(SourceEvent::InitDone) => state.set_listed(),
                PolicyChange::Rejected(errors) => state.refuse(errors),
                PolicyChange::Uncertain(has_gaps) => state.set_gaps(has_gaps),
            }
        }
    }

    async fn pass_on(&mut self, (): ()) -> Result<(), Gone> {
        self.0.changed.notify_one();
        Ok(())
    }
}
