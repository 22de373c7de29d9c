//! `--standby`: a second agent takes the place of the one that owns the node.
use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::lab::{DNS4, at, web4};
use holdfast_e2e::policy::good_names;
use holdfast_e2e::process::Program;
use holdfast_e2e::{AgentOptions, Lab, Query, SdpOptions, eventually, with_lab};
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use shared_maps::pin;

const SOON: Duration = Duration::from_secs(15);
const STANDING_BY: &str = "standing by: ";
const TAKING_OVER: &str = "taking over: ";

fn options() -> AgentOptions {
    AgentOptions::default().flag("--standby")
}

/// An agent beside the owner, which has the metrics port.
fn second(lab: &Lab, name: &str, options: &AgentOptions) -> Result<Program> {
    let command = lab.agent_command(options)?;
    let log = lab.directory().join(format!("log/{name}.log"));
    Program::start(name, with_flag(&command, "--metrics-address=off"), &log)
}

/// The command with another value of a flag, which it has as one argument.
fn with_flag(command: &Command, flag: &str) -> Command {
    let (name, _) = flag.split_once('=').unwrap_or((flag, ""));
    let mut changed = Command::new(command.get_program());
    let is_other = |argument: &&OsStr| !argument.to_string_lossy().starts_with(name);
    changed.args(command.get_args().filter(is_other)).arg(flag);
    for (variable, value) in command.get_envs() {
        changed.env(variable, value.unwrap_or_default());
    }
    changed
}

/// The command with another value of a flag, which it has as two arguments.
fn with_value(command: &Command, flag: &str, value: &Path) -> Command {
    let mut changed = Command::new(command.get_program());
    let mut is_value = false;
    for argument in command.get_args() {
        changed.arg(if is_value {
            value.as_os_str()
        } else {
            argument
        });
        is_value = argument == flag;
    }
    for (variable, value) in command.get_envs() {
        changed.env(variable, value.unwrap_or_default());
    }
    changed
}

fn standing_by(lab: &Lab, name: &str) -> Result<Program> {
    let standby = second(lab, name, &options())?;
    eventually("it stands by", SOON, || {
        ensure!(standby.log().contains(STANDING_BY), "{}", standby.log());
        Ok(())
    })?;
    Ok(standby)
}

fn expect_owner(lab: &Lab, agent: &Program) -> Result<()> {
    eventually("it owns the node", SOON, || {
        let status = lab.agent_json(&["status"])?;
        let pid = status.pointer("/pid").and_then(serde_json::Value::as_u64);
        ensure!(pid == Some(agent.id().into()), "pid {pid:?}");
        let is_ready = status
            .pointer("/ready")
            .and_then(serde_json::Value::as_bool);
        ensure!(is_ready == Some(true), "it is not ready");
        Ok(())
    })
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
        let first = standing_by(lab, "first")?;
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
        let elsewhere = with_flag(&elsewhere, "--metrics-address=off");
        expect_refused(
            Program::start("elsewhere", elsewhere, &log)?,
            &["--state-dir", "keeps its state elsewhere"],
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

#[test]
fn a_stopped_owner_is_not_replaced_and_goes_on() {
    with_owner(|lab, owner, _proxy| {
        let standby = standing_by(lab, "standby")?;
        owner.signal(Signal::SIGSTOP)?;
        std::thread::sleep(Duration::from_secs(20));
        ensure!(!standby.log().contains(TAKING_OVER), "{}", standby.log());
        owner.signal(Signal::SIGCONT)?;
        eventually("it goes on", SOON, || expect_new_name(lab, 10))?;
        std::thread::sleep(Duration::from_secs(3));
        expect_owner(lab, &owner)
    });
}

#[test]
fn an_owner_whose_core_hangs_ends_itself_and_the_standby_owns_the_node() {
    with_owner(|lab, mut owner, _proxy| {
        let standby = standing_by(lab, "standby")?;
        let thread = core_thread(owner.id())?;
        // Stops one thread: the others go on.
        ptrace::seize(thread, ptrace::Options::empty())?;
        ptrace::interrupt(thread)?;
        waitpid(thread, Some(WaitPidFlag::__WALL))?;
        let stopped = Instant::now();
        // The process ends when its tracer has seen the end of the thread.
        let flags = WaitPidFlag::__WALL | WaitPidFlag::WNOHANG;
        eventually("the thread ends", Duration::from_secs(30), || {
            let seen = waitpid(thread, Some(flags))?;
            ensure!(matches!(seen, WaitStatus::Signaled(..)), "{seen:?}");
            Ok(())
        })?;
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
        expect_new_name(lab, 10)
    });
}

fn core_thread(process: u32) -> Result<Pid> {
    for entry in fs::read_dir(format!("/proc/{process}/task"))? {
        let path = entry?.path();
        if fs::read_to_string(path.join("comm"))?.trim() == "core" {
            let id = path.file_name().and_then(|id| id.to_str());
            return Ok(Pid::from_raw(id.context("no id")?.parse()?));
        }
    }
    anyhow::bail!("there is no thread of that name")
}

#[test]
fn there_is_one_owner_also_if_its_locks_are_removed() {
    with_owner(|lab, mut owner, _proxy| {
        let standby = standing_by(lab, "standby")?;
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
