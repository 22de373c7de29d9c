//! Endpoints that commands added are under policy again after /run was emptied, as a service manager does
//! when it stops the agent. What a boot makes void is named in `status`, with the command that adds it
//! again.
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use agent_datapath::nftables::{self, Family};
use anyhow::{Context, Result, ensure};
use holdfast_e2e::lab::{at, web4};
use holdfast_e2e::pod::PodProcess;
use holdfast_e2e::policy::{WEB, cidr, egress};
use holdfast_e2e::{AgentOptions, Lab, Pod, eventually, with_lab};

const SOON: Duration = Duration::from_secs(20);
const OPEN: u8 = 10;
const DENIED: u8 = 12;
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

fn problems(lab: &Lab) -> Result<String> {
    let status = lab.agent_json(&["status"])?;
    Ok(status.get("problems").context("problems")?.to_string())
}

fn is_under_policy(pod: &Pod) -> Result<()> {
    pod.expect_closed(at(web4(DENIED), 80))?;
    pod.expect_open(at(web4(OPEN), 80))
}

fn is_open(pod: &Pod) -> Result<()> {
    pod.expect_open(at(web4(DENIED), 80))
}

/// Removes everything in a directory.
fn empty(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        match path.is_dir() {
            true => fs::remove_dir_all(&path)?,
            false => fs::remove_file(&path)?,
        }
    }
    Ok(())
}

/// Removes everything of the agent from the kernel, as a boot does, and waits until the pods are
/// open.
fn unpin(lab: &Lab, pods: &[&Pod]) -> Result<()> {
    empty(lab.bpf_root())?;
    for family in Family::ALL {
        lab.node.enter(move || nftables::remove(family))??;
    }
    for pod in pods {
        let port = pod.host_side.as_str();
        lab.node
            .run("ip", &["link", "set", "dev", port, "group", "default"])?;
    }
    eventually("the pods are open", SOON, || {
        pods.iter().try_for_each(|pod| is_open(pod))
    })
}

/// Files of endpoints in the store.
fn stored(lab: &Lab) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(lab.endpoint_store())?;
    let paths = entries.map(|entry| Ok(entry?.path()));
    let paths: Vec<PathBuf> = paths.collect::<Result<_>>()?;
    let is_endpoint = |path: &PathBuf| path.extension().is_some_and(|of| of == "json");
    Ok(paths.into_iter().filter(is_endpoint).collect())
}

/// Starts an agent with a policy for pods that have the labels of web, adds two of them as endpoints (pod a by
/// the name of its namespace, pod b by its process), and kills the agent.
fn start(lab: &Lab, process: &PodProcess) -> Result<()> {
    lab.write_policy("web.yaml", &egress("web", "web", &cidr("203.0.113.10/32")))?;
    let agent = lab.start_agent(&AgentOptions::default())?;
    lab.agent(&["endpoint", "add", "--pid", &process.pid(), "--labels", WEB])?;
    let name = lab.a.netns.name();
    lab.agent(&["endpoint", "add", "--netns", name, "--labels", WEB])?;
    lab.endpoint_id(&lab.a)?;
    lab.endpoint_id(&lab.b)?;
    is_under_policy(&lab.a)?;
    is_under_policy(&lab.b)?;
    agent.kill_9()
}

#[test]
fn added_endpoints_are_under_policy_again_after_run_was_emptied() {
    with_lab(|lab| {
        let process = lab.b.process()?;
        start(lab, &process)?;
        let state = lab.directory().join("state");
        for with_pins in [true, false] {
            empty(&state)?;
            if !with_pins {
                unpin(lab, &[&lab.a, &lab.b])?;
            }
            let agent = lab.start_agent(&AgentOptions::default())?;
            for pod in [&lab.a, &lab.b] {
                lab.endpoint_id(pod)
                    .with_context(|| format!("with pins: {with_pins}"))?;
                is_under_policy(pod)?;
            }
            let said = problems(lab)?;
            ensure!(!said.contains("cli/"), "{said}");
            agent.kill_9()?;
        }
        // An endpoint that is removed stays removed.
        let agent = lab.start_agent(&AgentOptions::default())?;
        lab.endpoint_id(&lab.a)?;
        let key = format!("cli/{}/eth0", lab.a.netns.name());
        lab.agent(&["endpoint", "remove", &key])?;
        agent.kill_9()?;
        empty(&state)?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        lab.endpoint_id(&lab.b)?;
        is_under_policy(&lab.b)?;
        let list = lab.agent_json(&["endpoint", "list"])?;
        let count = list.as_array().map_or(0, Vec::len);
        ensure!(count == 1, "{list}");
        ensure!(stored(lab)?.len() == 1, "{:?}", stored(lab)?);
        Ok(())
    });
}

