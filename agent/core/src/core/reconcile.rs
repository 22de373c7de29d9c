//! Comparing the datapath with the model while the agent runs. Differences are counted, and the
//! next plan repairs them. Normally the count stays 0.
//!
//! A run reads [`BATCH`] entries at a time, with a pause after each, on the thread that also
//! writes, so that a batch is of one instant. A walk over each map finds wrong entries and entries
//! without an owner. Then each entry of the model is looked up, which finds missing ones (except
//! where the covering prefix has the same identity: no verdict differs then). The names are
//! checked on the way: every address that a selected name has must carry its labels (CFP-28427,
//! "IP Labels Lifecycle").

mod programs;

use std::{net::IpAddr, ops::Bound, time::Duration};

use dns_policy::{boot_time::BootTime, name::Fqdn};
use ipnet::IpNet;
use shared_maps::{
    EndpointId, IdentityId,
    ipcache::{IpcacheKey, IpcacheValue},
    lxc::{LxcKey, LxcValue},
    policy::{PolicyKey, PolicyValue},
};

use self::programs::ProgramsRun;
use super::{snapshot::Reconciled, state::State};
use crate::{
    datapath::map_query::{BATCH, MapEntries, MapQuery},
    endpoint::endpoint::Endpoint,
    ipcache::{
        owners::Owner,
        table::{key_of, prefix_of},
    },
    labels::LabelSet,
};

/// Pause between two queries of a run: a query takes less than a millisecond.
const PAUSE: Duration = Duration::from_millis(10);
/// A walk begins again when the entry it stands on is removed. Once it has seen more than twice the
/// known entries and this many, it is given up until the next run.
const MAX_EXTRA_ENTRIES: usize = 4096;

/// Comparing the datapath with the model: what differs is corrected in the model.
#[derive(Debug, Default)]
pub(super) struct Reconcile {
    maps: ReconcileRun,
    programs: ProgramsRun,
}

/// How far a run over the maps and the names is.
#[derive(Debug, Default)]
struct ReconcileRun {
    stage: Stage,
    /// When the next query is due.
    due: BootTime,
    /// Entries that the walk under way has seen.
    walked: usize,
    /// Position of the check of names; `None` once all names were seen.
    names: Option<NamesSeen>,
}

/// How many names were seen, in the order that the name cache has right now. A name that moves because
/// another one is added is seen in another run.
#[derive(Clone, Copy, Debug, Default)]
struct NamesSeen {
    names: usize,
    /// How many addresses of the next name were seen.
    addresses: usize,
}

#[derive(Clone, Copy, Debug, Default)]
enum Stage {
    #[default]
    Rest,
    Ipcache(Option<IpcacheKey>),
    IpcacheModel(Option<IpNet>),
    Lxc(Option<LxcKey>),
    /// How many entries were seen, as in [`NamesSeen`].
    LxcModel(usize),
    Policy(EndpointId, Option<PolicyKey>),
    PolicyModel(EndpointId, Option<PolicyKey>),
    /// All maps have been compared, and the names have not.
    Names,
}

impl Reconcile {
    /// When the next query is due; `None` before the sources are synced.
    pub(super) fn due(&self, state: &State) -> Option<BootTime> {
        let due = self.maps.due.min(self.programs.due());
        state.restoration.is_synced().then_some(due)
    }

    /// The next query; `None` before it is due. Programs come first, because without programs the maps have no
    /// effect.
    pub(super) fn next(&mut self, state: &mut State) -> Option<MapQuery> {
        if !state.restoration.is_synced() {
            return None;
        }
        let programs = self.programs.next(state);
        programs.or_else(|| self.maps.next(state))
    }

    /// Compares entries with the model; `None` means that the query failed. Returns the number of
    /// differences, which the next plan repairs.
    pub(super) fn compare(&mut self, state: &mut State, entries: Option<MapEntries>) -> u64 {
        if !self.programs.end_query() {
            return self.maps.compare(state, entries);
        }
        match entries {
            Some(MapEntries::Programs(faults)) => self.programs.compare(state, &faults),
            // This datapath has no programs.
            Some(_) => 0,
            None => {
                state.counters.reconciled.failures += 1;
                0
            }
        }
    }
}

