//! A node with the startup taint gets pods only once its agent is ready, and keeps its other taints.
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::apiserver::{ApiServer, Options, STARTUP_TAINT};
use holdfast_e2e::{AgentOptions, Lab, Program, eventually, with_lab};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(30);
/// The configuration of the node's network.
const BASE: &str = r#"{"name":"net","cniVersion":"1.0.0","plugins":[{"type":"ptp"}]}"#;

/// A taint that another program writes again and again.
const COUNT: &str = "example.org/count";

fn taint(key: &str, effect: &str) -> Value {
    json!({"key": key, "value": "true", "effect": effect})
}

/// A taint of another program, and the startup taint with both effects.
fn node() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": "n1", "labels": {"pool": "a"}},
        "spec": {"podCIDR": "10.244.1.0/24", "taints": [
            taint("example.org/gpu", "NoSchedule"),
            taint(STARTUP_TAINT, "NoSchedule"),
            taint(STARTUP_TAINT, "NoExecute"),
        ]},
        "status": {"addresses": []},
    })
}

fn cluster(lab: &Lab, options: Options) -> Result<(ApiServer, PathBuf)> {
    let api = ApiServer::start(Some(&lab.node), &lab.directory().join("apiserver"), options)?;
    api.put(node())?;
    let conf_dir = lab.directory().join("net.d");
    std::fs::create_dir(&conf_dir)?;
    Ok((api, conf_dir))
}

/// Starts an agent without waiting until it is ready.
fn start(lab: &Lab, api: &ApiServer, conf_dir: &Path) -> Result<Program> {
    let kubeconfig = api.files().kubeconfig.display();
    let options = AgentOptions::default()
        .flag("--kubernetes")
        .flag(&format!("--kubeconfig={kubeconfig}"))
        .flag("--node-name=n1")
        .flag(&format!("--cni-socket={}", lab.cni_socket().display()))
        .flag(&format!("--cni-conf-dir={}", conf_dir.display()));
    let log = lab.directory().join("log/agent.log");
    Program::start("holdfast-agent", lab.agent_command(&options)?, &log)
}

fn taints(api: &ApiServer) -> Result<Vec<String>> {
    let node = api.get("nodes", "", "n1")?.context("no Node")?;
    let taints = node["spec"]["taints"].as_array().into_iter().flatten();
    let keys = taints.filter_map(|taint| taint["key"].as_str());
    Ok(keys.map(str::to_owned).collect())
}

fn has_startup_taint(api: &ApiServer) -> Result<bool> {
    Ok(taints(api)?.iter().any(|key| key == STARTUP_TAINT))
}

fn problem_with(lab: &Lab, texts: &[&str]) -> Result<()> {
    eventually("status names the taint", SOON, || {
        let status = lab.agent_json(&["status"])?;
        let problems = status["problems"].as_array().context("problems")?;
        let mut problems = problems.iter().filter_map(Value::as_str);
        let found = problems.any(|problem| texts.iter().all(|text| problem.contains(text)));
        ensure!(found, "{texts:?} are not in one of {}", status["problems"]);
        Ok(())
    })
}

#[test]
fn the_taint_goes_once_policy_and_cni_configuration_are_in_place_and_others_stay() {
    with_lab(|lab| {
        let (api, conf_dir) = cluster(lab, Options::with_startup_taint(Some("n1")))?;
        // The agent cannot be ready without the pods.
        api.hold("pods")?;
        let _agent = start(lab, &api, &conf_dir)?;
        eventually("the agent has written its CiliumNode", SOON, || {
            api.get("ciliumnodes", "", "n1")?.context("no CiliumNode")
        })?;
        ensure!(
            lab.agent_json(&["status"])?["ready"] == false,
            "it is ready"
        );
        ensure!(has_startup_taint(&api)?, "{:?}", taints(&api)?);
        api.release("pods")?;
        // Pods would start open: there is no configuration to add the plugin to.
        problem_with(lab, &["has no CNI configuration"])?;
        eventually("the agent is ready", SOON, || {
            ensure!(lab.agent_json(&["status"])?["ready"] == true, "not yet");
            Ok(())
        })?;
        ensure!(has_startup_taint(&api)?, "{:?}", taints(&api)?);
        std::fs::write(conf_dir.join("10-net.conflist"), BASE)?;
        eventually("the taint is removed", SOON, || {
            ensure!(!has_startup_taint(&api)?, "{:?}", taints(&api)?);
            Ok(())
        })?;
        ensure!(conf_dir.join("05-holdfast.conflist").exists(), "no plugin");
        let found = api.get("nodes", "", "n1")?.context("no Node")?;
        let mut expected = node();
        expected["spec"]["taints"] = json!([taint("example.org/gpu", "NoSchedule")]);
        ensure!(found["spec"] == expected["spec"], "{found}");
        ensure!(
            found["metadata"]["labels"] == expected["metadata"]["labels"],
            "{found}"
        );
        Ok(())
    });
}

