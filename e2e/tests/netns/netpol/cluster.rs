//! The cluster as the source: watches, a refused policy, and an API server that is away at the start.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::apiserver::{ApiServer, Options, pod};
use holdfast_e2e::{Lab, Pod, Program, config, eventually, with_lab};
use serde_json::{Value, json};

use super::{PORT, Pods, SOON, addresses, both, of, reaches, status_has};

/// Time until a connection must be there again: the longest pause is 30 s.
const FOLLOWS: Duration = Duration::from_secs(45);

fn object(name: &str, pod_of: &Pod) -> Value {
    let ips = addresses(pod_of).map(|address| address.to_string());
    let ips: Vec<&str> = ips.iter().map(String::as_str).collect();
    pod("default", name, json!({"app": name}), "n1", &ips)
}

fn policy(spec: &Value) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "b", "namespace": "default"},
        "spec": spec,
    })
}

fn start(lab: &Lab, options: Options) -> Result<ApiServer> {
    let directory = lab.directory().join("apiserver");
    let api = ApiServer::start(Some(&lab.node), &directory, options)?;
    api.put(json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"}}))?;
    api.put(json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}, "status": {"addresses": []},
    }))?;
    for (name, of) in [("a", &lab.a), ("b", &lab.b)] {
        api.put(object(name, of))?;
    }
    Ok(api)
}

#[test]
fn the_last_table_then_the_stored_list_stand_in_for_the_api_server() {
    with_lab(|lab| {
        let _servers = Pods::without_documents(lab)?;
        let api = start(lab, Options::default())?;
        api.put(policy(
            &json!({"podSelector": of("b"), "ingress": [{"ports": [{"port": PORT}]}]}),
        ))?;
        let kubeconfig = format!("--kubeconfig={}", api.files().kubeconfig.display());
        let flags = ["--kubernetes", kubeconfig.as_str()];
        let netpol = lab.start_netpol(&flags)?;
        reaches(&lab.a, &both(&lab.b, 8080), false)?;
        reaches(&lab.a, &both(&lab.b, PORT), true)?;
        let stored = lab.directory().join("netpol/cluster.json");
        eventually("the list is stored", SOON, || {
            ensure!(stored.exists(), "it is not");
            Ok(())
        })?;
        netpol.kill_9()?;

        api.away();
        let netpol = lab.begin_netpol(&flags)?;
        status_has(lab, &["no: see PROBLEM", "the table of the last run stays"])?;
        reaches(&lab.a, &both(&lab.b, 8080), false)?;
        eventually("the stored list stands in", SOON * 3, || {
            let status = lab.netpol_json(&["status"])?;
            ensure!(status["ready"] == true, "{status}");
            Ok(())
        })?;
        reaches(&lab.a, &both(&lab.b, 8080), false)?;
        reaches(&lab.a, &both(&lab.b, PORT), true)?;

        api.back()?;
        api.put(policy(&json!({"podSelector": of("b"), "ingress": [{}]})))?;
        eventually("the watch follows again", FOLLOWS, || {
            lab.a.expect_open(both(&lab.b, 8080)[0])
        })?;
        drop(netpol);
        Ok(())
    });
}

#[test]
fn a_refused_policy_is_an_event_and_its_last_version_stays() {
    with_lab(|lab| {
        let _servers = Pods::without_documents(lab)?;
        let api = start(lab, Options::default())?;
        api.put(policy(&json!({"podSelector": of("b"), "ingress": []})))?;
        let kubeconfig = format!("--kubeconfig={}", api.files().kubeconfig.display());
        let _netpol = lab.start_netpol(&["--kubernetes", &kubeconfig])?;
        reaches(&lab.a, &both(&lab.b, PORT), false)?;
        api.put(policy(&json!({"podSelector": of("b"), "ingres": []})))?;
        eventually("an Event about the policy", SOON * 2, || {
            let events = api.all("events.events.k8s.io")?;
            let about = events.iter().any(|event| {
                let text = event.to_string();
                text.contains("NetworkPolicy") && text.contains("spec.ingres")
            });
            ensure!(about, "{events:?}");
            Ok(())
        })?;
        reaches(&lab.a, &both(&lab.b, PORT), false)
    });
}

#[test]
fn a_relay_gives_the_same_and_may_go_away() {
    with_lab(|lab| {
        let _servers = Pods::without_documents(lab)?;
        let api = start(lab, Options::with_relays())?;
        let allows = |port: u16| {
            policy(&json!({"podSelector": of("b"), "ingress": [{"ports": [{"port": port}]}]}))
        };
        api.put(allows(PORT))?;
        let kubeconfig = |path: &Path| format!("--kubeconfig={}", path.display());
        let relay = || -> Result<Program> {
            let program = config::program("holdfast-agent")?;
            let mut command = lab.node.command(program.to_str().context("UTF-8")?);
            command.args(["relay", "--metrics-address=off", "--plaintext"]);
            command.arg("--listen=127.0.0.1:9971");
            command.arg(kubeconfig(&api.files().admin));
            Program::start(
                "holdfast-agent relay",
                command,
                &lab.directory().join("log/relay.log"),
            )
        };
        let running = relay()?;
        let account = kubeconfig(&api.files().kubeconfig);
        let flags = [
            "--kubernetes",
            account.as_str(),
            "--k8s-relay=127.0.0.1:9971",
            "--k8s-relay-plaintext",
        ];
        let _netpol = lab.start_netpol(&flags)?;
        reaches(&lab.a, &both(&lab.b, 8080), false)?;
        reaches(&lab.a, &both(&lab.b, PORT), true)?;
        running.kill_9()?;
        status_has(lab, &["stale"])?;
        reaches(&lab.a, &both(&lab.b, 8080), false)?;
        reaches(&lab.a, &both(&lab.b, PORT), true)?;
        let _running = relay()?;
        api.put(allows(8080))?;
        eventually("the relay is followed again", FOLLOWS, || {
            lab.a.expect_open(both(&lab.b, 8080)[0])
        })?;
        reaches(&lab.a, &both(&lab.b, PORT), false)
    });
}
