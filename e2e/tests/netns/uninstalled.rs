//! An agent that is stopped takes everything off its node if its DaemonSet was deleted, and leaves
//! everything in force if the API server does not accept the agent any more.
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::apiserver::{ApiServer, Options, Refusal, StreamingLists};
use holdfast_e2e::lab::{at, web4};
use holdfast_e2e::policy::{WEB, cidr, egress};
use holdfast_e2e::{AgentOptions, Lab, Program, config, eventually, shell, with_lab};
use nix::sys::signal::Signal;
use serde_json::json;

const SOON: Duration = Duration::from_secs(20);
/// An agent that gets no clear answer asks for 15 seconds.
const ENDS: Duration = Duration::from_secs(40);
/// Web server that policy allows, by the number that `web4` takes.
const OPEN: u8 = 10;
/// Web server that policy does not allow.
const DENIED: u8 = 12;
const SET: &str = "holdfast-agent";

/// An agent of a DaemonSet, with pod a under policy.
fn start(lab: &Lab) -> Result<(ApiServer, Program)> {
    lab.write_policy("web.yaml", &egress("web", "web", &cidr("203.0.113.10/32")))?;
    let directory = lab.directory().join("apiserver");
    let options = Options {
        streaming_lists: StreamingLists::Refused,
        ..Options::default()
    };
    let api = ApiServer::start(Some(&lab.node), &directory, options)?;
    api.put(json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet",
        "metadata": {"name": SET, "namespace": "kube-system"},
    }))?;
    api.put(json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": "n1"}, "status": {"addresses": []},
    }))?;
    let kubeconfig = api.files().kubeconfig.display().to_string();
    let options = AgentOptions::default()
        .flag("--kubernetes")
        .flag(&format!("--kubeconfig={kubeconfig}"))
        .flag("--node-name=n1")
        .flag(&format!("--daemonset={SET}"));
    let agent = lab.start_agent(&options)?;
    let netns = lab.a.netns.name();
    lab.agent(&["endpoint", "add", "--netns", netns, "--labels", WEB])?;
    lab.a.expect_closed(at(web4(DENIED), 80))?;
    eventually("the agent follows its DaemonSet", SOON, || {
        let answered = api.answered();
        let mut watches = answered.iter().filter(|answer| answer.verb == "watch");
        let of_set = watches.find(|watch| watch.resource == "daemonsets");
        ensure!(of_set.context("no watch")?.code == 200, "{of_set:?}");
        Ok(())
    })?;
    Ok((api, agent))
}

fn ends(mut agent: Program) -> Result<String> {
    // The agent's repairs are read before it cleans up, because they cannot be read afterwards.
    agent.check_repairs_now();
    agent.signal(Signal::SIGTERM)?;
    let status = agent.wait(ENDS)?;
    ensure!(status.success(), "{status}");
    Ok(agent.log())
}

#[test]
fn an_uninstall_that_removes_the_account_before_the_agents_cleans_the_node() {
    with_lab(|lab| {
        let (api, agent) = start(lab)?;
        // As Helm does: the DaemonSet first, then role and account, and the pods end after that.
        api.delete("daemonsets", "kube-system", SET)?;
        api.refuse("daemonsets", Refusal::Forbidden)?;
        api.expire_token();
        ends(agent)?;
        lab.a.expect_open(at(web4(DENIED), 80))
    });
}

#[test]
fn a_daemonset_older_than_the_history_of_the_api_server_is_followed_by_one_watch() {
    with_lab(|lab| {
        let (api, agent) = start(lab)?;
        // As after a restart of the API server: the version of the DaemonSet is too old for a watch.
        api.forget_answered();
        api.expire("daemonsets")?;
        eventually("the agent follows its DaemonSet again", SOON, || {
            ensure!(watches(&api) > 0, "no watch yet");
            Ok(())
        })?;
        api.delete("daemonsets", "kube-system", SET)?;
        api.refuse("daemonsets", Refusal::Forbidden)?;
        ends(agent)?;
        lab.a.expect_open(at(web4(DENIED), 80))?;
        ensure!(watches(&api) == 1, "{:?}", api.answered());
        Ok(())
    });
}

/// Watches of DaemonSets that the API server accepted.
fn watches(api: &ApiServer) -> usize {
    let answered = api.answered();
    let watches = answered
        .iter()
        .filter(|a| a.verb == "watch" && a.resource == "daemonsets" && a.code == 200);
    watches.count()
}

