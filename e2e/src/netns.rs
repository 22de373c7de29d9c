//! A network namespace that is created, entered and deleted.

use std::fs::File;
use std::path::PathBuf;
use std::process::Command;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sched::{CloneFlags, setns};
use parking_lot::Mutex;

use crate::shell;
use crate::wait::eventually;

const SETTLED: Duration = Duration::from_secs(20);

/// A named network namespace that this lab made; deleted when dropped.
#[derive(Debug)]
pub struct Netns {
    name: String,
    path: PathBuf,
    keep: bool,
    /// File of the mount namespace that commands enter as well.
    mounts: Mutex<Option<PathBuf>>,
}

impl Netns {
    /// Creates the namespace with loopback up. Address checks that would only take time (duplicate
    /// address detection, router solicitation) are off.
    pub fn create(name: String) -> Result<Self> {
        shell::run("ip", &["netns", "add", &name])
            .context("make a network namespace (this needs root)")?;
        let path = PathBuf::from("/run/netns").join(&name);
        let mut netns = Self::at(name, path);
        netns.keep = false;
        netns.sysctl(&[
            ("net.ipv6.conf.default.accept_dad", "0"),
            ("net.ipv6.conf.all.accept_dad", "0"),
            ("net.ipv6.conf.default.router_solicitations", "0"),
            ("net.ipv6.conf.all.accept_ra", "0"),
            ("net.ipv6.conf.default.accept_ra", "0"),
        ])?;
        netns.batch("link set lo up")?;
        Ok(netns)
    }

    /// A namespace that another process created and deletes.
    pub fn existing(name: &str) -> Self {
        Self::at(name.to_owned(), PathBuf::from("/run/netns").join(name))
    }

    /// Like [`Self::existing`], for a namespace whose file is not in the directory of `ip netns`.
    pub fn at(name: String, path: PathBuf) -> Self {
        Self {
            name,
            path,
            keep: true,
            mounts: Mutex::default(),
        }
    }

    /// Name of the namespace for `ip netns`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// File of the namespace, usually below `/run/netns`.
    pub fn path(&self) -> PathBuf {
        self.path.clone()
    }

    /// Makes later commands also enter the mount namespace of this file.
    pub fn set_mounts(&self, mounts: Option<PathBuf>) {
        *self.mounts.lock() = mounts;
    }

    /// Leaves the namespace in place when this is dropped.
    pub fn keep(&mut self) {
        self.keep = true;
    }

    /// A command that runs inside the namespace. `nsenter` keeps the mounts, so that /sys/fs/bpf
    /// stays visible, which `ip netns exec` hides. It replaces itself with the program, so the
    /// child's pid is the program's.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.path.display()));
        if let Some(mounts) = &*self.mounts.lock() {
            command.arg(format!("--mount={}", mounts.display()));
        }
        command.arg("--").arg(program);
        command
    }

    /// Runs a command inside and returns its output.
    pub fn run(&self, program: &str, arguments: &[&str]) -> Result<String> {
        shell::finish(self.command(program).args(arguments))
    }

    /// Runs lines of `ip` commands inside.
    pub fn batch(&self, lines: &str) -> Result<()> {
        shell::feed(
            Command::new("ip").args(["-n", &self.name, "-batch", "-"]),
            lines,
        )?;
        Ok(())
    }

    /// Waits until the kernel receives packets for every global IPv6 address inside. The kernel
    /// adds the routes of addresses later, from a work queue that all namespaces share. Links must
    /// be up at both ends.
    pub fn settled(&self) -> Result<()> {
        eventually("routes of IPv6 addresses", SETTLED, || {
            let addresses = self.run("ip", &["-6", "-o", "address", "show", "scope", "global"])?;
            let routes = self.run("ip", &["-6", "route", "show", "table", "local"])?;
            for line in addresses.lines() {
                let mut words = line.split_whitespace().skip_while(|word| *word != "inet6");
                let address = words.nth(1).and_then(|word| word.split('/').next());
                let address = address.with_context(|| format!("no address in: {line}"))?;
                let route = format!("local {address} ");
                ensure!(
                    routes.lines().any(|line| line.starts_with(&route)),
                    "no route for {address} in {}",
                    self.name
                );
            }
            Ok(())
        })
    }

    pub fn sysctl(&self, settings: &[(&str, &str)]) -> Result<()> {
        let mut command = self.command("sysctl");
        command.arg("-qw");
        for (key, value) in settings {
            command.arg(format!("{key}={value}"));
        }
        shell::finish(&mut command)?;
        Ok(())
    }

    /// Runs `f` inside on a new thread and waits for it. Sockets made there stay in the namespace.
    pub fn enter<T: Send>(&self, f: impl FnOnce() -> T + Send) -> Result<T> {
        let file = self.open()?;
        std::thread::scope(|scope| {
            scope
                .spawn(move || {
                    setns(file, CloneFlags::CLONE_NEWNET).context("enter the namespace")?;
                    Ok(f())
                })
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Runs `f` inside on a new thread, without waiting.
    pub fn spawn(&self, f: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
        let file = self.open()?;
        Ok(std::thread::spawn(move || {
            match setns(file, CloneFlags::CLONE_NEWNET) {
                Ok(()) => f(),
                Err(error) => eprintln!("cannot enter the namespace: {error}"),
            }
        }))
    }

    fn open(&self) -> Result<File> {
        File::open(&self.path).with_context(|| format!("open {}", self.path.display()))
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        if !self.keep
            && let Err(error) = shell::run("ip", &["netns", "delete", &self.name])
        {
            eprintln!("left behind: network namespace {}: {error:#}", self.name);
        }
    }
}
