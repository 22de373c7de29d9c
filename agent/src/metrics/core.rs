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
            /// Identities of addresses that have at least one FQDN label
            gauge identity_fqdn = summary.fqdn_identities;
            /// Identities of addresses that have the FQDN labels of several selectors.
            /// --tofqdns-max-identities limits this number
            gauge identity_fqdn_combinations = summary.fqdn_combinations;
            /// Addresses whose identity has the labels of only some of their names, because of
            /// --tofqdns-max-identities
            gauge identity_limited_addresses = summary.addresses_limited;
            /// Addresses in answers that got no FQDN label, because of --tofqdns-refuse-prefix
            counter fqdn_refused_addresses = summary.counters.addresses_refused;
            /// Prefixes, including single addresses, that have an identity in the ipcache map
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
            /// Learned combinations of endpoint, name and address whose TTL has not ended
            gauge fqdn_active_ips = summary.names_live;
            /// Addresses whose TTL has ended and that stay open because connections still use them
            /// (zombies)
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
            /// Answers from DNS servers that are not trusted, for names that toFQDNs rules select.
            /// With --tofqdns-servers=trusted they open nothing
            counter fqdn_untrusted_answers = counters.answers_untrusted;
            /// Addresses that were not learned, because a name or an endpoint had too many
            /// addresses
            counter fqdn_pairs_left_out = counters.pairs_left_out;
        }
    }

    pub(super) fn firewalls(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let firewalls = &self.scrape.summary.firewalls;
        let observations = &self.scrape.summary.counters.observations;
        families! { out;
            /// Answers of DNS servers that arrived while an EgressFirewall used names, by outcome
            counter_by resolver_observations = |outcome| match outcome {
                Observation::Taken => observations.taken,
                Observation::Unmatched => observations.unmatched,
                Observation::Untrusted => observations.untrusted,
            };
            /// Entries of policy maps that come from EgressFirewalls. An entry counts once for all
            /// endpoints with the same identity
            gauge tier_entries = firewalls.entries;
            /// Pairs of name and address: an EgressFirewall uses the name, and the address has
            /// the label of this name
            gauge egress_firewall_addresses = firewalls.addresses;
        }
    }

    pub(super) fn writes(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let summary = &self.scrape.summary;
        let counters = &summary.counters;
        families! { out;
            /// Writes to BPF maps, by map
            counter_by bpf_map_writes = |map| match map {
                WrittenMap::Ipcache => counters.ipcache_writes,
                WrittenMap::Policy => counters.policy_writes,
            };
            /// Steps of a change that failed, such as a write to a map or file. The previous state
            /// stays in force
            counter datapath_step_failures = counters.step_failures;
            /// Failed steps that the agent will try again
            gauge datapath_pending_steps = summary.pending_steps;
            /// Label sets that got no identity, because all numbers were in use
            counter identity_exhausted = counters.identity_exhausted;
            /// Times that the circuit breaker (--tofqdns-max-identities) gave an address an
            /// identity with the labels of only some of its names
            counter identity_limited = counters.identities_limited;
            /// Prefixes whose labels were computed. A change of a prefix counts this prefix and all
            /// prefixes within it
            counter ipcache_prefixes_resolved = counters.prefixes_resolved;
            /// Pairs of name and address that the agent closed again
            counter fqdn_pairs_removed = counters.pairs_removed;
            /// Leases of proxies that the agent revoked before their end
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
            /// Completed comparisons of the maps with the agent's model
            counter reconcile_passes = reconciled.passes;
            /// Repairs of the datapath, by part. The count grows only if another program changes
            /// the datapath, or if the agent has a fault
            counters reconcile_differences["part"] = found.into_iter().chain(repairs);
            /// 1 for a part of the datapath that is wrong and that the agent cannot repair.
            /// `holdfast-agent status` gives the reason
            gauges datapath_broken["part"] = broken;
            /// Reads of a map that failed during a comparison of the maps with the agent's model
            counter reconcile_failures = reconciled.failures;
        }
    }
}