#[test]
fn taints_that_another_program_sets_meanwhile_are_not_lost() {
    with_lab(|lab| {
        let (api, conf_dir) = cluster(lab, Options::with_startup_taint(Some("n1")))?;
        std::fs::write(conf_dir.join("10-net.conflist"), BASE)?;
        let stop = AtomicBool::new(false);
        let lost = std::thread::scope(|scope| -> Result<u64> {
            let writer = scope.spawn(|| count_in_a_taint(&api, &stop));
            let removed = start(lab, &api, &conf_dir).and_then(|agent| {
                eventually("the agent has tried to remove the taint", SOON, || {
                    let answered = api.answered();
                    let mut answered = answered.iter();
                    let tried = answered.any(|a| a.verb == "patch" && a.resource == "nodes");
                    ensure!(tried, "not yet");
                    Ok(())
                })?;
                Ok(agent)
            });
            stop.store(true, Ordering::Relaxed);
            let lost = writer.join().expect("the writer")?;
            let _agent = removed?;
            eventually("the taint is removed", SOON, || {
                ensure!(!has_startup_taint(&api)?, "it is there");
                Ok(())
            })?;
            Ok(lost)
        })?;
        ensure!(lost == 0, "{lost} changes of the other program were lost");
        ensure!(
            taints(&api)? == ["example.org/gpu", COUNT],
            "{:?}",
            taints(&api)?
        );
        Ok(())
    });
}

/// Counts in the value of a taint. Returns how often the value was not the last one that was
/// written.
fn count_in_a_taint(api: &ApiServer, stop: &AtomicBool) -> Result<u64> {
    let (mut last, mut lost) = (0_u64, 0);
    while !stop.load(Ordering::Relaxed) {
        api.edit("nodes", "", "n1", |node| {
            let mut taints = node["spec"]["taints"]
                .as_array()
                .cloned()
                .unwrap_or_default();
            let before = taints.iter().find(|taint| taint["key"] == COUNT);
            let written = last.to_string();
            let is_last = before.map(|taint| taint["value"].as_str() == Some(&written));
            lost += u64::from(!is_last.unwrap_or(last == 0));
            last += 1;
            taints.retain(|taint| taint["key"] != COUNT);
            taints.push(json!({"key": COUNT, "value": last.to_string(), "effect": "NoSchedule"}));
            node["spec"]["taints"] = json!(taints);
        })?;
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(lost)
}

#[test]
fn a_right_that_is_missing_is_a_problem_with_the_command_that_removes_the_taint() {
    let command = format!("kubectl taint node n1 {STARTUP_TAINT}-");
    for (options, reason) in [
        // The chart's value is empty, or the API server has no admission policies.
        (Options::default(), "cannot patch resource"),
        // Tokens of an API server that does not write the node into them.
        (
            Options::with_startup_taint(None),
            "ValidatingAdmissionPolicy 'holdfast-agent-node'",
        ),
        // The token of a pod on another node.
        (
            Options::with_startup_taint(Some("n2")),
            "its token has to name",
        ),
    ] {
        with_lab(|lab| {
            let (api, conf_dir) = cluster(lab, options)?;
            std::fs::write(conf_dir.join("10-net.conflist"), BASE)?;
            let _agent = start(lab, &api, &conf_dir)?;
            problem_with(lab, &[reason, command.as_str(), "agentNotReadyTaintKey"])?;
            ensure!(has_startup_taint(&api)?, "{:?}", taints(&api)?);
            // The taint is removed by hand, and the agent notices it.
            api.edit("nodes", "", "n1", |node| {
                node["spec"]["taints"] = json!([]);
            })?;
            eventually("the problem goes", Duration::from_secs(60), || {
                let status = lab.agent(&["status"])?;
                ensure!(!status.contains(STARTUP_TAINT), "{status}");
                Ok(())
            })
        });
    }
}
