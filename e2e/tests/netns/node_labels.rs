//! Labels of a Node reach the rules of EgressFirewalls: the agent of the node copies them to its
//! CiliumNode, from which agents know the nodes of the cluster.
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::apiserver::{ApiServer, Options, namespace, pod};
use holdfast_e2e::lab::{at, web4};
use holdfast_e2e::{AgentOptions, Lab, eventually, with_lab};
use serde_json::{Value, json};

/// The agent looks at its labels every 5 seconds, and writes repeated changes more slowly.
const SOON: Duration = Duration::from_secs(45);
/// An address of the node that a server answers on.
const OWN: fn() -> IpAddr = || web4(16);

fn cluster(lab: &Lab) -> Result<ApiServer> {
    let directory = lab.directory().join("apiserver");
    let api = ApiServer::start(Some(&lab.node), &directory, Options::default())?;
    let addresses = [lab.a.v4.to_string(), lab.a.v6.to_string()];
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    for object in [
        namespace("default", "c"),
        pod("default", "web", json!({"app": "web"}), "n1", &addresses),
        json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": "n1", "labels": {"rack": "7"}},
            "status": {"addresses": [{"type": "InternalIP", "address": OWN()}]},
        }),
        json!({
            "apiVersion": "k8s.ovn.org/v1", "kind": "EgressFirewall",
            "metadata": {"name": "default", "namespace": "default"},
            "spec": {"egress": [
                {"type": "Deny", "to": {"nodeSelector": {"matchLabels": {"region": "west"}}}},
                {"type": "Allow", "to": {"cidrSelector": "0.0.0.0/0"}},
            ]},
        }),
    ] {
        api.put(object)?;
    }
    Ok(api)
}

fn options(api: &ApiServer) -> AgentOptions {
    let kubeconfig = api.files().kubeconfig.display();
    AgentOptions::default()
        .flag("--kubernetes")
        .flag(&format!("--kubeconfig={kubeconfig}"))
        .flag("--node-name=n1")
}

fn label_node(api: &ApiServer, labels: &Value) -> Result<()> {
    api.edit("nodes", "", "n1", |node| {
        node["metadata"]["labels"] = labels.clone();
    })?;
    Ok(())
}

fn copied(api: &ApiServer, labels: &Value) -> Result<()> {
    eventually(&format!("the CiliumNode has {labels}"), SOON, || {
        let own = api.get("ciliumnodes", "", "n1")?.context("no CiliumNode")?;
        ensure!(own["metadata"]["labels"] == *labels, "{own}");
        Ok(())
    })
}

#[test]
fn a_deny_by_labels_of_nodes_follows_the_labels_of_the_node() {
    with_lab(|lab| {
        const US: &str = "holdfast-agent";
        const BY: &str = "app.kubernetes.io/managed-by";
        let api = cluster(lab)?;
        let _agent = lab.start_agent(&options(&api))?;
        let netns = lab.a.netns.name();
        lab.agent(&["endpoint", "add", "--netns", netns, "--pod", "default/web"])?;
        lab.endpoint_id(&lab.a)?;
        copied(&api, &json!({BY: US, "rack": "7"}))?;
        eventually("the node is open", SOON, || {
            lab.a.expect_open(at(OWN(), 80))
        })?;
        api.edit("ciliumnodes", "", "n1", |own| {
            own["metadata"]["labels"]["theirs"] = json!("stays");
        })?;
        label_node(&api, &json!({"rack": "7", "region": "west"}))?;
        copied(
            &api,
            &json!({BY: US, "rack": "7", "region": "west", "theirs": "stays"}),
        )?;
        eventually("the node is closed", SOON, || {
            lab.a.expect_closed(at(OWN(), 80))
        })?;
        lab.a.expect_open(at(web4(17), 80))?;
        label_node(&api, &json!({}))?;
        copied(&api, &json!({BY: US, "theirs": "stays"}))?;
        eventually("the node is open again", SOON, || {
            lab.a.expect_open(at(OWN(), 80))
        })
    });
}
