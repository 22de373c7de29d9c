//! `--standby`: a second agent takes the place of the one that owns the node.
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::lab::{DNS4, at, web4};
use holdfast_e2e::policy::good_names;
use holdfast_e2e::process::Program;
use holdfast_e2e::standby::{
    STANDING_BY, StoppedCore, TAKING_OVER, expect_owner, second, standing_by, stands_by,
    with_metrics, with_value,
};
use holdfast_e2e::{AgentOptions, Lab, Query, SdpOptions, eventually, with_lab};
use nix::sys::signal::Signal;
use shared_maps::pin;

const SOON: Duration = Duration::from_secs(15);
const STANDBY_METRICS: u16 = 9964;

fn options() -> AgentOptions {
    AgentOptions::default().flag("--standby")
}

fn expect_refused(mut agent: Program, parts: &[&str]) -> Result<()> {
    let status = agent.wait(SOON)?;
    ensure!(!status.success(), "it ended well: {status}");
    for part in parts {
        ensure!(
            agent.log().contains(part),
            "no {part:?} in: {}",
            agent.log()
        );
    }
    Ok(())
}

/// A lab with an owner, a proxy, and names `n10.good.test` to `n19.good.test`.
fn with_owner(test: impl FnOnce(&Lab, Program, Program) -> Result<()>) {
    with_lab(|lab| {
        for n in 10..20 {
            lab.zone.set(&format!("n{n}.good.test"), &[web4(n)], 600);
        }
        lab.write_policy("names.yaml", &good_names())?;
        let owner = lab.start_agent(&options())?;
        let proxy = lab.start_sdp(&SdpOptions::default())?;
        lab.add_endpoint(&lab.a, holdfast_e2e::policy::WEB)?;
        test(lab, owner, proxy)
    });
}

/// Looks up a name that was not looked up before, and connects to its address.
fn expect_new_name(lab: &Lab, n: u8) -> Result<()> {
    lab.a
        .ask(&Query::a(&format!("n{n}.good.test"), DNS4))?
        .expect(web4(n))?;
    lab.a.expect_open(at(web4(n), 80))
}

#[test]
fn the_next_agent_takes_over_when_the_owner_is_killed_and_a_third_one_takes_its_turn() {
    with_owner(|lab, owner, _proxy| {
        expect_new_name(lab, 10)?;
        let first = standing_by(lab, "first", &options())?;
        let status = lab.agent_json(&["status"])?;
        ensure!(
            status.pointer("/standby/pid") == Some(&first.id().into()),
            "status does not name the standby: {status}"
        );
        let third = second(lab, "third", &options())?;
        let before = Instant::now();
        owner.kill_9()?;
        eventually("a new name opens", SOON, || expect_new_name(lab, 11))?;
        println!("a name asked for after the kill: {:?}", before.elapsed());
        ensure!(first.log().contains(TAKING_OVER), "{}", first.log());
        expect_owner(lab, &first)?;
        lab.a.expect_open(at(web4(10), 80))?;
        lab.a.expect_closed(at(web4(12), 80))?;
        eventually("the third stands by", SOON, || {
            ensure!(third.log().contains(STANDING_BY), "{}", third.log());
            Ok(())
        })?;
        ensure!(first.terminate(SOON)?.success());
        expect_owner(lab, &third)?;
        eventually("a new name opens", SOON, || expect_new_name(lab, 12))
    });
}

