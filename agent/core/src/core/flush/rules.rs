//! DNS rules: into endpoints' files, and to the proxies once the datapath has their policy.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use dns_policy::{
    boot_time::BootTime,
    name::Fqdn,
    rule::{EndpointRules, Servers},
};
use shared_maps::{EndpointId, IdentityId};

use crate::{
    core::{
        event::Effect,
        plan::{Plan, Undo},
        state::{
            State,
            publication::{PlanResult, Rules},
            retry::RETRY,
        },
    },
    datapath::{late_text::LateText, plan::Step},
    endpoint::{
        config_file::{
            EndpointFile, LearnedPair, RulesInFile, ServerAddresses, UnrenderedFile, ZombieEntry,
        },
        endpoint::Endpoint,
    },
    fqdn::cache::EndpointNames,
};

impl State {
    /// Marks the file of an endpoint that learned something: it is written soon.
    pub(in crate::core) fn file_soon(&mut self, id: EndpointId) {
        let pairs = self
            .learned
            .names
            .endpoint(id)
            .map_or(0, |names| names.held);
        self.files.mark_due_soon(id, pairs, self.now);
    }

    /// Writes the files of endpoints whose rules changed or whose names are due.
    pub(in crate::core) fn plan_files(&mut self, plan: &mut Plan) {
        if !self.restoration.is_synced() {
            return;
        }
        let mut due = self.files.take_due(self.now);
        if self.proxies.publication.take_stale_files() {
            due.extend(self.with_outdated_files());
        }
        for id in due {
            let endpoint = self.endpoints.get(id);
            if endpoint.is_some_and(|endpoint| endpoint.policy_map.is_some()) {
                self.refresh_file(plan, id);
            }
        }
    }

    /// Endpoints whose files lack their current DNS rules, or are of an earlier run.
    pub(in crate::core) fn with_outdated_files(&self) -> Vec<EndpointId> {
        let stale = self.endpoints.iter().filter(|endpoint| {
            let subject = self.policy.subject(endpoint.identity);
            let rules = subject.map(|subject| subject.dns());
            let rules = self.restoration.hold().rules_of(endpoint.id).or(rules);
            self.files.is_outdated(endpoint.id, rules)
        });
        stale.map(|endpoint| endpoint.id).collect()
    }

    /// Plans the write of an endpoint's file, in the background if the file has its rules already.
    pub(in crate::core) fn refresh_file(&mut self, plan: &mut Plan, id: EndpointId) {
        let Some(endpoint) = self.endpoints.get(id) else {
            return;
        };
        let rules = self.rules_of(endpoint);
        if !self.files.has_rules(id, &rules) || !self.config.names_kept_later {
            self.file(plan, id);
        } else if self.files.is_being_written(id) {
            // The disk is slow: the next write begins after the one under way.
            self.files.postpone(id, self.now);
        } else {
            let Some(file) = self.unrendered(id, &rules) else {
                return;
            };
            let number = self.files.begin_background(id, self.now);
            let step = Step::KeepNames(id, number, LateText::new(move || file.text()));
            self.step(plan, step, Undo::Names(id, number));
        }
    }

    /// Notes that a write in the background is done.
    pub(in crate::core) fn on_names_written(
        &mut self,
        plan: &mut Plan,
        id: EndpointId,
        number: u64,
    ) {
        plan.make_durable(id, self.files.end_background(id, number));
    }

    /// Notes that a write in the background failed.
    pub(in crate::core) fn on_names_unwritten(
        &mut self,
        id: EndpointId,
        number: u64,
        failure: String,
    ) {
        let retry_at = self.now.plus_secs(RETRY);
        if self.files.fail_background(id, number, failure, retry_at) {
            self.counters.step_failures += 1;
        }
    }

    /// Plans the write of an endpoint's file.
    pub(in crate::core) fn file(&mut self, plan: &mut Plan, id: EndpointId) {
        let Some(endpoint) = self.endpoints.get(id) else {
            return;
        };
        let rules = self.rules_of(endpoint);
        let Some(file) = self.unrendered(id, &rules) else {
            return;
        };
        let text = file.text();
        let (before, results) = self.files.write(id, rules, self.now);
        self.step(plan, Step::WriteEndpoint(id, text), Undo::File(id, before));
        plan.make_durable(id, results);
    }

    fn rules_of(&self, endpoint: &Endpoint) -> Arc<EndpointRules> {
        let subject = self.policy.subject(endpoint.identity);
        let rules = subject.map(|subject| subject.dns());
        let rules = self.restoration.hold().rules_of(endpoint.id).or(rules);
        rules.map(Arc::clone).unwrap_or_default()
    }

