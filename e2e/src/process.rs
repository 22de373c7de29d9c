//! A program under test: started inside a namespace with a log file, and ended.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::repairs::RepairCheck;
use crate::wait::eventually;

/// Longest wait until a program has stopped.
const STOPS: Duration = Duration::from_secs(10);

/// A running child; killed and reaped when dropped.
#[derive(Debug)]
pub struct Program {
    name: String,
    child: Child,
    log: PathBuf,
    repair_check: Option<RepairCheck>,
}

impl Program {
    /// Starts `command`, with both outputs appended to `log`.
    pub fn start(name: &str, mut command: Command, log: &Path) -> Result<Self> {
        let file = File::options()
            .create(true)
            .append(true)
            .open(log)
            .with_context(|| format!("open {}", log.display()))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("start {command:?}"))?;
        Ok(Self {
            name: name.to_owned(),
            child,
            log: log.to_owned(),
            repair_check: None,
        })
    }

    /// Makes `look` read the program's repairs before the program ends.
    pub fn check_repairs_at_end(&mut self, look: RepairCheck) {
        self.repair_check = Some(look);
    }

    /// Reads the program's repairs at once instead of at its end. A program that was stopped or has
    /// ended reports no repairs.
    pub fn check_repairs_now(&mut self) {
        if let Some(look) = self.repair_check.take()
            && self.runs()
        {
            look.now();
        }
    }

    fn runs(&mut self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()));
        let stopped = stat.is_ok_and(|stat| {
            let state = stat.rsplit_once(") ").map(|(_, state)| state);
            state.is_some_and(|state| state.starts_with('T'))
        });
        !stopped && matches!(self.child.try_wait(), Ok(None))
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The program's whole log so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Fails if the program has ended. The error has the end of its log.
    pub fn check_alive(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            let tail = lines
                .get(lines.len().saturating_sub(15)..)
                .unwrap_or_default();
            bail!("{} ended ({status}):\n{}", self.name, tail.join("\n"));
        }
        Ok(())
    }

    /// Sends a signal. After SIGSTOP, waits until none of its threads runs.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = i32::try_from(self.child.id()).context("pid")?;
        kill(Pid::from_raw(pid), signal).with_context(|| format!("{signal} to {}", self.name))?;
        if signal == Signal::SIGSTOP {
            // The call returns before the last thread has stopped.
            eventually(&format!("{} stops", self.name), STOPS, || {
                for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
                    let stat = std::fs::read_to_string(task?.path().join("stat"))?;
                    let (_, state) = stat.rsplit_once(") ").context("no state")?;
                    ensure!(state.starts_with('T'), "a thread is in state {state}");
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Kills the program with SIGKILL, like a crash.
    pub fn kill_9(mut self) -> Result<()> {
        self.check_repairs_now();
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Sends SIGTERM to the program and waits for its end.
    pub fn terminate(mut self, limit: Duration) -> Result<ExitStatus> {
        self.check_repairs_now();
        self.signal(Signal::SIGTERM)?;
        self.wait(limit)
    }

    /// Waits until the program ends by itself.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let name = self.name.clone();
        eventually(&format!("{name} ends"), limit, || {
            self.child.try_wait()?.context("still running")
        })
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if let Some(look) = self.repair_check.take()
            && self.runs()
        {
            look.whole();
        }
        // This fails only if the program has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
