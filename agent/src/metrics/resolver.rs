//! Metrics of the resolver of names of EgressFirewalls.

use super::{
    Sample,
    writer::{Writer, count},
};
use crate::resolver::{
    counters::{LookupResult, WriteResult},
    view::ResolverView,
};

/// State and counts of the resolver.
#[derive(Clone, Debug, Default)]
pub struct ResolverScrape {
    pub view: ResolverView,
    pub lookups: Vec<(LookupResult, u64)>,
    pub writes: Vec<(WriteResult, u64)>,
    /// Addresses that objects had no room for.
    pub left_out: u64,
}

impl Sample {
    pub(super) fn resolver(&self, out: &mut Writer<'_, '_>) -> Result<(), std::fmt::Error> {
        let Some(resolver) = &self.scrape.resolver else {
            return Ok(());
        };
        resolver.gauges(out)?;
        out.counter(
            "resolver_queue_dropped",
            "Answers to pods that were dropped before the resolver took them, because 10,000 waited",
            resolver.view.dropped,
        )?;
        out.counter(
            "resolver_addresses_left_out",
            "Addresses that a DNSNameResolver object has no room for: 1,000 for a name, 3,000 and 250 names for an object",
            resolver.left_out,
        )?;
        let lookups = resolver.lookups.iter();
        let lookups: Vec<_> = lookups
            .map(|(result, count)| ("outcome", result.as_str(), *count))
            .collect();
        out.counters(
            "resolver_lookups",
            "Own look-ups of names of EgressFirewalls, by outcome",
            &lookups,
        )?;
        let writes = resolver.writes.iter();
        let writes: Vec<_> = writes
            .map(|(result, count)| ("outcome", result.as_str(), *count))
            .collect();
        out.counters(
            "resolver_status_writes",
            "Writes of the status of DNSNameResolver objects, by outcome",
            &writes,
        )
    }
}

impl ResolverScrape {
    fn gauges(&self, out: &mut Writer<'_, '_>) -> Result<(), std::fmt::Error> {
        let view = &self.view;
        for (name, help, value) in [
            (
                "resolver_leads",
                "1 on the agent that looks up names of EgressFirewalls and writes DNSNameResolver objects; 0 on the others. The sum over all agents is 1",
                usize::from(view.role == "leads"),
            ),
            ("resolver_objects", "DNSNameResolver objects", view.objects),
            (
                "resolver_names",
                "Names that DNSNameResolver objects have: their own, and those that wildcards found",
                view.names,
            ),
            (
                "resolver_addresses",
                "Addresses of all names of DNSNameResolver objects",
                view.addresses,
            ),
            (
                "resolver_names_degraded",
                "Names of DNSNameResolver objects whose last look-up failed",
                view.degraded,
            ),
            (
                "resolver_queued",
                "Answers to pods that wait for the resolver; more than 10,000 are dropped",
                view.queued,
            ),
            (
                "resolver_unwritten",
                "DNSNameResolver objects whose new status is not in the store yet; if this stays above 0, see `holdfast-agent status`",
                view.unwritten,
            ),
        ] {
            out.gauge(name, help, count(value))?;
        }
        Ok(())
    }
}
