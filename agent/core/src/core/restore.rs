//! What an earlier run left: numbers, labels and map entries stay as they are at least until the
//! sources are synced.

mod hold;
mod left_behind;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use dns_policy::{boot_time::BootTime, rule::EndpointRules};
use ipnet::IpNet;
use shared_maps::{EndpointId, IdentityId};

use super::{
    config::{CoreConfig, Restored},
    endpoints::Origin,
    plan::Plan,
    snapshot::Counters,
    state::{ClusterObjects, Learned, Proxies, State},
};
use crate::{
    core::{
        plan::Undo,
        state::{
            closed_names::ClosedNames,
            endpoint_files::EndpointFiles,
            endpoint_table::EndpointTable,
            hold::Hold,
            identity_numbers::{Givers, IdentityNumbers},
            location::RuleKey,
            lxc_table::LxcTable,
            passed_answers::PassedAnswers,
            policy_model::PolicyModel,
            resolved::ResolvedNames,
            restoration::Restoration,
            retry::Retry,
        },
    },
    datapath::plan::Step,
    endpoint::config_file::{EndpointFile, HistoryEntry, ZombieEntry},
    fqdn::{
        cache::{Answer, Limits, NameCache, Trust},
        longest::MAX_TTL,
        pre_cache::PreCached,
        servers::NameServers,
    },
    identity::scopes::RESERVED_IDENTITIES,
    ipcache::{
        metadata::Claim,
        owners::{Owner, Source},
        resolve::{World, cidr_label, cidr_of},
        table::{Ipcache, key_of, prefix_of},
    },
    labels::{
        CIDR, CIDR_GROUP, DNS_NAME, FQDN, Label, LabelSet, NODE, NODE_CIDR, RESERVED, SERVICE,
    },
};

/// Source of the label that stands for the lost labels of a number.
const LOST: &str = "lost";
/// Minimum time for which a restored address stays valid, in seconds.
const AT_LEAST: u64 = 30;

impl State {
    pub(super) fn new(config: CoreConfig, restored: Restored) -> Self {
        let dual = config.enable_ipv4 && config.enable_ipv6;
        let pods = restored_pods(&restored);
        let (local, requested) =
            restored_local(&restored, &World::new(dual).pruned(config.pods.prunes()));
        let limits = Limits {
            per_name: config.max_ips_per_name,
            per_endpoint: config.max_pairs_per_endpoint,
            zombies: config.max_deferred_deletes,
            idle_grace: config.idle_grace,
        };
        let givers = Givers {
            objects: config.cluster_identities,
            shares: config.high_scale.is_some(),
        };
        let mut state = Self {
            now: restored.now,
            ipcache: Ipcache::new(dual).pruned(config.pods.prunes()),
            numbers: IdentityNumbers::new(local.clone(), pods, givers),
            policy: PolicyModel::new(config.enable_policy, config.proxy_port),
            resolved: ResolvedNames::new(limits, config.ipcache_max),
            learned: Learned {
                names: NameCache::new(limits),
                closed: ClosedNames::default(),
                passed: PassedAnswers::default(),
            },
            endpoints: EndpointTable::new(restored.policy_map_sizes.clone()),
            lxc: LxcTable::new(&restored.lxc),
            cluster: ClusterObjects::default(),
            proxies: Proxies::default(),
            retry: Retry::default(),
            files: EndpointFiles::default(),
            restoration: Restoration::new(
                requested,
                former_rules(&restored),
                Hold::new(rules_in_files(&restored)),
            ),
            counters: Counters::default(),
            config,
        };
        state.know_reserved();
        state.claim_world();
        state.claim_cluster();
        state.restore_cleaned(&restored);
        state.refresh_servers();
        state.restore_pre_cached(&restored.pre_cache);
        state.restore(restored, &local);
        state
    }

    fn restore_cleaned(&mut self, restored: &Restored) {
        let mut cleaned = restored.cleaned.clone();
        if cleaned.boot_id == self.config.boot_id {
            // A file of an earlier build has no Unix time.
            let without = cleaned.cleanings.iter_mut();
            for cleaning in without.filter(|cleaning| cleaning.at_unix == 0) {
                cleaning.at_unix = self.unix_time(cleaning.at);
            }
        }
        let boot_id = &self.config.boot_id;
        self.learned.closed.restore(cleaned, boot_id, self.now);
    }

