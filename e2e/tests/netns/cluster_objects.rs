//! Pods of other nodes, from documents as kubectl prints them: policies select them by the labels of
//! the pod and of its namespace. An endpoint may be a pod, and follows its document.
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Result, ensure};
use holdfast_e2e::lab::{at, web4, web6};
use holdfast_e2e::policy::WEB;
use holdfast_e2e::web::Web;
use holdfast_e2e::{AgentOptions, Lab, eventually, with_lab};

const SOON: Duration = Duration::from_secs(10);

/// Web may reach databases, and everything in namespaces of team a.
const POLICY: &str = r#"apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: web, namespace: default}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toEndpoints: [{matchLabels: {app: db}}]
    toPorts: [{ports: [{port: db, protocol: TCP}]}]
  - toEndpoints: [{matchLabels: {"k8s:io.cilium.k8s.namespace.labels.team": a}}]
"#;

fn pod(namespace: &str, name: &str, app: &str, addresses: &[IpAddr]) -> String {
    let addresses = addresses.iter().map(|ip| format!("{{ip: \"{ip}\"}}"));
    let addresses: Vec<String> = addresses.collect();
    format!(
        r"
- apiVersion: v1
  kind: Pod
  metadata:
    name: {name}
    namespace: {namespace}
    labels: {{app: {app}, pod-template-hash: {name}}}
  spec:
    nodeName: worker-2
    containers: [{{name: c, image: i, ports: [{{name: db, containerPort: 8080}}]}}]
  status: {{phase: Running, podIPs: [{}]}}
",
        addresses.join(", ")
    )
}

fn namespace(name: &str, team: &str) -> String {
    format!(
        "- apiVersion: v1\n  kind: Namespace\n  metadata: {{name: {name}, labels: {{team: {team}}}}}\n"
    )
}

fn write(lab: &Lab, items: &[String]) -> Result<()> {
    let text = format!("apiVersion: v1\nitems:\n{}kind: List\n", items.concat());
    lab.write_policy("cluster.yaml", &text)
}

#[test]
fn policies_mean_pods_of_other_nodes() {
    with_lab(|lab| {
        let own: [IpAddr; 2] = [lab.b.v4.into(), lab.b.v6.into()];
        let _b = Web::start(&lab.b.netns, &own, &[80, 8080], &[])?;
        lab.write_policy("web.yaml", POLICY)?;
        let agent = lab.start_agent(&AgentOptions::default())?;
        lab.add_endpoint(&lab.a, WEB)?;
        let db = [web4(10), web6(10)];
        for address in db {
            lab.a.expect_closed(at(address, 8080))?;
        }

        // The pods of two other nodes, and a pod of this one.
        let own_pod = pod("default", "db-1", "db", &own);
        let others = [
            namespace("shop", "b"),
            namespace("default", "c"),
            pod("default", "db-0", "db", &db),
            pod("shop", "cart", "cart", &[web4(11)]),
        ];
        write(lab, &[&others[..], std::slice::from_ref(&own_pod)].concat())?;
        eventually("pods of other nodes are selected", SOON, || {
            lab.a.expect_open(at(db[0], 8080))
        })?;
        lab.agent(&[
            "endpoint",
            "add",
            "--netns",
            lab.b.netns.name(),
            "--pod",
            "default/db-1",
        ])?;
        lab.endpoint_id(&lab.b)?;
        for address in [db, own].concat() {
            lab.a.expect_open(at(address, 8080))?;
            lab.a.expect_closed(at(address, 80))?;
        }
        lab.a.expect_closed(at(web4(11), 80))?;
        let list = lab.agent(&["ip", "list"])?;
        ensure!(list.contains("Pod/default/db-0"), "{list}");

        // A namespace's label opens its pods. The pod that is an endpoint here gets another label `app`.
        let moved = [
            namespace("shop", "a"),
            namespace("default", "c"),
            pod("default", "db-0", "db", &db),
            pod("shop", "cart", "cart", &[web4(11)]),
            own_pod.replace("app: db", "app: other"),
        ];
        let stays = lab.a.stream(at(db[0], 8080))?;
        write(lab, &moved)?;
        eventually("the namespace is team a's", SOON, || {
            lab.a.expect_open(at(web4(11), 80))
        })?;
        eventually("the endpoint follows its pod", SOON, || {
            lab.a.expect_closed(at(own[0], 8080))
        })?;
        stays.expect_alive()?;

        // A restart keeps numbers and connections; a pod that cannot be read keeps its last good
        // version.
        let identities = lab.identities()?;
        agent.kill_9()?;
        let torn: Vec<String> = moved
            .iter()
            .map(|item| item.replace("app: db", "app: -db"))
            .collect();
        write(lab, &torn)?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        ensure!(lab.identities()? == identities, "identities changed");
        stays.expect_alive()?;
        lab.a.expect_open(at(db[1], 8080))?;
        let status = lab.agent(&["policy", "get"])?;
        ensure!(
            status.contains("Pod/default/db-0") && status.contains("metadata.labels.app"),
            "{status}"
        );
        Ok(())
    });
}
