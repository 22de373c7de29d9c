//! Which mappings of proxies the core accepts, and when.
//!
//! Owns the rate of each stream and the mappings that came before the sources were synced. No
//! stream or endpoint takes more than its share, and nothing grows without a bound: mappings
//! beyond [`MAX_EARLY`] are refused.

use std::collections::HashMap;

use holdfast_sdp::{mapping::BootTime, quota::Quota};
use shared_maps::EndpointId;

use super::{
    event::{MappingEvent, StreamId},
    rate::MappingRate,
};

/// Mappings kept until the sources are synced.
const MAX_EARLY: usize = 100_000;

/// See the module.
#[derive(Debug)]
pub(super) struct Intake {
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
    /// Whether the stream's rate, in addresses per second, allows one more mapping.
    pub(super) fn allows(&mut self, event: &MappingEvent, rate: u32, now: BootTime) -> bool {
        let endpoint = event.mapping.endpoint.id;
        let of_stream = self.rates.entry(event.stream);
        let of_stream = of_stream.or_insert_with(|| MappingRate::new(now));
        of_stream.take(endpoint, event.mapping.addresses.len(), rate, now)
    }

    /// Keeps a mapping until the sources are synced. Returns it if there is no room.
    pub(super) fn postpone(&mut self, event: MappingEvent) -> Result<(), MappingEvent> {
        if !self.early_shares.take(event.mapping.endpoint.id, 1) {
            return Err(event);
        }
        self.early.push(event);
        Ok(())
    }

    /// Takes the mappings that came before the sources were synced.
    pub(super) fn take_early(&mut self) -> Vec<MappingEvent> {
        self.early_shares.clear();
        std::mem::take(&mut self.early)
    }

    /// A stream closed.
    pub(super) fn close(&mut self, stream: StreamId) {
        self.rates.remove(&stream);
    }
}