    fn know_reserved(&mut self) {
        for (key, id) in RESERVED_IDENTITIES {
            self.introduce(id, LabelSet::new(vec![Label::new(RESERVED, key, "")]));
        }
        let both = ["kube-apiserver", "remote-node"].map(|key| Label::new(RESERVED, key, ""));
        self.introduce(IdentityId::KUBE_APISERVER, LabelSet::new(both.to_vec()));
    }

    fn claim_world(&mut self) {
        for all in self.config.whole_families() {
            let labels = LabelSet::new(vec![self.ipcache.world().label(all).clone()]);
            self.ipcache.claim(all, Owner::World, Claim::Labels(labels));
        }
    }

    /// Claims the blocks of the cluster: an address in them never counts as the world.
    fn claim_cluster(&mut self) {
        let unmanaged = LabelSet::new(vec![Label::new(RESERVED, "unmanaged", "")]);
        let blocks = [&self.config.cluster_blocks, &self.config.pod_blocks];
        let blocks: Vec<IpNet> = blocks.into_iter().flatten().copied().collect();
        for block in blocks {
            let owner = Owner::Object(Source::Local, "cluster block".into());
            self.ipcache
                .claim(block, owner, Claim::Labels(unmanaged.clone()));
        }
    }

    fn restore(&mut self, restored: Restored, local: &[(IdentityId, LabelSet)]) {
        for (key, value) in &restored.ipcache {
            if let Some(prefix) = prefix_of(key) {
                let identity = IdentityId(value.sec_identity);
                self.ipcache.realise(prefix, Some(identity));
                self.ipcache.mark(prefix);
            }
        }
        self.restore_labels(&restored, local);
        let mut maps: BTreeMap<EndpointId, _> = restored.policy_maps.into_iter().collect();
        for file in restored.endpoints {
            let map = maps.remove(&file.id);
            let alive = restored.interfaces.contains(&file.interface.ifindex)
                && file.id.0 > 0
                && self.endpoints.get(file.id).is_none();
            let is_judged = restored
                .under_programs
                .contains(&(file.id, file.interface.ifindex));
            let has_map = map.is_some();
            self.restore_endpoint(&file, map);
            if is_judged && has_map {
                self.keep_programs(&file);
            }
            if alive {
                self.restore_names(&file);
            } else {
                self.remove_endpoint(file.id);
            }
        }
        for (id, interfaces) in restored.programs {
            if self.endpoints.get(id).is_none() && !self.endpoints.is_leaving(id) {
                let entries = maps.remove(&id).unwrap_or_default();
                self.endpoints.add_left(id, interfaces, entries);
            }
        }
        for id in maps.into_keys() {
            self.endpoints.add_orphan(id);
        }
    }

    /// Gives prefixes the labels of the numbers that they have in the maps, as far as they may
    /// keep them through the grace.
    fn restore_labels(&mut self, restored: &Restored, local: &[(IdentityId, LabelSet)]) {
        let labels: BTreeMap<IdentityId, &LabelSet> =
            local.iter().map(|(id, labels)| (*id, labels)).collect();
        let mut asked = BTreeSet::new();
        let requests = self.restoration.requests().map(|(_, id)| id);
        let shared: BTreeSet<IdentityId> = requests.filter(|id| !asked.insert(*id)).collect();
        for (prefix, identity) in numbers(restored) {
            if identity.is_service() {
                // The addresses of Services come from the cluster's objects.
                continue;
            }
            let Some(labels) = labels.get(&identity) else {
                continue;
            };
            let kept = labels.iter().filter(|label| match label.source() {
                // A label that a prefix inherits from a block is inherited again. So is the world's
                // label, which differs if a family was switched on or off.
                CIDR => cidr_of(label) == Some(prefix) && !shared.contains(&identity),
                // Documents and the node give these labels before anything is resolved. A group, a
                // node or an API server that is gone keeps nothing open.
                CIDR_GROUP | NODE | NODE_CIDR | RESERVED => false,
                // The earlier run may have let answers label this prefix.
                FQDN | DNS_NAME => !self.config.refused_prefixes.covers(prefix),
                _ => true,
            });
            let kept = Claim::Labels(LabelSet::new(kept.cloned().collect()));
            self.ipcache.claim(prefix, Owner::Restored, kept);
            self.restoration.add_prefix(prefix);
        }
    }

