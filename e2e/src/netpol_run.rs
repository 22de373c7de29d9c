//! `netpol run` on the lab's node, with documents in the policy directory.

use std::net::IpAddr;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::config;
use crate::lab::Lab;
use crate::netns::Netns;
use crate::pod::Pod;
use crate::process::Program;
use crate::shell;
use crate::wait::eventually;

/// Port of the metrics of `netpol run`.
pub const NETPOL_METRICS: u16 = 9963;
/// Family and name of the table of `netpol run`, as arguments of nft(8).
pub const TABLE: [&str; 2] = ["inet", "holdfast_policies_v1"];
/// Name of the node in documents.
pub const NODE: &str = "n1";
/// Longest wait until a change of a document is in force.
pub const SOON: Duration = Duration::from_secs(10);

impl Lab {
    /// Command line of `netpol run`.
    pub fn netpol_command(&self, flags: &[&str]) -> Result<Command> {
        let program = config::program("holdfast-agent")?;
        // The program runs with the only capability that it needs.
        let mut command = self.node.command("setpriv");
        command.args(["--bounding-set=-all,+net_admin", "--inh-caps=-all", "--"]);
        command.arg(program);
        command.env("NO_COLOR", "1");
        command.env("HOLDFAST_LOG_LEVEL", "info,holdfast_agent=debug");
        command.args(["netpol", "run", "--node-name", NODE, "--policy-dir"]);
        command.arg(self.policy_dir());
        command
            .arg("--state-dir")
            .arg(self.directory().join("netpol"));
        command.arg("--admin-socket").arg(self.netpol_socket());
        command.args(flags);
        Ok(command)
    }

    /// Starts `netpol run` without waiting for anything.
    pub fn begin_netpol(&self, flags: &[&str]) -> Result<Program> {
        let log = self.directory().join("log/netpol.log");
        Program::start("netpol run", self.netpol_command(flags)?, &log)
    }

    /// Starts `netpol run` and waits until the policies are in force.
    pub fn start_netpol(&self, flags: &[&str]) -> Result<Program> {
        let mut program = self.begin_netpol(flags)?;
        eventually("netpol run is ready", SOON * 2, || {
            program.check_alive()?;
            let (code, text) = self.http(NETPOL_METRICS, "/readyz")?;
            ensure!(code == 200, "{text}");
            Ok(())
        })?;
        Ok(program)
    }

    fn netpol_socket(&self) -> PathBuf {
        self.directory().join("run/netpol.sock")
    }

    /// Runs a client command of `netpol run`.
    pub fn netpol(&self, arguments: &[&str]) -> Result<String> {
        let program = config::program("holdfast-agent")?;
        let mut command = self.node.command(program.to_str().context("UTF-8")?);
        command.arg("netpol").args(arguments);
        command.arg("--admin-socket").arg(self.netpol_socket());
        shell::finish(&mut command)
    }

    /// Like [`Self::netpol`], with the answer as JSON.
    pub fn netpol_json(&self, arguments: &[&str]) -> Result<Value> {
        let text = self.netpol(&[arguments, &["-o", "json"]].concat())?;
        serde_json::from_str(&text).with_context(|| format!("JSON of {arguments:?}: {text}"))
    }

    /// Writes the Pod document of a pod of namespace `default`.
    pub fn write_pod(&self, name: &str, labels: &Value, pod: &Pod) -> Result<()> {
        let ips = [IpAddr::V4(pod.v4), IpAddr::V6(pod.v6)];
        let ips: Vec<Value> = ips.iter().map(|ip| json!({"ip": ip})).collect();
        let document = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "default", "labels": labels},
            "spec": {"nodeName": NODE},
            "status": {"phase": "Running", "podIP": pod.v4, "podIPs": ips},
        });
        self.write_policy(&format!("pod-{name}.json"), &document.to_string())
    }

    /// Writes a NetworkPolicy of namespace `default`.
    pub fn write_network_policy(&self, name: &str, spec: &Value) -> Result<()> {
        let document = json!({
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": name, "namespace": "default"},
            "spec": spec,
        });
        self.write_policy(&format!("policy-{name}.json"), &document.to_string())
    }

    /// The table as nft(8) lists it, without the lines that count packets.
    pub fn netpol_table(&self) -> Result<String> {
        table(&self.node)
    }
}

/// The table in a namespace, as nft(8) lists it, without the lines that count packets.
pub fn table(netns: &Netns) -> Result<String> {
    let listed = netns.run("nft", &["list", "table", TABLE[0], TABLE[1]])?;
    let lines = listed.lines().filter(|line| !line.contains("packets "));
    Ok(lines.collect::<Vec<_>>().join("\n"))
}
