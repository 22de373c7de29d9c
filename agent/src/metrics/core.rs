//! Metrics of the core: identities, names, writes, changes and the reconciler.

use std::fmt;

use daemon::{families, metrics::Families};

use super::{
    Sample,
    meanings::{IdentityType, MappingOutcome, Observation, WrittenMap},
};

impl Sample {
    pub(super) fn identities(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let summary = &self.scrape.summary;
        families! { out;
            /// Security identities in use
            gauge_by identity = |of| match of {
                IdentityType::Endpoint => summary.endpoint_identities,
                IdentityType::Local => summary.local_identities,
            };
            /// Local identities with the label of a name
            gauge identity_fqdn = summary.fqdn_identities;
            /// Local identities with the labels of several names' selectors: what
            /// --tofqdns-max-identities limits
            gauge identity_fqdn_combinations = summary.fqdn_combinations;
            /// Addresses that have the identity of some of their names only, because of
            /// --tofqdns-max-identities
            gauge identity_limited_addresses = summary.addresses_limited;
            /// Addresses in answers that got no label of a name, because of --tofqdns-refuse-prefix
            counter fqdn_refused_addresses = summary.counters.addresses_refused;
            /// Prefixes (addresses among them) that have an identity in the ipcache map
            gauge ipcache_entries = summary.ipcache_entries;
            /// Prefixes that the ipcache map can hold
            gauge ipcache_max_entries = summary.ipcache_max;
        }
    }

    pub(super) fn names(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let summary = &self.scrape.summary;
        let counters = &summary.counters;
        families! { out;
            /// Selectors of policy rules
            gauge fqdn_selectors = summary.selectors;
            /// Learned triples of endpoint, name and address whose TTL has not run out
            gauge fqdn_active_ips = summary.names_live;
            /// Expired addresses kept open for connections that are alive
            gauge fqdn_alive_zombie_connections = summary.names_zombies;
            /// Mappings from proxies, by outcome
            counter_by fqdn_mappings = |outcome| match outcome {
                MappingOutcome::Realised => counters.mappings_realised,
                MappingOutcome::EndpointUnknown => counters.mappings_endpoint_unknown,
                MappingOutcome::NotAllowed => counters.mappings_not_allowed,
                MappingOutcome::Invalid => counters.mappings_invalid + self.proxies.unreadable(),
                MappingOutcome::RateLimited => counters.mappings_rate_limited,
                MappingOutcome::NotRealised => counters.mappings_not_realised,
            };
            /// Answers for names that toFQDNs rules select, from DNS servers that are not trusted;
            /// with --tofqdns-servers=trusted they open nothing
            counter fqdn_untrusted_answers = counters.answers_untrusted;
            /// Addresses not learned because a name or an endpoint had too many of them
            counter fqdn_pairs_left_out = counters.pairs_left_out;
        }
    }

    pub(super) fn firewalls(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let firewalls = &self.scrape.summary.firewalls;
        let observations = &self.scrape.summary.counters.observations;
        families! { out;
            /// Answers of DNS servers that came while an EgressFirewall uses names, by outcome
            counter_by resolver_observations = |outcome| match outcome {
                Observation::Taken => observations.taken,
                Observation::Unmatched => observations.unmatched,
                Observation::Untrusted => observations.untrusted,
            };
            /// Entries of policy maps that EgressFirewalls decide, counted once for endpoints of
            /// one identity
            gauge tier_entries = firewalls.entries;
            /// Pairs of a name that an EgressFirewall uses and an address that has its label
            gauge egress_firewall_addresses = firewalls.addresses;
        }
    }

    pub(super) fn writes(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let summary = &self.scrape.summary;
        let counters = &summary.counters;
        families! { out;
            /// Writes to maps
            counter_by bpf_map_writes = |map| match map {
                WrittenMap::Ipcache => counters.ipcache_writes,
                WrittenMap::Policy => counters.policy_writes,
            };
            /// Failed steps, such as map and file writes; the state before stays in force
            counter datapath_step_failures = counters.step_failures;
            /// Failed steps that wait for another attempt
            gauge datapath_pending_steps = summary.pending_steps;
            /// Label sets without an identity because all numbers were in use
            counter identity_exhausted = counters.identity_exhausted;
            /// Times that an address got the identity of some of its names only: the circuit
            /// breaker
            counter identity_limited = counters.identities_limited;
            /// Prefixes whose labels were resolved: for each change the prefix and those within it
            counter ipcache_prefixes_resolved = counters.prefixes_resolved;
            /// Pairs of name and address that were closed again
            counter fqdn_pairs_removed = counters.pairs_removed;
            /// Leases of proxies that were revoked before their end
            counter fqdn_lease_revocations = counters.revocations;
        }
    }

    pub(super) fn reconciler(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let reconciled = &self.scrape.summary.counters.reconciled;
        let conditions = &self.scrape.conditions;
        let found = [
            ("ipcache", reconciled.ipcache),
            ("policy", reconciled.policy),
            ("lxc", reconciled.lxc),
            ("names", reconciled.names),
            ("programs", reconciled.programs),
        ];
        let repairs = conditions.iter();
        let repairs = repairs.map(|(part, condition)| (part.as_str(), condition.repairs));
        let broken = conditions.iter();
        let broken = broken.map(|(part, condition)| (part.as_str(), condition.fault.is_some()));
        families! { out;
            /// Passes that compared the maps with the model
            counter reconcile_passes = reconciled.passes;
            /// Repairs, by part: entries of maps that a pass found wrong, and programs, pins,
            /// routes, netfilter and steering that the check every 2 s found missing or changed;
            /// grows only if something else changes them, or through a fault of the agent
            counters reconcile_differences["part"] = found.into_iter().chain(repairs);
            /// 1 for a part of the datapath that is wrong and cannot be repaired; `holdfast-agent
            /// status` says why
            gauges datapath_broken["part"] = broken;
            /// Failed reads of a map in such a pass
            counter reconcile_failures = reconciled.failures;
        }
    }
}
