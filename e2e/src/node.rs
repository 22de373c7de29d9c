//! Starts the programs under test on the lab's node, and sends requests to them.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use agent_datapath::events::Counters;
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use shared_maps::event::Reason;
use shared_maps::user::Globals;

use crate::config;
use crate::http;
use crate::lab::Lab;
use crate::pod::Pod;
use crate::policy::WEB;
use crate::process::Program;
use crate::repairs::RepairCheck;
use crate::shell;
use crate::wait::eventually;

/// Longest wait for a program to become ready, with room for a busy machine.
const READY: Duration = Duration::from_secs(20);
/// Port of the agent's metrics.
pub const AGENT_METRICS: u16 = 9962;

/// How to start the agent.
#[derive(Clone, Debug, Default)]
pub struct AgentOptions {
    /// Whether the agent has the built-in DNS proxy.
    pub builtin: bool,
    /// A program of another build, which may lack the newest flags.
    pub program: Option<PathBuf>,
    /// Command-line flags in addition to the flags that the lab always sets.
    pub flags: Vec<String>,
}

/// How to start one standalone proxy.
#[derive(Clone, Debug)]
pub struct SdpOptions {
    /// The proxy's `--name`, by which the lab finds its admin socket.
    pub name: String,
    /// Port of the proxy's metrics, one per replica.
    pub metrics: u16,
    /// Whether the proxy has a setting for the agent's native socket.
    pub native: bool,
    /// A program of another build.
    pub program: Option<PathBuf>,
    /// A BPF root in place of the lab's.
    pub bpf_root: Option<PathBuf>,
    /// Command-line flags in addition to the flags that the lab always sets.
    pub flags: Vec<String>,
}

impl AgentOptions {
    pub fn flag(mut self, flag: &str) -> Self {
        self.flags.push(flag.to_owned());
        self
    }

    /// Turns on the agent's built-in DNS proxy.
    pub fn with_builtin(self) -> Self {
        Self {
            builtin: true,
            ..self
        }
    }
}

impl SdpOptions {
    /// The replica called `name`, with its own metrics port.
    pub fn new(name: &str, metrics: u16) -> Self {
        Self {
            name: name.to_owned(),
            metrics,
            native: true,
            program: None,
            bpf_root: None,
            flags: Vec::new(),
        }
    }

    pub fn flag(mut self, flag: &str) -> Self {
        self.flags.push(flag.to_owned());
        self
    }
}

impl Default for SdpOptions {
    fn default() -> Self {
        Self::new("one", 9961)
    }
}

/// An agent and one standalone proxy, both ready.
#[derive(Debug)]
pub struct Programs {
    pub agent: Program,
    /// The standalone proxy, whose name is `one`.
    pub sdp: Program,
}

impl Lab {
    /// Puts `policy` in force for pod a, which has the labels [`WEB`], with an agent without
    /// built-in proxy and one standalone proxy.
    pub fn start(&self, policy: &str) -> Result<Programs> {
        self.start_with(policy, &AgentOptions::default())
    }

    /// Like [`Lab::start`], with agent options.
    pub fn start_with(&self, policy: &str, options: &AgentOptions) -> Result<Programs> {
        self.write_policy("web.yaml", policy)?;
        let agent = self.start_agent(options)?;
        let sdp = self.start_sdp(&SdpOptions::default())?;
        self.add_endpoint(&self.a, WEB)?;
        Ok(Programs { agent, sdp })
    }

    /// Command line of the agent.
    pub fn agent_command(&self, options: &AgentOptions) -> Result<Command> {
        let program = match &options.program {
            Some(program) => program.clone(),
            None => config::program("holdfast-agent")?,
        };
        let mut command = self.node.command(path(program)?.as_str());
        command.env("NO_COLOR", "1");
        let level = "info,holdfast_agent=debug,holdfast_sdp=debug";
        command.env("HOLDFAST_LOG_LEVEL", level);
        if options.program.is_some() {
            // Earlier releases use this name of the variable.
            command.env("HOLDFAST_LOG", level);
        }
        command.arg("run");
        command.arg("--bpf-root").arg(self.bpf_root());
        command
            .arg("--state-dir")
            .arg(self.directory().join("state"));
        command.arg("--policy-dir").arg(self.policy_dir());
        command
            .arg("--endpoint-dir")
            .arg(self.directory().join("endpoints"));
        if options.program.is_none() {
            command.arg("--endpoint-store").arg(self.endpoint_store());
        }
        command.arg("--sdp-socket").arg(self.sdp_socket());
        command.arg("--admin-socket").arg(self.agent_socket());
        command.arg(format!("--metrics-address=127.0.0.1:{AGENT_METRICS}"));
        command.arg("--conntrack-gc-interval=500ms");
        if options.program.is_none() {
            command.arg("--reconcile-interval=50ms");
        }
        if !options.builtin {
            command.arg("--disable-builtin-dns-proxy");
        }
        command.args(&options.flags);
        Ok(command)
    }