impl ReconcileRun {
    /// The next query of this run; `None` before it is due.
    fn next(&mut self, state: &mut State) -> Option<MapQuery> {
        if self.due > state.now {
            return None;
        }
        if matches!(self.stage, Stage::Rest) {
            self.names = Some(NamesSeen::default());
            self.go_to(Stage::Ipcache(None));
        }
        // The endpoint of this stage may be gone since the last query.
        while let Stage::Policy(id, _) | Stage::PolicyModel(id, _) = self.stage
            && state
                .endpoints
                .get(id)
                .is_none_or(|e| e.policy_map.is_none())
        {
            self.go_to(self.policies_after(state, id));
        }
        Some(match self.stage {
            Stage::Ipcache(after) => MapQuery::IpcacheAfter(after),
            Stage::IpcacheModel(after) => {
                let prefixes = state.ipcache.after(after, BATCH);
                let there = prefixes.iter().filter(|(_, m)| m.realised.is_some());
                MapQuery::IpcacheAt(there.map(|(prefix, _)| key_of(*prefix)).collect())
            }
            Stage::LxcModel(from) => {
                let keys = state.lxc.keys().skip(from).take(BATCH);
                MapQuery::LxcAt(keys.copied().collect())
            }
            Stage::Policy(id, after) => MapQuery::PolicyAfter(id, after),
            Stage::PolicyModel(id, after) => {
                MapQuery::PolicyAt(id, entries_after(state, id, after))
            }
            Stage::Lxc(after) => MapQuery::LxcAfter(after),
            Stage::Rest | Stage::Names => MapQuery::Nothing,
        })
    }

    /// Compares entries with the model; `None` means that the query failed.
    fn compare(&mut self, state: &mut State, entries: Option<MapEntries>) -> u64 {
        let before = state.counters.reconciled.differences();
        let more = match entries {
            None => {
                state.counters.reconciled.failures += 1;
                false
            }
            Some(MapEntries::Nothing | MapEntries::Programs(_)) => false,
            Some(MapEntries::Ipcache(entries)) => self.reconcile_ipcache(state, &entries),
            Some(MapEntries::Policy(id, entries)) => self.reconcile_policy(state, id, &entries),
            Some(MapEntries::Lxc(entries)) => self.reconcile_lxc(state, &entries),
        };
        if !more {
            self.go_to(self.stage_after(state));
        }
        self.check_names(state);
        if self.names.is_none() && matches!(self.stage, Stage::Names) {
            state.counters.reconciled.passes += 1;
            self.go_to(Stage::Rest);
        }
        let pause = match self.stage {
            Stage::Rest => state.config.reconcile_interval,
            _ => PAUSE,
        };
        self.due = state.now.plus(pause);
        state.counters.reconciled.differences() - before
    }

    fn go_to(&mut self, stage: Stage) {
        self.stage = stage;
        self.walked = 0;
    }

    fn policies_after(&self, state: &State, id: EndpointId) -> Stage {
        let mapped = state.endpoints.iter().filter(|e| e.policy_map.is_some());
        let next = mapped.map(|e| e.id).filter(|next| *next > id).min();
        next.map_or(Stage::Names, |id| Stage::Policy(id, None))
    }

    fn stage_after(&self, state: &State) -> Stage {
        match self.stage {
            Stage::Rest | Stage::Names => self.stage,
            Stage::Ipcache(_) => Stage::IpcacheModel(None),
            Stage::IpcacheModel(_) => Stage::Lxc(None),
            Stage::Lxc(_) => Stage::LxcModel(0),
            Stage::LxcModel(_) => self.policies_after(state, EndpointId(0)),
            Stage::Policy(id, _) => Stage::PolicyModel(id, None),
            Stage::PolicyModel(id, _) => self.policies_after(state, id),
        }
    }

    /// Whether a walk goes on after it saw `seen` more entries.
    fn goes_on(&mut self, seen: usize, known: usize) -> bool {
        self.walked += seen;
        seen >= BATCH && self.walked <= 2 * known + MAX_EXTRA_ENTRIES
    }

    fn reconcile_ipcache(
        &mut self,
        state: &mut State,
        entries: &[(IpcacheKey, Option<IpcacheValue>)],
    ) -> bool {
        match self.stage {
            Stage::Ipcache(_) => {
                for (key, value) in entries {
                    if let Some(prefix) = prefix_of(key)
                        && let Some(value) = value
                    {
                        compare_prefix(state, prefix.trunc(), value);
                    }
                }
                let last = entries.last().map(|(key, _)| *key);
                self.stage = Stage::Ipcache(last);
                self.goes_on(entries.len(), state.ipcache.realised())
            }
            Stage::IpcacheModel(after) => {
                for (key, value) in entries {
                    let Some(prefix) = prefix_of(key) else {
                        continue;
                    };
                    let has = value.map(|value| IdentityId(value.sec_identity));
                    let known = state.ipcache.get(prefix).and_then(|m| m.realised);
                    if known.is_some() && known != has {
                        state.counters.reconciled.ipcache += 1;
                        state.ipcache.realise(prefix, None);
                        state.ipcache.mark(prefix);
                    }
                }
                let prefixes = state.ipcache.after(after, BATCH);
                let last = prefixes.last().map(|(prefix, _)| *prefix);
                let more = prefixes.len() >= BATCH;
                self.stage = Stage::IpcacheModel(last);
                more
            }
            _ => false,
        }
    }

