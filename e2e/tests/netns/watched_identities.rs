//! With `--identity-allocation=cluster` a label set has the number of its CiliumIdentity, which
//! comes from the agent's own watch, a relay, or the stored list. Without the right to read the
//! objects, policy is in force all the same.
use std::net::IpAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::apiserver::{ApiServer, Options, namespace, pod, web_policy};
use holdfast_e2e::config;
use holdfast_e2e::lab::{at, web4};
use holdfast_e2e::relay::Certificates;
use holdfast_e2e::{AgentOptions, Lab, Program, eventually, with_lab};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(20);
/// Longest wait until an absent kind counts as empty (15 s), or a stored list stands in (15 s),
/// with a pause of a watch.
const LATER: Duration = Duration::from_secs(60);
const CLUSTER: &str = "--identity-allocation=cluster";

fn db(name: &str, address: IpAddr) -> Value {
    let address = address.to_string();
    pod("default", name, json!({"app": "db"}), "n2", &[&address])
}

/// The object that gives pods of namespace `default` with this label their number.
fn identity(number: &str, app: &str) -> Value {
    json!({
        "apiVersion": "cilium.io/v2", "kind": "CiliumIdentity",
        "metadata": {"name": number, "annotations": {"holdfast.io/made-by": "holdfast"}},
        "security-labels": {
            "k8s:app": app,
            "k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name": "default",
            "k8s:io.cilium.k8s.namespace.labels.team": "c",
            "k8s:io.cilium.k8s.policy.cluster": "default",
            "k8s:io.cilium.k8s.policy.serviceaccount": "default",
            "k8s:io.kubernetes.pod.namespace": "default",
        },
    })
}

/// A policy, the pod that it selects, and a database on another node.
fn cluster(lab: &Lab, options: Options) -> Result<ApiServer> {
    let directory = lab.directory().join("apiserver");
    let api = ApiServer::start(Some(&lab.node), &directory, options)?;
    let own = [lab.a.v4.to_string(), lab.a.v6.to_string()];
    let own: Vec<&str> = own.iter().map(String::as_str).collect();
    for object in [
        namespace("default", "c"),
        web_policy(&json!([{"toEndpoints": [{"matchLabels": {"app": "db"}}]}])),
        pod("default", "web", json!({"app": "web"}), "n1", &own),
        db("db", web4(10)),
        json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": "n1"}, "status": {"addresses": []},
        }),
    ] {
        api.put(object)?;
    }
    Ok(api)
}

fn options(kubeconfig: &Path) -> AgentOptions {
    AgentOptions::default()
        .flag("--kubernetes")
        .flag(&format!("--kubeconfig={}", kubeconfig.display()))
        .flag("--node-name=n1")
        .flag(CLUSTER)
}

fn add_web(lab: &Lab) -> Result<()> {
    let netns = lab.a.netns.name();
    lab.agent(&["endpoint", "add", "--netns", netns, "--pod", "default/web"])?;
    Ok(())
}

/// Waits until the pods with this label have this number, from this source.
fn has_number(lab: &Lab, app: &str, number: u64, source: &str) -> Result<()> {
    let label = format!("k8s:app={app}");
    eventually(&format!("{label} has {number} of {source}"), LATER, || {
        let all = lab.agent_json(&["identity", "list"])?;
        let of_label = |one: &&Value| {
            let mut labels = one["labels"].as_array().into_iter().flatten();
            labels.any(|text| text == &label) && one["references"] != 0
        };
        let found: Vec<&Value> = all
            .as_array()
            .into_iter()
            .flatten()
            .filter(of_label)
            .collect();
        ensure!(
            found.len() == 1 && found[0]["id"] == number && found[0]["source"] == source,
            "{found:?}"
        );
        Ok(())
    })
}

fn opens(lab: &Lab, to: IpAddr) -> Result<()> {
    eventually(&format!("{to} is open"), LATER, || {
        lab.a.expect_open(at(to, 80))
    })
}

fn relay(lab: &Lab, api: &ApiServer, files: &Certificates, flag: &str) -> Result<Program> {
    let program = config::program("holdfast-agent")?;
    let mut command: Command = lab
        .node
        .command(program.to_str().context("a path in UTF-8")?);
    command.env("NO_COLOR", "1");
    command.args(["relay", "--metrics-address=off", "--name=relay", flag]);
    command.arg("--listen=127.0.0.1:9971");
    command.arg(format!("--kubeconfig={}", api.files().admin.display()));
    command.arg(format!("--tls-cert={}", files.certificate.display()));
    command.arg(format!("--tls-key={}", files.key.display()));
    command.arg(format!("--client-ca={}", files.authority.display()));
    let log = lab.directory().join("log/relay.log");
    Program::start("holdfast-agent relay", command, &log)
}