    fn restore_endpoint(
        &mut self,
        file: &EndpointFile,
        map: Option<
            Vec<(
                shared_maps::policy::PolicyKey,
                shared_maps::policy::PolicyValue,
            )>,
        >,
    ) {
        let id = file.id;
        let mut spec = file.spec();
        if spec.key.is_empty() {
            spec.key = format!("restored/{id}");
        }
        self.add_endpoint(id, spec, &file.labels, Origin::EarlierRun);
        if self.endpoints.get(id).is_some() {
            let rules = file.rules.as_ref();
            let rules = rules.map(|found| Arc::new(found.rules.clone()));
            self.files.find(id, rules);
        }
        if let Some(endpoint) = self.endpoints.get_mut(id)
            && let Some(map) = map
        {
            let shadow = endpoint.policy_map.get_or_insert_default();
            for (key, value) in map {
                shadow.put(key, Some(value));
            }
        }
    }

    /// Notes that programs of the earlier run judge an endpoint's packets: this run may attach its own
    /// later.
    fn keep_programs(&mut self, file: &EndpointFile) {
        let endpoint = self.endpoints.get_mut(file.id);
        if let Some(endpoint) = endpoint.filter(|endpoint| endpoint.identity == file.identity) {
            endpoint.former_programs = Some(endpoint.attachment());
        }
    }

    /// Restores the pre-cached names, except those cleaned since they were looked up, and
    /// addresses that no answer may label.
    fn restore_pre_cached(&mut self, known: &[PreCached]) {
        let (mut kept, mut left_out) = (0_usize, 0_usize);
        for entry in known {
            let until = self.instant(entry.expires);
            let closed = &self.learned.closed;
            let over = until <= self.now || closed.covers_on_node(&entry.name, entry.lookup);
            for address in entry.addresses.iter().copied() {
                if over || !self.is_plumbed(address) {
                    left_out += 1;
                } else {
                    self.learned.names.know_until(&entry.name, address, until);
                    kept += 1;
                }
            }
        }
        if !known.is_empty() {
            tracing::info!(kept, left_out, "addresses of --tofqdns-pre-cache");
        }
    }

    /// Restores the names of a file, except those cleaned since: the file is written later than the
    /// list of cleaned names. Addresses stay open until the end of the grace period, because
    /// proxies may hold leases. Answers that do not count now are left out: the earlier run may
    /// have had another `--tofqdns-servers`.
    fn restore_names(&mut self, file: &EndpointFile) {
        let mut is_changed = false;
        for entry in &file.history {
            is_changed |= !self.restore_answer(file.id, entry);
        }
        for entry in &file.zombies {
            if self
                .config
                .refused_prefixes
                .covering(entry.address)
                .is_none()
            {
                is_changed |= !self.restore_zombie(file.id, entry);
            }
        }
        if is_changed {
            self.file_soon(file.id);
        }
    }

    /// Restores an answer of a file. False if it is left out.
    fn restore_answer(&mut self, endpoint: EndpointId, entry: &HistoryEntry) -> bool {
        let only_trusted = self.config.name_servers == NameServers::Trusted;
        let seen = self.instant(entry.lookup).min(self.now);
        let is_passed = only_trusted && entry.trusted_until == 0;
        if is_passed || self.learned.closed.covers(endpoint, &entry.name, seen) {
            return false;
        }
        let at_least = self.now.plus_secs(AT_LEAST);
        // The wall clock may have jumped since: no answer lasts longer than its TTL.
        let ttl = entry.ttl.min(MAX_TTL);
        let longest = self.now.plus_secs(ttl.into()).max(at_least);
        let expires = match only_trusted {
            true => entry.trusted_until.min(entry.expires),
            false => entry.expires,
        };
        let expires = self.instant(expires).max(at_least).min(longest);
        let is_trusted = entry.trusted_until > 0;
        let trusted = is_trusted.then(|| self.instant(entry.trusted_until));
        let trusted_until = trusted.and_then(|at| {
            match entry.trusted_until < entry.expires {
                // An answer of another server keeps the pair for longer.
                true => (at > BootTime::START).then(|| at.min(longest)),
                false => Some(at.max(at_least).min(longest.plus(self.config.lease_slack))),
            }
        });
        for address in entry.addresses.iter().copied() {
            if !self.is_plumbed(address) {
                continue;
            }
            self.learned.names.learn(&Answer {
                endpoint,
                name: &entry.name,
                labels: None,
                address,
                seen,
                ttl: entry.ttl,
                expires,
                lease_end: None,
                trusted_until,
            });
        }
        true
    }

