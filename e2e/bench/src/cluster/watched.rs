//! An API server with the objects of a cluster, and an agent that watches it.

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use holdfast_e2e::apiserver::{ApiServer, Options, pod as small_pod};
use holdfast_e2e::bench::usage;
use holdfast_e2e::node::AGENT_METRICS;
use holdfast_e2e::{Lab, Program, config, eventually};
use serde_json::json;
use shared_maps::ipcache::{IpcacheKey, IpcacheValue};
use shared_maps::user::{Access, Globals, Map, ipcache_key};

use super::objects::{self, Size};

/// A step that takes longer is an error.
const LIMIT: Duration = Duration::from_secs(300);
/// Time between two readings of a map.
const POLL: Duration = Duration::from_micros(50);
/// Memory and CPU time are read once they have not changed for this long.
const STILL: Duration = Duration::from_secs(2);

/// The lab, with the server.
pub(crate) struct Cluster {
    pub(crate) lab: Lab,
    pub(crate) api: ApiServer,
    pub(crate) size: Size,
}

/// A running agent, with its ipcache map open for reading.
pub(crate) struct Agent {
    program: Program,
    ipcache: Map<IpcacheKey, IpcacheValue>,
    /// Time from the agent's start until it was ready.
    pub(crate) sync: Duration,
}

impl Cluster {
    /// Starts a cluster with the endpoint's pod, its policy and the namespaces.
    pub(crate) fn start() -> Result<Self> {
        let lab = Lab::new()?;
        let directory = lab.directory().join("apiserver");
        let api = ApiServer::start(Some(&lab.node), &directory, Options::default())?;
        for number in 0..objects::NAMESPACES {
            api.put(objects::namespace(number))?;
        }
        api.put(objects::policy())?;
        let addresses = [lab.a.v4.to_string(), lab.a.v6.to_string()];
        let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
        let labels = json!({"app": "web"});
        api.put(small_pod("ns-0", "web", labels, "n1", &addresses))?;
        api.put(json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": "n1"}, "status": {"addresses": []},
        }))?;
        let size = Size {
            pods: 0,
            nodes: 0,
            services: 0,
        };
        Ok(Self { lab, api, size })
    }

    /// Adds objects until there are as many as `size` says.
    pub(crate) fn grow(&mut self, size: Size) -> Result<()> {
        for number in self.size.pods..size.pods {
            self.api.put(objects::pod(number, "stable"))?;
        }
        for number in self.size.nodes..size.nodes {
            self.api.put(objects::node(number, None))?;
        }
        for number in self.size.services..size.services {
            self.api.put(objects::service(number))?;
            self.api.put(objects::slice(number, size.pods, 0))?;
        }
        self.size = size;
        Ok(())
    }

    /// Starts an agent without state of an earlier one, and waits until it is ready.
    pub(crate) fn start_agent(&self) -> Result<Agent> {
        let lab = &self.lab;
        let agent = Agent::start(lab, &self.api, "n1", &[])?;
        if let Some(last) = self.size.pods.checked_sub(1) {
            agent.wait_for(objects::address(last), |identity| identity.is_some())?;
        }
        let netns = lab.a.netns.name();
        lab.agent(&["endpoint", "add", "--netns", netns, "--pod", "ns-0/web"])?;
        lab.endpoint_id(&lab.a)?;
        Ok(agent)
    }
}

impl Agent {
    /// Starts the agent of node `node` in a lab, with additional `flags`, and waits until it is
    /// ready.
    pub(crate) fn start(lab: &Lab, api: &ApiServer, node: &str, flags: &[String]) -> Result<Self> {
        let program = config::program("holdfast-agent")?;
        let program = program.to_str().context("path of the agent")?;
        let mut command = lab.node.command(program);
        command.env("NO_COLOR", "1").arg("run");
        command.arg("--bpf-root").arg(lab.bpf_root());
        let state = lab.directory().join("state");
        command.arg("--state-dir").arg(state);
        let endpoints = lab.directory().join("endpoints");
        command.arg("--endpoint-dir").arg(endpoints);
        command.arg("--sdp-socket").arg(lab.sdp_socket());
        command.arg("--admin-socket").arg(lab.agent_socket());
        command.arg(format!("--metrics-address=127.0.0.1:{AGENT_METRICS}"));
        command.arg("--disable-builtin-dns-proxy");
        command.arg("--kubernetes");
        command.arg(format!("--node-name={node}"));
        command.arg("--kubeconfig").arg(&api.files().kubeconfig);
        command.args(flags);
        let log = lab.directory().join("log/agent.log");
        let start = Instant::now();
        let mut program = Program::start("holdfast-agent", command, &log)?;
        eventually("the agent is ready", LIMIT, || {
            program.check_alive()?;
            let (code, text) = lab.http(AGENT_METRICS, "/readyz")?;
            ensure!(code == 200, "{text}");
            Ok(())
        })?;
        let sync = start.elapsed();
        let ipcache = Globals::new(lab.bpf_root()).ipcache(Access::ReadOnly)?;
        Ok(Self {
            program,
            ipcache,
            sync,
        })
    }

    /// The identity of an address in the kernel's map.
    pub(crate) fn identity(&self, address: Ipv4Addr) -> Result<Option<u32>> {
        let key = ipcache_key(IpAddr::V4(address), 32);
        let value = self.ipcache.get(&key)?;
        Ok(value.map(|value| value.sec_identity))
    }

    /// Waits until the identity of an address is as wanted. Returns how long that took.
    pub(crate) fn wait_for(
        &self,
        address: Ipv4Addr,
        wanted: impl Fn(Option<u32>) -> bool,
    ) -> Result<Duration> {
        let start = Instant::now();
        while !wanted(self.identity(address)?) {
            ensure!(start.elapsed() < LIMIT, "{address} does not change");
            std::thread::sleep(POLL);
        }
        Ok(start.elapsed())
    }

    /// Whether the agent still runs.
    pub(crate) fn runs(&self) -> Result<bool> {
        Ok(usage::cpu_time(self.program.id()).is_ok())
    }

    /// Entries of the kernel's map.
    pub(crate) fn prefixes(&self) -> Result<usize> {
        Ok(self.ipcache.entries()?.found.len())
    }

    /// CPU time that the agent has used.
    pub(crate) fn cpu(&self) -> Result<Duration> {
        usage::cpu_time(self.program.id())
    }

    /// Resident memory, and its highest value so far, MiB.
    pub(crate) fn memory(&self) -> Result<(f64, f64)> {
        let pid = self.program.id();
        Ok((mib(usage::resident(pid)?), mib(usage::peak_resident(pid)?)))
    }

    /// Waits until the agent has nothing to do.
    pub(crate) fn settle(&self) -> Result<()> {
        let limit = Instant::now() + LIMIT;
        loop {
            let before = self.cpu()?;
            std::thread::sleep(STILL);
            if self.cpu()? - before < STILL / 10 {
                return Ok(());
            }
            ensure!(Instant::now() < limit, "the agent does not become idle");
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