#[test]
fn a_standby_that_differs_from_the_owner_is_refused_with_the_difference() {
    with_owner(|lab, owner, _proxy| {
        let with = |flags: &[&str]| {
            let all = flags.iter().fold(options(), |all, flag| all.flag(flag));
            second(lab, "other", &all)
        };
        expect_refused(
            with(&["--tofqdns-min-ttl=7s"])?,
            &[
                "--tofqdns-min-ttl is 7s here, and 0s there",
                "--standby=other",
            ],
        )?;
        expect_refused(
            with(&["--node-name=elsewhere"])?,
            &["--node-name", "elsewhere"],
        )?;
        let elsewhere = lab.directory().join("elsewhere");
        let log = lab.directory().join("log/elsewhere.log");
        let elsewhere = with_value(&lab.agent_command(&options())?, "--state-dir", &elsewhere);
        expect_refused(
            Program::start("elsewhere", elsewhere, &log)?,
            &["--state-dir", "keeps its state elsewhere"],
        )?;
        let second_root = lab.bpf_root().join("second");
        let log = lab.directory().join("log/second-root.log");
        let other_root = with_value(&lab.agent_command(&options())?, "--bpf-root", &second_root);
        expect_refused(
            Program::start("second-root", other_root, &log)?,
            &["--bpf-root", "has the BPF root"],
        )?;
        ensure!(!second_root.exists(), "the refused standby made its root");
        let socket = lab.directory().join("elsewhere.sock");
        let log = lab.directory().join("log/other-socket.log");
        let other = AgentOptions::default().flag("--standby=other");
        let other_socket = with_value(&lab.agent_command(&other)?, "--sdp-socket", &socket);
        expect_refused(
            Program::start("other-socket", other_socket, &log)?,
            &["--standby=other", "--sdp-socket is", "elsewhere.sock"],
        )?;
        // The way out for an upgrade.
        let other = second(
            lab,
            "upgrade",
            &AgentOptions::default()
                .flag("--standby=other")
                .flag("--tofqdns-min-ttl=7s"),
        )?;
        eventually("it stands by", SOON, || {
            ensure!(other.log().contains(STANDING_BY), "{}", other.log());
            Ok(())
        })?;
        ensure!(owner.terminate(SOON)?.success());
        expect_owner(lab, &other)
    });
}

/// Longer than the watchdog of an owner waits, twice.
const STOPPED: Duration = Duration::from_secs(25);

#[test]
fn a_stopped_owner_is_not_replaced_reported_as_silent_and_goes_on() {
    with_owner(|lab, owner, _proxy| {
        // A metrics address of its own, as in the chart.
        let command = with_metrics(&lab.agent_command(&options())?, STANDBY_METRICS);
        let log = lab.directory().join("log/standby.log");
        let standby = Program::start("standby", command, &log)?;
        stands_by(&standby)?;
        let silent = || {
            let name = "holdfast_standby_owner_silent_seconds";
            lab.metric(STANDBY_METRICS, name, "")
        };
        std::thread::sleep(Duration::from_secs(8));
        ensure!(silent()? < 3.0, "an owner that answers is silent");
        owner.signal(Signal::SIGSTOP)?;
        let stopped = Instant::now();
        eventually("the standby reports the silence", STOPPED, || {
            let seconds = silent()?;
            ensure!(seconds >= 10.0, "{seconds}");
            Ok(())
        })?;
        // Only the standby answers.
        let error = lab.agent(&["status"]).err().context("status is well")?;
        let text = format!("{error:#}");
        for part in [
            "did not answer",
            &format!("pid {}, waits since", standby.id()),
            &format!("pid {}, holdfast-agent", owner.id()),
            "the owner has not answered the standby for",
            "SIGSTOP",
        ] {
            ensure!(text.contains(part), "no {part:?} in {text}");
        }
        std::thread::sleep(STOPPED.saturating_sub(stopped.elapsed()));
        ensure!(!standby.log().contains(TAKING_OVER), "{}", standby.log());
        owner.signal(Signal::SIGCONT)?;
        eventually("it goes on", SOON, || expect_new_name(lab, 10))?;
        std::thread::sleep(Duration::from_secs(3));
        expect_owner(lab, &owner)?;
        eventually("the owner is not silent any more", 2 * SOON, || {
            let seconds = silent()?;
            ensure!(seconds < 3.0, "{seconds}");
            Ok(())
        })
    });
}

