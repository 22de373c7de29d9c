//! Other nodes and API servers, from the documents with their addresses. Entities select them;
//! blocks and names do not.
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Result, ensure};
use holdfast_e2e::lab::{DNS4, at, web4, web6};
use holdfast_e2e::pod::REFUSED_AFTER;
use holdfast_e2e::policy::{CLIENT, WEB, dns, egress, names};
use holdfast_e2e::web::Web;
use holdfast_e2e::{AgentOptions, Lab, Query, SdpOptions, eventually, with_lab};
use socket2::{Domain, Socket, Type};

const SOON: Duration = Duration::from_secs(10);

fn node(name: &str, addresses: &[IpAddr]) -> String {
    let addresses = addresses.iter();
    let addresses = addresses.map(|ip| format!("{{type: InternalIP, ip: \"{ip}\"}}"));
    let addresses: Vec<String> = addresses.collect();
    format!(
        "apiVersion: cilium.io/v2\nkind: CiliumNode\nmetadata: {{name: {name}}}\nspec: {{addresses: [{}]}}\n---\n",
        addresses.join(", ")
    )
}

fn api_servers(family: &str, address: IpAddr) -> String {
    format!(
        r#"
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: kubernetes-{}
  namespace: default
  labels: {{kubernetes.io/service-name: kubernetes}}
addressType: {family}
endpoints: [{{addresses: ["{address}"]}}]
---
"#,
        family.to_lowercase()
    )
}

/// Web may reach nodes and API servers, and also one block and one name that contain nodes.
fn policy() -> String {
    let entities = r#"
- toEntities: [remote-node]
  toPorts: [{ports: [{port: "80", protocol: TCP}]}]
- toEntities: [kube-apiserver]
  toPorts: [{ports: [{port: "8080", protocol: TCP}]}]
- toCIDR: ["203.0.113.12/32"]
"#;
    egress(
        "web",
        "web",
        &(entities.to_owned() + &dns("*.good.test") + &names("*.good.test")),
    )
}

const FROM_NODES: &str = r#"apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: client-in, namespace: default}
spec:
  endpointSelector: {matchLabels: {app: client}}
  ingress:
  - fromEntities: [cluster]
"#;

fn from_world(lab: &Lab, from: IpAddr, to: SocketAddr) -> Result<bool> {
    lab.world.enter(|| -> Result<bool> {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
        socket.bind(&at(from, 0).into())?;
        Ok(socket.connect_timeout(&to.into(), REFUSED_AFTER).is_ok())
    })?
}

#[test]
fn entities_mean_nodes_and_api_servers() {
    with_lab(|lab| {
        let own = [IpAddr::from(lab.b.v4), lab.b.v6.into()];
        let _b = Web::start(&lab.b.netns, &own, &[80], &[])?;
        lab.zone.set("node.good.test", &[web4(10)], 600);
        lab.write_policy("web.yaml", &policy())?;
        lab.write_policy("in.yaml", FROM_NODES)?;
        let named = AgentOptions::default().flag("--node-name=this");
        let agent = lab.start_agent(&named)?;
        let _sdp = lab.start_sdp(&SdpOptions::default())?;
        lab.add_endpoint(&lab.a, WEB)?;
        lab.add_endpoint(&lab.b, CLIENT)?;
        // 12 belongs to a block, the others to nothing yet.
        for address in [web4(10), web4(11), web6(10)] {
            lab.a.expect_closed(at(address, 80))?;
            lab.a.expect_closed(at(address, 8080))?;
        }
        lab.a.expect_open(at(web4(12), 8080))?;
        ensure!(
            !from_world(lab, web4(10), at(own[0], 80))?,
            "the world came in"
        );

        // 10 and 12 are a node's, 11 and 12 are API servers'.
        let cluster = node("other", &[web4(10), web4(12), web6(10)])
            + &node("this", &[web4(13)])
            + &api_servers("IPv4", web4(11));
        lab.write_policy("cluster.yaml", &cluster)?;
        eventually("nodes are known", SOON, || {
            lab.a.expect_open(at(web4(10), 80))?;
            lab.a.expect_open(at(web4(11), 8080))
        })?;
        lab.a.expect_open(at(web6(10), 80))?;
        lab.a.expect_open(at(web4(12), 80))?;
        lab.a.expect_closed(at(web4(12), 8080))?;
        lab.a.expect_closed(at(web4(11), 80))?;
        lab.a.expect_closed(at(web4(10), 8080))?;
        lab.a.expect_closed(at(web4(13), 80))?;
        for (from, to) in [(web4(10), own[0]), (web6(10), own[1])] {
            ensure!(from_world(lab, from, at(to, 80))?, "{from} is a node");
        }
        // The host needs no rule; an API server outside of the cluster does.
        ensure!(
            from_world(lab, web4(13), at(own[0], 80))?,
            "13 is this node"
        );
        ensure!(!from_world(lab, web4(11), at(own[0], 80))?, "11 is outside");

        // No answer gives a node's address the label of a name.
        lab.a
            .ask(&Query::a("node.good.test", DNS4))?
            .expect(web4(10))?;
        let streams = [
            lab.a.stream(at(web4(10), 80))?,
            lab.a.stream(at(web4(11), 8080))?,
        ];
        let identities = lab.identities()?;
        agent.kill_9()?;
        let _agent = lab.start_agent(&named)?;
        assert_eq!(lab.identities()?, identities, "identities changed");
        for stream in &streams {
            stream.expect_alive()?;
        }

        // The API server has moved to that node, too. The API server outside of the cluster was
        // removed.
        let moved = node("other", &[web4(10)]) + &api_servers("IPv4", web4(10));
        lab.write_policy("cluster.yaml", &moved)?;
        eventually("the API server has moved", SOON, || {
            lab.a.expect_open(at(web4(10), 8080))?;
            lab.a.expect_closed(at(web4(11), 8080))
        })?;
        let [node, api] = &streams;
        node.expect_alive()?;
        api.expect_cut(SOON)?;
        lab.a.expect_open(at(web4(12), 8080))?;
        lab.a.expect_closed(at(web6(10), 80))?;
        // When no node has the address any more, the rule for the name opens it again.
        lab.remove_policy("cluster.yaml")?;
        eventually("the node is gone", SOON, || {
            lab.a.expect_closed(at(web4(10), 8080))
        })?;
        lab.a.expect_open(at(web4(10), 80))
    });
}