    /// Starts the agent and waits until it is ready.
    pub fn start_agent(&self, options: &AgentOptions) -> Result<Program> {
        let log = self.directory().join("log/agent.log");
        let mut agent = Program::start("holdfast-agent", self.agent_command(options)?, &log)?;
        self.wait_ready(&mut agent, AGENT_METRICS)?;
        if options.program.is_none() {
            agent.check_repairs_at_end(RepairCheck::new(&self.node, AGENT_METRICS, &self.repairs));
        }
        *self.client.lock() = options.program.clone();
        Ok(agent)
    }

    /// Command line of a standalone proxy.
    pub fn sdp_command(&self, options: &SdpOptions) -> Result<Command> {
        let program = match &options.program {
            Some(program) => program.clone(),
            None => config::program("holdfast-sdp")?,
        };
        let mut command = self.node.command(path(program)?.as_str());
        command.env("NO_COLOR", "1");
        command.env("HOLDFAST_LOG_LEVEL", "info,holdfast_sdp=debug");
        let bpf_root = options.bpf_root.as_deref().unwrap_or(self.bpf_root());
        command.arg("--bpf-root").arg(bpf_root);
        if !options.flags.iter().any(|f| f.starts_with("--state-dir")) {
            command
                .arg("--state-dir")
                .arg(self.directory().join("state"));
        }
        if options.native {
            let socket = format!("unix://{}", self.sdp_socket().display());
            command.arg("--agent-address").arg(socket);
        }
        command.arg("--name").arg(&options.name);
        command
            .arg("--admin-socket")
            .arg(self.sdp_admin(&options.name));
        command.arg(format!("--metrics-address=127.0.0.1:{}", options.metrics));
        if !options.flags.iter().any(|f| f.starts_with("--journal-dir")) {
            command
                .arg("--journal-dir")
                .arg(self.directory().join("journal"));
        }
        command.args(&options.flags);
        Ok(command)
    }

    /// Starts a standalone proxy and waits until it is ready.
    pub fn start_sdp(&self, options: &SdpOptions) -> Result<Program> {
        let log = self
            .directory()
            .join(format!("log/sdp-{}.log", options.name));
        let mut sdp = Program::start("holdfast-sdp", self.sdp_command(options)?, &log)?;
        self.wait_ready(&mut sdp, options.metrics)?;
        Ok(sdp)
    }

    /// Adds an endpoint for a pod and waits until its policy is in force.
    pub fn add_endpoint(&self, pod: &Pod, labels: &str) -> Result<u64> {
        let arguments = [
            "endpoint",
            "add",
            "--netns",
            pod.netns.name(),
            "--ifname",
            "eth0",
            "--labels",
            labels,
        ];
        self.agent(&arguments)?;
        let id = self.endpoint_id(pod)?;
        self.proxies_in_step()?;
        Ok(id)
    }

    /// Waits until the proxy `name` is connected to the agent. A proxy that finds rules on disk is
    /// ready before it is connected.
    pub fn connected(&self, name: &str) -> Result<()> {
        eventually("the proxy is connected", READY, || {
            let status = self.agent_json(&["status"])?;
            let proxies = status
                .get("proxies")
                .and_then(Value::as_array)
                .context("proxies")?;
            for kind in ["mappings", "rules"] {
                let stream = |proxy: &&Value| {
                    proxy
                        .get("instance")
                        .is_some_and(|instance| instance == name)
                        && proxy.get("kind").is_some_and(|of| of == kind)
                };
                proxies
                    .iter()
                    .find(stream)
                    .with_context(|| format!("no {kind} stream yet"))?;
            }
            Ok(())
        })?;
        self.proxies_in_step()
    }