#[test]
fn a_standby_needs_no_more_memory_than_the_owner() {
    with_owner(|lab, owner, _proxy| {
        expect_new_name(lab, 10)?;
        let standby = standing_by(lab, "standby", &options())?;
        let (of_owner, of_standby) = (memory_kib(&owner)?, memory_kib(&standby)?);
        println!("owner {of_owner} KiB, standby {of_standby} KiB");
        let limit = of_owner + of_owner / 10;
        ensure!(of_standby <= limit, "standby: {of_standby} of {limit} KiB");
        owner.kill_9()?;
        expect_owner(lab, &standby)?;
        expect_new_name(lab, 10)?;
        let after = memory_kib(&standby)?;
        println!("after the takeover {after} KiB");
        ensure!(after <= limit, "after the takeover: {after} of {limit} KiB");
        Ok(())
    });
}

#[test]
fn an_owner_that_expects_a_standby_says_if_there_is_none() {
    with_lab(|lab| {
        let expected = options().flag("--standby-expected");
        lab.write_policy("names.yaml", &good_names())?;
        let owner = lab.start_agent(&expected)?;
        let missing = || lab.metric(9962, "holdfast_standby_missing", "");
        lab.status_has(SOON, &["no agent stands by beside this one"])?;
        ensure!(missing()? == 1.0, "no alert");
        // The flag need not be the same.
        let standby = standing_by(lab, "standby", &options())?;
        eventually("it has a standby", SOON, || {
            let status = lab.agent(&["status"])?;
            ensure!(!status.contains("no agent stands by"), "{status}");
            ensure!(status.contains("waits since"), "{status}");
            ensure!(missing()? == 0.0, "the alert is still there");
            Ok(())
        })?;
        // One that is asked to end is no part of a loop.
        ensure!(owner.terminate(SOON)?.success());
        expect_owner(lab, &standby)?;
        lab.status_has(SOON, &["which was asked to end after"])?;
        let takeovers = |end| lab.metric(9962, "holdfast_takeovers_total", end);
        ensure!(takeovers("end=\"stopped\"")? == 1.0);
        ensure!(takeovers("end=\"died\"")? == 0.0);
        let recent = lab.metric(9962, "holdfast_takeovers_recent", "")?;
        ensure!(recent == 0.0, "{recent} recent takeovers");
        Ok(())
    });
}

/// Memory that a process has, in KiB.
fn memory_kib(program: &Program) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", program.id()))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    Ok(number.context("no VmRSS")?.parse()?)
}

#[test]
fn an_owner_whose_core_hangs_ends_itself_and_the_standby_owns_the_node() {
    with_owner(|lab, mut owner, _proxy| {
        let standby = standing_by(lab, "standby", &options())?;
        let core = StoppedCore::of(&owner)?;
        let stopped = Instant::now();
        core.ends()?;
        let status = owner.wait(SOON)?;
        println!("it ended {:?} after its core stopped", stopped.elapsed());
        ensure!(
            stopped.elapsed() >= Duration::from_secs(9),
            "too early: {status}"
        );
        ensure!(!status.success(), "it ended well");
        ensure!(
            owner.log().contains("has not moved on for"),
            "{}",
            owner.log()
        );
        expect_owner(lab, &standby)?;
        eventually("a new name opens", SOON, || expect_new_name(lab, 10))
    });
}

