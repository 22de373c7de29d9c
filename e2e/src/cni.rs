//! A minimal container runtime: it gives the CNI plugin the same input as a real runtime, for pods
//! whose interfaces the lab has made.

use std::io::Write as _;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::config;
use crate::lab::Lab;
use crate::pod::Pod;

/// A small container runtime, with the settings that it gives the plugin.
#[derive(Clone, Debug)]
pub struct Runtime {
    plugin: PathBuf,
    /// The agent's socket for the plugin.
    pub socket: PathBuf,
    /// Seconds that ADD waits for the agent.
    pub wait: u64,
    /// Namespaces whose pods start without an agent.
    pub fail_open: Vec<String>,
}

/// A pod, as the runtime names it.
#[derive(Clone, Debug)]
pub struct Sandbox {
    /// Container id that the runtime chose.
    pub container: String,
    /// `namespace/name`.
    pub pod: String,
    pub uid: String,
    /// Path of its network namespace.
    pub netns: PathBuf,
    /// Addresses that the earlier plugins report.
    pub addresses: Vec<IpAddr>,
    /// Name of the node's end of its veth pair.
    pub host_side: String,
}

/// The error that the plugin printed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CniError {
    /// Error code of the CNI specification.
    pub code: u64,
    pub message: String,
}

impl Sandbox {
    /// The sandbox of a pod that the lab made, `default/<name>`.
    pub fn new(pod: &Pod, name: &str) -> Self {
        Self {
            container: format!("c0ffee-{name}"),
            pod: format!("default/{name}"),
            uid: format!("uid-{name}"),
            netns: pod.netns.path(),
            addresses: vec![pod.v4.into(), pod.v6.into()],
            host_side: pod.host_side.clone(),
        }
    }

    /// The result of the earlier plugin, as ptp prints it.
    pub fn result(&self) -> Value {
        let ips = self.addresses.iter().map(|address| {
            let bits = if address.is_ipv4() { 32 } else { 128 };
            json!({"interface": 1, "address": format!("{address}/{bits}")})
        });
        json!({
            "cniVersion": "1.0.0",
            "interfaces": [
                {"name": self.host_side},
                {"name": "eth0", "sandbox": self.netns},
            ],
            "ips": ips.collect::<Vec<_>>(),
            "dns": {},
        })
    }
}

impl Runtime {
    /// A runtime whose plugin sends requests to the agent of `lab`.
    pub fn new(lab: &Lab) -> Result<Self> {
        Ok(Self {
            plugin: config::program("holdfast-cni")?,
            socket: lab.cni_socket(),
            wait: 20,
            fail_open: Vec::new(),
        })
    }

    /// Runs ADD, and returns the plugin's result.
    pub fn add(&self, sandbox: &Sandbox) -> Result<Result<Value, CniError>> {
        self.add_with(sandbox, json!({"prevResult": sandbox.result()}))
    }

    /// Runs ADD with further fields in the configuration.
    pub fn add_with(&self, sandbox: &Sandbox, fields: Value) -> Result<Result<Value, CniError>> {
        self.call("ADD", sandbox, fields)
    }

    /// Runs ADD, which has to succeed.
    pub fn start(&self, sandbox: &Sandbox) -> Result<()> {
        match self.add(sandbox)? {
            Ok(result) => {
                ensure!(result["ips"] == sandbox.result()["ips"], "result: {result}");
                Ok(())
            }
            Err(error) => bail!("ADD of {}: {error:?}", sandbox.pod),
        }
    }

    /// Runs DEL, which has to succeed.
    pub fn stop(&self, sandbox: &Sandbox) -> Result<()> {
        match self.call("DEL", sandbox, json!({}))? {
            Ok(_) => Ok(()),
            Err(error) => bail!("DEL of {}: {error:?}", sandbox.pod),
        }
    }

    /// Runs a command of the CNI specification.
    pub fn call(
        &self,
        command: &str,
        sandbox: &Sandbox,
        fields: Value,
    ) -> Result<Result<Value, CniError>> {
        let mut config = json!({
            "cniVersion": "1.0.0",
            "name": "lab",
            "type": "holdfast-cni",
            "socket": self.socket,
            "wait": self.wait,
            "failOpenNamespaces": self.fail_open,
        });
        if let (Some(config), Value::Object(fields)) = (config.as_object_mut(), fields) {
            config.extend(fields);
        }
        let (namespace, name) = sandbox.pod.split_once('/').context("namespace/name")?;
        let mut child = Command::new(&self.plugin)
            .env_clear()
            .env("CNI_COMMAND", command)
            .env("CNI_CONTAINERID", &sandbox.container)
            .env("CNI_NETNS", &sandbox.netns)
            .env("CNI_IFNAME", "eth0")
            .env("CNI_PATH", "/opt/cni/bin")
            .env(
                "CNI_ARGS",
                format!(
                    "IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={name};K8S_POD_UID={}",
                    sandbox.uid
                ),
            )
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start holdfast-cni")?;
        let mut input = child.stdin.take().context("standard input")?;
        input.write_all(config.to_string().as_bytes())?;
        drop(input);
        let output = child.wait_with_output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        if output.status.success() {
            let result = match text.is_empty() {
                true => Value::Null,
                false => serde_json::from_str(&text).with_context(|| format!("result: {text}"))?,
            };
            return Ok(Ok(result));
        }
        let error: Value = serde_json::from_str(&text).with_context(|| format!("error: {text}"))?;
        Ok(Err(CniError {
            code: error["code"].as_u64().context("code")?,
            message: error["msg"].as_str().context("msg")?.to_owned(),
        }))
    }
}
