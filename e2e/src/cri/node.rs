//! A container runtime with its own mount and process namespaces, like a node.
//!
//! ```text
//!  mounts 1: own /run, /var/lib/cni ── agent, proxies
//!     └ mounts 2 + processes: own /proc ── containerd, shims, pods
//! ```
//! Mounts below `/run` propagate to the other namespace, as with `HostToContainer`. All processes
//! of the runtime end with its first process.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use parking_lot::RwLock;
use serde_json::Value;
use tonic::Status;

use super::client::{Cri, Loaded};
use super::image;
use super::network::{Base, DEBIAN, FILE, PLUGINS};
use crate::lab::Lab;
use crate::netns::Netns;
use crate::node::AgentOptions;
use crate::pod::Pod;
use crate::process::Program;
use crate::shell;
use crate::wait::eventually;

const STARTS: Duration = Duration::from_secs(60);
/// Longest wait until the runtime has read a configuration.
const LOADS: Duration = Duration::from_secs(30);
/// Longest wait until the processes of a killed runtime are gone.
const ENDS: Duration = Duration::from_secs(30);
const OWN: &str = "05-holdfast.conflist";

/// A pod, as the kubelet names it to the runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodName {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    /// Number of the sandbox among the pod's sandboxes, from 0.
    pub attempt: u32,
}

impl PodName {
    /// The first attempt of pod `default/<name>`.
    pub fn new(name: &str) -> Self {
        Self {
            namespace: "default".to_owned(),
            name: name.to_owned(),
            uid: format!("uid-{name}"),
            attempt: 0,
        }
    }

    /// The same pod, to be started in another sandbox.
    pub fn again(&self) -> Self {
        let attempt = self.attempt + 1;
        let again = self.clone();
        Self { attempt, ..again }
    }
}

/// A pod that the runtime started.
#[derive(Debug)]
pub struct Sandbox {
    /// Id that the runtime gave the sandbox.
    pub id: String,
    /// Network namespace and addresses of the pod.
    pub pod: Pod,
}

impl Sandbox {
    /// IPv4 address of the pod.
    pub fn address(&self) -> IpAddr {
        self.pod.v4.into()
    }
}

/// A pod that was started at the same time as others.
#[derive(Debug)]
pub struct Started {
    pub sandbox: Sandbox,
    /// Number of attempts to start it.
    pub attempts: u32,
    /// Time from the start of all pods until this one ran.
    pub after: Duration,
}

/// containerd on the lab's node. Dropping this ends it and all its pods.
#[derive(Debug)]
pub struct CriNode<'l> {
    lab: &'l Lab,
    /// Directory of everything that survives a reboot.
    home: PathBuf,
    up: RwLock<Option<Up>>,
}

/// Everything that a reboot ends. Fields are dropped in this order.
#[derive(Debug)]
struct Up {
    cri: Cri,
    _containerd: Program,
    mounts: Program,
}

impl<'l> CriNode<'l> {
    /// Starts containerd on the lab's node, with `base` as its network. Programs that the lab
    /// starts after this call see the runtime's mounts.
    pub fn start(lab: &'l Lab, base: Base) -> Result<Self> {
        let home = lab.directory().join("cri");
        for part in ["conf", "bin", "cni", "root"] {
            std::fs::create_dir_all(home.join(part))?;
        }
        for plugin in PLUGINS {
            let from = Path::new(DEBIAN).join(plugin);
            std::fs::copy(&from, home.join("bin").join(plugin)).with_context(|| {
                format!("copy {} (is containernetworking-plugins installed? cargo xtask test --tier cri)", from.display())
            })?;
        }
        let node = Self {
            lab,
            home,
            up: RwLock::new(None),
        };
        node.write_base(&base.conflist().to_string())?;
        let archive = image::archive(&node.home)?;
        node.boot()?;
        let mut import = node.command("ctr");
        import
            .arg("--address")
            .arg(node.home.join("containerd.sock"));
        import.args(["--namespace", "k8s.io", "images", "import"]);
        import.args(["--snapshotter", "native"]).arg(archive);
        shell::finish(&mut import)?;
        Ok(node)
    }