#[test]
fn a_deleted_daemonset_that_is_made_again_is_no_uninstall() {
    with_lab(|lab| {
        let (api, agent) = start(lab)?;
        api.delete("daemonsets", "kube-system", SET)?;
        api.put(json!({
            "apiVersion": "apps/v1", "kind": "DaemonSet",
            "metadata": {"name": SET, "namespace": "kube-system"},
        }))?;
        ends(agent)?;
        lab.a.expect_closed(at(web4(DENIED), 80))?;
        lab.a.expect_open(at(web4(OPEN), 80))
    });
}

#[test]
fn an_agent_whose_credentials_are_refused_leaves_its_node_as_it_is() {
    for is_expired in [true, false] {
        with_lab(|lab| {
            let (api, agent) = start(lab)?;
            match is_expired {
                true => api.expire_token(),
                false => api.refuse("daemonsets", Refusal::Forbidden)?,
            }
            let log = ends(agent)?;
            ensure!(log.contains("holdfast-agent cleanup"), "{log}");
            lab.a.expect_closed(at(web4(DENIED), 80))?;
            lab.a.expect_open(at(web4(OPEN), 80))
        });
    }
}

#[test]
fn a_node_that_was_taken_out_enforces_until_a_pod_of_an_administrator_cleans_it_up() {
    with_lab(|lab| {
        let (_api, agent) = start(lab)?;
        // The DaemonSet still exists, but does not select the node any more.
        let log = ends(agent)?;
        ensure!(!log.contains("was deleted"), "{log}");
        lab.a.expect_closed(at(web4(DENIED), 80))?;
        let (state, host) = (lab.directory().join("state"), lab.directory().join("host"));
        std::fs::create_dir(&host)?;
        let conf_dir = lab.directory().join("net.d");
        std::fs::create_dir(&conf_dir)?;
        // As in `kubectl debug node`: the node's root is at another place, and its directories are not
        // in the container's own.
        let program = config::program("holdfast-agent")?;
        let in_pod = |flags: &str| {
            let (bpf_root, host) = (lab.bpf_root().display(), host.display());
            let script = format!(
                "mount --rbind / {host} && mount -t tmpfs none /sys/fs/bpf && \
                 mount -t tmpfs none {state} && exec {program} cleanup {flags} \
                 --bpf-root {bpf_root} --state-dir {state} --cni-conf-dir {conf_dir}",
                state = state.display(),
                program = program.display(),
                conf_dir = conf_dir.display(),
            );
            let mut command = lab.node.command("unshare");
            command.args(["--mount", "sh", "-c", &script]);
            shell::finish(&mut command)
        };
        let refused = in_pod("").err().context("without the node's root")?;
        ensure!(
            format!("{refused:#}").contains("--host-root /host"),
            "{refused:#}"
        );
        lab.a.expect_closed(at(web4(DENIED), 80))?;
        lab.a.expect_open(at(web4(OPEN), 80))?;
        let removed = in_pod(&format!("--host-root {}", host.display()))?;
        ensure!(
            removed.contains("pinned links of programs in "),
            "{removed}"
        );
        lab.a.expect_open(at(web4(DENIED), 80))
    });
}

#[test]
fn cleanup_prints_what_it_removed_or_that_there_was_nothing() {
    with_lab(|lab| {
        lab.write_policy("web.yaml", &egress("web", "web", &cidr("203.0.113.10/32")))?;
        let agent = lab.start_agent(&AgentOptions::default())?;
        lab.add_endpoint(&lab.a, WEB)?;
        lab.a.expect_closed(at(web4(DENIED), 80))?;
        let conf_dir = lab.directory().join("net.d");
        std::fs::create_dir(&conf_dir)?;
        let cleanup = || {
            let program = config::program("holdfast-agent")?;
            let mut command = lab.node.command(program.to_str().context("not UTF-8")?);
            command.arg("cleanup").arg("--bpf-root").arg(lab.bpf_root());
            command
                .arg("--state-dir")
                .arg(lab.directory().join("state"));
            command.arg("--cni-conf-dir").arg(&conf_dir);
            shell::finish(&mut command)
        };
        let refused = cleanup().err().context("beside a running agent")?;
        ensure!(format!("{refused:#}").contains("pid"), "{refused:#}");
        ends(agent)?;
        let removed = cleanup()?;
        for text in [
            "pinned links of programs in ",
            "removed nftables table inet holdfast_v1",
            "removed ip rule 9, ip -6 rule 9, the local route of table 2004, the local IPv6 route",
            "pinned maps of the agent in ",
            "of state in ",
        ] {
            ensure!(removed.contains(text), "{text:?} is not in: {removed}");
        }
        // There was no CNI configuration.
        ensure!(!removed.contains("CNI"), "{removed}");
        lab.a.expect_open(at(web4(DENIED), 80))?;
        let again = cleanup()?;
        ensure!(
            again == "nothing of holdfast-agent was on this node\n",
            "{again}"
        );
        Ok(())
    });
}
