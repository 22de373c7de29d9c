//! An agent that follows relays enforces the same as with watches of its own, and goes on with what
//! it has while relays, or their API server, are away.
use std::net::IpAddr;
use std::path::{Path, PathBuf};
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
/// Time until a connection must be there again: the longest pause is 30 s.
const FOLLOWS: Duration = Duration::from_secs(45);

fn policy() -> Value {
    web_policy(&json!([
        {"toEndpoints": [{"matchLabels": {"app": "db"}}]},
        {"toEndpoints": [{"matchLabels": {
            "k8s:io.cilium.k8s.namespace.labels.team": "a",
        }}]},
    ]))
}

fn db(name: &str, address: IpAddr) -> Value {
    let address = address.to_string();
    pod("default", name, json!({"app": "db"}), "n2", &[&address])
}

/// A cluster with a policy, the pod that it selects, and a database on another node. Only the
/// account of the relays may read these objects, not the account of the agents.
fn cluster(lab: &Lab) -> Result<ApiServer> {
    let directory = lab.directory().join("apiserver");
    let api = ApiServer::start(Some(&lab.node), &directory, Options::with_relays())?;
    let own = [lab.a.v4.to_string(), lab.a.v6.to_string()];
    let own: Vec<&str> = own.iter().map(String::as_str).collect();
    for object in [
        namespace("default", "c"),
        namespace("shop", "b"),
        policy(),
        pod("default", "web", json!({"app": "web"}), "n1", &own),
        db("db", web4(10)),
        pod(
            "shop",
            "cart",
            json!({"app": "cart"}),
            "n2",
            &[&web4(11).to_string()],
        ),
        json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": "n1"}, "status": {"addresses": []},
        }),
    ] {
        api.put(object)?;
    }
    Ok(api)
}

fn relay_command(lab: &Lab, api: &ApiServer, files: &Certificates, port: u16) -> Result<Command> {
    let program = config::program("holdfast-agent")?;
    let mut command = lab
        .node
        .command(program.to_str().context("a path in UTF-8")?);
    command.env("NO_COLOR", "1");
    command.args(["relay", "--metrics-address=off"]);
    command.arg(format!("--name=relay-{port}"));
    command.arg(format!("--kubeconfig={}", api.files().admin.display()));
    command.arg(format!("--listen=127.0.0.1:{port}"));
    command.arg(format!("--tls-cert={}", files.certificate.display()));
    command.arg(format!("--tls-key={}", files.key.display()));
    command.arg(format!("--client-ca={}", files.authority.display()));
    Ok(command)
}

fn start_relay(lab: &Lab, api: &ApiServer, files: &Certificates, port: u16) -> Result<Program> {
    let log = lab.directory().join(format!("log/relay-{port}.log"));
    let command = relay_command(lab, api, files, port)?;
    Program::start("holdfast-agent relay", command, &log)
}

fn options(kubeconfig: &Path, relays: &str, files: &Certificates) -> AgentOptions {
    AgentOptions::default()
        .flag("--kubernetes")
        .flag(&format!("--kubeconfig={}", kubeconfig.display()))
        .flag("--node-name=n1")
        .flag(&format!("--k8s-relay={relays}"))
        .flag(&format!("--k8s-relay-ca={}", files.authority.display()))
        .flag(&format!("--k8s-relay-cert={}", files.certificate.display()))
        .flag(&format!("--k8s-relay-key={}", files.key.display()))
}

fn start(lab: &Lab, options: &AgentOptions) -> Result<Program> {
    let log = lab.directory().join("log/agent.log");
    Program::start("holdfast-agent", lab.agent_command(options)?, &log)
}

fn opens(lab: &Lab, to: IpAddr) -> Result<()> {
    eventually(&format!("{to} is open"), FOLLOWS, || {
        lab.a.expect_open(at(to, 80))
    })
}

fn closes(lab: &Lab, to: IpAddr) -> Result<()> {
    eventually(&format!("{to} is closed"), FOLLOWS, || {
        lab.a.expect_closed(at(to, 80))
    })
}

/// Certificates of a relay and of an agent.
fn certificates(lab: &Lab, name: &str) -> Result<(Certificates, Certificates)> {
    let directory: PathBuf = lab.directory().join(name);
    Certificates::issue(&directory)
}

