//! The cluster as the source: watches, a refused policy, and an API server that is away at the start.

use anyhow::{Result, ensure};
use holdfast_e2e::apiserver::{ApiServer, Options, pod};
use holdfast_e2e::{Lab, Pod, eventually, with_lab};
use serde_json::{Value, json};

use super::{PORT, Pods, SOON, addresses, both, of, reaches, status_has};

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

fn start(lab: &Lab) -> Result<ApiServer> {
    let directory = lab.directory().join("apiserver");
    let api = ApiServer::start(Some(&lab.node), &directory, Options::default())?;
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
        let api = start(lab)?;
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
        reaches(&lab.a, &both(&lab.b, 8080), true)?;
        drop(netpol);
        Ok(())
    });
}

#[test]
fn a_refused_policy_is_an_event_and_its_last_version_stays() {
    with_lab(|lab| {
        let _servers = Pods::without_documents(lab)?;
        let api = start(lab)?;
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
