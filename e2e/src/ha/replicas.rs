//! R3: replicas replace one another.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use shared_maps::{ipcache, lxc};

use super::setup::{LEAVES, Running, Setup, now, replica_name};
use super::{Redirect, Row, in_flight};
use crate::node::SdpOptions;
use crate::process::Program;
use crate::shell;

/// Two replicas run undisturbed.
pub(super) fn calm(setup: &Setup) -> Result<Vec<Row>> {
    let _agent = setup.agent(&setup.agent_options())?;
    let _replicas = [setup.replica(0)?, setup.replica(1)?];
    let report = setup.load()?.finish()?;
    Ok(vec![Row::none_lost(String::new(), &report, String::new())])
}

/// Replaces two replicas one after the other, repeatedly. Every second new replica runs `other`, if
/// given.
pub(super) fn rolled(setup: &Setup, other: Option<&Path>) -> Result<Vec<Row>> {
    let _agent = setup.agent(&setup.agent_options())?;
    let start = |setup: &Setup, number| surge(setup, number, other);
    let replicas = [start(setup, 0)?, start(setup, 1)?];
    let load = setup.load()?;
    let rolled = roll(setup, &load, replicas, start)?;
    finish(load, &rolled)
}

/// Kills the agent first, and starts it again when all replicas are replaced.
pub(super) fn without_agent(setup: &Setup) -> Result<Vec<Row>> {
    let agent = setup.agent(&setup.agent_options())?;
    let replicas = [setup.replica(0)?, setup.replica(1)?];
    let load = setup.load()?;
    load.flows()?;
    agent.kill_9()?;
    let start = |setup: &Setup, number| setup.lab.start_sdp(&setup.sdp_options(number));
    let rolled = roll(setup, &load, replicas, start)?;
    let _agent = setup.lab.start_agent(&setup.agent_options())?;
    setup.lab.proxies_in_step()?;
    finish(load, &rolled)
}

/// Replaces replicas, alternately by the previous version and by this one.
pub(super) fn rolled_versions(setup: &Setup) -> Result<Vec<Row>> {
    let previous = setup.size.previous.as_deref();
    let previous = previous.context("the previous version's holdfast-sdp is not at hand")?;
    rolled(setup, Some(previous))
}

/// Without steering maps, the kernel's hash distributes the load.
pub(super) fn without_maps(setup: &Setup) -> Result<Vec<Row>> {
    ensure!(
        setup.redirect == Redirect::Tproxy,
        "our redirect needs the maps"
    );
    let _agent = setup.agent(&setup.agent_options())?;
    setup.remove_steering()?;
    setup
        .lab
        .node
        .sysctl(&[("net.ipv4.tcp_migrate_req", "1")])?;
    let replicas = [unsteered(setup, 0)?, unsteered(setup, 1)?];
    let status = setup.lab.sdp_json(&replica_name(0), &["status"])?;
    let says = |what: &str| status.pointer(&format!("/steering/{what}")).cloned();
    ensure!(
        says("replacement_loses_nothing") == Some(true.into())
            && says("failed_are_bypassed") == Some(false.into()),
        "status does not say what holds without steering: {status}"
    );
    let load = setup.load()?;
    let rolled = roll(setup, &load, replicas, unsteered)?;
    finish(load, &rolled)
}

/// Observations while replicas were replaced.
struct Rolled {
    /// The last two replicas, which run until the load has ended.
    _replicas: [Program; 2],
    replacements: u32,
    /// Queries that were in flight when a replica began to drain.
    in_flight: u64,
    /// Queries that were sent while a replica drained.
    while_draining: u64,
    leaves: Vec<Leave>,
}

/// The end of one replica.
struct Leave {
    number: u32,
    /// Time from the signal to the end of the process, in nanoseconds of CLOCK_MONOTONIC.
    within: RangeInclusive<u64>,
}

impl Rolled {
    /// The replica that was ending when a query was sent, in words.
    fn leaving_at(&self, sent: u64) -> String {
        let leave = self
            .leaves
            .iter()
            .find(|leave| leave.within.contains(&sent));
        match leave {
            Some(leave) => format!("while replica {} left", leave.number),
            None => "while no replica left".to_owned(),
        }
    }
}

/// Whether the replica runs the other version, if there is one.
fn is_previous(number: u32) -> bool {
    number.is_multiple_of(2)
}