#[test]
fn label_sets_have_the_numbers_of_the_cluster_also_after_a_restart_without_the_api_server() {
    with_lab(|lab| {
        let api = cluster(lab, Options::default().and_identities())?;
        api.put(identity("5000", "web"))?;
        // An object of another writer.
        let mut of_another = identity("5001", "db");
        // The label alone says nothing: Cilium copies the labels of pods.
        of_another["metadata"]["annotations"] = json!({});
        of_another["metadata"]["labels"] = json!({"app.kubernetes.io/managed-by": "holdfast"});
        api.put(of_another)?;
        let options = options(&api.files().kubeconfig);
        let agent = lab.start_agent(&options)?;
        add_web(lab)?;
        opens(lab, web4(10))?;
        has_number(lab, "web", 5000, "agent")?;
        has_number(lab, "db", 5001, "other_writer")?;
        // A later duplicate, with a lower number, changes nothing.
        std::thread::sleep(Duration::from_millis(1100));
        api.put(identity("4000", "web"))?;
        lab.status_has(SOON, &["CiliumIdentity/4000 has the same"])?;
        has_number(lab, "web", 5000, "agent")?;
        // A number outside of the range is refused, and the other objects stay in force.
        api.put(identity("61440", "x"))?;
        eventually("it is refused", SOON, || {
            let documents = lab.agent(&["policy", "get"])?;
            for part in ["CiliumIdentity/61440", "256–61439"] {
                ensure!(documents.contains(part), "no {part:?} in {documents}");
            }
            Ok(())
        })?;

        // Once the list is stored, a restart needs no API server.
        let stored = lab.directory().join("state/state/cluster.json");
        eventually("the list is stored", Duration::from_secs(90), || {
            let text = std::fs::read_to_string(&stored)?;
            ensure!(text.contains("CiliumIdentity/5000"), "{text}");
            Ok(())
        })?;
        agent.kill_9()?;
        api.away();
        let _agent = lab.start_agent(&options)?;
        has_number(lab, "web", 5000, "agent")?;
        lab.a.expect_open(at(web4(10), 80))
    });
}

#[test]
fn label_sets_have_the_numbers_of_the_cluster_through_a_relay_with_the_same_setting() {
    with_lab(|lab| {
        let api = cluster(lab, Options::with_relays().and_identities())?;
        api.put(identity("5000", "web"))?;
        let directory = lab.directory().join("tls");
        let (of_relay, of_agent) = Certificates::issue(&directory)?;
        let options = options(&api.files().kubeconfig)
            .flag("--k8s-relay=127.0.0.1:9971")
            .flag(&format!("--k8s-relay-ca={}", of_agent.authority.display()))
            .flag(&format!(
                "--k8s-relay-cert={}",
                of_agent.certificate.display()
            ))
            .flag(&format!("--k8s-relay-key={}", of_agent.key.display()));
        let other = relay(lab, &api, &of_relay, "--identity-allocation=node")?;
        let log = lab.directory().join("log/agent.log");
        let _agent = Program::start("holdfast-agent", lab.agent_command(&options)?, &log)?;
        lab.status_has(
            SOON,
            &["no CiliumIdentity", "the same --identity-allocation"],
        )?;
        other.kill_9()?;
        let _relay = relay(lab, &api, &of_relay, CLUSTER)?;
        lab.watches_follow(LATER)?;
        add_web(lab)?;
        opens(lab, web4(10))?;
        has_number(lab, "web", 5000, "agent")?;
        api.put(identity("5001", "db"))?;
        has_number(lab, "db", 5001, "agent")
    });
}

#[test]
fn without_the_right_or_the_definition_policy_is_in_force_and_status_names_what_is_missing() {
    with_lab(|lab| {
        // The chart without the mode: the agent's account has no right to the kind.
        let api = cluster(lab, Options::default())?;
        let options = options(&api.files().kubeconfig);
        let log = lab.directory().join("log/agent.log");
        // It is ready once the missing kind counts as empty.
        let start = || Program::start("holdfast-agent", lab.agent_command(&options)?, &log);
        let agent = start()?;
        lab.status_has(
            SOON,
            &[
                "the verb list on ciliumidentities.cilium.io is missing",
                "holdfast-identities-reader",
            ],
        )?;
        eventually("it is ready", LATER, || lab.agent(&["health"]).map(drop))?;
        add_web(lab)?;
        opens(lab, web4(10))?;
        lab.a.expect_closed(at(web4(11), 80))?;
        agent.kill_9()?;
        drop(api);
        let api = cluster(lab, Options::default().and_identities())?;
        api.uninstall("ciliumidentities")?;
        let _agent = start()?;
        lab.status_has(
            SOON,
            &["install the CRDs (chart values identities.mode=cluster and crds.install)"],
        )?;
        opens(lab, web4(10))
    });
}