#[test]
fn there_is_one_owner_also_if_its_locks_are_removed() {
    with_owner(|lab, mut owner, _proxy| {
        let standby = standing_by(lab, "standby", &options())?;
        let lock = lab.bpf_root().join(pin::AGENT_LOCK);
        fs::remove_dir(&lock)?;
        fs::remove_file(lab.directory().join("state/agent.lock"))?;
        eventually("the owner has the new lock", SOON, || {
            ensure!(lock.exists(), "it is not there");
            Ok(())
        })?;
        std::thread::sleep(Duration::from_secs(3));
        ensure!(!standby.log().contains(TAKING_OVER), "{}", standby.log());
        expect_owner(lab, &owner)?;
        expect_new_name(lab, 10)?;
        // Another process is faster: the owner ends before it writes.
        fs::remove_dir(&lock)?;
        let thief = daemon::pins::make(
            lab.bpf_root(),
            pin::AGENT_LOCK,
            daemon::pins::MayOpen::Owner,
        )?;
        let _held = daemon::pins::lock(thief, Duration::ZERO)?.context("the owner was faster")?;
        let status = owner.wait(SOON)?;
        ensure!(!status.success(), "it ended well");
        ensure!(
            owner.log().contains("the lock of this agent was removed"),
            "{}",
            owner.log()
        );
        Ok(())
    });
}

#[test]
fn an_owner_whose_lock_file_cannot_be_made_again_goes_on_and_says_so() {
    with_owner(|lab, owner, _proxy| {
        let standby = standing_by(lab, "standby", &options())?;
        let state = lab.directory().join("state");
        let away = lab.directory().join("away");
        fs::rename(&state, &away)?;
        fs::write(&state, "")?;
        lab.status_has(SOON, &["the lock file of the state directory"])?;
        expect_new_name(lab, 10)?;
        let broken = lab.metric(9962, "holdfast_datapath_broken", "part=\"lock\"")?;
        ensure!(broken > 0.0, "no alert");
        ensure!(!standby.log().contains(TAKING_OVER), "{}", standby.log());
        fs::remove_file(&state)?;
        fs::rename(&away, &state)?;
        eventually("it is well again", SOON, || {
            let status = lab.agent(&["status"])?;
            ensure!(
                !status.contains("the lock file of the state directory"),
                "{status}"
            );
            Ok(())
        })?;
        expect_owner(lab, &owner)
    });
}

#[test]
fn a_standby_that_waits_changes_no_file_and_no_pin() {
    with_owner(|lab, _owner, _proxy| {
        expect_new_name(lab, 10)?;
        let places = [lab.directory().join("state"), lab.bpf_root().to_owned()];
        let settled = || {
            std::thread::sleep(Duration::from_secs(8));
            listing(&places)
        };
        let before = settled()?;
        let standby = standing_by(lab, "standby", &options())?;
        let after = settled()?;
        // The lock of the standbys is a directory that stays.
        let lock = lab.bpf_root().join(pin::STANDBY_LOCK);
        let mut new = after.iter().filter(|entry| !before.contains(entry));
        let other = new.find(|(path, _)| !lock.starts_with(path));
        ensure!(other.is_none(), "the standby changed {other:?}");
        let gone = before
            .iter()
            .find(|(path, _)| after.iter().all(|(other, _)| other != path));
        ensure!(gone.is_none(), "the standby removed {gone:?}");
        let socket = lab.agent_socket();
        let own = socket.with_file_name(format!(
            "{}.standby",
            socket.file_name().unwrap_or_default().to_string_lossy()
        ));
        ensure!(own.exists(), "it has no socket");
        ensure!(standby.terminate(SOON)?.success());
        ensure!(!own.exists(), "its socket is left");
        Ok(())
    });
}

/// A file's inode, size, and time of change in seconds and nanoseconds.
type Stamp = (u64, u64, i64, i64);

/// Every file below these directories.
fn listing(places: &[PathBuf]) -> Result<Vec<(PathBuf, Stamp)>> {
    let mut found = Vec::new();
    let mut left = places.to_vec();
    while let Some(path) = left.pop() {
        let of = fs::symlink_metadata(&path)?;
        if of.is_dir() {
            for entry in fs::read_dir(&path)? {
                left.push(entry?.path());
            }
        }
        found.push((path, (of.ino(), of.size(), of.mtime(), of.mtime_nsec())));
    }
    Ok(found)
}
