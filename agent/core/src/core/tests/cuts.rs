//! Fixed plans, cut before each of their steps. The entries that are in force after the cut are sound, no rules are
//! published, and the next run ends in the same state as a run without a cut.

use std::collections::{BTreeMap, BTreeSet};

use shared_maps::{EndpointId, IdentityId, lxc::FLAG_HOST, policy::PolicyKey};

use super::{
    oracle::{Act, Ends, Fate, Pod, World, config, fate, questions},
    restart::{again, restarted},
};
use crate::{
    core::{Effect, Event},
    datapath::{
        memory::MemoryDatapath,
        plan::{Datapath as _, Step, StepError},
    },
    identity::checkpoint,
    labels::LabelSet,
    source_event::SourceEvent,
};

/// The policy in force before. 1.1.1.1 carries `*.cilium.io`.
const OLD: &str = r"
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toFQDNs: [{matchPattern: '*.cilium.io'}]
  - toCIDR: [2.2.2.2/32]
";
/// The policy that is removed: an allowed block, with a denied part that no other policy allows.
const GONE: &str = r"
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toCIDR: [9.9.9.0/24]
  egressDeny:
  - toCIDR: [9.9.9.9/32]
";
/// The policy that is added: 1.1.1.1 gets two more labels; an allowed block with a denied part; a
/// DNS server inside a block that is allowed; a deny of addresses in use.
pub(super) const NEW: &str = r"
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toFQDNs: [{matchName: www.cilium.io}]
  - toCIDR: [1.1.0.0/16]
    toPorts: [{ports: [{port: 443, endPort: 450, protocol: TCP}]}]
  - toCIDR: [1.1.9.9/32]
    toPorts: [{ports: [{port: 53}], rules: {dns: [{matchPattern: '*'}]}}]
  - toCIDR: [1.1.9.0/24]
  egressDeny:
  - toCIDR: [1.1.2.0/24]
  - toCIDR: [2.2.2.2/32]
    toPorts: [{ports: [{port: 80, protocol: TCP}]}]
";

/// Endpoints 7 and 9 (web) under the old policy; 7 learned 1.1.1.1, which is on disk.
pub(super) fn old() -> World {
    let mut world = World::new();
    for (name, text) in [("old", OLD), ("gone", GONE)] {
        let event = world.document(name, Some(text));
        world.node.event(event);
    }
    let event = world.host(9, Some(Pod::WEB));
    world.node.event(event);
    world.act(&Act::Learn("www.cilium.io", "1.1.1.1"));
    world.node.tick(world.node.now.plus_secs(6));
    world.check_end();
    world
}

/// The same world, where the next change of policy is one plan for each endpoint and prefix.
fn old_in_parts() -> World {
    let mut world = old();
    world.node.in_parts(1);
    world
}

/// The agent is about to be synced after a restart, and everything changed meanwhile. This is one plan.
fn about_to_sync() -> World {
    let mut world = old();
    world.document("new", Some(NEW));
    world.document("gone", None);
    world.host(8, Some(Pod::WEB));
    world.host(9, None);
    world.node = again(&world.node, config(), &[107, 108, 109]);
    world.node.begin();
    let mut node = std::mem::replace(&mut world.node, super::scenario::Node::new());
    world.replay(&mut node);
    node.event(Event::Policies(SourceEvent::InitDone));
    assert!(node.datapath.log.is_empty(), "{:?}", node.datapath.log);
    world.node = node;
    world
}

pub(super) fn publishes(effects: &[Effect]) -> bool {
    effects
        .iter()
        .any(|effect| matches!(effect, Effect::Rules(_)))
}