    /// Waits until every connected proxy has acknowledged the policy in force.
    pub fn proxies_in_step(&self) -> Result<()> {
        eventually("proxies acknowledge the policy", READY, || {
            let status = self.agent_json(&["status"])?;
            let number = |value: &Value, key: &str| value.get(key).and_then(Value::as_u64);
            let summary = status.get("summary").context("no summary")?;
            let wanted = number(summary, "revision").context("no revision")?;
            ensure!(
                number(summary, "published_revision") == Some(wanted),
                "not published"
            );
            let proxies = status
                .get("proxies")
                .and_then(Value::as_array)
                .context("proxies")?;
            let behind = proxies
                .iter()
                .filter(|proxy| proxy.get("kind").is_some_and(|kind| kind == "rules"))
                .find(|proxy| number(proxy, "acked_revision") < Some(wanted));
            match behind {
                Some(proxy) => bail!("policy is {wanted}, behind: {proxy}"),
                None => Ok(()),
            }
        })
    }

    /// Number of a pod's endpoint. Waits until its `cilium_lxc` entry is written.
    pub fn endpoint_id(&self, pod: &Pod) -> Result<u64> {
        eventually("the endpoint is realised", READY, || {
            let listing = self.agent_json(&["endpoint", "list"])?;
            let endpoints = listing
                .as_array()
                .or_else(|| listing.get("endpoints").and_then(Value::as_array))
                .context("endpoint list is no list")?;
            let own = Value::String(pod.v4.to_string());
            let endpoint = endpoints
                .iter()
                .find(|endpoint| endpoint.get("ipv4") == Some(&own))
                .with_context(|| format!("{} is not listed: {listing}", pod.v4))?;
            ensure!(
                endpoint.get("state").is_none_or(|state| state == "ready"),
                "not ready: {endpoint}"
            );
            endpoint.get("id").and_then(Value::as_u64).context("no id")
        })
    }

    /// Identities the agent has: number and labels.
    pub fn identities(&self) -> Result<BTreeMap<u64, String>> {
        let listing = self.agent_json(&["identity", "list"])?;
        let list = listing
            .as_array()
            .with_context(|| format!("no list: {listing}"))?;
        list.iter()
            .map(|identity| {
                let id = identity
                    .get("id")
                    .and_then(Value::as_u64)
                    .context("no id")?;
                Ok((id, identity.get("labels").context("no labels")?.to_string()))
            })
            .collect()
    }

    /// Waits until `holdfast-agent status` has each of `texts`.
    pub fn status_has(&self, limit: Duration, texts: &[&str]) -> Result<()> {
        eventually(&format!("status names {texts:?}"), limit, || {
            let status = self.agent(&["status"])?;
            let missing = texts.iter().find(|text| !status.contains(**text));
            ensure!(missing.is_none(), "{status}");
            Ok(())
        })
    }

    /// Waits until every watch of the agent follows its source.
    pub fn watches_follow(&self, limit: Duration) -> Result<()> {
        eventually("every watch follows", limit, || {
            let status = self.agent_json(&["status"])?;
            let watches = status["cluster"]["watches"].as_array().context("watches")?;
            let stale = watches.iter().find(|watch| watch["stale_seconds"] != 0);
            ensure!(stale.is_none(), "{stale:?}");
            Ok(())
        })
    }

    /// Runs a client verb of the agent.
    pub fn agent(&self, arguments: &[&str]) -> Result<String> {
        let of_same_build = self.client.lock().clone();
        let program = match of_same_build {
            Some(program) => program,
            None => config::program("holdfast-agent")?,
        };
        let mut command = self.node.command(path(program)?.as_str());
        command
            .args(arguments)
            .arg("--admin-socket")
            .arg(self.agent_socket());
        shell::finish(&mut command)
    }

    /// Runs a client command of the agent and parses its JSON.
    pub fn agent_json(&self, arguments: &[&str]) -> Result<Value> {
        let text = self.agent(&[arguments, &["-o", "json"]].concat())?;
        serde_json::from_str(&text).with_context(|| format!("JSON of {arguments:?}: {text}"))
    }