/// Replaces the older replica repeatedly. The server has queries of every pod, and answers them
/// only after the replica has received its signal.
fn roll(
    setup: &Setup,
    load: &Running<'_>,
    mut replicas: [Program; 2],
    start: impl Fn(&Setup, u32) -> Result<Program>,
) -> Result<Rolled> {
    let (mut in_flight, mut while_draining) = (0, 0);
    let mut leaves = Vec::new();
    for round in 0..setup.size.rolls {
        load.flows()?;
        let next = start(setup, round + 2)?;
        let [oldest, newest] = replicas;
        let status = in_flight::with_slow_queries(setup, round, |slow| {
            in_flight += slow;
            let (before, from) = (load.sent(), now());
            let status = oldest.terminate(LEAVES)?;
            let within = from..=now();
            leaves.push(Leave {
                number: round,
                within,
            });
            while_draining += load.sent() - before;
            Ok(status)
        })?;
        ensure!(status.success(), "a replica that drained: {status}");
        replicas = [newest, next];
    }
    ensure!(
        while_draining > 0,
        "no query was sent while a proxy drained"
    );
    Ok(Rolled {
        _replicas: replicas,
        replacements: setup.size.rolls,
        in_flight,
        while_draining,
        leaves,
    })
}

fn finish(load: Running<'_>, rolled: &Rolled) -> Result<Vec<Row>> {
    let report = load.finish()?;
    let closed = report.tcp.reopened;
    let crossed = report.tcp.crossed;
    ensure!(
        crossed == 0,
        "{crossed} queries met the closing of their connection"
    );
    let note = format!(
        "{} replacements; {} queries in flight when they began, {} sent while a proxy drained; \
         {closed} lasting connections closed, {crossed} queries met that",
        rolled.replacements, rolled.in_flight, rolled.while_draining
    );
    let lost_at = report.total().lost_at;
    let mut losses: BTreeMap<String, u32> = BTreeMap::new();
    for sent in &lost_at {
        *losses.entry(rolled.leaving_at(*sent)).or_default() += 1;
    }
    let mut row = Row::none_lost(String::new(), &report, note);
    for (when, number) in losses {
        row.note += &format!("; {number} lost {when}");
    }
    Ok(vec![row])
}

fn surge(setup: &Setup, number: u32, other: Option<&Path>) -> Result<Program> {
    let mut options = setup.sdp_options(number);
    options.program = other.filter(|_| is_previous(number)).map(Path::to_owned);
    let next = setup.lab.start_sdp(&options)?;
    setup.lab.connected(&replica_name(number))?;
    Ok(next)
}

fn unsteered(setup: &Setup, number: u32) -> Result<Program> {
    let next = setup
        .lab
        .start_sdp(&setup.sdp_options(number).flag("--steering=off"))?;
    setup.lab.connected(&replica_name(number))?;
    Ok(next)
}

/// A proxy on the same port without a slot. It has no access to the steering maps.
fn outsider(setup: &Setup) -> Result<Program> {
    let root = setup.lab.bpf_root().join("outsider");
    let pins = root.join(shared_maps::pin::GLOBALS);
    std::fs::create_dir_all(&pins)?;
    for map in [lxc::NAME, ipcache::NAME] {
        let (from, to) = (setup.lab.pin(map), pins.join(map));
        let show = |path: &Path| path.display().to_string();
        shell::run(
            "bpftool",
            &["map", "pin", "pinned", &show(&from), &show(&to)],
        )?;
    }
    let options = SdpOptions {
        bpf_root: Some(root),
        ..SdpOptions::new("outsider", 9969).flag("--steering=off")
    };
    setup.lab.start_sdp(&options)
}

/// The replica ends first and then starts again. In between, the other proxy gets all queries.
pub(super) fn beside_other(setup: &Setup) -> Result<Vec<Row>> {
    ensure!(
        setup.redirect == Redirect::Tproxy,
        "our redirect asks members only"
    );
    let _agent = setup.agent(&setup.agent_options())?;
    setup
        .lab
        .node
        .sysctl(&[("net.ipv4.tcp_migrate_req", "1")])?;
    let _other = outsider(setup)?;
    setup.lab.connected("outsider")?;
    let mut own = setup.replica(0)?;
    let asked = || setup.lab.metric(9969, "holdfast_dns_queries_total", "");
    let load = setup.load()?;
    let before = asked()?;
    load.flows()?;
    let steered = asked()?;
    for round in 0..setup.size.faults {
        load.flows()?;
        let status = own.terminate(LEAVES)?;
        ensure!(status.success(), "a replica that drained: {status}");
        load.flows()?;
        own = setup.replica(round + 1)?;
    }
    let report = load.finish()?;
    let got = asked()?;
    let note = format!(
        "{} restarts; the other proxy got {} queries before, {} in all",
        setup.size.faults,
        steered - before,
        got - before
    );
    let mut row = Row::none_lost(String::new(), &report, note);
    // Lasting connections to the other proxy stay there. It must get no new connections.
    row.holds &= steered == before && got > steered;
    Ok(vec![row])
}