    /// Makes the namespaces, and starts containerd in them.
    fn boot(&self) -> Result<()> {
        let mounts = self.make_mounts()?;
        let namespace = format!("/proc/{}/ns/mnt", mounts.id());
        self.lab.node.set_mounts(Some(namespace.into()));
        let config = self.home.join("containerd.toml");
        std::fs::write(&config, self.config())?;
        let mut command = self.command("unshare");
        command.args(["--mount", "--propagation", "unchanged", "--mount-proc"]);
        command.args(["--pid", "--fork", "--kill-child", "containerd", "-c"]);
        command.arg(config);
        let log = self.lab.directory().join("log/containerd.log");
        let mut containerd = Program::start("containerd", command, &log)?;
        let socket = self.home.join("containerd.sock");
        let mut ended = None;
        let cri = eventually("containerd answers", STARTS, || {
            if let Err(error) = containerd.check_alive() {
                ended = Some(error);
                return Ok(None);
            }
            Cri::connect(&socket, &self.cgroups()).map(Some)
        })?;
        if let Some(error) = ended {
            return Err(error);
        }
        let cri = cri.context("containerd does not answer")?;
        *self.up.write() = Some(Up {
            cri,
            _containerd: containerd,
            mounts,
        });
        Ok(())
    }

    fn make_mounts(&self) -> Result<Program> {
        let ready = self.home.join("ready");
        if ready.exists() {
            std::fs::remove_file(&ready)?;
        }
        // The directory /var/lib/cni is empty on the machine.
        let script = "set -e; mkdir -p /var/lib/cni; mount --bind \"$0/cni\" /var/lib/cni; \
                      mount -t tmpfs tmpfs /run; mkdir /run/netns; mount --make-shared /run; \
                      touch \"$0/ready\"; exec sleep infinity";
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c", script]);
        command.arg(&self.home);
        let log = self.lab.directory().join("log/mounts.log");
        let mut mounts = Program::start("mounts", command, &log)?;
        eventually("the mounts of the node", STARTS, || {
            mounts.check_alive()?;
            ensure!(ready.exists(), "not there");
            Ok(())
        })?;
        Ok(mounts)
    }

    fn config(&self) -> String {
        let home = self.home.display();
        format!(
            "version = 2\nroot = \"{home}/root\"\nstate = \"/run/containerd\"\n\
             [debug]\nlevel = \"warn\"\n\
             [grpc]\naddress = \"{home}/containerd.sock\"\n\
             [ttrpc]\naddress = \"{home}/containerd.sock.ttrpc\"\n\
             [plugins.\"io.containerd.internal.v1.opt\"]\npath = \"{home}/opt\"\n\
             [plugins.\"io.containerd.grpc.v1.cri\"]\n\
             sandbox_image = \"{image}\"\n\
             restrict_oom_score_adj = true\n\
             disable_apparmor = true\n\
             [plugins.\"io.containerd.grpc.v1.cri\".cni]\n\
             bin_dir = \"{home}/bin\"\nconf_dir = \"{home}/conf\"\n\
             [plugins.\"io.containerd.grpc.v1.cri\".containerd]\n\
             snapshotter = \"native\"\n\
             [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\n\
             runtime_type = \"io.containerd.runc.v2\"\n",
            image = image::NAME,
        )
    }

    /// Path of the parent cgroup of all pods.
    fn cgroups(&self) -> String {
        format!("/{}", self.lab.name())
    }

    /// A command on the node, which sees the runtime's mounts.
    pub fn command(&self, program: &str) -> Command {
        self.lab.node.command(program)
    }

    /// Directory of the runtime's network configurations.
    pub fn conf_dir(&self) -> PathBuf {
        self.home.join("conf")
    }

    /// Directory of the runtime's network plugins.
    pub fn bin_dir(&self) -> PathBuf {
        self.home.join("bin")
    }

    /// Flags with which an agent or `netpol run` installs the plugin here.
    pub fn plugin_flags(&self) -> [String; 3] {
        [
            format!("--cni-conf-dir={}", self.conf_dir().display()),
            format!("--cni-bin-dir={}", self.bin_dir().display()),
            format!("--cni-socket={}", self.lab.cni_socket().display()),
        ]
    }

    /// Options of an agent that installs the plugin here.
    pub fn agent_options(&self) -> AgentOptions {
        let flags = self.plugin_flags();
        flags
            .iter()
            .fold(AgentOptions::default(), |options, flag| options.flag(flag))
    }