    /// Runs a client command of a standalone proxy and parses its JSON.
    pub fn sdp_json(&self, name: &str, arguments: &[&str]) -> Result<Value> {
        let mut command = self
            .node
            .command(path(config::program("holdfast-sdp")?)?.as_str());
        command
            .args(arguments)
            .args(["-o", "json", "--admin-socket"])
            .arg(self.sdp_admin(name));
        let text = shell::finish(&mut command)?;
        serde_json::from_str(&text).with_context(|| format!("JSON of {arguments:?}: {text}"))
    }

    /// Dumps one of the pinned maps. This needs no running agent.
    pub fn bpf_json(&self, arguments: &[&str]) -> Result<Value> {
        let mut command = self
            .node
            .command(path(config::program("holdfast-agent")?)?.as_str());
        command
            .arg("bpf")
            .args(arguments)
            .args(["-o", "json", "--bpf-root"])
            .arg(self.bpf_root());
        let text = shell::finish(&mut command)?;
        serde_json::from_str(&text).with_context(|| format!("JSON of {arguments:?}: {text}"))
    }

    /// Whether the ipcache has the IPv4 address.
    pub fn is_plumbed(&self, address: IpAddr) -> Result<bool> {
        let listed = self.bpf_json(&["ipcache", "list"])?.to_string();
        Ok(listed.contains(&format!("\"{address}/32\"")))
    }

    /// Waits until the ipcache no longer has the IPv4 address. Opens no connection, which would keep it.
    pub fn leaves_ipcache(&self, address: IpAddr, within: Duration) -> Result<()> {
        eventually(&format!("{address} leaves the ipcache"), within, || {
            ensure!(!self.is_plumbed(address)?, "it is there");
            Ok(())
        })
    }

    /// Packets that the datapath counted for a reason, read from its map.
    pub fn counted(&self, reason: Reason) -> Result<u64> {
        let counters = Counters::open(&Globals::new(self.bpf_root()))?.read()?;
        let counter = counters.into_iter().find(|(of, _)| *of == reason);
        Ok(counter.context("no such counter")?.1.packets)
    }

    /// Value of a metric (sum over its label sets that contain `labels`), 0 if absent.
    pub fn metric(&self, port: u16, name: &str, labels: &str) -> Result<f64> {
        let text = self.http(port, "/metrics")?.1;
        let lines = text.lines().filter(|line| {
            line.strip_prefix(name)
                .is_some_and(|rest| rest.starts_with(['{', ' ']))
                && line.contains(labels)
        });
        Ok(lines
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum())
    }

    /// Gets a page from the node's loopback. Returns status code and body.
    pub fn http(&self, port: u16, page: &str) -> Result<(u16, String)> {
        http::get(&self.node, port, page)
    }

    /// Directory of endpoints that survives a reboot.
    pub fn endpoint_store(&self) -> PathBuf {
        self.directory().join("store")
    }

    /// Socket of the native gRPC service.
    pub fn sdp_socket(&self) -> PathBuf {
        self.directory().join("run/sdp.sock")
    }

    /// Admin socket of the agent.
    pub fn agent_socket(&self) -> PathBuf {
        self.directory().join("run/agent.sock")
    }

    /// Socket for the CNI plugin.
    pub fn cni_socket(&self) -> PathBuf {
        self.directory().join("run/cni.sock")
    }

    /// Admin socket of a standalone proxy.
    pub fn sdp_admin(&self, name: &str) -> PathBuf {
        self.directory().join(format!("run/sdp-{name}.sock"))
    }

    pub(crate) fn wait_ready(&self, program: &mut Program, port: u16) -> Result<()> {
        // A program that has ended will not become ready, so this fails at once.
        let mut ended = None;
        eventually("ready", READY, || {
            if let Err(error) = program.check_alive() {
                ended = Some(error);
                return Ok(());
            }
            let (code, body) = self.http(port, "/readyz")?;
            if code != 200 {
                bail!("/readyz returned {code}: {body}");
            }
            Ok(())
        })?;
        ended.map_or(Ok(()), Err)
    }
}

fn path(path: PathBuf) -> Result<String> {
    path.into_os_string()
        .into_string()
        .ok()
        .context("a path that is not UTF-8")
}