#[test]
fn status_says_after_a_boot_which_endpoints_to_add_again() {
    with_lab(|lab| {
        let process = lab.b.process()?;
        lab.write_policy("web.yaml", &egress("web", "web", &cidr("203.0.113.10/32")))?;
        let c = lab.add_pod("c", 13)?;
        let agent = lab.start_agent(&AgentOptions::default())?;
        lab.agent(&["endpoint", "add", "--pid", &process.pid(), "--labels", WEB])?;
        let name = c.netns.name().to_owned();
        lab.agent(&["endpoint", "add", "--netns", &name, "--labels", WEB])?;
        lab.endpoint_id(&lab.b)?;
        lab.endpoint_id(&c)?;
        agent.kill_9()?;
        empty(&lab.directory().join("state"))?;
        unpin(lab, &[&lab.b, &c])?;
        drop(c);
        // Makes the files look as if they were written before this boot: another process may have
        // the number.
        let boot_id = fs::read_to_string(BOOT_ID)?;
        for entry in fs::read_dir(lab.endpoint_store())? {
            let path = entry?.path();
            let text = fs::read_to_string(&path)?;
            ensure!(text.contains(boot_id.trim()), "{}: {text}", path.display());
            fs::write(&path, text.replace(boot_id.trim(), "of-another-boot"))?;
        }
        let _agent = lab.start_agent(&AgentOptions::default())?;
        let said = problems(lab)?;
        let by_pid = format!("endpoint cli/pid-{}/eth0", process.pid());
        let by_name = format!("endpoint cli/{name}/eth0");
        let add = format!("holdfast-agent endpoint add --pid PID --ifname eth0 --labels '{WEB}'");
        for part in [&by_pid, &by_name, &add, "--netns NETNS", "is open"] {
            ensure!(said.contains(part), "{part} is not in: {said}");
        }
        is_open(&lab.b)?;
        let list = lab.agent_json(&["endpoint", "list"])?;
        ensure!(list.as_array().is_some_and(Vec::is_empty), "{list}");
        // The commands add the same endpoints as before.
        let name = lab.a.netns.name();
        lab.agent(&["endpoint", "add", "--netns", name, "--labels", WEB])?;
        lab.agent(&["endpoint", "add", "--pid", &process.pid(), "--labels", WEB])?;
        for pod in [&lab.a, &lab.b] {
            lab.endpoint_id(pod)?;
            is_under_policy(pod)?;
        }
        let said = problems(lab)?;
        ensure!(!said.contains("cli/"), "{said}");
        Ok(())
    });
}

#[test]
fn a_stored_endpoint_that_is_damaged_is_named_and_the_others_are_read() {
    with_lab(|lab| {
        let process = lab.b.process()?;
        start(lab, &process)?;
        empty(&lab.directory().join("state"))?;
        let files = stored(lab)?;
        ensure!(files.len() == 2, "{files:?}");
        let is_of_a = |path: &&PathBuf| {
            fs::read_to_string(path).is_ok_and(|text| text.contains(lab.a.netns.name()))
        };
        let file = files.iter().find(is_of_a).context("no file of pod a")?;
        let text = fs::read_to_string(file)?;
        fs::write(file, text.get(..text.len() / 2).unwrap_or_default())?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        lab.endpoint_id(&lab.b)?;
        is_under_policy(&lab.b)?;
        let said = problems(lab)?;
        let file = file.display().to_string();
        for part in [file.as_str(), ".corrupt", "endpoint add"] {
            ensure!(said.contains(part), "{part} is not in: {said}");
        }
        Ok(())
    });
}
