//! Services of the cluster.

use std::{collections::BTreeMap, sync::Arc};

use super::state::State;
use crate::{kubernetes::service_at::ServiceAt, source_event::SourceEvent};

/// The Services that the cluster has.
#[derive(Debug, Default)]
pub(super) struct Services {
    known: BTreeMap<Arc<str>, ServiceAt>,
}

impl Services {
    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.known.len()
    }
}

impl State {
    pub(super) fn on_services(&mut self, events: Vec<SourceEvent<ServiceAt>>) {
        for event in events {
            match event {
                SourceEvent::Init => self.restoration.services().begin(),
                SourceEvent::Apply(service) => {
                    self.restoration.services().note(&service.key);
                    let key = Arc::clone(&service.key);
                    self.services.known.insert(key, service);
                }
                SourceEvent::Delete(key) => {
                    self.services.known.remove(&*key);
                }
                SourceEvent::InitDone => {
                    let seen = self.restoration.services().end();
                    self.services.known.retain(|key, _| seen.contains(&**key));
                }
            }
        }
    }
}
