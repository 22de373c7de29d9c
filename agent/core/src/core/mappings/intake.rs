//! Which mappings of proxies the core accepts, and when.
//!
//! Owns the rate of each stream and the mappings that arrived before the sources were synced. No
//! stream or endpoint takes more than its share, and nothing grows without a bound: mappings beyond
//! [`MAX_EARLY`] are refused.

use std::collections::HashMap;

use dns_policy::mapping::Refusal;
use limits::quota::Quota;
use shared_maps::EndpointId;

use crate::core::{
    event::{MappingEvent, StreamId},
    mappings::rate::MappingRate,
    plan::Plan,
    state::State,
};

/// Maximum number of mappings that are kept until the sources are synced.
const MAX_EARLY: usize = 100_000;

/// The rate of each stream, and the mappings that wait for the sync.
#[derive(Debug)]
pub(in crate::core) struct Intake {
    rates: HashMap<StreamId, MappingRate>,
    early: Vec<MappingEvent>,
    /// Each endpoint's share of `early`.
    early_shares: Quota<EndpointId>,
}

impl Default for Intake {
    fn default() -> Self {
        Self {
            rates: HashMap::new(),
            early: Vec::new(),
            early_shares: Quota::new(MAX_EARLY),
        }
    }
}

impl Intake {
    /// Accepts a mapping, refuses it, or keeps it until the sources are synced.
    pub(in crate::core) fn admit(
        &mut self,
        state: &mut State,
        plan: &mut Plan,
        event: MappingEvent,
    ) {
        let endpoint = event.mapping.endpoint.id;
        if !self.is_within_rate(state, &event) {
            state.refuse(plan, &event, Refusal::RateLimited);
        } else if state.restoration.is_synced() {
            state.learn(plan, &event);
        } else if self.early_shares.take(endpoint, 1) {
            self.early.push(event);
        } else {
            state.refuse(plan, &event, Refusal::RateLimited);
        }
    }

    /// Accepts the mappings that arrived before the sources were synced.
    pub(in crate::core) fn admit_early(&mut self, state: &mut State, plan: &mut Plan) {
        self.early_shares.clear();
        for event in std::mem::take(&mut self.early) {
            state.learn(plan, &event);
        }
    }

    /// Forgets a stream that closed.
    pub(in crate::core) fn close(&mut self, stream: StreamId) {
        self.rates.remove(&stream);
    }

    fn is_within_rate(&mut self, state: &State, event: &MappingEvent) -> bool {
        let (now, rate) = (state.now, state.config.mapping_rate);
        let of_stream = self.rates.entry(event.stream);
        let of_stream = of_stream.or_insert_with(|| MappingRate::new(now));
        let addresses = event.mapping.addresses.len();
        of_stream.take(event.mapping.endpoint.id, addresses, rate, now)
    }
}