/// Cuts the plan of an event before each of its steps and after the last.
fn every_cut(before: fn() -> World, change: fn(&mut World) -> Event) -> Vec<Step> {
    let mut whole = before();
    let start = whole.node.datapath.clone();
    let event = change(&mut whole);
    let steps = whole.node.event(event);
    whole.check_end();
    assert!(publishes(&whole.node.effects));
    let end = whole.node.datapath.clone();
    files_follow_maps(&start, &steps);
    let ends = Ends::new(&start, &end);
    let mut uncut = restarted(&whole);
    uncut.tick(uncut.now.plus_secs(31));
    for cut in 0..=steps.len() {
        let mut world = before();
        let at = (cut, steps.get(cut.wrapping_sub(1)));
        let (mut event, mut done) = (change(&mut world), 0);
        let (plan, lost) = loop {
            let plan = world.node.core.plan(world.node.now, event);
            let here = &steps[done..done + plan.steps.len()];
            assert_eq!(plan.steps, here, "the plan is the same each time");
            let carried_out = plan.steps.len().min(cut - done);
            for step in plan.steps.iter().take(carried_out) {
                world.node.datapath.apply(step).unwrap();
            }
            done += carried_out;
            let lost: Vec<_> = (carried_out..plan.steps.len())
                .map(|n| (n, StepError::Skipped))
                .collect();
            if !lost.is_empty() || !world.node.core.change_in_progress() {
                break (plan, lost);
            }
            let effects = world.node.core.commit(world.node.now, plan, &lost);
            assert!(!publishes(&effects), "{at:?}");
            event = Event::ContinueChange;
        };
        ends.judge(&world.node.datapath, &at);
        judge_comers_and_goers(&start, &world.node.datapath, &end, &at);
        judge_numbers(&world.node.datapath, &at);
        judge_lxc(&world.node.datapath, &at);
        let effects = world.node.core.commit(world.node.now, plan, &lost);
        assert_eq!(publishes(&effects), lost.is_empty(), "{at:?}");

        let mut node = restarted(&world);
        node.tick(node.now.plus_secs(31));
        world.node = node;
        world.check_end();
        let (is, shall) = (&world.node.datapath, &uncut.datapath);
        assert_eq!(meaning(is), meaning(shall), "{at:?}");
        assert_eq!(is.attached, shall.attached, "{at:?}");
        let ids = |datapath: &MemoryDatapath| datapath.files.keys().copied().collect::<Vec<_>>();
        assert_eq!(ids(is), ids(shall), "{at:?}");
    }
    steps
}

/// The content of the maps with labels in place of numbers: new label sets may have other numbers.
pub(super) fn meaning(datapath: &MemoryDatapath) -> BTreeSet<String> {
    let local = checkpoint::parse_local(datapath.checkpoint.as_deref().unwrap()).unwrap();
    let labels: BTreeMap<u32, LabelSet> = local.into_iter().map(|(id, l)| (id.0, l)).collect();
    let named = |id: u32| match labels.get(&id) {
        Some(labels) => labels.texts().join(","),
        None => id.to_string(),
    };
    let ipcache = datapath.ipcache.iter();
    let ipcache = ipcache.map(|(key, value)| format!("{key:?} {}", named(value.sec_identity)));
    let lxc = datapath.lxc.iter().map(|entry| format!("{entry:?}"));
    let policy = datapath.policy.iter().flat_map(|(id, map)| {
        map.iter().map(move |(key, value)| {
            let peer = named(key.sec_label);
            let key = PolicyKey {
                sec_label: 0,
                ..*key
            };
            format!("{id} {peer} {key:?} {value:?}")
        })
    });
    ipcache.chain(lxc).chain(policy).collect()
}

/// Packets of a new endpoint meet its whole policy from the first packet on. Packets of a removed
/// endpoint that are dropped at first stay dropped until it is gone.
fn judge_comers_and_goers(
    start: &MemoryDatapath,
    state: &MemoryDatapath,
    end: &MemoryDatapath,
    at: &dyn std::fmt::Debug,
) {
    for question in questions(end, end) {
        let id = question.endpoint;
        if start.policy.contains_key(&id) || !state.attached.contains_key(&id) {
            continue;
        }
        let (is, will) = (fate(state, question), fate(end, question));
        assert_eq!(is, will, "{question:?} at {at:?}");
    }
    for question in questions(start, start) {
        let id = question.endpoint;
        let stays = end.policy.contains_key(&id);
        if !stays && fate(start, question) == Some(Fate::Dropped) {
            let is = fate(state, question);
            assert!(
                is.is_none_or(|is| is == Fate::Dropped),
                "{question:?} at {at:?}"
            );
            assert!(
                is.is_some() || !state.attached.contains_key(&id),
                "{id} has programs and no policy map at {at:?}"
            );
        }
    }
}