    /// Starts `netpol run`, and waits until new pods get its plugin.
    pub fn start_netpol(&self, network: &str, further: &[&str]) -> Result<Program> {
        let plugin = self.plugin_flags();
        let plugin = plugin.each_ref().map(String::as_str);
        let flags = [&plugin, further].concat();
        let netpol = self.lab.start_netpol(&flags)?;
        self.uses(network, true)?;
        Ok(netpol)
    }

    /// Writes the base's configuration in place, as a network program does.
    pub fn write_base(&self, text: &str) -> Result<()> {
        self.write(FILE, text)
    }

    /// Deletes the configuration of the base network.
    pub fn remove_base(&self) -> Result<()> {
        self.remove(FILE)
    }

    /// Writes the agent's configuration file, as programs that add plugins to it do.
    pub fn write_own(&self, text: &str) -> Result<()> {
        self.write(OWN, text)
    }

    /// Deletes the configuration that the agent wrote.
    pub fn remove_own(&self) -> Result<()> {
        self.remove(OWN)
    }

    /// Writes a file of the configuration directory, in place.
    pub fn write(&self, file: &str, text: &str) -> Result<()> {
        let path = self.conf_dir().join(file);
        std::fs::write(&path, text).with_context(|| path.display().to_string())
    }

    /// Deletes a file of the configuration directory.
    pub fn remove(&self, file: &str) -> Result<()> {
        let path = self.conf_dir().join(file);
        std::fs::remove_file(&path).with_context(|| path.display().to_string())
    }

    /// Whether a plugin is installed.
    pub fn has_plugin(&self, name: &str) -> bool {
        self.bin_dir().join(name).exists()
    }

    /// Addresses in use on the node, according to the files of its networks.
    pub fn leases(&self) -> Result<Vec<IpAddr>> {
        let mut leases = Vec::new();
        let networks = std::fs::read_dir(self.home.join("cni/networks"));
        for network in networks.into_iter().flatten() {
            for file in std::fs::read_dir(network?.path())? {
                leases.extend(
                    file?
                        .file_name()
                        .to_str()
                        .and_then(|name| name.parse::<IpAddr>().ok()),
                );
            }
        }
        Ok(leases)
    }

    /// The agent's configuration, if it is there.
    pub fn own(&self) -> Option<Value> {
        let text = std::fs::read(self.conf_dir().join(OWN)).ok()?;
        serde_json::from_slice(&text).ok()
    }

    fn with<T>(&self, f: impl FnOnce(&Up) -> Result<T>) -> Result<T> {
        f(self.up.read().as_ref().context("the node is down")?)
    }

    /// Name and version of the runtime.
    pub fn version(&self) -> Result<String> {
        self.with(|up| up.cri.version())
    }

    /// Waits until new pods get `network`, with the agent's plugin last if `with_ours`, else
    /// without it.
    pub fn uses(&self, network: &str, with_ours: bool) -> Result<Loaded> {
        eventually("the runtime has read the configuration", LOADS, || {
            let loaded = self.with(|up| up.cri.network())?.context("no network")?;
            let ours = loaded
                .plugins
                .last()
                .is_some_and(|last| last == "holdfast-cni");
            ensure!(loaded.name == network && ours == with_ours, "{loaded:?}");
            Ok(loaded)
        })
    }

    /// Starts the agent, and waits until new pods get its plugin.
    pub fn start_agent(&self, network: &str) -> Result<Program> {
        let agent = self.lab.start_agent(&self.agent_options())?;
        self.uses(network, true)?;
        Ok(agent)
    }

    /// Starts a pod. The inner error is the runtime's.
    pub fn try_run(&self, name: &PodName) -> Result<Result<Sandbox, Status>> {
        self.with(|up| match up.cri.run(name) {
            Ok(id) => Self::sandbox(up, id).map(Ok),
            Err(status) => Ok(Err(status)),
        })
    }

    /// Starts a pod. A refusal of the runtime is an error.
    pub fn run(&self, name: &PodName) -> Result<Sandbox> {
        self.try_run(name)?
            .with_context(|| format!("RunPodSandbox of {}", name.name))
    }