    /// Restores a zombie of a file. False if one of its names is left out.
    fn restore_zombie(&mut self, endpoint: EndpointId, entry: &ZombieEntry) -> bool {
        let only_trusted = self.config.name_servers == NameServers::Trusted;
        let latest = self.now.plus(self.config.idle_grace);
        let alive = self.instant_if_any(entry.alive_at);
        let alive = alive.map(|alive| alive.min(latest));
        let pending = self.instant(entry.delete_pending_at).min(self.now);
        let mut is_whole = true;
        for name in &entry.names {
            // The time of the look-up is unknown, but no later than the expiry.
            let trust = match entry.trusted.contains(name) {
                true => Trust::Trusted,
                false => Trust::Untrusted,
            };
            let is_passed = only_trusted && trust == Trust::Untrusted;
            if is_passed || self.learned.closed.covers(endpoint, name, pending) {
                is_whole = false;
                continue;
            }
            let names = &mut self.learned.names;
            names.restore_zombie(endpoint, name, entry.address, alive, pending, trust);
        }
        is_whole
    }

    /// An instant of a file. `None` if the file has none, or one before the node started.
    fn instant_if_any(&self, unix_ns: u64) -> Option<BootTime> {
        let at = self.instant(unix_ns);
        (at > BootTime::START).then_some(at)
    }

    /// An instant as files have it: nanoseconds of Unix time.
    pub(super) fn unix_time(&self, at: BootTime) -> u64 {
        at.nanos().saturating_add(self.config.boot_unix_ns)
    }

    /// An instant of a file.
    fn instant(&self, unix_ns: u64) -> BootTime {
        BootTime::from_nanos(unix_ns.saturating_sub(self.config.boot_unix_ns))
    }

    /// In the first plan, removes the entries of removed interfaces, before endpoints are
    /// published.
    pub(super) fn start(&mut self, plan: &mut Plan) {
        for (address, key, value) in self.lxc.unwanted() {
            let gone = self.endpoints.is_leaving(EndpointId(value.lxc_id))
                && self.endpoints.by_address(address).is_none();
            if !gone {
                continue;
            }
            let prefix = IpNet::from(address);
            let has = self
                .ipcache
                .get(prefix)
                .and_then(|metadata| metadata.realised);
            if has.is_some() {
                let undo = Undo::Ipcache(prefix, has);
                self.step(plan, Step::UnsetIpcache(key_of(prefix)), undo);
                self.ipcache.realise(prefix, None);
            }
            self.step(plan, Step::UnsetLxc(key), Undo::Lxc(key, Some(value)));
            self.lxc.remove(&key);
        }
    }

    /// When the grace after a restart ends; `None` while a change of policy is under way or
    /// policies of the last run are kept.
    pub(super) fn restored_until(&self) -> Option<BootTime> {
        let until = self.restoration.until();
        until.filter(|_| !self.change_in_progress())
    }

    /// Releases restored identities and labels that are still unused after the grace period.
    pub(super) fn end_restore(&mut self, plan: &mut Plan) {
        if self.restored_until().is_none_or(|until| until > self.now) {
            return;
        }
        // Labels that this event asks for get their former numbers before these are released.
        self.flush(plan);
        for prefix in self.restoration.end() {
            self.keep_denied(prefix);
            self.ipcache.unclaim(prefix, &Owner::Restored);
        }
        self.numbers.release_withheld();
    }
}

