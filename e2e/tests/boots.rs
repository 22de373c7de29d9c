//! A node that boots another kernel keeps its pods under policy from their first packet on, with
//! the state that was left on its disk under the previous kernel.
//!
//! `cargo xtask test --tier kernels` runs the two tests in two guests, one after another, which share
//! a directory.
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::cni::{Runtime, Sandbox};
use holdfast_e2e::lab::{UDP_PORT, at, web4};
use holdfast_e2e::policy::{WEB, egress};
use holdfast_e2e::{AgentOptions, Lab, Pod, Program, config, eventually, shell, with_lab};

const SOON: Duration = Duration::from_secs(20);
/// Web server that policy allows, by the number that `web4` takes.
const OPEN: u8 = 10;
/// Server that policy does not allow. Only the pod of the container runtime sends to it.
const DENIED: u8 = 12;
/// Another server that policy does not allow, for the other pods. They are open until the agent has
/// found them.
const OTHER: u8 = 11;
const REASON: &str = "two guests with one disk: cargo xtask test --tier kernels";

/// Directories of the lab that a node has on its disk.
const ON_DISK: [&str; 3] = ["state", "store", "endpoints"];

fn disk() -> Result<PathBuf> {
    config::disk().context(REASON)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to)?;
    for name in ON_DISK {
        let source = from.join(name);
        if source.exists() {
            shell::run(
                "cp",
                &["-a", &source.to_string_lossy(), &to.to_string_lossy()],
            )?;
        }
    }
    Ok(())
}

/// What the node's configuration management writes at each boot.
fn configure(lab: &Lab) -> Result<()> {
    let rules = format!("- toCIDR: [\"{}/32\"]\n", web4(OPEN));
    lab.write_policy("web.yaml", &egress("web", "web", &rules))?;
    let pod = r"
apiVersion: v1
kind: Pod
metadata: {name: p, namespace: default, uid: uid-p, labels: {app: web}}
";
    lab.write_policy("pods.yaml", pod)
}

fn start_agent(lab: &Lab) -> Result<Program> {
    let socket = format!("--cni-socket={}", lab.cni_socket().display());
    lab.start_agent(&AgentOptions::default().flag(&socket))
}

/// Acts like a container that sends as soon as it runs: sends packets to a forbidden server, then
/// to an allowed server, whose echo it waits for.
fn sends_at_once(pod: &Pod) -> Result<()> {
    pod.netns.enter(|| -> Result<()> {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        for _ in 0..50 {
            socket.send_to(b"leak", at(web4(DENIED), UDP_PORT))?;
        }
        Ok(())
    })??;
    pod.datagram(at(web4(OPEN), UDP_PORT), SOON)
}

fn closes(pod: &Pod) -> Result<()> {
    eventually("it is under policy", SOON, || {
        pod.expect_closed(at(web4(OTHER), 80))
    })
}

fn is_judged(lab: &Lab, pod: &Pod) -> Result<()> {
    pod.expect_open(at(web4(OPEN), 80))?;
    pod.expect_closed(at(web4(DENIED), 80))?;
    let leaked: u64 = [80, UDP_PORT]
        .into_iter()
        .map(|port| lab.web.visits(at(web4(DENIED), port)))
        .sum();
    ensure!(leaked == 0, "{leaked} packets or connections arrived");
    Ok(())
}

/// Three pods: one from the container runtime, one from an endpoint document, one from a command.
struct Pods {
    by_cni: Sandbox,
    document: String,
}

impl Pods {
    fn of(lab: &Lab) -> Self {
        let document = format!("netns: {}\nlabels: [{WEB}]\n", lab.b.netns.name());
        Self {
            by_cni: Sandbox::new(&lab.a, "p"),
            document,
        }
    }
}

#[test]
#[ignore = "two guests with one disk: cargo xtask test --tier kernels"]
fn a_first_kernel() {
    with_lab(|lab| {
        configure(lab)?;
        let pods = Pods::of(lab);
        let third = lab.add_pod("c", 13)?;
        let agent = start_agent(lab)?;
        Runtime::new(lab)?.start(&pods.by_cni)?;
        sends_at_once(&lab.a)?;
        let documents = lab.directory().join("endpoints");
        std::fs::write(documents.join("b.yaml"), &pods.document)?;
        closes(&lab.b)?;
        lab.add_endpoint(&third, WEB)?;
        closes(&third)?;
        // The agent is killed, as by a power failure.
        agent.kill_9()?;
        for pod in [&lab.a, &lab.b, &third] {
            is_judged(lab, pod)?;
        }
        copy(lab.directory(), &disk()?)
    });
}

#[test]
#[ignore = "two guests with one disk: cargo xtask test --tier kernels"]
fn a_second_kernel() {
    with_lab(|lab| {
        copy(&disk()?, lab.directory())?;
        configure(lab)?;
        let pods = Pods::of(lab);
        let mut runtime = Runtime::new(lab)?;
        runtime.wait = 1;
        let refused = runtime.add(&pods.by_cni)?;
        ensure!(refused.is_err(), "a pod started without an agent");
        runtime.wait = 20;

        let agent = start_agent(lab)?;
        Runtime::new(lab)?.start(&pods.by_cni)?;
        sends_at_once(&lab.a)?;
        for pod in [&lab.a, &lab.b] {
            closes(pod)?;
            is_judged(lab, pod)?;
        }
        // After a boot, the endpoint that a command added is void. The status names it.
        let status = lab.agent(&["status"])?;
        ensure!(status.contains("endpoint add"), "{status}");
        ensure!(status.contains(&format!("{}-c", lab.name())), "{status}");
        // By this time, the state belongs to this kernel.
        agent.kill_9()?;
        is_judged(lab, &lab.a)?;
        let _agent = start_agent(lab)?;
        is_judged(lab, &lab.a)?;
        is_judged(lab, &lab.b)
    });
}