    /// Starts a pod like the kubelet, which tries again in another sandbox. Also returns the number
    /// of attempts.
    pub fn run_as_kubelet(&self, name: &PodName, limit: Duration) -> Result<(Sandbox, u32)> {
        let mut name = name.clone();
        eventually("the pod starts", limit, || {
            let started = self.run(&name);
            name = name.again();
            Ok((started?, name.attempt))
        })
    }

    /// Starts pods at the same time, each as the kubelet does.
    pub fn run_at_once(&self, names: &[PodName], limit: Duration) -> Result<Vec<Started>> {
        let begin = Instant::now();
        let run = |name| {
            let (sandbox, attempts) = self.run_as_kubelet(name, limit)?;
            let after = begin.elapsed();
            Ok(Started {
                sandbox,
                attempts,
                after,
            })
        };
        std::thread::scope(|scope| {
            let running: Vec<_> = names
                .iter()
                .map(|name| scope.spawn(move || run(name)))
                .collect();
            let ended = running.into_iter().map(|one| one.join());
            ended
                .map(|one| one.map_err(|_| anyhow!("the client panicked"))?)
                .collect()
        })
    }

    /// Starts a pod, which has to fail. Returns the runtime's message.
    pub fn run_fails(&self, name: &PodName) -> Result<String> {
        let status = self.try_run(name)?.err();
        Ok(status.context("the pod started")?.message().to_owned())
    }

    fn sandbox(up: &Up, id: String) -> Result<Sandbox> {
        let described = up.cri.describe(&id)?;
        let mounts = up.mounts.id();
        let netns = described.netns.strip_prefix("/")?;
        let netns = netns.strip_prefix("var").unwrap_or(netns);
        let path = Path::new("/proc").join(mounts.to_string());
        let path = path.join("root").join(netns);
        let parsed: Vec<IpAddr> = described
            .addresses
            .iter()
            .map(|address| address.parse())
            .collect::<Result<_, _>>()?;
        let v4 = parsed.iter().find_map(|address| match address {
            IpAddr::V4(v4) => Some(*v4),
            IpAddr::V6(_) => None,
        });
        let v6 = parsed.iter().find_map(|address| match address {
            IpAddr::V6(v6) => Some(*v6),
            IpAddr::V4(_) => None,
        });
        Ok(Sandbox {
            pod: Pod {
                netns: Netns::at(id.clone(), path),
                v4: v4.unwrap_or(Ipv4Addr::UNSPECIFIED),
                v6: v6.unwrap_or(Ipv6Addr::UNSPECIFIED),
                host_side: String::new(),
                answers: Default::default(),
            },
            id,
        })
    }

    /// Ends and removes a pod.
    pub fn stop(&self, id: &str) -> Result<()> {
        self.with(|up| {
            up.cri.stop(id).context("StopPodSandbox")?;
            up.cri.remove(id).context("RemovePodSandbox")
        })
    }

    /// Ids of all pods that the runtime knows.
    pub fn list(&self) -> Result<Vec<String>> {
        self.with(|up| Ok(up.cri.list()?))
    }

    /// Ends all processes and mounts, removes everything below `/run`, and starts containerd again.
    /// The caller must end agents and proxies first.
    pub fn reboot(&self) -> Result<()> {
        self.end()?;
        self.boot()
    }

    fn end(&self) -> Result<()> {
        self.lab.node.set_mounts(None);
        let Some(up) = self.up.write().take() else {
            return Ok(());
        };
        drop(up);
        let controllers = std::fs::read_dir("/sys/fs/cgroup")?;
        let mut roots = vec![PathBuf::from("/sys/fs/cgroup")];
        roots.extend(controllers.flatten().map(|entry| entry.path()));
        for root in roots {
            let own = root.join(self.lab.name());
            eventually("the pods' processes end", ENDS, || {
                for pod in std::fs::read_dir(&own).into_iter().flatten().flatten() {
                    if pod.file_type()?.is_dir() {
                        std::fs::remove_dir(pod.path())?;
                    }
                }
                match std::fs::remove_dir(&own) {
                    Err(error) if own.exists() => Err(error.into()),
                    _ => Ok(()),
                }
            })?;
        }
        Ok(())
    }
}

impl Drop for CriNode<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            eprintln!("left behind by containerd: {error:#}");
        }
    }
}