fn rules_in_files(restored: &Restored) -> BTreeMap<EndpointId, Arc<EndpointRules>> {
    let files = restored.endpoints.iter();
    let rules = files.filter_map(|file| Some((file.id, file.rules.as_ref()?.rules.clone())));
    rules.map(|(id, rules)| (id, Arc::new(rules))).collect()
}

fn former_rules(restored: &Restored) -> BTreeSet<RuleKey> {
    let files = restored.endpoints.iter();
    let rules = files.filter_map(|file| Some((file.id, &file.rules.as_ref()?.rules)));
    let keys = rules.flat_map(|(id, rules)| {
        let ports = rules.ports.iter();
        ports.map(move |port| (id, port.port, port.transport))
    });
    keys.collect()
}

/// Identities that prefixes had before the start.
fn numbers(restored: &Restored) -> impl Iterator<Item = (IpNet, IdentityId)> {
    let ipcache = restored.ipcache.iter();
    ipcache.filter_map(|(key, value)| Some((prefix_of(key)?, IdentityId(value.sec_identity))))
}

/// The numbers of pods and their labels, from the checkpoint, endpoints' files and maps.
fn restored_pods(restored: &Restored) -> Vec<(IdentityId, LabelSet)> {
    let mut pods = restored.endpoint_identities.clone();
    for file in &restored.endpoints {
        let known = pods
            .iter()
            .any(|(id, labels)| *id == file.identity || *labels == file.labels);
        if file.identity.is_endpoint() && !file.labels.is_empty() && !known {
            pods.push((file.identity, file.labels.clone()));
        }
    }
    pods.extend(pods_without_checkpoint(restored, &pods));
    pods
}

/// Numbers of pods that the maps have, but neither the checkpoint nor a file: no other label set
/// gets one of them while entries of the earlier run are there.
fn pods_without_checkpoint(
    restored: &Restored,
    known: &[(IdentityId, LabelSet)],
) -> Vec<(IdentityId, LabelSet)> {
    let known: BTreeSet<IdentityId> = known.iter().map(|(id, _)| *id).collect();
    let maps = restored.policy_maps.iter().flat_map(|(_, map)| map);
    let peers = maps.map(|(key, _)| IdentityId(key.sec_label));
    let found: BTreeSet<IdentityId> = numbers(restored)
        .map(|(_, id)| id)
        .chain(peers)
        .filter(|id| id.is_endpoint() && !known.contains(id))
        .collect();
    let lost = |id: IdentityId| LabelSet::new(vec![Label::new(LOST, &id.0.to_string(), "")]);
    found.into_iter().map(|id| (id, lost(id))).collect()
}

type Numbered = (Vec<(IdentityId, LabelSet)>, BTreeMap<IpNet, IdentityId>);

/// The identities of the checkpoint. Numbers that it lacks get the labels of their blocks
/// ("withhold and request", CFP-28427), so that no other label set gets them meanwhile. The result also
/// has the number that each prefix requests.
fn restored_local(restored: &Restored, world: &World) -> Numbered {
    let mut found = restored.local_identities.clone();
    let known: BTreeSet<IdentityId> = found.iter().map(|(id, _)| *id).collect();
    let mut prefixes: BTreeMap<IdentityId, Vec<IpNet>> = BTreeMap::new();
    let mut requested = BTreeMap::new();
    for (prefix, id) in numbers(restored) {
        if id.is_service() && !known.contains(&id) {
            // No other Service gets the number while an address has it.
            let label = Label::new(SERVICE, &prefix.to_string(), "");
            found.push((id, LabelSet::new(vec![label])));
        } else if id.is_local_scope() && !known.contains(&id) {
            prefixes.entry(id).or_default().push(prefix);
            requested.insert(prefix, id);
        }
    }
    for (id, prefixes) in prefixes {
        let blocks = prefixes.iter().filter_map(|prefix| cidr_label(*prefix));
        let worlds = prefixes.iter().map(|prefix| world.label(*prefix).clone());
        let labels: Vec<Label> = blocks.chain(worlds).collect();
        if labels.iter().any(|label| label.source() == CIDR) {
            found.push((id, LabelSet::new(labels)));
        }
    }
    (found, requested)
}