    fn unrendered(&mut self, id: EndpointId, rules: &Arc<EndpointRules>) -> Option<UnrenderedFile> {
        let servers = self.server_addresses(rules);
        let endpoint = self.endpoints.get(id)?;
        Some(UnrenderedFile {
            file: self.file_of(endpoint, rules),
            pairs: self.pairs_of(id),
            servers,
            max_servers: self.config.max_ips_per_restored_rule,
            boot_unix_ns: self.config.boot_unix_ns,
        })
    }

    fn file_of(&self, endpoint: &Endpoint, rules: &Arc<EndpointRules>) -> EndpointFile {
        let names = self.learned.names.endpoint(endpoint.id);
        let zombies = names.map(|names| self.zombies_of(names));
        EndpointFile {
            id: endpoint.id,
            key: endpoint.spec.key.clone(),
            identity: endpoint.identity,
            labels: endpoint.labels.clone(),
            ipv4: endpoint.ipv4,
            ipv6: endpoint.ipv6,
            interface: endpoint.spec.interface.clone(),
            netns: endpoint.spec.netns.clone(),
            pod: endpoint.spec.pod.clone(),
            history: Vec::new(),
            zombies: zombies.unwrap_or_default(),
            rules: Some(RulesInFile {
                boot_id: self.config.boot_id.clone(),
                start: self.config.start,
                revision: self.revision_in_files(),
                rules: (**rules).clone(),
            }),
        }
    }

    /// Unix time of a boot time, in nanoseconds.
    fn wall(&self, at: BootTime) -> u64 {
        at.nanos().saturating_add(self.config.boot_unix_ns)
    }

    fn pairs_of(&self, endpoint: EndpointId) -> Vec<LearnedPair> {
        let Some(names) = self.learned.names.endpoint(endpoint) else {
            return Vec::new();
        };
        let mut pairs = Vec::with_capacity(names.held);
        for (name, addresses) in &names.names {
            pairs.extend(addresses.iter().map(|(address, lookup)| LearnedPair {
                name: name.clone(),
                address: *address,
                seen: lookup.seen,
                expires: lookup.expires,
                ttl: lookup.ttl,
                trusted_until: lookup.trusted_until,
            }));
        }
        pairs
    }

    fn zombies_of(&self, names: &EndpointNames) -> Vec<ZombieEntry> {
        // An answer of another server may have kept the pair for longer.
        let is_trusted = |name: &Fqdn, address: &IpAddr, expired: BootTime| {
            let entry = self.learned.names.name(name);
            let pair = entry.and_then(|entry| entry.pairs.get(address));
            let until = pair.and_then(|pair| pair.trusted_until);
            until.is_some_and(|until| until >= expired) || self.resolved.has(name, *address)
        };
        let zombies = names.zombies.iter().map(|(address, zombie)| ZombieEntry {
            address: *address,
            names: zombie.names.iter().cloned().collect(),
            trusted: zombie
                .names
                .iter()
                .filter(|name| is_trusted(name, address, zombie.delete_pending))
                .cloned()
                .collect(),
            alive_at: zombie.alive_at.map_or(0, |at| self.wall(at)),
            delete_pending_at: self.wall(zombie.delete_pending),
        });
        zombies.collect()
    }

    /// Addresses of the servers of these rules, as many as a file lists.
    fn server_addresses(&mut self, rules: &EndpointRules) -> ServerAddresses {
        let all = rules.ports.iter().flat_map(|port| &port.rules);
        let ids: BTreeSet<IdentityId> = all
            .filter_map(|rule| match &rule.servers {
                Servers::Identities(ids) => Some(ids),
                Servers::Any | Servers::Prefixes(_) => None,
            })
            .flatten()
            .copied()
            .collect();
        let mut found = ServerAddresses::new();
        if !ids.is_empty() {
            let limit = self.config.max_ips_per_restored_rule;
            for (prefix, id) in self.ipcache.prefixes_of(&ids, limit) {
                found.entry(id).or_default().push(prefix);
            }
        }
        found
    }

    /// Brings the agent's own verdict on names up to date, and notes a new revision if any
    /// endpoint's rules differ.
    pub(in crate::core) fn settle_rules(&mut self) {
        if !self.restoration.is_synced() || !self.proxies.publication.take_stale() {
            return;
        }
        let mut current = Rules::new();
        for (_, subject) in self.policy.subjects() {
            for id in subject.endpoints() {
                let rules = self
                    .restoration
                    .hold()
                    .rules_of(*id)
                    .unwrap_or(subject.dns());
                if !rules.ports.is_empty() {
                    current.insert(*id, Arc::clone(rules));
                }
            }
        }
        self.proxies.publication.check(current);
    }

    /// Rules that proxies may have now.
    pub(in crate::core) fn publish(&mut self, result: PlanResult) -> Vec<Effect> {
        self.proxies.publication.note(result);
        if self.restoration.is_synced() {
            self.proxies.publication.publish()
        } else {
            Vec::new()
        }
    }
}
