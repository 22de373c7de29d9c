//! Metrics of the core: identities, names, writes, changes and the reconciler.

use super::{
    Sample,
    writer::{Writer, count},
};

impl Sample {
    pub(super) fn identities(&self, out: &mut Writer<'_, '_>) -> Result<(), std::fmt::Error> {
        let summary = &self.scrape.summary;
        let counters = &self.scrape.summary.counters;
        out.labelled(
            "identity",
            "Security identities in use",
            &[
                (&[("type", "endpoint")], count(summary.endpoint_identities)),
                (&[("type", "local")], count(summary.local_identities)),
            ],
        )?;
        out.gauge(
            "identity_fqdn",
            "Local identities with the label of a name",
            count(summary.fqdn_identities),
        )?;
        out.gauge(
            "identity_fqdn_combinations",
            "Local identities with the labels of several names' selectors: what --tofqdns-max-identities limits",
            count(summary.fqdn_combinations),
        )?;
        out.gauge(
            "identity_limited_addresses",
            "Addresses that have the identity of some of their names only, because of --tofqdns-max-identities",
            count(summary.addresses_limited),
        )?;
        out.counter(
            "fqdn_refused_addresses",
            "Addresses in answers that got no label of a name, because of --tofqdns-refuse-prefix",
            counters.addresses_refused,
        )?;
        out.gauge(
            "ipcache_entries",
            "Prefixes (addresses among them) that have an identity in the ipcache map",
            count(summary.ipcache_entries),
        )?;
        out.gauge(
            "ipcache_max_entries",
            "Prefixes that the ipcache map can hold",
            count(summary.ipcache_max),
        )
    }

    pub(super) fn names(&self, out: &mut Writer<'_, '_>) -> Result<(), std::fmt::Error> {
        let summary = &self.scrape.summary;
        let counters = &self.scrape.summary.counters;
        out.gauge(
            "fqdn_selectors",
            "Selectors of policy rules",
            count(summary.selectors),
        )?;
        out.gauge(
            "fqdn_active_ips",
            "Learned triples of endpoint, name and address whose TTL has not run out",
            count(summary.names_live),
        )?;
        out.gauge(
            "fqdn_alive_zombie_connections",
            "Expired addresses kept open for connections that are alive",
            count(summary.names_zombies),
        )?;
        out.counters(
            "fqdn_mappings",
            "Mappings from proxies, by outcome",
            &[
                ("outcome", "realised", counters.mappings_realised),
                (
                    "outcome",
                    "endpoint_unknown",
                    counters.mappings_endpoint_unknown,
                ),
                ("outcome", "not_allowed", counters.mappings_not_allowed),
                (
                    "outcome",
                    "invalid",
                    counters.mappings_invalid + self.unreadable,
                ),
                ("outcome", "rate_limited", counters.mappings_rate_limited),
                ("outcome", "not_realised", counters.mappings_not_realised),
            ],
        )?;
        out.counter(
            "fqdn_untrusted_answers",
            "Answers for names that toFQDNs rules select, from DNS servers that are not trusted; with --tofqdns-servers=trusted they open nothing",
            counters.answers_untrusted,
        )?;
        out.counter(
            "fqdn_pairs_left_out",
            "Addresses not learned because a name had too many of them, or an endpoint",
            counters.pairs_left_out,
        )
    }

    pub(super) fn firewalls(&self, out: &mut Writer<'_, '_>) -> Result<(), std::fmt::Error> {
        let firewalls = &self.scrape.summary.firewalls;
        let observations = &self.scrape.summary.counters.observations;
        out.counters(
            "resolver_observations",
            "Answers while EgressFirewalls use names, by outcome",
            &[
                ("outcome", "taken", observations.taken),
                ("outcome", "unmatched", observations.unmatched),
                ("outcome", "untrusted", observations.untrusted),
            ],
        )?;
        out.gauge(
            "tier_entries",
            "Entries of policy maps that EgressFirewalls decide, counted once for endpoints of one identity",
            count(firewalls.entries),
        )?;
        out.gauge(
            "egress_firewall_addresses",
            "Pairs of a name that an EgressFirewall uses and an address that has its label",
            count(firewalls.addresses),
        )
    }

    pub(super) fn writes(&self, out: &mut Writer<'_, '_>) -> Result<(), std::fmt::Error> {
        let summary = &self.scrape.summary;
        let counters = &self.scrape.summary.counters;
        out.counters(
            "bpf_map_writes",
            "Writes to maps",
            &[
                ("map", "ipcache", counters.ipcache_writes),
                ("map", "policy", counters.policy_writes),
            ],
        )?;
        out.counter(
            "datapath_step_failures",
            "Failed steps, such as map and file writes; the state before stays in force",
            counters.step_failures,
        )?;
        out.gauge(
            "datapath_pending_steps",
            "Failed steps that wait for another attempt",
            count(summary.pending_steps),
        )
    }

    pub(super) fn changes(&self, out: &mut Writer<'_, '_>) -> Result<(), std::fmt::Error> {
        let counters = &self.scrape.summary.counters;
        out.counter(
            "identity_exhausted",
            "Label sets without an identity because all numbers were in use",
            counters.identity_exhausted,
        )?;
        out.counter(
            "identity_limited",
            "Times that an address got the identity of some of its names only: the circuit breaker",
            counters.identities_limited,
        )?;
        out.counter(
            "ipcache_prefixes_resolved",
            "Prefixes whose labels were resolved: for each change the prefix and those within it",
            counters.prefixes_resolved,
        )?;
        out.counter(
            "fqdn_pairs_removed",
            "Pairs of name and address that were closed again",
            counters.pairs_removed,
        )?;
        out.counter(
            "fqdn_lease_revocations",
            "Leases of proxies that were revoked before their end",
            counters.revocations,
        )
    }

    pub(super) fn reconciler(&self, out: &mut Writer<'_, '_>) -> Result<(), std::fmt::Error> {
        let counters = &self.scrape.summary.counters;
        let reconciled = &counters.reconciled;
        out.counter(
            "reconcile_passes",
            "Passes that compared the maps with the model",
            reconciled.passes,
        )?;
        let mut differences = vec![
            ("part", "ipcache", reconciled.ipcache),
            ("part", "policy", reconciled.policy),
            ("part", "lxc", reconciled.lxc),
            ("part", "names", reconciled.names),
            ("part", "programs", reconciled.programs),
        ];
        let conditions = &self.scrape.conditions;
        let repairs = conditions.iter();
        differences.extend(repairs.map(|(part, c)| ("part", part.as_str(), c.repairs)));
        let labels: Vec<_> = conditions
            .iter()
            .map(|(p, _)| [("part", p.as_str())])
            .collect();
        let broken = labels.iter().zip(conditions);
        let broken: Vec<_> = broken
            .map(|(label, (_, c))| (label.as_slice(), u64::from(c.fault.is_some())))
            .collect();
        out.counters(
            "reconcile_differences",
            "Repairs, by part: entries of maps that a pass found wrong, and programs, pins, routes, netfilter and steering that the check every 2 s found missing or changed; grows only if something else changes them, or through a fault of the agent",
            &differences,
        )?;
        out.labelled(
            "datapath_broken",
            "1 for a part of the datapath that is wrong and cannot be repaired; `holdfast-agent status` says why",
            &broken,
        )?;
        out.counter(
            "reconcile_failures",
            "Failed reads of a map in such a pass",
            reconciled.failures,
        )
    }
}