#[test]
fn policy_of_the_cluster_is_in_force_by_relays_and_stays_while_they_are_away() {
    with_lab(|lab| {
        let api = cluster(lab)?;
        let (of_relay, of_agent) = certificates(lab, "tls")?;
        let relay = start_relay(lab, &api, &of_relay, 9971)?;
        let both = "127.0.0.1:9971,127.0.0.1:9973";
        let _agent = lab.start_agent(&options(&api.files().kubeconfig, both, &of_agent))?;
        let netns = lab.a.netns.name();
        lab.agent(&["endpoint", "add", "--netns", netns, "--pod", "default/web"])?;
        opens(lab, web4(10))?;
        lab.a.expect_closed(at(web4(11), 80))?;
        // Labels of namespaces, changes and removals arrive.
        api.put(namespace("shop", "a"))?;
        opens(lab, web4(11))?;
        api.put(namespace("shop", "b"))?;
        closes(lab, web4(11))?;
        api.put(db("db-2", web4(12)))?;
        opens(lab, web4(12))?;
        api.delete("pods", "default", "db-2")?;
        closes(lab, web4(12))?;
        lab.watches_follow(FOLLOWS)?;
        lab.status_has(SOON, &["by relay 127.0.0.1:9971"])?;
        // The agent itself requested only objects about its own node.
        let lists = api.answered();
        let pods = lists
            .iter()
            .filter(|a| a.verb == "list" && a.resource == "pods");
        ensure!(pods.count() == 1, "{lists:?}");
        let refused = lists.iter().find(|a| a.code == 403);
        ensure!(refused.is_none(), "{refused:?}");
        eventually("the CiliumNode is written", SOON, || {
            let nodes = api.all("ciliumnodes")?;
            ensure!(nodes.len() == 1, "{nodes:?}");
            Ok(())
        })?;

        // No relay: everything stays.
        let stays = lab.a.stream(at(web4(10), 80))?;
        relay.kill_9()?;
        lab.status_has(
            SOON,
            &[
                "watches of Namespace, Pod, ",
                "relay 127.0.0.1:997",
                "stays in force",
            ],
        )?;
        let status = lab.agent_json(&["status"])?;
        ensure!(status["ready"] == true, "{status}");
        api.delete("pods", "default", "db")?;
        api.put(db("db-3", web4(13)))?;
        lab.a.expect_open(at(web4(10), 80))?;
        lab.a.expect_closed(at(web4(13), 80))?;
        stays.expect_alive()?;
        // The other relay comes.
        let _relay = start_relay(lab, &api, &of_relay, 9973)?;
        opens(lab, web4(13))?;
        closes(lab, web4(10))?;
        lab.watches_follow(FOLLOWS)?;
        lab.status_has(SOON, &["by relay 127.0.0.1:9973"])?;

        // The relay's API server is away.
        api.away();
        lab.status_has(
            SOON,
            &["watches of Namespace, Pod, ", "relay 127.0.0.1:9973: "],
        )?;
        lab.a.expect_open(at(web4(13), 80))?;
        api.back()?;
        lab.watches_follow(FOLLOWS)?;
        api.put(db("db-2", web4(12)))?;
        opens(lab, web4(12))
    });
}

#[test]
fn a_certificate_that_cannot_be_used_is_named_with_a_remedy() {
    with_lab(|lab| {
        let api = cluster(lab)?;
        let (of_relay, of_agent) = certificates(lab, "tls")?;
        let (of_other_relay, of_other_agent) = certificates(lab, "other")?;
        let _relay = start_relay(lab, &api, &of_relay, 9971)?;
        let kubeconfig = &api.files().kubeconfig;
        let relay = "127.0.0.1:9971";

        let strangers = Certificates {
            authority: of_other_agent.authority.clone(),
            ..of_agent.clone()
        };
        let mut agent = start(lab, &options(kubeconfig, relay, &strangers))?;
        lab.status_has(
            SOON,
            &[
                "relay 127.0.0.1:9971: its certificate is not trusted",
                "--k8s-relay-ca",
            ],
        )?;
        agent.check_alive()?;
        agent.kill_9()?;

        let stranger = Certificates {
            authority: of_agent.authority.clone(),
            ..of_other_agent
        };
        let agent = start(lab, &options(kubeconfig, relay, &stranger))?;
        lab.status_has(
            SOON,
            &[
                "it does not accept the agent's certificate",
                "--k8s-relay-cert",
            ],
        )?;
        agent.kill_9()?;

        let misnamed = options(kubeconfig, relay, &of_agent).flag("--k8s-relay-server-name=other");
        let agent = start(lab, &misnamed)?;
        lab.status_has(
            SOON,
            &["its certificate is not trusted", "--k8s-relay-server-name"],
        )?;
        agent.kill_9()?;

        // Files and flags that cannot be used: exit code 2.
        let absent = Certificates {
            key: of_agent.key.with_file_name("absent.key"),
            ..of_agent.clone()
        };
        let plain = AgentOptions::default()
            .flag("--kubernetes")
            .flag("--k8s-relay=192.0.2.1:9971")
            .flag("--k8s-relay-plaintext");
        let without = AgentOptions::default()
            .flag("--kubernetes")
            .flag("--k8s-relay=192.0.2.1:9971");
        let odd = AgentOptions::default()
            .flag("--kubernetes")
            .flag("--k8s-relay=192.0.2.1");
        for (options, text) in [
            (options(kubeconfig, relay, &absent), "--k8s-relay-key: "),
            (plain, "192.0.2.1:9971 is not an address of loopback"),
            (without, "--k8s-relay-ca: is missing"),
            (odd, "write for example 192.0.2.1:9971"),
        ] {
            let output = lab.agent_command(&options)?.output()?;
            let said = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.code() == Some(2), "{text}: {output:?}");
            ensure!(said.contains(text), "{text}: {said}");
        }
        let swapped = Certificates {
            certificate: of_relay.key.clone(),
            key: of_relay.certificate.clone(),
            ..of_other_relay
        };
        let output = relay_command(lab, &api, &swapped, 9975)?.output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(2), "{output:?}");
        ensure!(
            said.contains("--tls-cert: ") && said.contains("no certificate in it"),
            "{said}"
        );
        Ok(())
    });
}