/// Every number that a map uses is on disk.
fn judge_numbers(state: &MemoryDatapath, at: &dyn std::fmt::Debug) {
    let local = checkpoint::parse_local(state.checkpoint.as_deref().unwrap()).unwrap();
    let pods = state.endpoint_identities();
    let saved = local.iter().chain(&pods).map(|(id, _)| *id);
    let saved: BTreeSet<IdentityId> = saved.collect();
    let ipcache = state.ipcache.values().map(|value| value.sec_identity);
    let policy = state.policy.values().flatten();
    let lxc = state.lxc.values().map(|value| value.sec_id);
    let used = ipcache.chain(policy.map(|(key, _)| key.sec_label));
    for id in used.chain(lxc).map(IdentityId) {
        let numbered = id.is_local_scope() || id.is_endpoint();
        assert!(
            !numbered || saved.contains(&id),
            "{id} is not on disk at {at:?}"
        );
    }
}

/// Every endpoint in `cilium_lxc` has a file and a policy map.
fn judge_lxc(state: &MemoryDatapath, at: &dyn std::fmt::Debug) {
    for value in state.lxc.values().filter(|v| v.flags & FLAG_HOST == 0) {
        let id = EndpointId(value.lxc_id);
        assert!(state.files.contains_key(&id), "{id} has no file at {at:?}");
        assert!(state.policy.contains_key(&id), "{id} has no map at {at:?}");
    }
}

/// A proxy that starts reads rules from files: the rules of an endpoint that existed before change
/// only after the maps.
fn files_follow_maps(start: &MemoryDatapath, steps: &[Step]) {
    let written = steps.iter().position(
        |step| matches!(step, Step::WriteEndpoint(id, _) if start.files.contains_key(id)),
    );
    let last = steps
        .iter()
        .rposition(|step| matches!(step, Step::SetPolicy(..) | Step::SetIpcache(..)));
    if let (Some(written), Some(last)) = (written, last) {
        assert!(written > last, "{written} {last}: {steps:?}");
    }
}

fn count(steps: &[Step], wanted: fn(&Step) -> bool) -> usize {
    steps.iter().filter(|step| wanted(step)).count()
}

#[test]
fn a_sync_at_which_everything_changed() {
    let synced = |_: &mut World| Event::Endpoints(SourceEvent::InitDone);
    let steps = every_cut(about_to_sync, synced);
    for (what, wanted) in [
        (
            "deny",
            (|s| matches!(s, Step::SetPolicy(_, _, v) if v.is_deny())) as fn(&Step) -> bool,
        ),
        (
            "redirect",
            |s| matches!(s, Step::SetPolicy(_, _, v) if v.proxy_port.get() != 0),
        ),
        ("removed entry", |s| matches!(s, Step::UnsetPolicy(..))),
        ("relabelled prefix", |s| matches!(s, Step::SetIpcache(..))),
        ("removed prefix", |s| matches!(s, Step::UnsetIpcache(_))),
        ("new endpoint", |s| matches!(s, Step::CreatePolicyMap(_))),
        ("its address", |s| matches!(s, Step::SetLxc(..))),
        ("its programs", |s| matches!(s, Step::Attach(_))),
        ("endpoint that goes", |s| {
            matches!(s, Step::RemovePolicyMap(_))
        }),
        ("new numbers", |s| matches!(s, Step::Checkpoint(_))),
    ] {
        assert!(count(&steps, wanted) > 0, "no {what} in {steps:?}");
    }
}

#[test]
fn a_policy_that_comes() {
    for before in [old, old_in_parts] {
        every_cut(before, |world| world.document("new", Some(NEW)));
    }
}

#[test]
fn a_policy_that_goes() {
    for before in [old, old_in_parts] {
        every_cut(before, |world| world.document("gone", None));
    }
}

#[test]
fn a_policy_that_changes() {
    for before in [old, old_in_parts] {
        every_cut(before, |world| world.document("old", Some(NEW)));
    }
}

#[test]
fn an_endpoint_that_comes() {
    every_cut(old, |world| world.host(8, Some(Pod::DB)));
}

#[test]
fn an_endpoint_that_goes() {
    every_cut(old, |world| world.host(9, None));
}
