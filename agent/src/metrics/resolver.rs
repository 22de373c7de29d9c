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
            /// 1 on the agent that looks up the names of EgressFirewalls and writes DNSNameResolver
            /// objects, 0 on all others. The sum over the agents that share these objects is 1. It
            /// is higher only while agents cannot write the objects and look up the names for
            /// themselves
            gauge resolver_leads = view.role == "leads";
            /// DNSNameResolver objects that the agent knows
            gauge resolver_objects = view.objects;
            /// Names in DNSNameResolver objects: the names that the objects are for, and the names
            /// that match their wildcards
            gauge resolver_names = view.names;
            /// Addresses of all names in DNSNameResolver objects
            gauge resolver_addresses = view.addresses;
            /// Names in DNSNameResolver objects whose last look-up failed
            gauge resolver_names_degraded = view.degraded;
            /// Answers to pods that wait for the resolver. If 10,000 wait, the oldest is
            /// dropped for a new one
            gauge resolver_queued = view.queued;
            /// DNSNameResolver objects whose new status is not written yet. If this stays above 0,
            /// see `holdfast-agent status`
            gauge resolver_unwritten = view.unwritten;
            /// Answers to pods that were dropped before the resolver read them, because 10,000
            /// answers waited
            counter resolver_queue_dropped = view.dropped;
            /// Addresses that were left out of a DNSNameResolver object. A name may have 1,000
            /// addresses, and an object 250 names and 3,000 addresses
            counter resolver_addresses_left_out = counters.addresses_left_out();
            /// Look-ups of names of EgressFirewalls by the agent itself, by outcome
            counter_by resolver_lookups = |outcome| counters.lookups.get(outcome);
            /// Writes of the status of DNSNameResolver objects, by outcome
            counter_by resolver_status_writes = |outcome| counters.writes.get(outcome);
        }
    }
}
