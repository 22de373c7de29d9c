//! Ways in which a container of podman could escape its policy, by itself or through a fault of the
//! host.

use anyhow::{Context, Result, ensure};
use holdfast_e2e::cri::{endpoints, only_allowed_server};
use holdfast_e2e::lab::NODE4;
use holdfast_e2e::{AgentOptions, Lab, eventually, with_lab};
use nix::sys::signal::Signal;

use super::containers::{SOON, refused, status_has_no_problem, web_with_a_document};

/// Index of the interface of a container's endpoint.
fn interface_of(lab: &Lab, name: &str) -> Result<u64> {
    let endpoints = lab.agent_json(&["endpoint", "list"])?;
    let key = format!("dir/{name}.yaml");
    let mut all = endpoints.as_array().context("a list")?.iter();
    let found = all.find(|endpoint| endpoint["key"] == key);
    found
        .and_then(|endpoint| endpoint["ifindex"].as_u64())
        .with_context(|| format!("{key} in {endpoints}"))
}

/// podman connects a container with a user namespace after the hook.
#[test]
fn a_container_whose_network_comes_after_the_hook_does_not_start() {
    with_lab(|lab| {
        let (podman, sent) = web_with_a_document(lab)?;
        let _agent = podman.start_agent(AgentOptions::default())?;
        let users = ["--uidmap", "0:100000:65536"];
        podman.start("other", &users)?;
        sent.expect_open(NODE4)?;
        podman.run(&["rm", "--force", "--time", "0", "other"])?;
        sent.clear();
        refused(podman.start("web", &users), &["user namespace"])?;
        sent.expect_no_leak(NODE4)
    });
}

/// A process on the host sends the container's packets.
#[test]
fn a_container_whose_packets_a_process_of_the_host_sends_does_not_start() {
    with_lab(|lab| {
        let (podman, sent) = web_with_a_document(lab)?;
        let _agent = podman.start_agent(AgentOptions::default())?;
        let slirp = ["--network", "slirp4netns"];
        podman.start("other", &slirp)?;
        sent.expect_open(NODE4)?;
        podman.run(&["rm", "--force", "--time", "0", "other"])?;
        sent.clear();
        refused(podman.start("web", &slirp), &["tap0"])?;
        sent.expect_no_leak(NODE4)
    });
}

#[test]
fn a_container_whose_document_is_refused_after_a_restart_does_not_start() {
    with_lab(|lab| {
        let (podman, sent) = web_with_a_document(lab)?;
        let agent = podman.start_agent(AgentOptions::default())?;
        podman.start("web", &[])?;
        sent.expect_judged(NODE4)?;
        podman.run(&["stop", "--time", "0", "web"])?;
        agent.kill_9()?;
        let document = lab.directory().join("endpoints/web.yaml");
        std::fs::write(
            &document,
            "container: podman/web\nlabels: [k8s:app=web]\nnoise: 1\n",
        )?;
        let agent = podman.start_agent(AgentOptions::default())?;
        refused(
            podman.run(&["start", "web"]),
            &["podman/web", "dir/web.yaml"],
        )?;
        agent.kill_9()?;
        refused(podman.run(&["start", "web"]), &["podman/web"])?;
        sent.expect_no_leak(NODE4)
    });
}

#[test]
fn a_container_without_a_document_starts_while_the_agent_hangs() {
    with_lab(|lab| {
        let (podman, sent) = web_with_a_document(lab)?;
        let agent = podman.start_agent(AgentOptions::default())?;
        agent.signal(Signal::SIGSTOP)?;
        let other = podman.start("other", &[]);
        let web = podman.start("web", &[]);
        agent.signal(Signal::SIGCONT)?;
        other?;
        refused(web, &["podman/web has a document"])?;
        sent.expect_open(NODE4)
    });
}

#[test]
fn containers_that_swap_their_names_stay_judged() {
    with_lab(|lab| {
        let (podman, sent) = web_with_a_document(lab)?;
        podman.describe("two.yaml", "two", "")?;
        lab.write_policy("web.yaml", &only_allowed_server())?;
        let _agent = podman.start_agent(AgentOptions::default())?;
        podman.start("web", &[])?;
        podman.start("two", &[])?;
        sent.expect_judged(NODE4)?;
        let before = (interface_of(lab, "web")?, interface_of(lab, "two")?);
        podman.run(&["rename", "web", "swap"])?;
        podman.run(&["rename", "two", "web"])?;
        podman.run(&["rename", "swap", "two"])?;
        eventually("each is at the other's interface", SOON, || {
            let at = ["web", "two"].map(|name| interface_of(lab, name));
            let [web, two] = at;
            ensure!((web?, two?) == (before.1, before.0), "as before");
            Ok(())
        })?;
        // Each container sends while the other one is stopped.
        for stopped in ["web", "two"] {
            podman.run(&["kill", "--signal", "STOP", stopped])?;
            sent.expect_judged(NODE4)?;
            podman.run(&["kill", "--signal", "CONT", stopped])?;
        }
        status_has_no_problem(lab)
    });
}

#[test]
fn a_container_of_the_hosts_network_that_gets_the_name_of_one_with_a_document_changes_nothing() {
    with_lab(|lab| {
        let (podman, sent) = web_with_a_document(lab)?;
        let _agent = podman.start_agent(AgentOptions::default())?;
        podman.start("other", &["--network", "host"])?;
        sent.expect_open(NODE4)?;
        podman.run(&["rename", "other", "web"])?;
        eventually("status says what it is", SOON, || {
            let problems = lab.agent_json(&["status"])?["problems"].to_string();
            ensure!(problems.contains("dir/web.yaml"), "{problems}");
            Ok(())
        })?;
        ensure!(endpoints(lab)?.is_empty(), "{:?}", endpoints(lab)?);
        sent.clear();
        sent.expect_open(NODE4)
    });
}

/// The hook also runs for these containers. They have no names that a document could have.
#[test]
fn containers_of_podman_build_start_beside_documents() {
    with_lab(|lab| {
        let (podman, _sent) = web_with_a_document(lab)?;
        let agent = podman.start_agent(AgentOptions::default())?;
        let home = lab.directory().join("build");
        std::fs::create_dir_all(&home)?;
        std::fs::write(
            home.join("Dockerfile"),
            "FROM localhost/first-process:1\nRUN [\"/absent\"]\n",
        )?;
        let hooks = lab.directory().join("podman/hooks");
        let arguments = ["build", "--hooks-dir"].map(std::ffi::OsStr::new);
        let build = || {
            let mut command = podman.command()?;
            command.args(arguments).arg(&hooks).arg(&home);
            let output = command.output()?;
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            // The runtime looks for the program only after the hook.
            ensure!(
                said.contains("/absent") && said.contains("no such file"),
                "{said}"
            );
            ensure!(!said.contains("holdfast"), "{said}");
            Ok(())
        };
        build().context("with an agent")?;
        agent.kill_9()?;
        build().context("without an agent")
    });
}