    fn reconcile_lxc(&mut self, state: &mut State, entries: &[(LxcKey, Option<LxcValue>)]) -> bool {
        for (key, value) in entries {
            if state.lxc.correct(key, value.as_ref()) {
                state.counters.reconciled.lxc += 1;
            }
        }
        match self.stage {
            Stage::Lxc(_) => {
                let last = entries.last().map(|(key, _)| *key);
                self.stage = Stage::Lxc(last);
                let known = state.lxc.keys().len();
                self.goes_on(entries.len(), known)
            }
            Stage::LxcModel(from) => {
                self.stage = Stage::LxcModel(from + BATCH);
                entries.len() >= BATCH
            }
            _ => false,
        }
    }

    fn reconcile_policy(
        &mut self,
        state: &mut State,
        id: EndpointId,
        entries: &[(PolicyKey, Option<PolicyValue>)],
    ) -> bool {
        let Some(endpoint) = state.endpoints.get_mut(id) else {
            return false;
        };
        let Some(map) = &mut endpoint.policy_map else {
            return false;
        };
        let mut differing = Vec::new();
        for (key, value) in entries {
            let peer = IdentityId(key.sec_label);
            let known = map.get(peer).and_then(|entries| entries.get(key));
            if known == value.as_ref() {
                continue;
            }
            differing.push(peer);
            map.put(*key, *value);
        }
        let known = endpoint.policy_entries();
        if !differing.is_empty() {
            state.counters.reconciled.policy += differing.len() as u64;
            endpoint.dirty_peers.add(differing);
            state.endpoints.mark(id);
        }
        let last = entries.last().map(|(key, _)| *key);
        match self.stage {
            Stage::Policy(..) => {
                self.stage = Stage::Policy(id, last);
                self.goes_on(entries.len(), known)
            }
            Stage::PolicyModel(..) => {
                self.stage = Stage::PolicyModel(id, last);
                entries.len() >= BATCH
            }
            _ => false,
        }
    }

    /// Checks the next names: each must have the labels that selectors give it, and each of its
    /// addresses must carry them.
    fn check_names(&mut self, state: &mut State) {
        let Some(mut at) = self.names else {
            return;
        };
        let mut wrong: Vec<(Fqdn, Option<LabelSet>)> = Vec::new();
        let (mut room, mut more) = (BATCH, false);
        for (name, entry) in state.learned.names.names().skip(at.names) {
            if room == 0 {
                more = true;
                break;
            }
            let labels = state.policy.labels_of_name(name);
            let owner = Owner::Name(name.clone());
            let carries = |address: &IpAddr| {
                let metadata = state.ipcache.get(IpNet::from(*address));
                metadata.and_then(|m| m.labels_by(&owner)) == labels.as_ref()
            };
            let here = entry.pairs.keys().skip(at.addresses).take(room);
            let looked = here.len();
            if entry.labels != labels || !here.into_iter().all(carries) {
                wrong.push((name.clone(), labels));
            }
            room = room.saturating_sub(looked.max(1));
            if at.addresses + looked < entry.pairs.len() {
                at.addresses += looked;
                more = true;
                break;
            }
            at = NamesSeen {
                names: at.names + 1,
                addresses: 0,
            };
        }
        self.names = more.then_some(at);
        for (name, labels) in wrong {
            state.counters.reconciled.names += 1;
            state.label_name(&name, labels);
        }
    }
}

fn compare_prefix(state: &mut State, prefix: IpNet, value: &IpcacheValue) {
    let has = IdentityId(value.sec_identity);
    let known = state.ipcache.get(prefix).and_then(|m| m.realised);
    let written = IpcacheValue {
        sec_identity: has.0,
        ..IpcacheValue::default()
    };
    if known == Some(has) && *value == written {
        return;
    }
    state.counters.reconciled.ipcache += 1;
    // The identity is right but another field is not: the entry must be written again.
    let rewrite = known == Some(has);
    state.ipcache.realise(prefix, (!rewrite).then_some(has));
    state.ipcache.mark(prefix);
}

fn entries_after(state: &State, id: EndpointId, after: Option<PolicyKey>) -> Vec<PolicyKey> {
    let map = state
        .endpoints
        .get(id)
        .and_then(|e: &Endpoint| e.policy_map.as_ref());
    let from = after.map_or(Bound::Unbounded, |key| {
        Bound::Included(IdentityId(key.sec_label))
    });
    let peers = map
        .into_iter()
        .flat_map(|map| map.range((from, Bound::Unbounded)));
    let keys = peers.flat_map(|entries| entries.keys());
    let later = |key: &&PolicyKey| {
        after.is_none_or(|after| (key.sec_label, **key) > (after.sec_label, after))
    };
    keys.filter(later).take(BATCH).copied().collect()
}

impl Reconciled {
    /// All differences that were found since the start.
    pub fn differences(&self) -> u64 {
        self.ipcache + self.policy + self.lxc + self.names + self.programs
    }
}
