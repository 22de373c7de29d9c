//! Agents that stand by, and what ends an owner.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use serde_json::Value;

use crate::dns::probe::Query;
use crate::lab::{DNS4, Lab, at, web4};
use crate::node::{AgentOptions, SdpOptions};
use crate::policy::{WEB, good_names};
use crate::process::Program;
use crate::wait::eventually;

const SOON: Duration = Duration::from_secs(15);
/// A watchdog's limit, and its tracer's turn.
const HANGS: Duration = Duration::from_secs(30);
/// In the log of an agent that waits.
pub const STANDING_BY: &str = "standing by: ";
/// In the log of one that waited.
pub const TAKING_OVER: &str = "taking over: ";
/// In the log of one that does not rely on the places of endpoints that the owner before had.
pub const LOOKS_FIRST: &str = "looks for all endpoints before it is ready";
/// In the log of one that waits because several owners died.
pub const BRAKES: &str = "waits before it takes over";

/// Starts an agent beside the owner. It gets the metrics port when it takes over.
pub fn second(lab: &Lab, name: &str, options: &AgentOptions) -> Result<Program> {
    let command = lab.agent_command(options)?;
    let log = lab.directory().join(format!("log/{name}.log"));
    Program::start(name, command, &log)
}

/// As [`second`], until it waits for the owner's end.
pub fn standing_by(lab: &Lab, name: &str, options: &AgentOptions) -> Result<Program> {
    let standby = second(lab, name, options)?;
    stands_by(&standby)?;
    Ok(standby)
}

/// Waits until an agent waits for the owner's end.
pub fn stands_by(agent: &Program) -> Result<()> {
    eventually("it stands by", SOON, || {
        ensure!(agent.log().contains(STANDING_BY), "{}", agent.log());
        Ok(())
    })
}

/// Starts an owner and a proxy. The lab's pod has opened `www.good.test` ([`web4`] 10).
pub fn owner_of_a_name(lab: &Lab, options: &AgentOptions) -> Result<(Program, Program)> {
    lab.zone.set("www.good.test", &[web4(10)], 600);
    lab.write_policy("names.yaml", &good_names())?;
    let owner = lab.start_agent(options)?;
    let proxy = lab.start_sdp(&SdpOptions::default())?;
    lab.add_endpoint(&lab.a, WEB)?;
    let query = Query::a("www.good.test", DNS4);
    lab.a.ask(&query)?.expect(web4(10))?;
    lab.a.expect_open(at(web4(10), 80))?;
    has_looked(lab)?;
    Ok((owner, proxy))
}

/// Fails unless the name of [`owner_of_a_name`] is open, and another address is closed.
pub fn expect_as_before(lab: &Lab) -> Result<()> {
    lab.a.expect_open(at(web4(10), 80))?;
    lab.a.expect_closed(at(web4(12), 80))
}

/// Waits until this agent is the one that answers, and ready.
pub fn expect_owner(lab: &Lab, agent: &Program) -> Result<()> {
    eventually("it owns the node", SOON, || {
        let status = lab.agent_json(&["status"])?;
        let pid = status.pointer("/pid").and_then(Value::as_u64);
        ensure!(pid == Some(agent.id().into()), "pid {pid:?}");
        let is_ready = status.pointer("/ready").and_then(Value::as_bool);
        ensure!(is_ready == Some(true), "it is not ready");
        Ok(())
    })
}

/// What the owner has noted about itself.
pub fn owner_file(lab: &Lab) -> Result<Value> {
    let path = lab.directory().join("state/owner.json");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    Ok(serde_json::from_str(&text)?)
}

/// Changes what the owner has noted about itself.
pub fn edit_owner_file(lab: &Lab, edit: impl FnOnce(&mut Value)) -> Result<()> {
    let mut file = owner_file(lab)?;
    edit(&mut file);
    let path = lab.directory().join("state/owner.json");
    Ok(fs::write(path, serde_json::to_vec(&file)?)?)
}

/// Waits until the owner has looked for its endpoints, and has noted it.
pub fn has_looked(lab: &Lab) -> Result<()> {
    eventually("the owner has looked for its endpoints", SOON, || {
        let looked = owner_file(lab)?.pointer("/run/looked").cloned();
        ensure!(looked == Some(Value::Bool(true)), "{looked:?}");
        Ok(())
    })
}

/// The command with another value of a flag, which it has as two arguments.
pub fn with_value(command: &Command, flag: &str, value: &Path) -> Command {
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
    copy_environment(command, &mut changed);
    changed
}

/// The command with its metrics on another port.
pub fn with_metrics(command: &Command, port: u16) -> Command {
    let mut changed = Command::new(command.get_program());
    let is_metrics =
        |argument: &&std::ffi::OsStr| argument.to_string_lossy().starts_with("--metrics-address=");
    changed.args(command.get_args().filter(|argument| !is_metrics(argument)));
    changed.arg(format!("--metrics-address=127.0.0.1:{port}"));
    copy_environment(command, &mut changed);
    changed
}

fn copy_environment(from: &Command, to: &mut Command) {
    for (variable, value) in from.get_envs() {
        to.env(variable, value.unwrap_or_default());
    }
}

/// The core's thread of an agent, stopped while the others go on.
#[derive(Debug)]
pub struct StoppedCore(Pid);

impl StoppedCore {
    /// Stops it. This thread becomes its tracer: it has to call [`Self::ends`].
    pub fn of(agent: &Program) -> Result<Self> {
        let thread = core_thread(agent.id())?;
        ptrace::seize(thread, ptrace::Options::empty())?;
        ptrace::interrupt(thread)?;
        waitpid(thread, Some(WaitPidFlag::__WALL))?;
        Ok(Self(thread))
    }

    /// Waits until the watchdog has ended the process: that ends when its tracer has seen the end of the thread.
    pub fn ends(self) -> Result<()> {
        let flags = WaitPidFlag::__WALL | WaitPidFlag::WNOHANG;
        eventually("the thread ends", HANGS, || {
            let seen = waitpid(self.0, Some(flags))?;
            ensure!(matches!(seen, WaitStatus::Signaled(..)), "{seen:?}");
            Ok(())
        })
    }
}

fn core_thread(process: u32) -> Result<Pid> {
    for entry in fs::read_dir(format!("/proc/{process}/task"))? {
        let path = entry?.path();
        if fs::read_to_string(path.join("comm"))?.trim() == "core" {
            let id = path.file_name().and_then(|id| id.to_str());
            return Ok(Pid::from_raw(id.context("no id")?.parse()?));
        }
    }
    bail!("there is no thread of that name")
}
