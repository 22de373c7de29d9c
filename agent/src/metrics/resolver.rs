//! Metrics of the resolver of names of EgressFirewalls.

use std::{fmt, sync::Arc};

use daemon::{families, metrics::Families};

use super::Sample;
use crate::resolver::{counters::Counters, view::ResolverView};

/// State and counts of the resolver.
#[derive(Clone, Debug, Default)]
pub struct ResolverScrape {
    pub view: ResolverView,
    pub counters: Arc<Counters>,
}

impl Sample {
    pub(super) fn resolver(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let Some(ResolverScrape { view, counters }) = &self.scrape.resolver else {
            return Ok(());
        };
        families! { out;
            /// 1 on the agent that looks up names of EgressFirewalls and writes DNSNameResolver
            /// objects; 0 on the others. The sum over the agents that share these objects is 1,
            /// unless some of them cannot write and lead in memory
            gauge resolver_leads = view.role == "leads";
            /// DNSNameResolver objects
            gauge resolver_objects = view.objects;
            /// Names that DNSNameResolver objects have: their own, and those that wildcards found
            gauge resolver_names = view.names;
            /// Addresses of all names of DNSNameResolver objects
            gauge resolver_addresses = view.addresses;
            /// Names of DNSNameResolver objects whose last look-up failed
            gauge resolver_names_degraded = view.degraded;
            /// Answers to pods that wait for the resolver; more than 10,000 are dropped
            gauge resolver_queued = view.queued;
            /// DNSNameResolver objects whose new status is not in the store yet; if this stays
            /// above 0, see `holdfast-agent status`
            gauge resolver_unwritten = view.unwritten;
            /// Answers to pods that were dropped before the resolver took them, because 10,000
            /// waited
            counter resolver_queue_dropped = view.dropped;
            /// Addresses that a DNSNameResolver object has no room for: 1,000 for a name, 3,000 and
            /// 250 names for an object
            counter resolver_addresses_left_out = counters.addresses_left_out();
            /// Own look-ups of names of EgressFirewalls, by outcome
            counter_by resolver_lookups = |outcome| counters.lookups.get(outcome);
            /// Writes of the status of DNSNameResolver objects, by outcome
            counter_by resolver_status_writes = |outcome| counters.writes.get(outcome);
        }
    }
}
